"""Parts of a bisection, without the steps: changes, comparisons, names and refusals."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from support.runs import ROOT
from support.token_batches import token_batch

from megatron_stare.algorithms.clip_cov import ClipCov
from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.draw import uniform
from megatron_stare.algorithms.stare import Stare
from megatron_stare.cli import main
from megatron_stare.commands.bisect.bisect_command import CAUSES, _chosen, as_text, as_tree
from megatron_stare.commands.bisect.causes import CAUSES as KNOWN
from megatron_stare.commands.bisect.causes import (
    Change,
    LateEngine,
    changes,
    closed_gate,
    contradictions,
    draws_by_place,
    open_gate,
    without_correction,
)
from megatron_stare.commands.bisect.explain import Remade, equal_steps, explain
from megatron_stare.commands.bisect.rerun import prepare
from megatron_stare.config.load import load_config, load_recorded
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.run_dir.run_state import RunDir, RunState
from megatron_stare.weights.files import manifest

MODEL = ROOT / "assets/tiny-adder"
EXACT = {"exact": True}


def row(
    step: int, shift: float = 0.0, *, agreement: float = 1e-6, loss: float = 0.1
) -> dict[str, float]:
    """A step of a run whose entropy and reward go up and down by a tenth."""
    swing = 0.1 * (-1) ** step
    return {
        "step": step,
        "entropy/mean": 1.0 + swing + shift,
        "reward/mean": 0.5 + swing,
        "loss/policy": loss,
        "optimizer/grad_norm": 2.0,
        "rollout/logprob_diff_mean": agreement,
        "time/step_s": float(step),
    }


def course(shift: float = 0.0, **more: float) -> list[dict[str, float]]:
    return [row(step, shift, **more) for step in range(11, 21)]


BEFORE = [row(step) for step in range(1, 11)]
GATE = Change("gate-open", "gate", "the gate is open in every step")
LATE = Change("weights-late", "staleness", "the weights are late")
CUT = Change("micro-batches", "layout", "smaller micro-batches", harmless=True)


def test_a_record_that_comes_out_names_nothing() -> None:
    remade = [Remade(None, course()), Remade(GATE, course(5.0)), Remade(CUT, course(1e-7))]
    found = explain(BEFORE, course(), remade, **EXACT)
    assert found.reproduced and (found.cause, found.change) == ("", "")
    assert [line.equal for line in found.lines] == [10, 0, 0]
    assert found.lines[1].moved["entropy"] > 3 and found.lines[2].moved["entropy"] == pytest.approx(
        0, abs=1e-3
    )
    assert "(+" in as_text(found).splitlines()[3] and "named: none" in as_text(found)


def test_a_layout_that_moves_the_first_step_is_named_though_the_record_comes_out() -> None:
    for far, cause in ((9e-4, ""), (2e-3, "layout")):
        moved = course()
        moved[0]["optimizer/grad_norm"] += 2 * far
        found = explain(BEFORE, course(), [Remade(None, course()), Remade(CUT, moved)], **EXACT)
        assert found.reproduced and found.cause == cause
        assert found.lines[1].breaks == (("optimizer/grad_norm",) if cause else ())
    later = course()
    later[1]["optimizer/grad_norm"] = 9.0  # rounding of the first step has come to this: no fault
    assert not explain(
        BEFORE, course(), [Remade(None, course()), Remade(CUT, later)], **EXACT
    ).cause


def test_a_gate_that_is_not_where_its_entropy_has_it_is_named_though_the_record_comes_out() -> None:
    overrides = [f"model.path={MODEL}", "algorithm={name: stare, entropy_target: 1.0}"]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    method = config.algorithm.method

    def record(*gates: float) -> list[dict[str, float]]:  # entropies of 0.9 and 1.1 by turns
        return [
            {**row(11 + i), "entropy/target": 1.0, "stare/gate": gate}
            for i, gate in enumerate(gates)
        ]

    assert contradictions(config, method, record(1.0, 0.0, 1.0)) == {}
    for stuck, said in (
        (1.0, "step 12 the gate is open, and entropy 1.1 not below"),
        (0.0, "step 11 the gate is closed"),
    ):
        wrong = contradictions(config, method, record(stuck, stuck))
        assert said in wrong["gate"]
        found = explain(BEFORE, course(), [Remade(None, course())], **EXACT, contradicted=wrong)
        assert (found.reproduced, found.cause, found.change) == (True, "gate", "")
        assert "named: gate\n" in as_text(found)
    lagged = config.model_copy(
        update={"statistics": config.statistics.model_copy(update={"gate": "lagged"})}
    )
    assert contradictions(lagged, method, record(1.0, 1.0)) == {}  # it reads the step before


def test_a_gate_that_predictive_control_holds_open_above_the_target_is_no_fault() -> None:
    overrides = [f"model.path={MODEL}", "algorithm={name: stare_predictive, entropy_target: 1.0}"]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    step = {**row(12), "entropy/target": 1.0, "stare/gate": 1.0}  # its entropy is 1.1
    method = config.algorithm.method
    assert contradictions(config, method, [{**step, "predictive/active": 1.0}]) == {}
    assert contradictions(config, method, [{**step, "predictive/active": 0.0}]).keys() == {"gate"}


def test_the_change_that_is_the_record_is_named() -> None:
    """And not one that comes near: a change is named for more equal steps than nothing changed
    has."""
    record = course(0.5)
    near = [dict(each) for each in record]
    near[0]["loss/policy"] += 1e-9
    remade = [Remade(None, course()), Remade(LATE, near), Remade(GATE, record)]
    found = explain(BEFORE, record, remade, **EXACT)
    assert (found.reproduced, found.cause, found.change) == (False, "gate", "gate-open")
    begun = [*record[:4], *course()[4:]]  # as long as the unchanged steps are: no sign of anything
    assert not explain(
        BEFORE, begun, [Remade(None, [*begun[:4], *near[4:]]), Remade(GATE, begun[:4])], **EXACT
    ).cause


def test_the_change_that_brings_the_figures_back_is_named() -> None:
    record = course(agreement=0.05)
    late = course(agreement=0.06, loss=0.2)
    also = course(3.0, agreement=0.05)  # it brings agreement back, and loses the entropy
    remade = [Remade(None, course()), Remade(GATE, also), Remade(LATE, late)]
    found = explain(BEFORE, record, remade, **EXACT)
    assert (found.reproduced, found.cause) == (False, "staleness") and "agreement" in found.why
    assert not explain(BEFORE, record, remade[:2], **EXACT).cause
    none = explain(
        BEFORE, record, [Remade(None, course(loss=0.3)), Remade(GATE, course(loss=0.4))], **EXACT
    )
    assert not none.reproduced and not none.cause and "a cause outside" in none.why


def test_a_re_run_without_the_figure_that_departs_does_not_explain_it() -> None:
    record = course(0.6, agreement=1e-3)
    nothing = [{**each, "entropy/mean": math.nan} for each in record]
    found = explain(
        BEFORE, record, [Remade(None, course(agreement=1e-3)), Remade(LATE, nothing)], **EXACT
    )
    assert not found.cause and "entropy" in found.why


def test_a_run_that_is_not_exact_is_held_to_its_noise() -> None:
    other = course(loss=0.2)
    for exact, shift, reproduced in ((True, 0.0, False), (False, 0.0, True), (False, 1.0, False)):
        found = explain(BEFORE, course(shift), [Remade(None, other)], exact=exact)
        assert found.reproduced == reproduced


def test_what_failed_is_shown_and_names_nothing() -> None:
    found = explain(
        BEFORE,
        course(1.0),
        [Remade(None, course()), Remade(GATE, failed="no"), Remade(LATE, [])],
        **EXACT,
    )
    assert not found.cause and [line.failed for line in found.lines] == [
        "",
        "no",
        "it made 0 of 10 steps",
    ]
    assert "gate-open: no" in as_text(found)
    tree = as_tree(
        explain([], [{**row(1), "reward/mean": math.nan}], [Remade(None, [row(1)])], **EXACT)
    )
    assert tree["record"]["reward"] is None


def test_steps_are_equal_in_all_that_does_not_hang_on_the_clock() -> None:
    one, other = course(), course()
    other[2]["time/step_s"] = 0.0
    other[3]["stare/gate"] = 1.0  # which one of them does not have
    one[4]["x"] = other[4]["x"] = math.nan
    assert equal_steps(one, other) == 10
    one[6]["x"], other[6]["x"] = 1.0, math.nextafter(1.0, 2.0)
    assert equal_steps(one, other) == 6
    del one[1]["loss/policy"]
    assert equal_steps(one, other) == 1


def test_changed_methods_are_the_runs_own_but_for_the_change() -> None:
    """Also where they arrive, in another process."""
    method = Stare(entropy_target=0.3, adaptive=True, correction=Correction())
    low, high = ({"entropy": torch.tensor(x, dtype=torch.float64)} for x in (0.1, 0.5))
    state = {
        name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()
    }
    for change, gate in ((open_gate, 1.0), (closed_gate, 0.0)):
        changed = pickle.loads(pickle.dumps(change(method)))
        assert isinstance(changed, Stare) and changed.share == method.share
        for statistics in (low, high):
            sound, held = method.control(state, statistics), changed.control(state, statistics)
            # W and M still move
            assert held == {**sound, "gate": torch.tensor(gate, dtype=torch.float64)}
    assert without_correction(method) == Stare(entropy_target=0.3, adaptive=True)

    drawn = ClipCov(seed=3)
    batch = token_batch([1.0, 0.0, 1.0, 0.0])
    part = batch.select(torch.arange(3, 9))
    assert torch.equal(drawn.tickets(part), drawn.tickets(batch)[3:9])
    moved = pickle.loads(pickle.dumps(draws_by_place(drawn)))
    assert torch.equal(moved.tickets(part), uniform(3, batch.step, torch.arange(6)))
    assert not torch.equal(moved.tickets(part), drawn.tickets(part))


def test_what_can_be_changed_of_a_run() -> None:
    assert CAUSES == KNOWN

    def found(*overrides: str) -> tuple[set[str], set[str]]:
        config = load_config(ROOT / "configs/quickstart.yaml", [f"model.path={MODEL}", *overrides])
        here, left = changes(config, config.algorithm.method)
        return {change.name for change in here}, {each.cause for each in left}

    both = {"micro-batches", "engine-batch"}
    assert found() == ({"gate-open", "gate-closed", "weights-late", *both}, {"correction"})
    assert found("algorithm={name: grpo, correction: {mode: clip}}") == (
        {"correction-off", "weights-late", *both},
        {"gate"},
    )
    assert found("algorithm=clip_cov", "parallel.data=2", "parallel.tensor=1")[0] >= {
        "draws-by-place",
        "data-ranks",
    }
    assert found("rollout.engine=sglang")[0] == {
        "gate-open",
        "gate-closed",
        "micro-batches",
        "engine-local",
    }
    assert found("batch.micro_batch_tokens=48", "algorithm=grpo")[1] == {
        "gate",
        "correction",
        "layout",
    }


def test_a_late_engine_samples_with_the_weights_before(tmp_path: Path) -> None:
    def sampled(engine: LocalEngine, versions: list[int]) -> list[int]:
        for version in versions:
            engine.begin_weight_update(version)
            generator = torch.Generator().manual_seed(version)
            engine.update_weights(
                [
                    (name, torch.randn(p.shape, generator=generator) * 0.1)
                    for name, p in engine._parameters.items()
                ]
            )
            engine.end_weight_update()
        params = SamplingParams(
            temperature=1.0, max_new_tokens=12, seed=1, step=1, stop_token_ids=()
        )
        engine.submit([GenerateRequest("a", (2, 3, 4), 0, 0)], params)
        (result,) = engine.collect(1.0)
        assert result.versions == ((versions[-1], 12),)  # it says that it has the newest
        return result.output_ids.tolist()

    path = str(MODEL)
    # there are none before
    assert sampled(LateEngine(path), [1]) == sampled(LocalEngine(path), [1])
    late = LateEngine(path)
    assert sampled(late, [1, 2]) == sampled(LocalEngine(path), [1])
    assert sampled(late, [3]) == sampled(LocalEngine(path), [2]) != sampled(LocalEngine(path), [3])


def run_of(where: Path) -> Path:
    """A run with two checkpoints and eleven steps."""
    overrides = [f"model.path={MODEL}", f"run.dir={where}", "eval.every=7"]
    run = RunDir.create(load_config(ROOT / "configs/quickstart.yaml", overrides))
    for step in (5, 10):
        staged = run.stage(RunState(step=step))
        run.complete(staged, {"part.bin": manifest.put(staged.folder / "part.bin", b"weights")})

    rows = [json.dumps(row(step)) + "\n" for step in range(1, 12)]
    (where / "metrics.jsonl").write_text("".join(rows))
    run.close()
    return where


def test_a_re_run_begins_where_the_run_stood_and_shares_what_it_does_not_write(
    tmp_path: Path,
) -> None:
    run, folder = run_of(tmp_path / "run"), tmp_path / "again"
    folder.mkdir()
    checkpoint = run / "checkpoints/step_000005"
    prepare(run, checkpoint, folder, {"algorithm.entropy_target": None, "rollout.max_batch": 3})
    again, was = load_recorded(folder / "config.yaml"), load_recorded(run / "config.yaml")
    assert (again.run.dir, again.run.steps, again.rollout.max_batch) == (
        str(folder),
        was.run.steps,
        3,
    )
    assert again.algorithm.settings()["entropy_target"] == 0.3  # the method's default
    assert (again.eval.every, [sink.name for sink in again.observability.sinks]) == (0, ["jsonl"])
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5
    there = folder / "checkpoints/step_000005"
    assert os.path.samefile(there / "part.bin", checkpoint / "part.bin")
    assert not os.path.samefile(there / "run_state.json", checkpoint / "run_state.json")
    assert RunState.read(there).step == 5 and not (folder / "checkpoints/step_000010").exists()


def test_causes_may_have_blanks_between_them() -> None:
    assert _chosen("gate, engine") == ("gate", "engine")


def test_what_cannot_be_bisected_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    for arguments, said in (
        ([str(tmp_path), "--from", "5", "--to", "6"], "not a run directory"),
        ([str(run), "--from", "6", "--to", "8"], "no checkpoint of step 6; there are: 5, 10"),
        ([str(run), "--from", "10", "--to", "12"], "no record of step 12"),
        ([str(run), "--from", "5", "--to", "5"], "step 5 is not after step 5"),
        ([str(run), "--from", "5", "--to", "6", "--causes", "gate,moon"], "unknown cause 'moon'"),
        (
            [str(run), "--from", "5", "--to", "6", "--out", str(taken)],
            "there are files in this folder",
        ),
    ):
        assert main(["bisect", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in taken.iterdir()] == ["file"]
