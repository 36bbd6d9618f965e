"""Which wrong lines the tests notice: changes drawn by a seed, evenly over the maths, the operators and the Megatron
path, before any of them is tried; then each is put into a checkout of its own and the tests are run.

    python tools/mutate.py draw --seed 1 --count 300     # writes benchmarks/results/mutants.json
    python tools/mutate.py run --minutes 60              # goes on where it stopped
    python tools/mutate.py run --whole                   # those that lived, on the whole quick suite
    python tools/mutate.py table                         # what was killed, and what lives

A mutant that changes nothing anybody could see is listed in tests/equivalent_mutants.yaml with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from mutation.judge import NEAR, Checkout, rounds_for
from mutation.sites import Mutant, mutants_of

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/mutants.json"
EQUIVALENT = ROOT / "tests/equivalent_mutants.yaml"
AREAS = {"maths": "algorithms", "operators": "ops", "megatron": "megatron"}
TARGETS = {"mutants": 300, "killed": 0.95, "equivalent": 0.10}
TIMEOUT_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    draw = verbs.add_parser("draw", help="draw mutants of the newest commit")
    draw.add_argument("--seed", type=int, default=1)
    draw.add_argument("--count", type=int, default=TARGETS["mutants"])
    run = verbs.add_parser("run", help="try those that were not tried")
    run.add_argument("--minutes", type=float, default=1e9, help="begin none after so long")
    run.add_argument("--whole", action="store_true", help="try survivors on the whole quick suite")
    verbs.add_parser("table", help="say what was found")
    args = parser.parse_args()
    if args.verb == "draw":
        drawn(args.seed, args.count)
    elif args.verb == "run":
        tried(time.monotonic() + 60 * args.minutes, args.whole)
    else:
        print(table(json.loads(RESULT.read_text()), equivalents()))


def drawn(seed: int, count: int) -> None:
    """Writes the draw; refuses to draw again over results."""
    if RESULT.exists():
        sys.exit(f"{RESULT} has a draw already: finish it, or remove it")
    if said := _git("status", "--porcelain", "megatron_stare"):
        sys.exit(f"the package differs from the newest commit, which mutants are drawn of:\n{said}")
    generator, mutants = random.Random(seed), []
    for area, package in AREAS.items():
        files = sorted((ROOT / "megatron_stare" / package).rglob("*.py"))
        sites = [mutant for file in files for mutant in mutants_of(file, str(file.relative_to(ROOT)))]
        chosen = generator.sample(range(len(sites)), count // len(AREAS))
        mutants += [{"area": area, **asdict(sites[i]), "status": None} for i in sorted(chosen)]
    for number, mutant in enumerate(mutants):
        mutant["number"] = number
    _write({"commit": _git("rev-parse", "HEAD"), "seed": seed, "seconds": {}, "mutants": mutants})


def tried(until: float, whole: bool) -> None:
    """Tries mutants until a time, each recorded as it is judged."""
    results = json.loads(RESULT.read_text())
    wanted = "survived" if whole else None
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(ROOT, Path(folder) / "checkout", results["commit"])
        try:
            if not results["seconds"]:
                results["seconds"] = unmutated(checkout.folder)
                _write(results)
            left = [each for each in results["mutants"] if each["status"] == wanted and not each.get("whole")]
            random.Random(0).shuffle(left)  # what is known after an hour is of all areas
            for each in left:
                if time.monotonic() > until:
                    break
                judge(checkout, each, results["seconds"], whole)
                _write(results)
        finally:
            checkout.close()


def judge(checkout: Checkout, each: dict[str, Any], seconds: dict[str, float], whole: bool) -> None:
    names = Mutant.__dataclass_fields__
    mutant = Mutant(**{name: tuple(each[name]) if name == "end" else each[name] for name in names})
    rounds = rounds_for(checkout.folder, mutant, seconds, whole)
    found = checkout.judge(mutant, rounds[2:] if whole else rounds[:2], TIMEOUT_S)
    each["status"] = "survived" if found.killed_by is None else "killed"
    each["killed_by"], each["whole"] = found.killed_by, whole
    each["seconds"] = round(each.get("seconds", 0.0) + found.seconds, 1)
    print(f"{each['number']:4d} {each['status']:9s} {each['seconds']:7.1f} s  {describe(each)}", flush=True)


def unmutated(folder: Path) -> dict[str, float]:
    """Seconds of every near test file as it stands; ends where one fails."""
    report = folder / "report.xml"
    near = [str(path) for name in NEAR if (path := folder / "tests" / name).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", f"--junitxml={report}", *near]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=True)
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[_file_of(folder, case.attrib["classname"])] += float(case.attrib["time"])
    return {name: round(value, 2) for name, value in sorted(seconds.items())}


def _file_of(folder: Path, classname: str) -> str:
    parts = classname.split(".")
    while parts and not (folder / f"{'/'.join(parts)}.py").exists():
        parts.pop()
    return f"{'/'.join(parts)}.py"


def equivalents() -> dict[int, str]:
    """Reasons by mutants' numbers."""
    return yaml.safe_load(EQUIVALENT.read_text()) or {} if EQUIVALENT.exists() else {}


def table(results: dict[str, Any], reasons: dict[int, str]) -> str:
    """Killed and living mutants of every area, and each that lives, in Markdown."""
    lines = ["| area | drawn | tried | killed | equivalent | living | killed of those that are not equivalent |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for area in (*AREAS, "all"):
        rows = [each for each in results["mutants"] if area in (each["area"], "all")]
        judged = [each for each in rows if each["status"]]
        killed = [each for each in judged if each["status"] == "killed"]
        same = [each for each in judged if each["status"] == "survived" and each["number"] in reasons]
        share = f"{len(killed) / (len(judged) - len(same)):.3f}" if len(judged) > len(same) else "-"
        living = len(judged) - len(killed) - len(same)
        lines.append(f"| {area} | {len(rows)} | {len(judged)} | {len(killed)} | {len(same)} | {living} | {share} |")
    lines.append("")
    for each in results["mutants"]:
        if each["status"] == "survived":
            lines.append(f"- {each['number']}: {describe(each)}: {reasons.get(each['number'], 'lives')}")
    return "\n".join(lines)


def describe(each: dict[str, Any]) -> str:
    before, after = (" ".join(each[name].split()) for name in ("before", "after"))
    return f"{each['file']}:{each['line']} {each['kind']}: `{before}` -> `{after}`"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _write(results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=None).replace('{"area"', '\n{"area"')  # a line a mutant
    RESULT.with_suffix(".part").write_text(text + "\n")
    RESULT.with_suffix(".part").replace(RESULT)


if __name__ == "__main__":
    main()
