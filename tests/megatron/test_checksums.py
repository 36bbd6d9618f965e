"""Checksums of a checkpoint's files, by the ranks that write them; and read again, each rank a
share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import take_step

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import DataError
from megatron_stare.megatron.backend.cpu_backend import substituted
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.megatron.upstream import RELEASE
from megatron_stare.weights.files.manifest import Sum, write_manifest

pytestmark = pytest.mark.distributed


def saved(rank: int, init: str, config: Config, folder: str) -> tuple[dict[str, Sum], list[str]]:
    """Sums that this rank says it wrote, and the files that its own process read for them."""
    trainer = Trainer(resolve_run(config), rank, init)
    take_step(trainer, random_batch(1, size=8))
    read: list[str] = []
    with substituted(Sum, "of_file", _noting(read)):
        trainer.save(folder)
        sums = trainer.finish_save()
    trainer.close()
    return sums, read


def verified(rank: int, init: str, config: Config, folder: str) -> tuple[list[str], str]:
    """The files that this rank read, and what it found wrong."""
    trainer = Trainer(resolve_run(config), rank, init)
    read: list[str] = []
    said = ""
    with substituted(Sum, "of_file", _noting(read)):
        try:
            trainer.verify(folder)
        except DataError as error:
            said = str(error)
    trainer.close()
    return read, said


def _noting(read: list[str]) -> Any:
    of_file = Sum.of_file

    def noting(file: Path) -> Sum:
        read.append(os.path.basename(file))
        return of_file(file)

    return staticmethod(noting)


def test_each_rank_sums_what_it_writes_and_reads_a_share(writers: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    folder = tmp_path / "saved"
    folder.mkdir()
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "batch": {"micro_batch_tokens": 48},
            "parallel": {"data": 2},
            "optimizer": {"distributed": True},
            "algorithm": {"name": "grpo"},
        }
    )
    found = writers.run(saved, 2, config, str(folder))
    shards = [{f"__{rank}_{n}.distcp" for n in range(2)} for rank in range(2)]
    # what is no tensor: until 0.19 in a file of its own, since then with the first rank's tensors
    beside = {".metadata", "metadata.json"} | ({"common.pt"} if RELEASE < (0, 19) else set())
    assert [set(sums) for sums, _ in found] == [shards[0] | beside, shards[1]]
    # tensors are summed as they are written
    assert [set(read) for _, read in found] == [beside, set()]
    sums = found[0][0] | found[1][0]
    assert sums == {file.name: Sum.of_file(file) for file in folder.iterdir()}

    write_manifest(folder, sums)
    read = [
        set(names) for names, said in writers.run(verified, 2, config, str(folder)) if said == ""
    ]
    assert len(read) == 2 and not read[0] & read[1]
    assert read[0] | read[1] == shards[0] | shards[1]
    assert len(read[0]) == len(read[1]) == 2  # files of like size

    damaged = folder / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    told = [said for _, said in writers.run(verified, 2, config, str(folder)) if said]
    assert len(told) == 1 and str(damaged) in told[0] and "damaged: its SHA-256 is" in told[0]
