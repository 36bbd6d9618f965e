"""Which wrong lines the tests notice: changes drawn by a seed, evenly over the folders of a set, before any of them is
tried; then each is put into a checkout of its own and the tests that reach it are run. The set `core` is of the maths,
the operators and the Megatron path, `rooms` of what lies around them.

    python tools/mutate.py draw --seed 1 --count 300     # writes benchmarks/results/mutants.json
    python tools/mutate.py --set rooms draw --count 200  # writes benchmarks/results/mutants_rooms.json
    python tools/mutate.py run                           # every mutant's quickest tests; goes on where it stopped
    python tools/mutate.py run --again survived --seconds 600     # those that lived, on slower tests too
    python tools/mutate.py run --again timeout           # those that ran out of time, again
    python tools/mutate.py confirm                       # the tests that killed, on the package as it stands
    python tools/mutate.py table                         # what was killed, and what lives

A mutant is killed by a test that fails, never by a run that ends in another way; one that ran out of time is counted by
itself. One that changes nothing anybody could see is listed in tests/equivalent_mutants.yaml with the reason.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from mutation.judge import Checkout
from mutation.reach import Reach
from mutation.sites import Mutant, mutants_of

ROOT = Path(__file__).parent.parent
EQUIVALENT = ROOT / "tests/equivalent_mutants.yaml"
TARGETS = {"mutants": 300, "killed": 0.95, "equivalent": 0.10}
KEPT = ROOT / "build/mutation"  # what can be found out again
CONFIRM_S = 1800.0
REACH, PASSED = KEPT / "reach.json", KEPT / "passed.json"


@dataclass(frozen=True)
class Areas:
    """What is drawn together: folders of the package by name, the file of results, the first number, which no other
    set's mutants have, and the tests that are followed first."""

    result: Path
    folders: dict[str, str]
    first: int
    near: list[str]


SETS = {
    "core": Areas(
        ROOT / "benchmarks/results/mutants.json",
        {"maths": "algorithms", "operators": "ops", "megatron": "megatron"},
        0,
        [f"{name}/test_*.py" for name in ("algorithms", "ops", "records", "megatron")],
    ),
    "rooms": Areas(
        ROOT / "benchmarks/results/mutants_rooms.json",
        {name: name for name in ("data", "weights", "rewards", "orchestration", "evaluation", "records")},
        1000,
        [f"{name}/test_*.py" for name in ("records", "data", "rewards", "weights", "evaluation", "orchestration")],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="core", help="of folders, core unless it is said")
    verbs = parser.add_subparsers(dest="verb", required=True)
    draw = verbs.add_parser("draw", help="draw mutants of the newest commit")
    draw.add_argument("--seed", type=int, default=1)
    draw.add_argument("--count", type=int, default=TARGETS["mutants"])
    run = verbs.add_parser("run", help="try those that were not tried")
    run.add_argument("--minutes", type=float, default=1e9, help="begin none after so long")
    run.add_argument("--again", choices=("survived", "timeout", "killed"), help="try those that were found so")
    run.add_argument("--seconds", type=float, default=20.0, help="of tests, by what they take unmutated, a mutant")
    run.add_argument("--follow", nargs="*", help="files under tests/ whose lines are followed first")
    run.add_argument("--only", nargs="*", type=int, default=[], help="numbers of mutants")
    verbs.add_parser(
        "confirm", help="run the tests that killed without any mutant; those of one that fails are untried"
    )
    verbs.add_parser("table", help="say what was found")
    args = parser.parse_args()
    areas = SETS[args.set]
    if args.verb == "draw":
        drawn(areas, args.seed, args.count)
    elif args.verb == "run":
        until = time.monotonic() + 60 * args.minutes
        tried(areas, until, args.again, args.seconds, args.follow or areas.near, args.only)
    elif args.verb == "confirm":
        confirmed(areas)
    else:
        print(table(json.loads(areas.result.read_text()), equivalents()))


def drawn(areas: Areas, seed: int, count: int) -> None:
    """Writes the draw; refuses to draw again over results."""
    if areas.result.exists():
        sys.exit(f"{areas.result} has a draw already: finish it, or remove it")
    if said := _git("status", "--porcelain", "megatron_stare"):
        sys.exit(f"the package differs from the newest commit, which mutants are drawn of:\n{said}")
    generator, mutants = random.Random(seed), []
    share, more = divmod(count, len(areas.folders))
    for place, (area, package) in enumerate(areas.folders.items()):
        files = sorted((ROOT / "megatron_stare" / package).rglob("*.py"))
        sites = [mutant for file in files for mutant in mutants_of(file, str(file.relative_to(ROOT)))]
        chosen = generator.sample(range(len(sites)), share + (place < more))
        mutants += [{"area": area, **asdict(sites[i]), "status": None} for i in sorted(chosen)]
    for number, mutant in enumerate(mutants):
        mutant["number"] = areas.first + number
    _write(areas, {"commit": _git("rev-parse", "HEAD"), "seed": seed, "mutants": mutants})


def tried(areas: Areas, until: float, again: str | None, seconds: float, folders: list[str], only: list[int]) -> None:
    """Tries mutants until a time, each recorded as it is judged.

    Args:
        again: the status of those to be tried; None: those that have none.
        seconds: tests that are tried on one mutant, by what they take unmutated, the quickest first.
        folders: of tests that are followed first.
        only: numbers of mutants; none: all.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the checkout goes
    sys.path.append(str(ROOT / "benchmarks"))
    from machine import machine  # imports torch, which nothing else here needs

    results = json.loads(areas.result.read_text())
    results |= {"tests_of": _git("rev-parse", "HEAD"), "machine": machine()}
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    reach = Reach(REACH)
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Checkout(ROOT, Path(scratch), "HEAD")
        try:
            for folder in folders:
                for path in sorted((checkout.folder / "tests").glob(folder)):
                    if time.monotonic() < until:
                        reach.follow(checkout, str(path.relative_to(checkout.folder)))
            left = [each for each in results["mutants"] if each["status"] in {again, "broken"}]
            left = [each for each in left if not only or each["number"] in only]
            changed = set(_git("diff", "--name-only", results["commit"], "HEAD").split())
            if away := [each["number"] for each in left if each["file"] in changed]:
                print(f"not tried, because their files have changed since the draw: {away}")
            left = [each for each in left if each["file"] not in changed]
            random.Random(0).shuffle(left)  # what is known after an hour is of all areas
            for each in left:
                if time.monotonic() > until:
                    break
                judge(checkout, reach, each, passed.setdefault(str(each["number"]), {}), seconds)
                _write(areas, results)
                PASSED.write_text(json.dumps(passed))
        finally:
            checkout.close()


def judge(checkout: Checkout, reach: Reach, each: dict[str, Any], passed: dict[str, str], seconds: float) -> None:
    """Tries a mutant on the tests that reach it and that it has not passed as they are now."""
    names = Mutant.__dataclass_fields__
    mutant = Mutant(**{name: tuple(each[name]) if name == "end" else each[name] for name in names})
    reaching = reach.tests_for(checkout.folder, mutant)
    texts = {test: reach.text_of(test) for _, test in reaching}
    chosen, total = [], 0.0
    for took, test in reaching:
        if passed.get(test) != texts[test] and (not chosen or total + took <= seconds):
            chosen.append((took, test))
            total += took
    if chosen:
        verdict = checkout.judge(mutant, by_file(chosen), 60 + 8 * total)
        each["status"], each["by"] = verdict.status, verdict.by
        each["seconds"] = round(each.get("seconds", 0.0) + verdict.seconds, 1)
        if verdict.status == "survived":
            passed.update({test: texts[test] for _, test in chosen})
    else:
        each["status"] = "survived"
    each["reaching"] = len(reaching)
    each["passed"] = sum(passed.get(test) == text for test, text in texts.items())
    tried = f"{each['passed']} of {each['reaching']}"
    print(f"{each['number']:4d} {each['status']:9s} {each.get('seconds', 0.0):7.1f} s {tried:>12s}  {describe(each)}")
    sys.stdout.flush()


def confirmed(areas: Areas) -> None:
    """Takes back what tests killed that fail without a mutant too."""
    results, reach = json.loads(areas.result.read_text()), Reach(REACH)
    killed = [(each, reach.named(each["by"])) for each in results["mutants"] if each["status"] == "killed"]
    tests = sorted({test for _, test in killed if test is not None})
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Checkout(ROOT, Path(scratch), "HEAD")
        try:
            found = checkout.run(tests, CONFIRM_S, first=False)
        finally:
            checkout.close()
    if found["code"] not in {0, 1}:  # a test of that name is gone, say: its mutant is to be tried again
        sys.exit(f"pytest ended with {found['code']}: {found['said'][-1000:]}")
    wrong = [(each, test) for each, test in killed if test is not None and test not in found["tests"]]
    for each, test in wrong:
        each["status"], each["by"] = None, None
        print(f"{each['number']} is untried again: {test} did not pass")
    print(f"{len(tests)} tests killed {len(killed)}; {len(found['tests'])} passed without a mutant")
    _write(areas, results)


def by_file(chosen: list[tuple[float, str]]) -> list[str]:
    """Tests with those of one file together, the quickest file first."""
    files: Counter[str] = Counter()
    for took, test in chosen:
        files[test.partition("::")[0]] += took
    order = sorted(chosen, key=lambda each: (files[each[1].partition("::")[0]], each[1].partition("::")[0], each[0]))
    return [test for _, test in order]


def equivalents() -> dict[int, str]:
    """Reasons by mutants' numbers."""
    return yaml.safe_load(EQUIVALENT.read_text()) or {} if EQUIVALENT.exists() else {}


def table(results: dict[str, Any], reasons: dict[int, str]) -> str:
    """Killed and living mutants of every area, and each that lives, in Markdown."""
    lines = [
        "| area | drawn | tried | killed | timeout | equivalent | living | killed of those that are not equivalent |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for area in (*dict.fromkeys(each["area"] for each in results["mutants"]), "all"):
        rows = [each for each in results["mutants"] if area in (each["area"], "all")]
        count = Counter(fate(each, reasons) for each in rows)
        tried = len(rows) - count["untried"]
        differing = tried - count["equivalent"]
        share = f"{count['killed'] / differing:.3f}" if differing else "-"
        found = " | ".join(str(count[name]) for name in ("killed", "timeout", "equivalent", "survived"))
        lines.append(f"| {area} | {len(rows)} | {tried} | {found} | {share} |")
    lines.append("")
    for each in results["mutants"]:
        if fate(each, reasons) in {"equivalent", "survived", "timeout"}:
            why = reasons.get(each["number"]) or {"timeout": "ran out of time"}.get(each["status"], "lives")
            lines.append(f"- {each['number']}: {describe(each)}: {why}")
    return "\n".join(lines)


def fate(each: dict[str, Any], reasons: dict[int, str]) -> str:
    """'untried', 'killed', 'timeout', 'survived', or of these 'equivalent'."""
    if each["status"] in {None, "broken"}:
        return "untried"
    return "equivalent" if each["status"] == "survived" and each["number"] in reasons else each["status"]


def describe(each: dict[str, Any]) -> str:
    before, after = (" ".join(each[name].split()) for name in ("before", "after"))
    return f"{each['file']}:{each['line']} {each['kind']}: `{before}` -> `{after}`"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _write(areas: Areas, results: dict[str, Any]) -> None:
    results["mutants"] = results.pop("mutants")  # last, a line each
    text = json.dumps(results, indent=None).replace('{"area"', '\n{"area"')
    areas.result.with_suffix(".part").write_text(text + "\n")
    areas.result.with_suffix(".part").replace(areas.result)


if __name__ == "__main__":
    main()
