"""Run directories with the files of runs that never took place, for pages to be drawn from and
looked at.

python tests/support/synthetic_runs.py FOLDER [STEPS]    writes one of every kind, and their reports
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

from megatron_stare.run_dir.json_lines import to_line, write_atomically
from megatron_stare.run_dir.rollout_files import rollout_file

# twin: the same as closed, by a method without a gate
KINDS = ("held", "closed", "twin", "collapsed")
_TARGET = 0.12


def synthetic_run(folder: Path, kind: str, steps: int = 300, seed: int = 1) -> Path:
    """Writes one into `folder`, and returns it."""
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    method = "grpo" if kind == "twin" else "stare"
    settings = ", variant: C2, amplify: 2.0, entropy_target: 0.12" if method == "stare" else ""
    (folder / "config.yaml").write_text(
        f"run: {{name: {kind}, steps: {steps}}}\nmodel: {{path: models/tiny}}\n"
        f"batch: {{prompts: 32, samples_per_prompt: 8}}\nalgorithm: {{name: {method}{settings}}}\n"
    )
    start = {
        "step": 0,
        "date": "2026-01-31T12:00:00+0000",
        "host": "node7",
        "version": "1",
        "commit": "0123456789ab",
    }
    write_atomically(folder / "starts.jsonl", [start])
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(to_line(_row(kind, method, step, steps, noise)))
    write_atomically(folder / "eval.jsonl", [_evaluation(kind, step, noise) for step in (0, steps)])
    write_atomically(
        rollout_file(folder / "rollouts", steps), [_response(steps, i, noise) for i in range(4)]
    )
    return folder


def _row(kind: str, method: str, step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    done = step / steps
    if kind == "held":
        entropy = _TARGET + 0.5 * math.exp(-12 * done) + 0.008 * noise.gauss(0, 1)
    elif kind == "collapsed":
        entropy = 0.5 * math.exp(-9 * done) + 1e-4 * abs(noise.gauss(0, 1))
    else:
        entropy = 0.2 + 0.3 * (1 - done) + 0.01 * noise.gauss(0, 1)
    reward = 0.3 + 0.6 * (1 - math.exp(-4 * done)) + 0.02 * noise.gauss(0, 1)
    if kind == "collapsed" and done > 0.6:
        reward *= math.exp(-8 * (done - 0.6))
    gate = float(entropy < _TARGET)
    row = {
        "step": step,
        "reward/mean": reward,
        "group/degenerate": 0.1 + 0.4 * done,
        "entropy/mean": entropy,
        "response/length_mean": 17 + 3 * done + noise.gauss(0, 0.3),
        "response/truncated": 0.0,
        "optimizer/grad_norm": 900.0 if step == steps // 3 else 0.5 + 0.1 * noise.random(),
        "optimizer/lr": 4.5e-4 * min(1.0, step / 10),
        "loss/clip_fraction": 0.0,
        "perf/tokens_per_s": 4000 + 200 * noise.gauss(0, 1),
        "memory/tree_pss_gb": 2.5,
        "forecast/entropy_change": -0.003 + 0.001 * noise.gauss(0, 1),
        "forecast/neutral_weight": 40.0 if step % 97 == 0 else 1.3 + 0.1 * noise.gauss(0, 1),
        "forecast/mass_common_plus": -0.0034,
        "forecast/mass_rare_plus": 0.0029 + 0.0002 * noise.gauss(0, 1),
        "forecast/mass_common_minus": 0.0035,
        "forecast/mass_rare_minus": -0.0063 + 0.0003 * noise.gauss(0, 1),
        "time/rollout_s": 0.2,
        "time/log_probs_s": 0.25,
        "time/update_s": 0.5,
        "time/sync_s": 0.02,
        "time/step_s": 1.0 + 0.02 * noise.random(),
    }
    if method == "stare":
        row |= {
            "entropy/target": _TARGET,
            "stare/gate": gate,
            "stare/amplify": 2.0,
            "stare/attenuate": 0.9,
        }
        row |= {"stare/selected_plus": 300.0 + step % 7, "stare/selected_minus": 110.0 + step % 5}
        row |= {"stare/threshold_plus": 0.4 + 0.1 * done, "stare/threshold_minus": 0.7 + 0.1 * done}
    return row


def _evaluation(kind: str, step: int, noise: random.Random) -> dict[str, Any]:
    sampled, greedy = (
        (0.5, 0.95) if step == 0 else (0.05, 0.05) if kind == "collapsed" else (0.75, 0.9)
    )
    right = [int(noise.random() < sampled) for _ in range(256)]
    decoded = [int(noise.random() < greedy) for _ in range(256)]
    shown = {
        "prompt": "21+92+36=",
        "response": "36+21=57;57+92=149",
        "answer": "149",
        "reward": 1.0,
    }
    return {
        "step": step,
        "weights": "trained" if step else "base",
        "problems": 256,
        "problem": list(range(256)),
        "correct": right,
        "pass1": sum(right) / 256,
        "greedy_correct": decoded,
        "greedy": sum(decoded) / 256,
        "failures": 0,
        "samples": [shown, {**shown, "prompt": "47+78+63=", "answer": "188", "reward": 0.0}],
    }


def _response(step: int, number: int, noise: random.Random) -> dict[str, Any]:
    pieces = [*"36+21=57;57+92=149", "\n", "ok", "<eos>"]
    n, right = len(pieces), number % 2 == 0
    surprisal = [round(noise.expovariate(3), 5) for _ in pieces]
    chosen = sorted(range(n), key=lambda i: surprisal[i])[-3:]
    return {
        "step": step,
        "cursor": number,
        "sample": 0,
        "prompt": "21+92+36=",
        "response": "".join(pieces[:-1]),
        "answer": "149",
        "reward": float(right),
        "tokens": n,
        "by_token": {
            "text": pieces,
            "surprisal": [None if i == n - 2 else value for i, value in enumerate(surprisal)],
            "entropy": [None if i == n - 2 else round(noise.expovariate(2), 5) for i in range(n)],
            "advantage": 0.61237 if right else -1.2247,
            "weight": [[2.0 if right and i in chosen else 1.0, 1] for i in range(n)],
            "selected": "".join(
                " " if i == n - 2 else ("+-"[not right] if i in chosen else ".") for i in range(n)
            ),
            "rare": "".join(" " if i == n - 2 else "cr"[surprisal[i] > 0.5] for i in range(n)),
        },
    }


if __name__ == "__main__":
    from megatron_stare.observability.report.page import write_report

    top, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300
    made = [synthetic_run(top / kind, kind, steps) for kind in KINDS]
    for run in made:
        print(write_report([run], run / "report.html"))
    print(write_report(made[1:3], top / "comparison.html"))
    print(write_report([made[0], made[3]], top / "collapse.html"))
