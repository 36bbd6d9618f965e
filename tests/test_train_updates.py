"""Several optimizer steps a rollout batch, and the lagging gate, through the driver: metrics,
skips, resume."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import random_batch
from support.runs import ROOT, metrics, model, train

from megatron_stare.config.load import load_config
from megatron_stare.driver.guards import read_guarded, step_folder
from megatron_stare.driver.policy_trainer import PolicyTrainer
from megatron_stare.errors import NonFiniteError
from megatron_stare.megatron.step.not_finite import NotFinite
from megatron_stare.records.token_numbers import TokenNumbers
from megatron_stare.records.updates import UpdateResult, combined, skipped_after
from megatron_stare.run_dir.run_state import RunState


def update(
    finite: bool = True, empty: bool = False, skipped: bool | None = None, **metrics: float
) -> UpdateResult:
    """One in float32, or with `skipped` one in float16."""
    flags = {"update/finite": float(finite), "update/empty": float(empty)}
    flags |= {} if skipped is None else {"update/skipped": float(skipped)}
    return UpdateResult({"ratio/max_abs_log": 0.0, **metrics, **flags}, {"gate": 1.0})


def test_metrics_of_updates_become_those_of_the_step() -> None:
    first = update(
        **{"loss/policy": 1.0, "loss/tokens": 10.0, "entropy/mean": 0.5, "stare/selected_plus": 2.0}
    )
    later = update(
        **{
            "loss/policy": 2.0,
            "loss/tokens": 20.0,
            "ratio/max_abs_log": 0.3,
            "stare/selected_plus": 3.0,
        }
    )
    skipped = update(False, **{"loss/policy": 3.0, "loss/tokens": 30.0, "ratio/max_abs_log": 0.2})
    assert combined([first, later, skipped]) == {
        "loss/policy": 2.0,
        "loss/tokens": 60.0,
        "stare/selected_plus": 5.0,
        "entropy/mean": 0.5,  # of the rollout batch, so the first update's alone
        "ratio/max_abs_log": 0.3,
        "ratio/first_max_abs_log": 0.0,
        "update/finite": 0.0,
        "update/empty": 0.0,
        "update/count": 2.0,
    }
    assert combined([first]) == {**first.metrics, "update/count": 1.0}


def test_empty_mini_batches_count_for_nothing_but_tell_of_the_rollout_batch() -> None:
    of_batch = {"entropy/mean": 0.5}
    empty = update(
        empty=True, **of_batch, **{"loss/policy": 0.0, "loss/tokens": 5.0, "ratio/max_abs_log": 0.4}
    )
    full = update(**{"loss/policy": 3.0, "loss/tokens": 30.0, "ratio/max_abs_log": 0.2})
    assert combined(
        [empty, full, replace(empty, metrics={**empty.metrics, "ratio/max_abs_log": 0.0})]
    ) == {
        "entropy/mean": 0.5,
        "loss/policy": 3.0,
        "loss/tokens": 40.0,
        "ratio/max_abs_log": 0.4,
        "ratio/first_max_abs_log": 0.4,
        "update/finite": 1.0,
        "update/empty": 2.0,
        "update/count": 1.0,
    }
    assert combined([empty]) == {**empty.metrics, "update/count": 0.0}


def test_empty_mini_batches_neither_stop_a_run_nor_excuse_one() -> None:
    no, empty = update(False), update(empty=True)
    assert skipped_after([empty] * 5, 0, 1) == 0
    assert skipped_after([no, empty, no, empty], 0, 2) == 2
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row"):
        skipped_after([empty, no], 2, 3)


def test_overflows_of_the_loss_scale_neither_stop_a_run_nor_excuse_one() -> None:
    yes, no, skipped = update(skipped=False), update(False, skipped=False), update(skipped=True)
    assert skipped_after([skipped] * 20, 0, 1) == 0
    assert skipped_after([no, skipped, no, skipped], 0, 2) == 2
    assert skipped_after([no, skipped, yes], 0, 2) == 0
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row"):
        skipped_after([skipped, no], 2, 3)


def test_overflows_have_no_say_in_averages() -> None:
    of_batch = {"entropy/mean": 0.5}
    skipped = update(
        skipped=True,
        **of_batch,
        **{"optimizer/grad_norm": math.inf, "optimizer/loss_scale": 4.0, "loss/tokens": 5.0},
    )
    taken = update(
        skipped=False,
        **{"optimizer/grad_norm": 3.0, "optimizer/loss_scale": 2.0, "loss/tokens": 30.0},
    )
    assert combined([skipped, taken, replace(skipped, metrics={**skipped.metrics})]) == {
        "ratio/max_abs_log": 0.0,
        "ratio/first_max_abs_log": 0.0,
        "entropy/mean": 0.5,
        "optimizer/grad_norm": 3.0,
        "optimizer/grad_norm_max": 3.0,
        "optimizer/loss_scale": 2.0,
        "loss/tokens": 40.0,
        "update/finite": 1.0,
        "update/empty": 0.0,
        "update/skipped": 2.0,
        "update/count": 1.0,
    }
    assert combined([skipped]) == {**skipped.metrics, "update/count": 0.0}


def test_of_several_updates_the_largest_norm_is_kept_and_those_held_back_are_counted() -> None:
    """A spike of one of them would be lost in the mean, and one that is not finite is no norm."""
    norms = (1.0, 8.0, math.nan)
    updates = [
        update(
            math.isfinite(norm), **{"optimizer/grad_norm": norm, "update/held": float(norm == 8.0)}
        )
        for norm in norms
    ]
    found = combined(updates)
    assert (found["optimizer/grad_norm_max"], found["update/held"], found["update/count"]) == (
        8.0,
        1.0,
        1.0,
    )
    assert "optimizer/grad_norm_max" not in combined(updates[:1])


def test_three_updates_in_a_row_that_were_not_taken_stop_the_run() -> None:
    yes, no = update(), update(False)
    assert skipped_after([no, no, yes, no], 0, 1) == 1  # never three in a row
    assert skipped_after([yes, no, no], 1, 2) == 2
    with pytest.raises(NonFiniteError, match=r"step 3: .*3 optimizer steps in a row"):
        skipped_after([no, yes], 2, 3)


class Ranks:
    """Ranks that write down what a PolicyTrainer asks of them."""

    def __init__(self, finite: list[bool]) -> None:
        self.finite, self.asked = finite, []

    def compute_log_probs(self, batch: object) -> None:
        self.asked.append("compute_log_probs")

    def measure(self, state: dict[str, float]) -> None:
        self.asked.append(f"measure at {state['gate']}")

    def update(
        self,
        number: int,
        dump_to: str | None = None,
        watched: Sequence[int] = (),
        norm_limit: float = math.inf,
    ) -> UpdateResult:
        self.asked.append(f"update {number}" + (f" to {dump_to}" if dump_to else ""))
        self.watched = [*watched]
        return replace(update(self.finite[number]), state={"gate": float(number)})

    def refresh_reference(self) -> None:
        self.asked.append("refresh")


def test_a_step_of_the_driver(tmp_path: Path) -> None:
    """The order of its parts, the state they leave, and that only the chosen step is written
    out."""
    overrides = [
        model(),
        "batch={prompts: 4, mini_batch_prompts: 2}",
        "model.reference_refresh_every=2",
    ]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    ranks: Any = Ranks([False, True])
    state, phases = RunState(method={"gate": 7.0}), []

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield
        phases.append(list(ranks.asked))
        ranks.asked.clear()

    agreement: Any = SimpleNamespace(after_log_probs=lambda step: {"agreement/step": float(step)})
    trainer = PolicyTrainer(config, ranks, state, agreement, phase, (2, tmp_path / "dump"))
    found = [trainer.step(replace(random_batch(3, size=4), step=step)) for step in (1, 2)]
    updates = ["update 0", "update 1"]
    assert phases == [
        *("log_probs", ["compute_log_probs", "measure at 7.0"], "update", updates),
        *(
            "log_probs",
            ["compute_log_probs", "measure at 1.0"],
            "update",
            [f"update 0 to {tmp_path}/dump", "update 1", "refresh"],
        ),
    ]
    assert [(metrics["agreement/step"], metrics["update/finite"]) for metrics in found] == [
        (1.0, 0.0),
        (2.0, 0.0),
    ]
    assert (state.method, state.skipped) == ({"gate": 1.0}, 0)  # as the last update left it


def test_a_loss_scale_that_was_too_large_is_no_event_of_the_guards(tmp_path: Path) -> None:
    """Nothing is asked of the ranks, nothing written; a gradient that is not finite itself is."""
    config = load_config(
        ROOT / "configs/quickstart.yaml", [model(), "batch={prompts: 4, mini_batch_prompts: 2}"]
    )

    class Scaled(Ranks):
        def update(self, number: int, *_: object) -> UpdateResult:
            return update(self.finite[number], skipped=self.finite[number])

        def not_finite(self) -> list[NotFinite]:
            self.asked.append("not_finite")
            return []

        def log_probs(self) -> torch.Tensor:
            return torch.zeros(int(batch.response_lengths.sum()))

    agreement: Any = SimpleNamespace(after_log_probs=lambda step: {})
    batch = replace(random_batch(3, size=4), step=1)
    for finite, asked in (([True, True], 0), ([True, False], 1)):
        ranks: Any = Scaled(finite)
        place = tmp_path / str(asked)
        trainer = PolicyTrainer(
            config,
            ranks,
            RunState(method={"gate": 1.0}),
            agreement,
            lambda _: contextlib.nullcontext(),
            events=place,
        )
        trainer.step(batch)
        assert ranks.asked.count("not_finite") == asked and place.exists() == bool(asked)
    assert (
        read_guarded(step_folder(tmp_path / "1", 1)).why
        == "loss or gradient of update 1 is not finite"
    )


def test_only_what_is_written_out_is_watched() -> None:
    """In steps of which rollouts are written, of the samples written as many as are to be shown by
    tokens; all updates are asked for them, and the trajectories carry what they found."""
    overrides = ["run.rollouts_every=2", "run.rollouts_kept=4", "run.tokens_kept=2"]
    overrides += [model(), "batch={prompts: 4, mini_batch_prompts: 2}"]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    batch = random_batch(3, size=8)

    class Watching(Ranks):
        def token_numbers(self) -> list[TokenNumbers]:
            self.asked.append("token numbers")
            return [numbers(sample, len(batch.trajectories[sample])) for sample in (4, 0)]

    def numbers(sample: int, n: int) -> TokenNumbers:
        floats = [torch.full((n,), float(sample))] * 4
        flags = [torch.zeros(n, dtype=torch.int8)] * 2
        return TokenNumbers(torch.full((n,), sample), torch.arange(n), *floats, *flags)

    def step(number: int, texts: Any) -> Any:
        ranks: Any = Watching([True, True])
        agreement: Any = SimpleNamespace(after_log_probs=lambda step: {})
        state = RunState(method={"gate": 7.0})
        trainer = PolicyTrainer(
            config, ranks, state, agreement, lambda name: contextlib.nullcontext(), None, texts
        )
        trainer.step(replace(batch, step=number))
        return ranks

    for number, texts in ((1, lambda ids: [str(i) for i in ids]), (2, None)):
        ranks = step(number, texts)
        assert ranks.watched == [] and "token numbers" not in ranks.asked
    assert all(trajectory.numbers is None for trajectory in batch.trajectories)
    ranks = step(2, lambda ids: [str(i) for i in ids])
    # of 0, 2, 4 and 6, written
    assert ranks.watched == [0, 4] and ranks.asked[-2:] == ["update 1", "token numbers"]
    for sample, trajectory in enumerate(batch.trajectories):
        if sample not in (0, 4):
            assert trajectory.numbers is None and trajectory.pieces == ()
            continue
        assert trajectory.numbers is not None and set(trajectory.numbers.log_prob.tolist()) == {
            float(sample)
        }
        assert trajectory.pieces == [str(i) for i in trajectory.tokens.tolist()]


def test_the_first_samples_are_a_batch_of_their_own() -> None:
    # the same samples, drawn one by one
    batch, alone = random_batch(3, size=8), random_batch(3, size=4)
    found, wanted = dict(vars(batch.first(4))), dict(vars(alone))
    kept, own = (
        [(t.prompt, t.sample_index, t.tokens.tolist()) for t in columns.pop("trajectories")]
        for columns in (found, wanted)
    )
    assert kept == own
    for name, value in wanted.items():
        assert (
            torch.equal(found[name], value)
            if isinstance(value, torch.Tensor)
            else found[name] == value
        ), name


INLINE = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 0,
    "run.steps": 3,
    "run.checkpoint_every": 2,
}


@pytest.mark.wide
@pytest.mark.distributed
def test_the_reference_is_refreshed_after_the_updates_of_every_second_step(tmp_path: Path) -> None:
    refresh = (
        "model.reference_refresh_every=2",
        "algorithm={name: grpo, reference_kl: {coef: 0.1}}",
    )
    shorter = {**INLINE, "run.steps": 3, "run.checkpoint_every": 0}
    done = train(model(), f"run.dir={tmp_path / 'run'}", *refresh, cwd=tmp_path, **shorter)
    assert done.returncode == 0, done.stderr
    # a step reads the reference before its one update: 0 where it is the policy that the step
    # starts from
    assert [row["reference/kl"] > 0 for row in metrics(tmp_path / "run")] == [False, True, False]
