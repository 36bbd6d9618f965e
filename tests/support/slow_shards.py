"""Runs the slow tests file by file, resumable, and writes their table.

    bash scripts/test.sh --slow                # all that this commit has left; run again to resume
    bash scripts/test.sh --slow tests/rollout  # some of them

The reports of each file are kept in build/slow/COMMIT/. After every file of a whole run the table
is written, benchmarks/results/slow_suite.json: the commit, the machine, of each file its seconds,
the tests that passed, and by name those that failed or were skipped, with the reason; and the files
that are left to run. A file whose tests passed at the commit is not run again, also in another
clone or on another machine that has the table.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import machine  # noqa: E402

TABLE = ROOT / "benchmarks/results/slow_suite.json"


def pytest(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs pytest in one process."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "slow", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, check=False, **how)


def files_of(paths: list[str]) -> list[str]:
    """Returns the files that have slow tests, in pytest's order. Exits where one cannot be
    collected."""
    listed = pytest("--collect-only", "-q", *paths, capture_output=True)
    if listed.returncode:
        sys.exit(listed.stdout + listed.stderr)
    return list(dict.fromkeys(re.findall(r"^(tests/\S+\.py)::", listed.stdout, re.MULTILINE)))


def outcome(report: Path) -> dict[str, Any]:
    """Reads what a file's tests came to from its JUnit report."""
    (suite,) = ElementTree.parse(report).getroot()
    told: dict[str, Any] = {"seconds": round(float(suite.attrib["time"]), 1), "passed": 0}
    for case in suite.iter("testcase"):
        found = {kind: case.find(kind) for kind in ("failure", "error", "skipped")}
        kind = next((kind for kind, element in found.items() if element is not None), None)
        if kind is None:
            told["passed"] += 1
        else:
            reason = (found[kind].get("message") or "").strip().splitlines()  # type: ignore[union-attr]
            told.setdefault("skipped" if kind == "skipped" else "failed", {})[
                case.attrib["name"]
            ] = without_folders((reason or [""])[0])
    return told


def without_folders(text: str) -> str:
    """Leaves of absolute paths only the last name: the table says nothing of where it was made."""
    return re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)+", "", text)


def passed_before(commit: str) -> dict[str, dict[str, Any]]:
    """Returns the table's files whose tests passed at this commit."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    files = table.get("files", {}) if table.get("commit") == commit else {}
    return {file: told for file, told in files.items() if "failed" not in told}


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main(paths: list[str]) -> int:
    # a commit of the table alone changes no test
    commit = git("log", "-1", "--format=%h", "--", ".", f":!{TABLE.relative_to(ROOT)}")
    if git("status", "--porcelain", "--untracked-files=no", "--", f":!{TABLE.relative_to(ROOT)}"):
        sys.exit(
            "error: there are changes that no commit has: commit them, as results are kept by"
            " commit"
        )
    folder = ROOT / "build/slow" / commit
    folder.mkdir(parents=True, exist_ok=True)
    every = files_of(paths)
    results = {file: told for file, told in passed_before(commit).items() if file in every}
    for number, file in enumerate(every, 1):
        report = folder / f"{file.replace('/', '.')}.xml"
        known = results.get(file) or (outcome(report) if report.exists() else {"failed": {}})
        if "failed" in known:
            begun = time.monotonic()
            print(f"{number}/{len(every)} {file}", end=" ", flush=True)
            report.unlink(missing_ok=True)
            with report.with_suffix(".log").open("w") as log:
                ended = pytest(
                    "-v",
                    f"--junitxml={report}",
                    file,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            if report.exists():
                known = outcome(report)
            else:  # a test has ended the process it runs in
                why = f"pytest ended with {ended.returncode} and left no report"
                known = {"seconds": round(time.monotonic() - begun, 1), "passed": 0}
                known["failed"] = {"(the whole file)": why}
            counts = ", ".join(
                f"{len(known[kind])} {kind}" for kind in ("failed", "skipped") if kind in known
            )
            print(
                f"{known['passed']} passed{counts and ', ' + counts} in"
                f" {time.monotonic() - begun:.0f} s",
                flush=True,
            )
        results[file] = known
        if not paths:
            table = {"commit": commit, "machine": machine()}
            table["files"] = {each: results[each] for each in every if each in results}
            table["left"] = [each for each in every if each not in results]
            TABLE.write_text(json.dumps(table, indent=1) + "\n")
    failed = [
        f"{file}::{name}" for file, told in results.items() for name in told.get("failed", {})
    ]
    print(*failed, sep="\n")
    print(
        f"{sum(told['passed'] for told in results.values())} passed, {len(failed)} failed, on"
        f" {commit}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
