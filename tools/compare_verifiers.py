"""Has several verifiers judge the same answers, each in worker processes, and reports where they
disagree.

    python tools/compare_verifiers.py  # the labelled answers that ship
    python tools/compare_verifiers.py runs/NAME/rollouts/*.jsonl --verifiers math dapo_boxed \\
        --out disagreements.jsonl

A file has JSON lines with "response", and "answer" or "gold"; with "label" (1 right, 0 wrong) the
report says how often each verifier is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_stare.errors import DataError, UserError
from megatron_stare.process.shipped import SHIPPED
from megatron_stare.rewards.verifier_pool import Verdict, VerifierPool

LABELLED = SHIPPED / "assets" / "verification" / "labelled_answers.jsonl"
VERIFIERS = ("math", "math_verify", "dapo_boxed")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "files", nargs="*", type=Path, default=[LABELLED], help="default: the labelled answers"
    )
    parser.add_argument(
        "--verifiers",
        nargs="+",
        default=list(VERIFIERS),
        help="names of verifiers, as in reward.verifier",
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes for each verifier")
    parser.add_argument(
        "--timeout-s", type=float, default=10.0, help="time limit of one answer, seconds"
    )
    parser.add_argument("--show", type=int, default=20, help="number of disagreements to print")
    parser.add_argument("--out", type=Path, help="file for all disagreements, JSON lines")
    args = parser.parse_args(argv)
    try:
        cases = [case for path in args.files for case in read_cases(path)]
        verdicts = {
            name: judged(name, cases, args.workers, args.timeout_s) for name in args.verifiers
        }
        report(cases, verdicts, args.show)
        if args.out:
            found = [
                described(case, verdicts, n)
                for n, case in enumerate(cases)
                if disagree(verdicts, n)
            ]
            args.out.write_text(
                "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found)
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The answers of a file, each with 'response' and 'answer'. Raises DataError where it has
    others or none."""
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the answers ({error})", where=str(path)) from error
    cases = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
            case["answer"] = str(case["answer"] if "answer" in case else case["gold"])
            case["response"] = str(case["response"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                'expected {"response": ..., "answer": ...}', where=f"{path}:{number}"
            ) from error
        cases.append(case)
    if not cases:
        raise DataError("the file has no answers", where=str(path))
    return cases


def judged(
    verifier: str, cases: list[dict[str, Any]], workers: int, timeout_s: float
) -> list[Verdict]:
    """A verdict on each case."""
    with VerifierPool(verifier, workers, timeout_s) as pool:
        return pool.verify([(case["response"], case["answer"]) for case in cases])


def disagree(verdicts: dict[str, list[Verdict]], number: int) -> bool:
    """Tells whether the verifiers disagree on a case; a timeout is another verdict than wrong."""
    return len({found[number].reward for found in verdicts.values()}) > 1


def described(
    case: dict[str, Any], verdicts: dict[str, list[Verdict]], number: int
) -> dict[str, Any]:
    """A case with what each verifier says of it."""
    said = {
        name: v[number].reward if v[number].status == "ok" else v[number].status
        for name, v in verdicts.items()
    }
    return {**case, "rewards": said}


def report(cases: list[dict[str, Any]], verdicts: dict[str, list[Verdict]], show: int) -> None:
    """Prints how often each verifier says right, fails and is wrong, how often any two disagree,
    and examples."""
    labelled = all("label" in case for case in cases)
    print(f"{len(cases)} answers")
    for name, found in verdicts.items():
        right = sum((verdict.reward or 0.0) > 0.5 for verdict in found)
        failed = Counter(verdict.status for verdict in found if verdict.status != "ok")
        line = f"{name:>20}: {right} right" + "".join(
            f", {n} {status}" for status, n in sorted(failed.items())
        )
        if labelled:
            wrong = [(v.reward or 0.0) > 0.5 for v in found]
            rewarded = sum(
                given and not case["label"] for given, case in zip(wrong, cases, strict=True)
            )
            refused = sum(
                bool(case["label"]) and not given for given, case in zip(wrong, cases, strict=True)
            )
            line += (
                f"; against the labels {rewarded} wrong ones rewarded, {refused} right ones refused"
            )
        print(line)
    names = list(verdicts)
    for at, first in enumerate(names):
        for second in names[at + 1 :]:
            pairs = zip(verdicts[first], verdicts[second], strict=True)
            print(f"{first} and {second} disagree on {sum(a.reward != b.reward for a, b in pairs)}")
    differing = [number for number in range(len(cases)) if disagree(verdicts, number)]
    for number in differing[:show]:
        told = described(cases[number], verdicts, number)["rewards"]
        print(
            f"  {told}  reference {cases[number]['answer']!r}, response"
            f" ...{cases[number]['response'][-80:]!r}"
        )
    if len(differing) > show:
        print(f"  and {len(differing) - show} more; --out FILE has all")


if __name__ == "__main__":
    sys.exit(main())
