"""Checks on this machine that the selector selects the same tokens as the reference (reference.py).
The command is `python -m stare_select.conformance [BATCH.npz ...]`. Without files, the command
generates random batches.

Each file contains the whole batch of one update: `log_probs`, `entropies`, `mask` [B, T] and
`advantages` [B] or [B, T]. `--probe trl` also checks that the installed TRL has the methods that
the adapter needs. The exit status is 0 if all cases agree, 1 if a case differs, and 2 for unusable
input.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ProcessGroup

from megatron_stare.errors import DataError, UserError
from megatron_stare.select.reference import reference
from megatron_stare.select.selector import Selector

Batch = dict[str, np.ndarray]
NAMES = ("log_probs", "entropies", "advantages", "mask")


def made(seed: int = 0, updates: int = 4) -> list[Batch]:
    """Generates random batches of 8 rows and 24 columns."""
    source = np.random.default_rng(seed)
    batches = []
    for _ in range(updates):
        entropies = source.gamma(0.5, 0.6, (8, 24))
        batches.append(
            {
                "log_probs": -source.gamma(0.5, 1.0, (8, 24)).astype(np.float32),
                "entropies": entropies.astype(np.float32),
                "advantages": source.normal(size=8).astype(np.float32),
                "mask": np.arange(24) < source.integers(4, 25, 8)[:, None],
            }
        )
    return batches


def read(files: Sequence[Path]) -> list[Batch]:
    """Reads one batch from each .npz file. Raises DataError if a file lacks an array."""
    batches = []
    for file in files:
        try:
            with np.load(file) as arrays:
                batch = {name: arrays[name] for name in NAMES}
        except (OSError, KeyError, ValueError) as error:
            raise DataError(
                str(error), where=str(file), fix=f"save {', '.join(NAMES)} with numpy.savez"
            ) from error
        batches.append(batch)
    return batches


def changed(batches: Sequence[Batch], how: Callable[[Batch], Mapping[str, np.ndarray]]) -> list:
    return [{**batch, **how(batch)} for batch in batches]


def cases(batches: Sequence[Batch]) -> dict[str, list[Batch]]:
    """Returns test cases by name: the given batches, and difficult variants of these batches."""
    rounded = changed(batches, lambda b: {"log_probs": np.round(b["log_probs"])})
    return {
        "as given": list(batches),
        "tool masks": changed(
            batches, lambda b: {"mask": b["mask"] & _columns(b, lambda c: c % 3)}
        ),
        "equal ties": rounded,
        "all tied": changed(batches, lambda b: {"log_probs": np.full_like(b["log_probs"], -0.5)}),
        "only positive": changed(batches, lambda b: {"advantages": np.abs(b["advantages"])}),
        "only negative": changed(batches, lambda b: {"advantages": -np.abs(b["advantages"])}),
        "no advantages": changed(batches, lambda b: {"advantages": 0 * b["advantages"]}),
        "no tokens": changed(batches, lambda b: {"mask": np.zeros_like(b["mask"])}),
    }


def _columns(batch: Batch, keep: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return keep(np.arange(batch["mask"].shape[1])).astype(bool)[None]


def share_of(batch: Batch, rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Returns a rank's share of a batch, and the indices that the share's rows have in the batch.
    The rows are permuted and padded with NaN. The number of padding columns differs from rank to
    rank. With three or more ranks, rank 1 gets no row."""
    here = batch["mask"].shape[0]
    order = np.random.default_rng(here).permutation(here)
    holders = [each for each in range(ranks) if each != 1 or ranks < 3]
    rows = order[holders.index(rank) :: len(holders)] if rank in holders else order[:0]
    more = ((0, 0), (0, 1 + 2 * rank))
    share: dict[str, torch.Tensor] = {}
    for name in NAMES:
        value = np.array(batch[name][rows])
        if name == "mask":
            value = np.pad(value.astype(bool), more)
        elif value.ndim == 2:
            value = np.pad(value.astype(np.float32), more, constant_values=np.nan)
        share[name] = torch.from_numpy(value)
    return share, rows


def difference(
    batches: Sequence[Batch],
    settings: Mapping[str, Any],
    rank: int = 0,
    ranks: int = 1,
    group: ProcessGroup | None = None,
) -> str | None:
    """Returns the first difference between the selector and the reference, or None. After half of
    the updates, a new selector continues from the saved state of the first selector."""
    selector = Selector("stare", group=group, **settings)
    faults = []
    for update, (batch, expected) in enumerate(
        zip(batches, reference(batches, settings), strict=True)
    ):
        if update == len(batches) // 2:
            saved = selector.state_dict()
            selector = Selector("stare", group=group, **settings)
            selector.load_state_dict(saved)
        share, rows = share_of(batch, rank, ranks)
        found = selector.update(**share, rows=torch.from_numpy(rows.astype(np.int64)))
        faults.append(_first(update, batch, expected, rows, found, selector))
    return next((fault for fault in faults if fault), None)


def _first(
    update: int, batch: Batch, expected: Any, rows: np.ndarray, found: Any, selector: Selector
) -> str | None:
    mask, width = batch["mask"][rows].astype(bool), batch["mask"].shape[1]
    for name, tolerance in (("codes", 0.0), ("weights", 1e-6)):
        ours = getattr(found, name).numpy()[:, :width].astype(np.float64)
        theirs = expected[name][rows].astype(np.float64)
        wrong = np.argwhere(mask & (np.abs(ours - theirs) > tolerance))
        if len(wrong):
            row, column = wrong[0]
            return (
                f"update {update}, row {rows[row]}, column {column}: {name} {ours[row, column]:g},"
                f" reference {theirs[row, column]:g}"
            )
    for name, value in selector.state_dict()["state"].items():
        if abs(value - expected[name]) > 1e-9:
            return f"update {update}: {name} {value:g}, reference {expected[name]:g}"
    return None


def _on_rank(rank: int, ranks: int, folder: str, batches: list[Batch], settings: dict) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    group = dist.group.WORLD
    found = {
        name: difference(each, settings, rank, ranks, group)
        for name, each in cases(batches).items()
    }
    gathered: list[dict[str, str | None]] = [{} for _ in range(ranks)]
    dist.all_gather_object(gathered, found)
    if rank == 0:
        torch.save(gathered, f"{folder}/found.pt")
    dist.destroy_process_group()


def conform(batches: list[Batch], settings: Mapping[str, Any], ranks: int) -> dict[str, str | None]:
    """Returns a dict that maps each case to the first difference, or to None if selector and
    reference agree in this case. Every case runs in this process. If `ranks` is above 1, every case
    also runs over `ranks` processes (gloo) with permuted and padded rows."""
    found = {
        f"{name}, one process": difference(each, settings) for name, each in cases(batches).items()
    }
    if ranks < 2:
        return found
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (ranks, folder, batches, dict(settings)), nprocs=ranks)
        of_ranks = torch.load(f"{folder}/found.pt", weights_only=True)
    for name in of_ranks[0]:
        fault = next((f"rank {r}: {f[name]}" for r, f in enumerate(of_ranks) if f[name]), None)
        found[f"{name}, {ranks} processes"] = fault
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("batches", nargs="*", type=Path)
    parser.add_argument("--ranks", type=int, default=3, help="processes; 1: none beside this")
    parser.add_argument("--probe", choices=["trl", "verl", "slime"], help="also probe this trainer")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings")
    given = parser.parse_args(arguments)
    try:
        settings = dict(_setting(each) for each in given.set)
        Selector("stare", **settings)
        batches = read(given.batches) or made()
        found = conform(batches, settings, given.ranks)
        if given.probe:
            adapter = importlib.import_module(f"{__package__}.{given.probe}")
            found[f"{given.probe}: parts that the adapter builds on"] = adapter.probe()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for name, fault in found.items():
        print(f"{'differs' if fault else 'agrees '}  {name}{f': {fault}' if fault else ''}")
    return int(any(found.values()))


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise DataError(f"{text!r} is no NAME=VALUE", where="--set")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
