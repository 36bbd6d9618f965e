"""Answers a second that a pool judges against bare math-verify in as many processes: what deadlines
and sockets cost.

No answer is the same characters as its reference, so nobody is helped by comparing strings. Two
mixes: `labelled`, the labelled answers that come along, and `integers`, what most answers of
competitions are. `math_verify` in the pool is the same work as bare, so its share is what the pool
costs; `math` is the verifier of runs. Bare processes and pool take turns, and a share is the median
of those turns.

python benchmarks/verifier.py --out benchmarks/results/verifier.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

from machine import machine

from megatron_stare.process.shipped import SHIPPED
from megatron_stare.rewards.math_verify_verifier import verify
from megatron_stare.rewards.verifier_pool import VerifierPool

WORKERS = 2
Texts = list[tuple[str, str]]


def labelled(number: int) -> Texts:
    """The labelled answers again and again, without those that repeat their reference."""
    lines = (
        (SHIPPED / "assets" / "verification" / "labelled_answers.jsonl").read_text().splitlines()
    )
    texts = [(case["response"], case["gold"]) for case in map(json.loads, lines)]
    texts = [(response, gold) for response, gold in texts if f"{{{gold}}}" not in response]
    return (texts * (number // len(texts) + 1))[:number]


def integers(number: int) -> Texts:
    """Integers named as '= n' or with zeros before, half of them wrong."""
    forms = (
        "So $m+n = \\boxed{%s%d}$.",
        "Thus \\boxed{0%s%d} is the answer.",
        "We get \\(\\boxed{x = %s%d}\\).",
    )
    return [(forms[n % 3] % ("", 100 + n % 800 + n % 2), str(100 + n % 800)) for n in range(number)]


def bare(texts: Texts, ready: Any, go: Any, done: Any) -> None:
    """One process of bare math-verify."""
    verify(*texts[0])  # imports and the parser's first use
    ready.put(None)
    while go.get():
        for response, gold in texts:
            verify(response, gold)
        done.put(None)


def measure(texts: Texts, rounds: int) -> dict[str, Any]:
    """Answers a second, by round: bare processes, then each pool."""
    context = multiprocessing.get_context("spawn")
    ready, go, done = context.Queue(), [context.Queue() for _ in range(WORKERS)], context.Queue()
    processes = [
        context.Process(target=bare, args=(texts[n::WORKERS], ready, go[n], done), daemon=True)
        for n in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.get()
    found: dict[str, list[float]] = {"bare": [], "math_verify": [], "math": []}
    with (
        VerifierPool("math_verify", WORKERS, 60) as plain,
        VerifierPool("math", WORKERS, 60) as ours,
    ):
        for turn in range(rounds + 1):  # the first warms up
            start = time.perf_counter()
            for queue in go:
                queue.put(True)
            for _ in processes:
                done.get()
            seconds = {"bare": time.perf_counter() - start}
            for name, pool in (("math_verify", plain), ("math", ours)):
                start = time.perf_counter()
                pool.verify(texts)
                seconds[name] = time.perf_counter() - start
            for name, taken in seconds.items():
                if turn:
                    found[name].append(len(texts) / taken)
    for queue in go:
        queue.put(False)
    rates = {
        f"{name}_answers_per_s": round(statistics.median(each), 1) for name, each in found.items()
    }
    shares = {
        f"{name}_share_of_bare": round(
            statistics.median(a / b for a, b in zip(found[name], found["bare"], strict=True)), 3
        )
        for name in ("math_verify", "math")
    }
    return {"answers": len(texts), **rates, **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns that count")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    args = parser.parse_args()
    results = {
        "machine": machine(),
        "workers": WORKERS,
        "rounds": args.rounds,
        "labelled": measure(labelled(1_000), args.rounds),
        "integers": measure(integers(2_000), args.rounds),
    }
    text = json.dumps(results, indent=2) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
