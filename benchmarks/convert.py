"""Offline conversion of a random bf16 checkpoint, both ways, against `cp` and fsync of the same
bytes.

Every copy and conversion starts with the checkpoint's bytes out of the page cache and ends when its
output is on disk. Conversions are the command as a user runs it, start of the interpreter included.
Copies and conversions take turns, so that a change of the disk's speed meets both. In one more turn
everything is cold, Python's and torch's own files too, which `cp` does without. Memory is the
anonymous part (RssAnon) of the whole process tree, sampled, above that of as many processes that
have imported what the command imports.

    python benchmarks/convert.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import machine, process_memory
from transformers import Qwen2Config

from megatron_stare.models import read_shape
from megatron_stare.weights.files.check import expected
from megatron_stare.weights.files.hf_folder import create_shards
from megatron_stare.weights.files.open_files import OpenFiles
from megatron_stare.weights.files.safetensors_file import write_rows

RESULT = Path(__file__).parent / "results/convert.json"
TARGET_SHARE = 0.5  # of cp's speed
TARGET_ANON_GB = 1.5
COMMAND = [sys.executable, "-m", "megatron_stare.cli", "convert"]
IMPORTS = (
    "import megatron_stare.cli, megatron_stare.weights.files.convert, time; print(flush=True);"
    " time.sleep(60)"
)
SAMPLE_S = 0.1  # seconds; a look at all processes takes several milliseconds of a core
PARAMETERS_32B = 32.8e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=26, help="26 make 2.0B parameters")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=8960)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        help="scratch space; default: the system's folder for temporary files",
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(args, Path(folder))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Speeds and memory of both directions."""
    hf, megatron, copied = folder / "hf", folder / "megatron", folder / "copied"
    parameters = make_checkpoint(args, hf)
    nbytes = 2 * parameters
    imports = anonymous_of_imports()
    seconds: dict[str, list[float]] = {
        name: [] for name in ("cp_hf", "to_megatron", "cp_megatron", "to_hf")
    }
    peaks: dict[str, list[float]] = {"to_megatron": [], "to_hf": []}
    cold = dict.fromkeys(seconds, 0.0)
    for turn in range(args.repeats + 1):
        everything = turn == args.repeats
        took = {}
        took["cp_hf"] = timed(hf, lambda: copy(hf, copied), everything)
        remove(copied, megatron)
        took["to_megatron"] = timed(
            hf, lambda: convert(args, hf, megatron, imports, peaks["to_megatron"]), everything
        )
        took["cp_megatron"] = timed(megatron, lambda: copy(megatron, copied), everything)
        remove(copied)
        took["to_hf"] = timed(
            megatron, lambda: convert(args, megatron, copied, imports, peaks["to_hf"]), everything
        )
        remove(copied)
        if everything:
            cold = took
        else:
            for name, value in took.items():
                seconds[name].append(value)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    share = {
        "to_megatron": median["cp_hf"] / median["to_megatron"],
        "to_hf": median["cp_megatron"] / median["to_hf"],
    }
    pairs = {
        "to_megatron": [
            round(c / t, 3) for c, t in zip(seconds["cp_hf"], seconds["to_megatron"], strict=True)
        ],
        "to_hf": [
            round(c / t, 3) for c, t in zip(seconds["cp_megatron"], seconds["to_hf"], strict=True)
        ],
    }
    peak_gb = {name: round(max(values) / 1e9, 3) for name, values in peaks.items()}
    return {
        "machine": machine(),
        "settings": {
            key: value for key, value in vars(args).items() if key not in ("folder", "out")
        },
        "parameters": parameters,
        "gb": round(nbytes / 1e9, 3),
        "seconds": {
            name: [round(value, 2) for value in values] for name, values in seconds.items()
        },
        "mb_per_s": {name: round(nbytes / value / 1e6) for name, value in median.items()},
        "share_of_cp": {name: round(value, 3) for name, value in share.items()},
        "share_of_cp_pairs": pairs,
        "all_cold_seconds": (
            {name: round(value, 2) for name, value in cold.items()} if os.geteuid() == 0 else None
        ),
        "peak_anonymous_gb_above_imports": peak_gb,
        "anonymous_gb_of_imports_a_process": round(imports / 1e9, 3),
        "within_target": (
            min(share.values()) >= TARGET_SHARE and max(peak_gb.values()) <= TARGET_ANON_GB
        ),
        "extrapolated_32b": {
            "gb": round(2 * PARAMETERS_32B / 1e9, 1),
            "minutes": {
                name: round(2 * PARAMETERS_32B / nbytes * median[name] / 60, 1)
                for name in ("to_megatron", "to_hf")
            },
        },
    }


def make_checkpoint(args: argparse.Namespace, folder: Path) -> int:
    """Writes a Qwen2 model of random bf16 weights; returns its number of parameters."""
    folder.mkdir()
    heads = args.hidden // 128
    Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        tie_word_embeddings=True,
        dtype="bfloat16",
    ).save_pretrained(folder)
    shape = read_shape(folder)
    parameters = sum(torch.Size(size).numel() for size in expected(shape).values())
    if (free := shutil.disk_usage(folder).free) < 4 * 2 * parameters:
        sys.exit(
            f"{free / 1e9:.0f} GB are free, {8 * parameters / 1e9:.0f} are needed: name a --folder"
        )
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(1 << 24, generator=generator).bfloat16()
    entries = create_shards(folder, [expected(shape)], torch.bfloat16)
    with OpenFiles(os.O_WRONLY) as files:
        for name, size in expected(shape).items():
            width = torch.Size(size[1:]).numel()
            step = max(1, len(pool) // (2 * width))
            for start in range(0, size[0], step):
                rows = min(step, size[0] - start)
                at = int(torch.randint(0, len(pool) - rows * width + 1, (), generator=generator))
                part = pool[at : at + rows * width].view(rows, *size[1:])
                write_rows(files[entries[name].file], entries[name], start, part)
        files.sync()
    return parameters


def timed(source: Path, work: Callable[[], None], everything: bool) -> float:
    """Seconds of `work`, begun with `source` out of the page cache; `everything` empties all of it,
    as root."""
    os.sync()
    if everything and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    drop(source)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy(source: Path, target: Path) -> None:
    """cp, and fsync of every file."""
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop(folder: Path) -> None:
    """Asks that the files' pages leave the cache, which needs no rights."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def convert(
    args: argparse.Namespace, source: Path, target: Path, imports: float, peaks: list[float]
) -> None:
    """The command. Adds the bytes of anonymous memory above imports at the peak."""
    command = [*COMMAND, str(source), str(target), "--processes", str(args.processes)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):  # it ended just now
            tree = [
                process.pid,
                *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
            ]
            peak = max(peak, sum(max(process_memory("RssAnon", pid) - imports, 0) for pid in tree))
        time.sleep(SAMPLE_S)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    peaks.append(peak)


def anonymous_of_imports() -> float:
    """RssAnon of a process that has imported what the command imports, bytes."""
    process = subprocess.Popen([sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    found = process_memory("RssAnon", process.pid)
    process.kill()
    process.wait()
    return found


if __name__ == "__main__":
    main()
