"""An update that takes longer than a phase may go without a word, and reports each micro-batch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import random_batch, save_model
from torch import Tensor

from megatron_stare.config.fault_sections import HangsConfig
from megatron_stare.config.schema import Config, ModelConfig, ParallelConfig
from megatron_stare.hangs.driver_side import BlackBox, DriverBeats
from megatron_stare.hangs.vigil import Vigil
from megatron_stare.hangs.watcher import Settings, Watcher
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import device, substituted
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import sequence_layout
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import build_policy, hidden_states
from megatron_stare.megatron.step import passes
from megatron_stare.models import cost_of, read_shape
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.run_dir.heartbeat import (
    DRIVER,
    FOLDER_VARIABLE,
    PROGRESS_S,
    Beat,
    CallBeats,
    beat_file,
    newest_progress,
    read_beat,
    tell_progress,
    watch_progress,
    write_beat,
)

FIRST_S, MICRO_BATCH_S = 900.0, 500.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def micro_batches(
    rank: int, init: str, path: str, at_each: Callable[[], Any]
) -> dict[str, list[Any]]:
    """A log-prob pass and a gradient pass: what `at_each` gave as the model met each of their
    micro-batches."""
    shape, parallel = read_shape(path), ParallelConfig()
    config = Config(model=ModelConfig(path=path))
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    batch = random_batch(3, 10)
    plan = plan_micro_batches(batch.lengths.tolist(), PlanRules(1, 40, True, cost=cost_of(shape)))
    ranked = RankBatch(
        batch.share(plan.branches_of(0)), plan, 0, device(), sequence_layout(config, layout)
    )
    model = build_policy(shape, config.model, parallel, layout, distributed_optimizer=False)
    head, met = Head(shape.vocab_size, 1.0, layout), []

    def meets(*args: Any) -> Tensor:
        met.append(at_each())
        return hidden_states(*args)

    with substituted(passes, "hidden_states", meets):
        passes.compute_log_probs(model, ranked, head)
        forward, met = met, []
        passes.accumulate_gradients(model, ranked, head, lambda log_prob, *_: (log_prob.sum(), {}))
    parallel_layout.leave()
    return {"forward": forward, "backward": met}


def in_a_worker(rank: int, init: str, path: str, folder: str) -> dict[str, list[Any]]:
    """When its call last got on, at each micro-batch, each of which takes MICRO_BATCH_S."""
    clock = Clock()

    def at_each() -> tuple[float, float | None]:
        seen = clock.now, newest_progress(Path(folder))
        clock.now += MICRO_BATCH_S
        return seen

    with CallBeats(Path(folder), "trainer rank 0", clock).call("update"):
        return micro_batches(rank, init, path, at_each)


def in_the_driver(rank: int, init: str, path: str, folder: str) -> dict[str, list[Any]]:
    """Says if a run of one process hangs, MICRO_BATCH_S after each micro-batch, and `then` with
    none more."""
    clock, vigil = Clock(), Vigil(MICRO_BATCH_S)
    beats = DriverBeats(Path(folder), HangsConfig(first_s=FIRST_S), clock)
    watch_progress(beats.progress_here)
    beats.begin_phase("update")

    def at_each() -> bool:
        beat = read_beat(beat_file(Path(folder), DRIVER))
        assert beat is not None
        clock.now += MICRO_BATCH_S
        return vigil.hangs(beat, clock.now)

    found = micro_batches(rank, init, path, at_each)
    beat = read_beat(beat_file(Path(folder), DRIVER))
    assert beat is not None
    return {**found, "then": [vigil.hangs(beat, clock.now + each) for each in (0.0, FIRST_S)]}


@pytest.mark.distributed
def test_a_rank_s_call_gets_on_with_each_micro_batch(ranks, tmp_path: Path) -> None:
    """The beat moves in the log-prob pass too, which may be as long as an update."""
    save_model(tmp_path, "qwen2")
    (tmp_path / "beats").mkdir()
    (found,) = ranks.run(in_a_worker, 1, str(tmp_path), str(tmp_path / "beats"))
    for seen in found.values():
        assert len(seen) > 2
        assert [moved for _, moved in seen] == [now for now, _ in seen]


@pytest.mark.distributed
def test_an_update_longer_than_the_limit_of_a_phase_does_not_hang_until_its_micro_batches_stop(
    ranks, tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen2")
    (found,) = ranks.run(in_the_driver, 1, str(tmp_path), str(tmp_path))
    told = found["forward"] + found["backward"]
    assert len(told) * MICRO_BATCH_S > 2 * FIRST_S
    assert not any(told)
    assert found["then"] == [False, True]


def test_a_run_s_black_box_is_told_of_progress_in_the_driver_s_process_while_it_is_open(
    tmp_path: Path,
) -> None:
    config = Config(model=ModelConfig(path="m"))
    box = BlackBox(config, tmp_path, None)
    try:
        file = beat_file(Path(os.environ[FOLDER_VARIABLE]), DRIVER)
        box.beats.begin_phase("update")
        for _ in range(2):
            begun = box.beats._phases[-1].moved = time.monotonic() - 50.0
            tell_progress()
            found = read_beat(file)
            assert found is not None and found.moved >= begun + 50.0
    finally:
        box.close()
    last = box.beats._phases[-1].moved = time.monotonic() - 50.0
    tell_progress()
    assert box.beats._phases[-1].moved == last


def test_the_watcher_lets_a_phase_get_on_with_any_rank(tmp_path: Path) -> None:
    driver = Beat(DRIVER, 1, "update", since=5.0, moved=1000.0, limit_s=FIRST_S)
    write_beat(beat_file(tmp_path, DRIVER), driver)
    watcher = Watcher(Settings(str(tmp_path), str(tmp_path / "run"), 1))
    assert watcher._read() == driver
    late, early, engine = Clock(), Clock(), Clock()
    late.now, early.now, engine.now = 1500.0, 900.0, 1800.0
    with (
        CallBeats(tmp_path, "trainer rank 11", late).call("update"),
        # where requests are seen to by the driver
        CallBeats(tmp_path, "rollout engine 0", engine).call("advance"),
        CallBeats(tmp_path, "trainer rank 2", early).call("update"),
    ):
        assert watcher._read() == replace(driver, moved=1500.0)
    assert watcher._read() == driver  # a rank that has nothing to do gets on with nothing


def test_the_watcher_lets_a_phase_get_on_with_a_rank_of_another_node(tmp_path: Path) -> None:
    driver = Beat(DRIVER, 1, "update", since=5.0, moved=time.monotonic() - 700.0, limit_s=FIRST_S)
    write_beat(beat_file(tmp_path, DRIVER), driver)
    watcher = Watcher(Settings(str(tmp_path), str(tmp_path / "run"), 1, token="t"))
    try:
        assert watcher._nodes is not None
        assert watcher._read() == driver
        watcher._nodes._take_progress(driver.moved + 650.0)
        watcher._nodes._take_progress(driver.moved + 600.0)  # of a node that has waited since
        assert watcher._read() == replace(driver, moved=driver.moved + 650.0)
    finally:
        watcher._nodes.close()


def test_thousands_of_micro_batches_are_not_written_down_each(tmp_path: Path) -> None:
    clock = Clock()
    beats = CallBeats(tmp_path, "trainer rank 0", clock)
    with beats.call("update"):
        begun = read_beat(beat_file(tmp_path, "trainer rank 0"))
        assert begun is not None
        clock.now += PROGRESS_S / 2
        beats._progress()
        assert read_beat(beat_file(tmp_path, "trainer rank 0")) == begun
        clock.now += PROGRESS_S
        beats._progress()
        assert read_beat(beat_file(tmp_path, "trainer rank 0")) == replace(begun, moved=clock.now)
