"""Figures of a long run, from its record and from samples of its processes; see long_run.py."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kill_anywhere import PROCESSES

from megatron_stare.config.formats import with_new_names
from megatron_stare.process.recovery import RESTARTS_FILE
from megatron_stare.run_dir.json_lines import read_jsonl

TARGET, BAND = 0.12, 0.25  # nats, of configs/quickstart.yaml; share of it
HELD_AFTER, HELD_SHARE = 300, 0.9  # steps, of the others
# steps of the run, and after a fault, of its new processes; growth, of the mean
LEVEL_AFTER, MEMORY_SHARE = 200, 0.05
SAVE_EVERY, SAVE_SHARE = 20, 0.03  # steps; of wall time
# steps after a save beside which its writers may still be at work; at the sixth processes are
# looked at
WRITTEN = 5
LAST = 100  # steps that say where a run ended
FAULTS = 10
COUNT_SHARE = 0.01  # of the mean, over the run
COUNTED = ("descriptors", "processes", "shm")  # the entries of the last
SETTINGS = (
    "parallel",
    "batch",
    "rollout",
    "runtime",
    "algorithm",
    "optimizer",
    "checkpoint",
    "faults",
)
Sample = dict[str, Any]


def figures(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of a run, finished or not."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    samples = [each for each in events if each["event"] == "sample"]
    ended = [each for each in events if each["event"] == "ended"]
    starts = [each for each in events if each["event"] == "started"]
    evaluations = {each["step"]: each for each in read_jsonl(run_dir / "eval.jsonl")}
    sessions = [
        (time.mktime(time.strptime(each["date"][:19], "%Y-%m-%dT%H:%M:%S")), each["step"])
        for each in read_jsonl(run_dir / "starts.jsonl")
    ]
    config = with_new_names(yaml.safe_load((run_dir / "config.yaml").read_text()))
    return {
        "settings": {section: config[section] for section in SETTINGS},
        "code": ended[-1]["code"] if ended else None,
        "left": ended[-1]["left"] if ended else None,
        "commands": len(starts),
        "own_shm": all(each["own_shm"] for each in starts),
        "package": sorted({each["package"] for each in starts}),
        "wall_s": round(events[-1]["at"] - events[0]["at"]),
        "steps_once": [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1)),
        "steps": len(rows),
        "pass1": {step: each.get("pass1") for step, each in evaluations.items()},
        "greedy": {step: each.get("greedy") for step, each in evaluations.items()},
        "entropy": entropy(rows),
        "step_s": round(statistics.median(row["time/step_s"] for row in rows), 3),
        "saves": saves(rows),
        "faults": faults(events, sessions),
        "restarts": dict(Counter(each["by"] for each in read_jsonl(run_dir / RESTARTS_FILE))),
        "memory": growth(samples, events, _pss) | {"by_kind": by_kind(samples, events)},
        "descriptors": growth(samples, events, lambda sample: _sum(sample, "descriptors")),
        "processes": growth(samples, events, lambda sample: _sum(sample, "number")),
        "shm": growth(samples, events, lambda sample: sample["shm"]["entries"]),
    }


def judged(runs: Mapping[str, Mapping[str, Any]], steps: int) -> dict[str, bool]:
    """Each thing that is asked for; what has not been run has not been shown."""
    stare, twin = runs.get("stare"), runs.get("grpo")
    found = {
        "completes": bool(stare) and _whole(stare, steps),
        "untouched": bool(stare) and stare["commands"] == 1 and not stare["left"],
        "faults": bool(stare) and _injected(stare["faults"]),
        "entropy_held": bool(stare) and (stare["entropy"]["held"] or 0.0) >= HELD_SHARE,
        "twin_completes": bool(twin) and _whole(twin, steps),
        "twin_outside": bool(twin) and not _inside(twin["entropy"]["end"]),
        "memory_level": bool(stare) and stare["memory"]["over_the_run"] is not None,
        **{f"{what}_level": bool(stare) and _level(stare[what]) for what in COUNTED},
        **{
            f"{what}_level_over_restarts": bool(stare) and _level_over_restarts(stare[what])
            for what in COUNTED
        },
        "saves_cheap": bool(stare) and stare["saves"]["share"] < SAVE_SHARE,
    }
    if found["memory_level"]:
        found["memory_level"] = stare["memory"]["over_the_run"] < MEMORY_SHARE
    return found


def _whole(run: Mapping[str, Any], steps: int) -> bool:
    return run["code"] == 0 and run["steps"] == steps and run["steps_once"]


def _injected(found: Sequence[Mapping[str, Any]]) -> bool:
    kinds = {each["kind"] for each in found}
    return len(found) >= FAULTS and kinds.issuperset(PROCESSES["ray"])


def _level(found: Mapping[str, Any]) -> bool:
    """Checks that a number does not rise between faults. The slope need not be 0: a connection that
    is there at one look and not at the next makes it a little more."""
    return found["over_the_run"] is not None and found["over_the_run"] < COUNT_SHARE


def _level_over_restarts(found: Mapping[str, Any]) -> bool:
    """Checks that a number is no larger after the last fault than before the first."""
    levels = found["levels"]
    return bool(levels) and levels[-1]["median"] <= levels[0]["median"]


def entropy(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares of the steps after HELD_AFTER whose entropy lies inside the band, and where the run
    ended, nats."""
    held = [row["entropy/mean"] for row in rows if row["step"] > HELD_AFTER]
    return {
        "target": TARGET,
        "held": round(statistics.fmean(map(_inside, held)), 4) if held else None,
        "lowest": round(min(held), 4) if held else None,
        "highest": round(max(held), 4) if held else None,
        "mean": round(statistics.fmean(held), 4) if held else None,
        "end": round(statistics.fmean(row["entropy/mean"] for row in rows[-LAST:]), 4),
        "each_100": [
            round(statistics.fmean(row["entropy/mean"] for row in rows[at : at + 100]), 4)
            for at in range(0, len(rows), 100)
        ],
    }


def _inside(nats: float) -> bool:
    return abs(nats / TARGET - 1.0) <= BAND


def saves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Cost of saving: seconds that training waited, and seconds by which steps are longer beside
    working writers. The latter are the excess of these steps' medians over the median of the other
    steps of a cycle."""
    rows = rows[SAVE_EVERY:]  # the first steps are warm-up
    waited = sum(row["perf/save_s"] for row in rows)
    cycle: dict[int, list[float]] = {}
    for row in rows:
        cycle.setdefault((row["step"] - 1) % SAVE_EVERY, []).append(row["time/step_s"])
    medians = [statistics.median(cycle.get(at, [0.0])) for at in range(SAVE_EVERY)]
    plain = statistics.median(medians[WRITTEN:])
    beside = sum(each - plain for each in medians[:WRITTEN]) * len(rows) / SAVE_EVERY
    wall = sum(row["time/step_s"] for row in rows) + waited
    return {
        "share": round((waited + beside) / wall, 5),
        "share_waited": round(waited / wall, 5),
        "share_beside": round(beside / wall, 5),
        "waited_s_a_save": round(waited / (len(rows) / SAVE_EVERY), 4),
        "step_s_by_steps_since": [round(each, 4) for each in medians],
    }


def faults(
    events: Sequence[Mapping[str, Any]], starts: Sequence[tuple[float, int]]
) -> list[dict[str, Any]]:
    """Each with the seconds until workers were started again for it, and the step that was gone
    back to.

    Args:
        starts: of the run's sessions, as seconds of the clock, whole ones, and the step after which
            they go on.
    """
    those = [event for event in events if event["event"] == "fault"]
    found = []
    for event, until in zip(
        those, [*(each["at"] for each in those), float("inf")][1:], strict=True
    ):
        again = next(((at, step) for at, step in starts if event["at"] < at < until), None)
        found.append(
            {
                "kind": event["fault"]["kind"],
                "drawn": event["fault"]["step"],
                "after_step": event["step"],
                "back_to_step": None if again is None else again[1],
                "seconds": None if again is None else round(again[0] - event["at"]),
            }
        )
    return found


def stretches(events: Sequence[Mapping[str, Any]], settled: int) -> list[list[Sample]]:
    """Samples after LEVEL_AFTER, those between two faults or starts by hand together, without so
    many steps after one."""
    found: list[list[Sample]] = [[]]
    since = last = 0
    for event in events:
        last = event.get("step", last)
        if event["event"] == "fault" or (event["event"] == "started" and last):
            since = last + settled
            found.append([])
        elif event["event"] == "sample" and event["step"] > max(LEVEL_AFTER, since):
            found[-1].append(dict(event))
    return [each for each in found if len(each) > 1]


def growth(
    samples: Sequence[Sample], events: Sequence[Mapping[str, Any]], value: Callable[[Sample], float]
) -> dict[str, Any]:
    """The slope of one line with an intercept for each stretch between faults (least squares),
    times the steps after LEVEL_AFTER; as it is, and as a share of the mean."""
    steps = max((sample["step"] for sample in samples), default=0) - LEVEL_AFTER
    found: dict[str, Any] = {
        "rise": None,
        "over_the_run": None,
        "over_the_run_unsettled": None,
        "levels": [],
    }
    for settled, name in ((LEVEL_AFTER, "over_the_run"), (0, "over_the_run_unsettled")):
        parts = stretches(events, settled)
        if not parts:
            continue
        squares = products = 0.0
        for part in parts:
            middle = statistics.fmean(each["step"] for each in part)
            mean = statistics.fmean(map(value, part))
            squares += sum((each["step"] - middle) ** 2 for each in part)
            products += sum((each["step"] - middle) * (value(each) - mean) for each in part)
        rise = products / squares * steps
        level = statistics.fmean(value(each) for part in parts for each in part)
        found[name] = round(rise / level, 5) if level else 0.0
        if settled:
            found["rise"] = round(rise, 3)
            found["levels"] = [
                {
                    "steps": [part[0]["step"], part[-1]["step"]],
                    "median": statistics.median(map(value, part)),
                    "most": max(map(value, part)),
                }
                for part in parts
            ]
    return found


def by_kind(samples: Sequence[Sample], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pss of each kind of process: mean in GB, and the rise over the run between faults, MB."""
    kinds = sorted({kind for sample in samples for kind in sample["kinds"]})
    found = {}
    for kind in kinds:
        grown = growth(
            samples, events, lambda sample, kind=kind: sample["kinds"].get(kind, {}).get("pss", 0)
        )
        levels = grown["levels"]
        found[kind] = {
            "mb": [round(each["median"] / 1e6, 1) for each in levels],
            "rise_mb": None if grown["rise"] is None else round(grown["rise"] / 1e6, 2),
        }
    return found


def _pss(sample: Sample) -> float:
    return _sum(sample, "pss")


def _sum(sample: Sample, what: str) -> float:
    return float(sum(each[what] for each in sample["kinds"].values()))


if __name__ == "__main__":
    import sys

    run = Path(sys.argv[1])
    print(json.dumps(figures(run, read_jsonl(run.parent / f"{run.name}.events.jsonl")), indent=1))
