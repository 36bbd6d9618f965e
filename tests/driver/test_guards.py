"""Guards find spikes, by worked numbers, and the run does what they say."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.models import random_batch

from megatron_stare.config.fault_sections import GuardsConfig
from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import PromptQueue
from megatron_stare.driver.guards import Guards, origin, read_guarded, step_folder, write_guarded
from megatron_stare.errors import DataError, GuardError, RollBack
from megatron_stare.megatron.step.not_finite import NotFinite
from megatron_stare.observability.metrics.rules import Watch
from megatron_stare.records.batch import Prompt
from megatron_stare.rollout.sources.kept import from_bytes, to_bytes, without
from megatron_stare.rollout.sources.under_way import UnderWay
from megatron_stare.run_dir.run_state import RunDir, RunState

FIVE = (1.0, 2.0, 3.0, 4.0, 100.0)  # their median is 3, and the median deviation from it 1
SPREAD = 1.4826


def guards(**settings: Any) -> Guards:
    return Guards(GuardsConfig.model_validate({"window": 5, "known": 5, **settings}), "float32")


def guards_like(watch: Guards) -> Guards:
    """Copies the guards, since a step moves them."""
    return copy.deepcopy(watch)


def rows(*norms: float) -> list[dict[str, float]]:
    return [
        {
            "optimizer/grad_norm": norm,
            "loss/policy": norm - 3,
            "rollout/logprob_diff_mean": norm / 1e3,
        }
        for norm in norms
    ]


def judged(watch: Guards, values: tuple[float, ...]) -> list[dict[str, float]]:
    return [watch.judge(step, row, [step]) for step, row in enumerate(rows(*values), 1)]


def test_a_resume_compares_with_the_same_steps() -> None:
    values = (*FIVE, 5.0, 2.0, 80.0, 3.0)
    whole = judged(guards(), values)
    resumed = guards()
    resumed.restore(rows(*values[:6]))
    assert judged(resumed, values[6:]) == whole[6:]
    assert whole[:5] == [{}] * 5
    assert whole[7]["guard/grad_norm_spike"] == 1.0 and whole[8]["guard/grad_norm_spike"] == 0.0


def test_only_a_guard_that_ends_the_run_holds_updates_back() -> None:
    limits = {}
    for action in ("off", "alert", "stop", "rollback"):
        watch = guards(grad_norm={"action": action, "spreads": 4.0})
        assert watch.norm_limit({}) == math.inf
        watch.restore(rows(*FIVE))
        limits[action] = watch.norm_limit({})
    assert limits["off"] == limits["alert"] == math.inf
    assert limits["stop"] == limits["rollback"] == 3 + 4 * SPREAD
    watch = guards(grad_norm={"action": "stop", "spreads": 4.0})
    # what is held back is a spike, to the bit: else the step were lost without a word
    watch.restore(rows(*FIVE))
    for norm, spike in ((limits["stop"], 0.0), (math.nextafter(limits["stop"], math.inf), 1.0)):
        assert guards_like(watch).judge(6, rows(norm)[0], [])["guard/grad_norm_spike"] == spike


def test_a_difference_of_engine_and_trainer_is_judged_before_the_update_where_it_is_known() -> None:
    for action, limit in (("alert", math.inf), ("stop", 0.0)):
        watch = guards(agreement={"action": action})
        watch.restore([{"agreement/mean": value * 1e-3} for value in FIVE])
        assert watch.norm_limit({"agreement/mean": 4e-3}) == math.inf
        assert watch.norm_limit({"agreement/mean": 1.0}) == limit
    watch.restore([{"agreement/mean": value * 1e-9} for value in FIVE])
    # rounding, however much more of it
    assert watch.norm_limit({"agreement/mean": 1e-3}) == math.inf


def test_what_is_done_is_what_the_most_decided_guard_says() -> None:
    watch = guards(grad_norm={"action": "rollback"}, loss={"action": "alert", "spreads": 10.0})
    watch.restore(rows(*FIVE))
    assert watch.judge(6, rows(4.0)[0], [40]) == {
        **{"guard/loss": pytest.approx(1 / SPREAD), "guard/loss_spike": 0.0},
        **{"guard/grad_norm": pytest.approx(1 / SPREAD), "guard/grad_norm_spike": 0.0},
        **{"guard/agreement": pytest.approx(1 / SPREAD), "guard/agreement_spike": 0.0},
    }
    watch.heed(0)
    watch.judge(7, rows(1e6)[0], [41, 42])
    with pytest.raises(RollBack) as back:
        watch.heed(2)
    assert (back.value.step, back.value.prompts) == (7, (41, 42))
    assert "the gradient norm 1e+06" in back.value.why and "loss" not in back.value.why
    with pytest.raises(
        GuardError, match=r"step 7: the gradient norm .*rolled back 3 times already"
    ):
        watch.heed(3)
    watch.judge(8, rows(3.0)[0], [43])
    watch.heed(0)  # that of step 7 is not heeded twice

    both = guards(grad_norm={"action": "rollback"}, agreement={"action": "stop"})
    both.restore(rows(*FIVE))
    both.judge(6, rows(1e6)[0], [40])
    with pytest.raises(GuardError, match=r"engine and trainer, 1e.03,.*gradient norm"):
        both.heed(0)


def test_entropy_may_not_leave_its_band() -> None:
    watch = guards(entropy={"low": 0.1, "high": 0.5, "action": "stop"})
    for entropy, outside in ((0.1, 0.0), (0.5, 0.0), (0.0999, 1.0), (0.5001, 1.0)):
        assert watch.judge(1, {"entropy/mean": entropy}, []) == {"guard/entropy_outside": outside}
        assert bool(watch.fired) == bool(outside)
    with pytest.raises(
        GuardError, match=r"entropy 0.5 is outside faults.guards.entropy, 0.1 to 0.5 nats"
    ):
        watch.heed(0)
    assert guards().judge(1, {"entropy/mean": 9.0}, []) == {}
    with pytest.raises(ValidationError, match="not below"):
        guards(entropy={"low": 1.0, "high": 1.0})
    with pytest.raises(ValidationError, match="no step would ever be judged"):
        guards(known=6)


def test_every_event_is_an_alert() -> None:
    figures = {
        "loss/policy": 1.0,
        "optimizer/grad_norm": 1.0,
        "rollout/logprob_diff_mean": 1.0,
        "entropy/mean": 1.0,
    }
    quiet = dict.fromkeys(
        ("guard/loss_spike", "guard/grad_norm_spike", "guard/agreement_spike"), 0.0
    )
    watch = Watch()
    assert watch.add(1, {**figures, **quiet, "guard/entropy_outside": 0.0}) == []
    loud = dict.fromkeys((*quiet, "guard/entropy_outside", "guard/rollbacks"), 1.0)
    changed = watch.add(2, {**figures, **loud, "guard/left_out": 8.0})
    assert [alert.name for alert in changed] == [
        "rolled back",
        "entropy out of bounds",
        "spike of the loss",
        "spike of the gradient norm",
        "spike of engine against trainer",
    ]
    assert (
        changed[0].text
        == "the run was rolled back to a checkpoint; rollbacks so far: 1, prompts skipped: 8"
    )
    assert not any(alert.name == "rolled back" for alert in watch.add(3, {**figures, **loud}))


def test_what_was_first_not_to_be_finite() -> None:
    def rank(number: int, **found: Any) -> NotFinite:
        nothing = {"own_gradient": False, "weights": None, "gradient": "w", "samples": ()}
        return NotFinite(number, number % 2, 0, number // 2, **{**nothing, **found})

    ranks = [rank(0), rank(1), rank(2), rank(3, own_gradient=True, gradient="layers.3")]
    assert origin(ranks) == "the gradient of layers.3 on rank 3 (data 1, tensor 0, stage 1)"
    assert origin(ranks[:3]) == "the gradient of w on rank 2 (data 0, tensor 0, stage 1)"
    both = [rank(2, own_gradient=True), rank(3, own_gradient=True)]  # of one stage the first rank
    assert (
        origin(both)
        == origin(both[::-1])
        == "the gradient of w on rank 2 (data 0, tensor 0, stage 1)"
    )
    ranks[2] = rank(2, samples=(4, 7))
    assert (
        origin(ranks)
        == "log-prob, advantage or loss of sample 4, 7, on rank 2 (data 0, tensor 0, stage 1)"
    )
    ranks[1] = rank(1, weights="embedding")
    assert origin(ranks) == "the weight embedding on rank 1 (data 1, tensor 0, stage 0)"
    assert origin([rank(0, gradient=None)]) == ""


def test_of_a_batch_that_was_left_out_are_named_the_ranks_that_found_something(
    tmp_path: Path,
) -> None:
    found: list[dict[str, Any]] = [
        {},
        {"own_gradient": True},
        {"weights": "w"},
        {"gradient": "w"},
        {"samples": (1,)},
    ]
    nothing = {"own_gradient": False, "weights": None, "gradient": None, "samples": ()}
    ranks = [NotFinite(number, 0, 0, 0, **{**nothing, **each}) for number, each in enumerate(found)]
    batch = replace(random_batch(3, size=4), step=5)
    write_guarded(tmp_path, batch, torch.zeros(len(batch.loss_mask)), "why not", ranks)
    event = read_guarded(step_folder(tmp_path, 5))
    assert [rank["rank"] for rank in event.ranks] == [1, 2, 3, 4]
    assert (event.step, event.why, event.first) == (5, "why not", origin(ranks))
    assert [response.cursor for response in event.responses] == [0, 0, 1, 1]


class Numbered:
    """A source of numbered prompts without an end."""

    problems = None

    def __init__(self) -> None:
        self._next = 0

    def take(self, n: int) -> list[Prompt]:
        self._next += n
        return [Prompt(i, str(i), "", "", (2,)) for i in range(self._next - n, self._next)]

    def state(self) -> dict[str, int]:
        return {"cursor": self._next}

    def restore(self, state: dict[str, int]) -> None:
        self._next = state["cursor"]


def test_prompts_that_are_left_out_never_come() -> None:
    queue = PromptQueue(Numbered())
    queue.leave_out([2, 3])
    assert [prompt.cursor for prompt in queue.take(4)] == [0, 1, 4, 5]
    queue.give_back(3)
    assert queue.state() == {"cursor": 1}
    queue.restore(queue.state())
    queue.leave_out([5])
    assert [prompt.cursor for prompt in queue.take(3)] == [1, 4, 6]


def test_prompts_that_were_given_back_are_left_out_too() -> None:
    queue = PromptQueue(Numbered())
    queue.take(5)
    queue.give_back(4)
    queue.leave_out([1, 3])
    assert [prompt.cursor for prompt in queue.take(3)] == [2, 4, 5]
    queue.leave_out([4])  # taken already, and not used after all
    queue.give_back(2)
    assert [prompt.cursor for prompt in queue.take(2)] == [5, 6]
    queue.leave_out([7, 8])
    queue.give_back(1)
    resumed = PromptQueue(Numbered())
    resumed.restore(queue.state())
    resumed.leave_out([7, 8])
    assert (
        [prompt.cursor for prompt in resumed.take(3)]
        == [prompt.cursor for prompt in queue.take(3)]
        == [6, 9, 10]
    )


def test_what_was_under_way_of_them_is_given_up() -> None:
    groups = [
        [UnderWay(Prompt(cursor, "", "", "", (2,)), index, 1) for index in range(2)]
        for cursor in (4, 5, 6)
    ]
    kept = to_bytes(groups)
    assert [group[0].prompt.cursor for group in from_bytes(without(kept, {5, 9}))] == [4, 6]
    assert without(kept, set()) is kept and without(b"", {5}) == b""


def test_rollbacks_are_kept_beside_the_checkpoints(tmp_path: Path) -> None:
    """A checkpoint holds the rollbacks before it; a run that is killed before the next checkpoint
    reads the file."""
    config = Config.model_validate({"model": {"path": "m"}, "run": {"dir": str(tmp_path / "run")}})
    run = RunDir.create(config)
    assert run.rollbacks() == [] and RunState().left_out == frozenset()
    run.note_rollback([], RollBack(7, "why", (14, 15)))
    run.note_rollback(run.rollbacks(), RollBack(9, "why", (18,)))
    state = RunState(rollbacks=run.rollbacks())
    assert [each["step"] for each in state.rollbacks] == [7, 9] and state.left_out == {14, 15, 18}
    (run.path / "rollbacks.json").write_text("[")
    with pytest.raises(DataError, match="not a record of a run's rollbacks"):
        run.rollbacks()
    run.close()
