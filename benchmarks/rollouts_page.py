"""How long a page of sampled responses takes to write, open, filter and scroll in a headless
Chromium, by their number.

Responses of mathematics' length, of which a third carry the numbers of their tokens; a small page
beside the large one says what the number costs. Medians of several openings; a frame is one that
the page draws while it scrolls.

python benchmarks/rollouts_page.py --out benchmarks/results/rollouts_page.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

from megatron_stare.observability.report.rollouts_page import write_rollouts
from megatron_stare.run_dir.json_lines import to_line, write_atomically
from megatron_stare.run_dir.rollout_files import rollout_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.browser import browser, tab  # a helper of the tests

PER_STEP, NUMBERED = 50, 16
WORDS = [
    "so",
    "we",
    "have",
    "the",
    "sum",
    "of",
    "such",
    "wait",
    "check",
    "hence",
    "x",
    "then",
    "factor",
    "7",
    "12",
    "144",
]
FRAMES = 120

READY = """new Promise(done => {
  const look = () => document.body.dataset.ready ? done(performance.now()) : setTimeout(look, 5);
  look();
})"""
PAINTED = """new Promise(done => new PerformanceObserver(all => {
  for (const each of all.getEntries())
    if (each.name === 'first-contentful-paint') done(each.startTime);
}).observe({ type: 'paint', buffered: true }))"""
FILTERED = """new Promise(done => {{
  const form = document.querySelector('.filters'), count = form.querySelector('.count');
  const began = performance.now();
  form.elements['{name}'].value = '{value}';
  new MutationObserver((_, seen) => {{
    if (!/ of /.test(count.textContent)) return;
    seen.disconnect();
    requestAnimationFrame(() => done([performance.now() - began, count.textContent]));
  }}).observe(count, {{ childList: true }});
  form.dispatchEvent(new Event('input'));
}})"""
SCROLLED = f"""new Promise(done => {{
  const list = document.querySelector('.list'), times = [];
  const step = (list.scrollHeight - list.clientHeight) / {FRAMES};
  let before = performance.now();
  const next = () => {{
    const now = performance.now(); times.push(now - before); before = now;
    list.scrollTop += step;
    if (times.length <= {FRAMES}) requestAnimationFrame(next); else done(times.slice(1));
  }};
  requestAnimationFrame(next);
}})"""
OPENED = """new Promise(done => {
  const list = document.querySelector('.list'), facts = document.querySelector('.facts');
  list.scrollTop = list.scrollHeight / 2;
  requestAnimationFrame(() => requestAnimationFrame(() => {
    const row = list.querySelectorAll('.row')[6], began = performance.now();
    new MutationObserver((_, seen) => {
      seen.disconnect(); requestAnimationFrame(() => done(performance.now() - began));
    }).observe(document.querySelector('.run-of-tokens'), { childList: true });
    row.click();
  }));
})"""


def run_directory(folder: Path, responses: int) -> Path:
    """A run that stored as many, PER_STEP a step."""
    noise = random.Random(1)
    folder.mkdir(parents=True)
    steps = responses // PER_STEP
    (folder / "config.yaml").write_text(
        f"run: {{name: made, steps: {steps}}}\nalgorithm: {{name: stare, variant: C2}}\n"
    )
    rows = [
        {
            "step": step,
            "stare/gate": step % 2,
            "stare/threshold_plus": 0.4,
            "stare/threshold_minus": 0.7,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(map(to_line, rows)))
    for step in range(1, steps + 1):
        write_atomically(
            rollout_file(folder / "rollouts", step),
            [_response(step, i, noise) for i in range(PER_STEP)],
        )
    return folder


def _response(step: int, number: int, noise: random.Random) -> dict[str, Any]:
    n = noise.randint(120, 480)
    pieces = [f" {noise.choice(WORDS)}" for _ in range(n)]
    right = noise.random() < 0.5
    record: dict[str, Any] = {
        "step": step,
        "cursor": step * PER_STEP + number,
        "sample": number % 8,
        "prompt": (
            f"Find the number of ordered pairs of integers below {noise.randint(10, 10**6)} whose "
            + " ".join(noise.choice(WORDS) for _ in range(40))
        ),
        "response": "".join(pieces),
        "answer": str(noise.randint(0, 999)),
        "reward": float(right),
        "reward_status": "ok",
        "finish_reason": "stop",
        "tokens": n,
    }
    if number < NUMBERED:
        record["by_token"] = {
            "text": pieces,
            "surprisal": [round(noise.expovariate(3), 5) for _ in pieces],
            "entropy": [round(noise.expovariate(2), 5) for _ in pieces],
            "advantage": 0.61237 if right else -1.2247,
            "weight": [[1.0, n]],
            "selected": "".join(noise.choice("....+" if right else "....-") for _ in pieces),
            "rare": "".join(noise.choice("ccr") for _ in pieces),
        }
    return record


async def opened(page: Path) -> dict[str, Any]:
    """One opening in a browser of its own; milliseconds."""
    async with tab() as here:
        await here.open(page, 1400)
        found: dict[str, Any] = {"listed_ms": await here.settled(READY)}
        await here.value("document.querySelector('.only-selected button').click()")
        found["first_paint_ms"] = await here.settled(PAINTED)
        found["filter_reward_ms"], _ = await here.settled(
            FILTERED.format(name="reward-from", value="1")
        )
        found["search_first_ms"], _ = await here.settled(
            FILTERED.format(name="search", value="factor 7 12")
        )
        found["search_again_ms"], _ = await here.settled(
            FILTERED.format(name="search", value="factor 144")
        )
        await here.settled(FILTERED.format(name="search", value=""))
        frames = sorted(await here.settled(SCROLLED))
        found["scroll_frame_median_ms"] = frames[len(frames) // 2]
        found["scroll_frame_p95_ms"] = frames[int(0.95 * len(frames))]
        found["open_response_ms"] = await here.settled(OPENED)
        found["rows_in_page"] = await here.value("document.querySelectorAll('.row').length")
        assert here.errors == [], here.errors
        return found


def measure(responses: int, openings: int) -> dict[str, Any]:
    """Medians over openings."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_directory(Path(folder) / "run", responses)
        began = time.perf_counter()
        page = write_rollouts([run], Path(folder) / "rollouts.html")
        wrote = time.perf_counter() - began
        stored = sum(file.stat().st_size for file in (run / "rollouts").iterdir())
        seen = [asyncio.run(opened(page)) for _ in range(openings)]
        return {
            "responses": responses,
            "rollout_files_mb": round(stored / 1e6, 1),
            "page_mb": round(page.stat().st_size / 1e6, 1),
            "write_s": round(wrote, 2),
            **{name: round(statistics.median(each[name] for each in seen), 1) for name in seen[0]},
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--responses", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--openings", type=int, default=5)
    args = parser.parse_args()
    if browser() is None:
        parser.error("there is no Chromium here: apt-get install chromium")
    rows = [measure(number, args.openings) for number in args.responses]
    args.out.write_text(
        json.dumps({"machine": machine(), "openings": args.openings, "pages": rows}, indent=2)
        + "\n"
    )
    print(args.out.read_text())


if __name__ == "__main__":
    main()
