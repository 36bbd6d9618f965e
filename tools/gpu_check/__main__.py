"""Runs the checks of this folder, one after another, each in a process with a limit, and keeps what
each found.

A result is a JSON file in benchmarks/results/gpu/: machine, figures, bounds and verdict. A check
that lacks something is `not run`, with the reason, and leaves no file, so that it is tried again;
it is never a pass. One that reaches its limit is ended, and `too slow`.

    python tools/gpu_check [NAME ...] [--again] [--cpu] [--limit S] [--out FOLDER]
    python tools/gpu_check --wheels [FOLDER] | --install FOLDER

Exit status: 0 where every check passed or had passed, 1 where one failed or was too slow, 3 where
one could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import wheels
from verdict import SECOND_GPU, SGLANG_VARIABLES, lacking, sglang_python, verdict_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
LIMIT_S = 480.0  # of a check
EVERY = ("psutil",)  # describes the machine
GPU_ONLY = ("cuda", SECOND_GPU, "nccl 2.30", "transformer_engine.pytorch")
# triton: megatron-core 0.19 imports it
_TRAINER = ("cuda", "triton", "megatron.core", "pydantic", "psutil", "transformers")
_SERVERS = (*_TRAINER, "aiohttp", "orjson", "sglang")
# in the order in which they tell most, with what each needs: known here, as without it a check
# cannot be imported
CHECKS: dict[str, tuple[str, ...]] = {
    "serve": _SERVERS,
    "quickstart": (*_TRAINER, "rich"),
    "server_cycle": _SERVERS,
    "trainer": _TRAINER,
    "mfu_32b": _TRAINER,
    "update_group": (*_SERVERS, SECOND_GPU),
    "vocabulary": ("cuda", "triton"),
    "stage_32b": ("cuda", "triton", "megatron.core", "pydantic"),
    "server_hash": ("cuda",),
    "cuda_ipc": ("cuda",),
    "agreement": _TRAINER,
    "kth_largest_key": ("cuda",),
    "export": _TRAINER,
    "offload": _TRAINER,
    "nccl_ranks": (*_TRAINER, "nccl 2.30"),
    "te": (*_TRAINER, "transformer_engine.pytorch"),
    "settings": _TRAINER,
    "optimizers": (*_TRAINER, "transformer_engine.pytorch"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument(
        "--again", action="store_true", help="run also checks that have a result already"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run small versions on a CPU, with results in a temporary folder",
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the results; default benchmarks/results/gpu"
    )
    parser.add_argument(
        "--wheels",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="list wheels to carry, or fetch them",
    )
    parser.add_argument(
        "--install", type=Path, metavar="FOLDER", help="install what --wheels FOLDER fetched"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"seconds of a check, after which it is too slow; default {LIMIT_S:.0f}",
    )
    # this process is the check's
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.wheels == "":
        print(wheels.listed())
        return 0
    if args.wheels is not None:
        return wheels.fetch(Path(args.wheels))
    if args.install is not None:
        return wheels.install(args.install)
    if unknown := sorted(set(args.names) - set(CHECKS)):
        parser.error(f"no check is called {unknown[0]!r}; there are {', '.join(CHECKS)}")
    if args.one:
        return one(args.names[0], args.out, cpu=args.cpu)
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or (Path(scratch) if args.cpu else RESULTS)
        out.mkdir(parents=True, exist_ok=True)
        said = [
            check(name, out, again=args.again, cpu=args.cpu, limit_s=args.limit)
            for name in args.names or CHECKS
        ]
    return 1 if {"fail", "too slow"} & {*said} else 3 if "not run" in said else 0


def check(name: str, out: Path, *, again: bool, cpu: bool, limit_s: float) -> str:
    """Runs one check unless its result is there, and says what came of it: pass, fail, too slow or
    not run."""
    file = out / f"{name}.json"
    if file.exists() and not again:
        verdict = json.loads(file.read_text())["verdict"]
        print(f"{name}: {verdict}, found before ({file})", flush=True)
        return verdict
    file.unlink(missing_ok=True)  # a check that dies leaves none
    every = (*EVERY, *CHECKS[name])
    needs = [need for need in every if not (cpu and need in GPU_ONLY)]
    if missing := lacking(needs):
        print(f"{name}: not run: {', '.join(missing)} missing", flush=True)
        return "not run"
    command = [sys.executable, str(HERE), name, "--one", "--out", str(out)]
    status = ended([*command, *(["--cpu"] if cpu else [])], limit_s)
    if status is None:
        broken = [f"it took longer than {limit_s:.0f} s, and was ended"]
        store(
            file, {"check": name, "small, on a CPU": cpu, "verdict": "too slow", "broken": broken}
        )
    elif status or not file.exists():
        print(f"{name}: fail: it ended with status {status}", flush=True)
        return "fail"
    result: dict[str, Any] = json.loads(file.read_text())
    print(
        f"{name}: {result['verdict']}{''.join(f'; {each}' for each in result['broken'])}",
        flush=True,
    )
    return result["verdict"]


def ended(command: list[str], limit_s: float) -> int | None:
    """Exit status of the command, which sees no GPU with --cpu. None: it reached its limit, and was
    ended with all processes of its group."""
    environment = dict(os.environ)
    if "--cpu" in command:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if (python := sglang_python()) is not None:
        environment[SGLANG_VARIABLES[0]] = python
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:  # an interrupt, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def store(file: Path, result: dict[str, Any]) -> None:
    """Writes a result, whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(file)


def one(name: str, out: Path, *, cpu: bool) -> int:
    """Runs the check itself, in this process. An error that the product explains is a result."""
    sys.path.append(str(ROOT / "benchmarks"))  # behind: it has a quickstart.py, too
    from machine import machine

    from megatron_stare.errors import UserError

    module = importlib.import_module(name)
    bounds = {
        each: bound
        for each, bound in module.BOUNDS.items()
        if not cpu or each not in module.GPU_ONLY
    }
    found: dict[str, Any] = {}
    try:
        found = module.run(cpu)
        verdict, broken = verdict_of(found["figures"], bounds)
    except UserError as error:
        verdict, broken = "fail", [str(error)]
    result = {
        "check": name,
        "small, on a CPU": cpu,
        "machine": machine(),
        "verdict": verdict,
        "broken": broken,
        "bounds": {each: " ".join(map(str, bound)) for each, bound in bounds.items()},
        **found,
    }
    store(out / f"{name}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
