"""The eight hangs that the black box must name, each in a real run; what it says, and how soon.

Each run has Ray, two tensor-parallel ranks over gloo, an engine and verifiers on this machine's
CPUs, and is hung after some steps by hanging a real part of it (tests/support/hangs.py). `limit_s`
is the limit of the phase at that moment, `from_hang_to_screen_s` the time until all processes were
looked at, their stacks taken and the bundle written. A run whose verifier takes five times as long
in one step must say nothing, nor one whose machine others take for a while.

    python benchmarks/hangs.py [--only PATTERN]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from machine import machine
from support.hangs import HANGS, HungRun, hung, loaded, now, sentence_of

CROWDED = "the machine taken by others for some steps"
SLOW = "one step five times as long"
RESULT = Path(__file__).parent / "results/hangs.json"


def named(name: str) -> dict[str, Any]:
    """Provokes one hang, waits until the watcher reports it, and compares the report with the
    expected sentence."""
    with tempfile.TemporaryDirectory() as folder, hung(name, Path(folder)) as (run, hang):
        hang.begin(run)
        begun = now()
        screen, facts = run.told()
        said = sentence_of(screen).replace(str(run.dir), "RUN")
        total = now() - begun
    print(screen, flush=True)
    return {
        "right": bool(re.search(hang.sentence, said)),
        "said": said,
        "phase": facts["beat"]["phase"],
        "limit_s": round(facts["beat"]["limit_s"], 1),
        "from_hang_to_screen_s": round(total, 1),
        "lines": len(screen.splitlines()),
    }


def undisturbed() -> dict[str, Any]:
    """A run that must end without a bundle."""
    settings = {
        "reward.verifier": "support.stalling_verifier.slow",
        "run.steps": 8,
        "reward.workers": 1,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        HungRun(Path(folder), **settings, **{"faults.hangs.floor_s": 2}) as run,
    ):
        run.step(5)
        run.stall.write_text("0.1")
        run.step(6)
        run.stall.unlink()
        run.process.stdout.read()
        bundles = list(run.dir.glob("blackbox/*"))
        code = run.process.wait()
    return {"exit": code, "bundles": len(bundles), "floor_s": 2}


def crowded() -> dict[str, Any]:
    """A run beside processes that want all of its machine, begun and ended in its middle, which
    must not be told of."""
    settings = {"batch.prompts": 16, "batch.samples_per_prompt": 8}
    with (
        tempfile.TemporaryDirectory() as folder,
        HungRun(Path(folder), **settings, **{"faults.hangs.floor_s": 0.5}) as run,
    ):
        found = loaded(run, slower=3.0, steps=10)
        bundles = list(run.dir.glob("blackbox/*"))
    return {
        "exit": found.code,  # of Ctrl-C, after more steps
        "bundles": len(bundles),
        "floor_s": 0.5,
        "busy processes": found.busy,
        "step_s": {
            "before": round(found.usual_s, 2),
            "beside them": [round(s, 2) for s in found.loaded_s],
        },
        "longest phase_s": {name: round(seconds, 2) for name, seconds in found.longest.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="pattern of the runs that are made; the others' results are kept"
    )
    args = parser.parse_args()
    for name in HANGS:
        if re.search(args.only, name):
            keep("hangs", name, named(name))
    if re.search(args.only, SLOW):
        keep("undisturbed", SLOW, undisturbed())
    if re.search(args.only, CROWDED):
        keep("undisturbed", CROWDED, crowded())


def keep(kind: str, name: str, found: dict[str, Any]) -> None:
    """Writes it at once, beside what was found before."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"hangs": {}, "undisturbed": {}}
    result[kind][name] = found
    result |= {"machine": machine()}
    result["named"] = f"{sum(each['right'] for each in result['hangs'].values())} of {len(HANGS)}"
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
