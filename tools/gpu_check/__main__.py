"""Runs the checks of this folder, one after another, each in a process with a limit, and keeps what
each found.

A result is a JSON file in benchmarks/results/gpu/: machine, figures, bounds and verdict. A check
that lacks something is `not run`, with the reason, and leaves no file, so that it is tried again;
it is never a pass.

    python tools/gpu_check [NAME ...] [--again] [--cpu] [--out FOLDER] [--wheels [FOLDER]]

Exit status: 0 where every check passed or had passed, 1 where one failed, 3 where one could not be
run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from verdict import lacking, verdict_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
LIMIT_S = 480.0
EVERY = ("psutil",)  # describes the machine
GPU_ONLY = ("cuda", "nccl 2.30", "transformer_engine.pytorch")
_TRAINER = ("cuda", "megatron.core", "pydantic", "psutil", "transformers")
# in the order in which they tell most, with what each needs: known here, as without it a check
# cannot be imported
CHECKS: dict[str, tuple[str, ...]] = {
    "trainer": _TRAINER,
    "vocabulary": ("cuda", "triton"),
    "stage_32b": ("cuda", "megatron.core", "pydantic"),
    "server_hash": ("cuda",),
    "cuda_ipc": ("cuda",),
    "agreement": _TRAINER,
    "kth_largest_key": ("cuda",),
    "export": _TRAINER,
    "offload": _TRAINER,
    "nccl_ranks": (*_TRAINER, "nccl 2.30"),
    "te": (*_TRAINER, "transformer_engine.pytorch"),
    "settings": _TRAINER,
    "optimizers": _TRAINER,
}
# beside PyTorch, Triton and transformers; the versions are those of constraints.txt
CARRIED = (
    "megatron-core",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",  # pydantic wants a newer one than PyTorch brings
    "orjson",
    "psutil",
)


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
    # this process is the check's
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.wheels is not None:
        return wheels(args.wheels)
    if unknown := sorted(set(args.names) - set(CHECKS)):
        parser.error(f"no check is called {unknown[0]!r}; there are {', '.join(CHECKS)}")
    if args.one:
        return one(args.names[0], args.out, cpu=args.cpu)
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or (Path(scratch) if args.cpu else RESULTS)
        out.mkdir(parents=True, exist_ok=True)
        said = [check(name, out, again=args.again, cpu=args.cpu) for name in args.names or CHECKS]
    return 1 if "fail" in said else 3 if "not run" in said else 0


def wheels(folder: str) -> int:
    """Prints the wheels that a machine with PyTorch lacks, or fetches them for Python 3.12 on
    Linux."""
    lines = (
        line.partition(";")[0].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
    # of two, the later is for Python 3.12
    pins = dict(line.split("==") for line in lines if "==" in line)
    wanted = [f"{name}=={pins[name]}" for name in CARRIED]
    if not folder:
        print("\n".join(wanted))
        return 0
    fetch = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
    ]
    for platform in ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014"):
        fetch += ["--platform", f"{platform}_x86_64"]
    return subprocess.call([*fetch, "-d", folder, *wanted])


def check(name: str, out: Path, *, again: bool, cpu: bool) -> str:
    """Runs one check unless its result is there, and says what came of it: pass, fail or not
    run."""
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
    command = [
        sys.executable,
        str(HERE),
        name,
        "--one",
        "--out",
        str(out),
        *(["--cpu"] if cpu else []),
    ]
    try:
        status = subprocess.run(command, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: fail: it took longer than {LIMIT_S:.0f} s", flush=True)
        return "fail"
    if status or not file.exists():
        print(f"{name}: fail: it ended with status {status}", flush=True)
        return "fail"
    result: dict[str, Any] = json.loads(file.read_text())
    print(
        f"{name}: {result['verdict']}{''.join(f'; {each}' for each in result['broken'])}",
        flush=True,
    )
    return result["verdict"]


def one(name: str, out: Path, *, cpu: bool) -> int:
    """The check itself, in this process."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import machine

    module = importlib.import_module(name)
    found = module.run(cpu)
    bounds = {
        each: bound
        for each, bound in module.BOUNDS.items()
        if not cpu or each not in module.GPU_ONLY
    }
    verdict, broken = verdict_of(found["figures"], bounds)
    result = {
        "check": name,
        "small, on a CPU": cpu,
        "machine": machine(),
        "verdict": verdict,
        "broken": broken,
    }
    result |= {
        "bounds": {each: " ".join(map(str, bound)) for each, bound in bounds.items()},
        **found,
    }
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
