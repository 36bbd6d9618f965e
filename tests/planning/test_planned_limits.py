"""Limits held against the plan of a run: at their edges, of every shipped recipe, and by a dry
run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT
from test_recipe_routes import TOOL

from megatron_stare.cli import main
from megatron_stare.config.load import load_config
from megatron_stare.config.recipes import recipes
from megatron_stare.config.resolved import ResolvedRun, resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.planning import forecast
from megatron_stare.planning.gpus import GPUS, Coefficients
from megatron_stare.planning.limits import Held, check_limits, held, limits_not_checked
from megatron_stare.planning.phase_times import (
    Lengths,
    body_flops,
    flow_of,
    parameters,
    request_time,
)
from megatron_stare.rollout.engines.replicas import ServedMemory
from megatron_stare.tasks.task import evaluation_tasks

GPU = "h100-80g"
RECIPE = "recipes/dapo_qwen2.5_32b"


def of(name: str = RECIPE, *overrides: str) -> ResolvedRun:
    return resolve_run(load_config(name, [f"plan.gpu={GPU}", *overrides]), published=True)


def changed(config: Config, where: str, value: float) -> Config:
    """With this setting, whatever other limits say to it."""
    section, *rest = where.split(".")
    part: Any = getattr(config, section)
    if len(rest) == 1:
        return config.model_copy(update={section: part.model_copy(update={rest[0]: value})})
    inner = getattr(part, rest[0]).model_copy(update={rest[1]: value})
    return config.model_copy(update={section: part.model_copy(update={rest[0]: inner})})


def longest(where: str) -> float:
    return max(
        each.planned_s
        for each in held(of(RECIPE, "faults.requests.rollout_s=9e5"))
        if each.where == where
    )


def of_requests(run: ResolvedRun) -> list[Held]:
    return [each for each in held(run) if each.where == "faults.requests.request_s"]


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("faults.requests.request_s", "a response of 20,480 tokens beside 61 others at its server"),
        ("faults.requests.rollout_s", "a rollout"),
        ("runtime.timeout_s", "the log-prob pass"),
        ("faults.hangs.first_s", "the first response of a rollout"),
    ],
)
def test_a_limit_of_just_what_is_planned_holds_and_a_second_less_is_refused(
    where: str, what: str
) -> None:
    run, planned = of(), longest(where)
    check_limits(replace(run, config=changed(run.config, where, planned)))
    short = replace(run, config=changed(run.config, where, planned - 1))
    with pytest.raises(ConfigError) as refused:
        check_limits(short)
    assert refused.value.where == where
    assert (
        refused.value.what
        == f"{what} takes {planned:,.0f} s by the plan, and {where} allows {planned - 1:,.0f}"
    )
    assert refused.value.fix.startswith(f"at least {int(planned) + 1:,}, ")


def test_what_is_held_against_the_limit_of_a_call() -> None:
    """Each is one call of a rank: of the optimizer steps of a batch one, and the log-prob pass as a
    whole."""
    one, four = of(), of(RECIPE, "batch.mini_batch_prompts=128")
    updates = one.config.batch.updates
    assert (updates, four.config.batch.updates) == (16, 4)
    calls = [
        {each.what: each for each in held(run) if each.where == "runtime.timeout_s"}
        for run in (one, four)
    ]
    assert list(calls[0]) == [
        "the log-prob pass",
        "an update of a mini-batch",
        "a weight sync",
        "a checkpoint",
    ]
    assert {each.limit_s for each in calls[0].values()} == {one.config.runtime.timeout_s}
    update, fewer = (call["an update of a mini-batch"].planned_s for call in calls)
    assert 3.5 < fewer / update < 4.5


def test_without_a_limit_of_its_own_a_request_has_its_share_of_a_call() -> None:
    run = of(
        RECIPE,
        "faults.requests.request_s=null",
        "runtime.timeout_s=6000",
        "faults.requests.attempts=4",
    )
    assert {each.limit_s for each in of_requests(run)} == {1500}


def test_nothing_is_held_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(held(of(RECIPE, "plan.enabled=false", "faults.requests.request_s=1"))) == []
    assert list(held(of(RECIPE, "plan.gpu=cpu-core", "faults.requests.request_s=1"))) == []
    monkeypatch.setattr(forecast, "name_here", lambda: None)
    short = of(RECIPE, "plan.gpu=null", "faults.requests.request_s=1")
    assert list(held(short)) == []
    assert limits_not_checked(short.config) == [
        "not checked: limits against the plan, as the kind of GPU is not known here (plan.gpu)"
    ]
    assert limits_not_checked(of().config) == []
    # on no GPU
    assert limits_not_checked(load_config(str(ROOT / "configs/quickstart.yaml"), [])) == []
    monkeypatch.setattr(forecast, "name_here", lambda: "NVIDIA H100 80GB HBM3")
    with pytest.raises(ConfigError, match=r"faults\.requests\.request_s allows 1\n"):
        check_limits(short)


def test_a_run_that_cannot_be_planned_is_held_to_nothing(tmp_path: Path) -> None:
    """The reason why a run cannot be planned is given where it is planned, not here."""
    (tmp_path / "own.json").write_text("no json")
    run = of(RECIPE, f"plan.coefficients={tmp_path / 'own.json'}", "faults.requests.request_s=1")
    with pytest.raises(DataError):
        list(held(run))
    check_limits(run)


def test_without_the_black_box_no_phase_has_to_get_on() -> None:
    where = "faults.hangs.first_s"
    assert [each for each in held(of()) if each.where == where]
    assert not [
        each for each in held(of(RECIPE, "faults.hangs.enabled=false")) if each.where == where
    ]


ONE_SERVER = (
    "recipes/short_cot_qwen2.5_math_7b",
    "sglang.tensor_parallel=1",
    "rollout.engines=1",
    "rollout.max_new_tokens=1000",
    "batch.generate_prompts=null",
)


def test_the_time_of_a_request_by_hand() -> None:
    """A server of one GPU has a cache for ten requests, each of 100 and 300 tokens. Its token step
    reads all weights and ten caches of 250 tokens, which takes longer than their products."""
    run = of(*ONE_SERVER)
    shape, gpu, rates = (
        run.shape,
        GPUS[GPU],
        Coefficients(decode_efficiency=0.5, decode_layer_s=1e-4),
    )
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
    served = ServedMemory(0, 4000 * token, token, "", 1)
    found = request_time(run.config, shape, gpu, rates, Lengths(100.0, 300.0), served)
    matrices = shape.layers * (
        2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
        + 3 * shape.hidden * shape.ffn
    )
    entries = matrices + 2 * shape.hidden * shape.vocab_size
    step = (entries * 2 + 10 * 250 * token) / (gpu.bandwidth * 0.5) + shape.layers * 1e-4
    attention = 2 * shape.layers * shape.heads * shape.head_dim * 100 * 100
    prefill = 10 * (2 * matrices * 100 + attention) / (gpu.flops * 0.4)
    assert found.beside == 9
    assert found.longest_s == pytest.approx(prefill + 1000 * step)
    assert found.first_s == pytest.approx(prefill + 300 * step)
    alone = request_time(
        run.config, shape, gpu, rates, Lengths(100.0, 300.0), replace(served, cache=token)
    )
    assert alone.beside == 0 and alone.longest_s < found.longest_s


PARTIAL = ("partial.tokens=2048", "algorithm.correction={mode: truncate}", "rollout.staleness=null")


def test_a_request_of_a_partial_rollout_ends_with_its_round() -> None:
    """Its response of 30,000 tokens takes more rounds, each of which is a request with a limit of
    its own."""
    asked = (
        "rollout.max_new_tokens=30000",
        "batch.micro_batch_tokens=32768",
        "faults.requests.request_s=300",
        "eval.tasks=[]",
        "eval.prompts=0",
    )
    check_limits(of(RECIPE, *asked, *PARTIAL))
    with pytest.raises(ConfigError, match=r"a response of 30,000 tokens .* allows 300"):
        check_limits(of(RECIPE, *asked))
    run = of(RECIPE, *asked, *PARTIAL, "faults.requests.request_s=1")
    with pytest.raises(ConfigError, match=r"a round of 2,048 tokens beside "):
        check_limits(run)


def test_the_time_of_a_round_by_hand() -> None:
    """A server that has room for ten of those that grow. All ten read what they carry over again,
    and each token step reads ten caches, which hold half of a round's tokens less than at its
    end."""
    run = of(
        *ONE_SERVER,
        "rollout.staleness=null",
        "partial.tokens=200",
        "algorithm.correction={mode: truncate}",
    )
    shape, gpu, rates, lengths = run.shape, GPUS[GPU], Coefficients(), Lengths(100.0, 300.0)
    flow = flow_of(run.config, lengths)
    assert flow is not None
    context = 100 + flow.held / flow.growing
    token = shape.layers * shape.cached * 2
    served = ServedMemory(0, round(10 * context * token), token, "", 1)
    found = request_time(run.config, shape, gpu, rates, lengths, served)
    reads = parameters(shape) * 2 + 10 * (context - 100) * token
    step = reads / (gpu.bandwidth * rates.decode_efficiency) + shape.layers * rates.decode_layer_s
    again = body_flops(shape, 100 + flow.carried / flow.continued, 0)
    prefill = 10 * again / (gpu.flops * rates.prefill_mfu)
    assert found.beside == pytest.approx(9) and found.tokens == 200
    assert found.longest_s == pytest.approx(prefill + 200 * step)
    assert found.first_s == pytest.approx(found.longest_s)  # the mean is beyond the round


LONG = (
    "eval.tasks=[{name: aime24, path: data/aime24.jsonl, samples: 32, max_new_tokens: 31744}]",
    "faults.requests.request_s=400",
)


def test_the_responses_of_an_evaluation_have_time_too() -> None:
    """A task's responses may be longer than those of training, at the same servers and with the
    same limit."""
    run = of("recipes/short_cot_qwen2.5_32b", *LONG)
    training, task = of_requests(run)
    training.require()
    assert task.what.startswith("a response of 31,744 tokens of task aime24 beside ")
    with pytest.raises(ConfigError, match=r"of task aime24 .* allows 400"):
        check_limits(run)
    # the number of problems is known: at most one for each server
    few = of_requests(of("recipes/short_cot_qwen2.5_32b", LONG[0].replace("32,", "1, prompts: 4,")))
    assert few[1].what.endswith("beside 0 others at its server")
    # other servers, which know no rollout of training
    apart = of("recipes/short_cot_qwen2.5_32b", *LONG, "eval.urls=[http://10.0.0.2:30000]")
    assert len(of_requests(apart)) == 1


def test_no_round_ends_a_response_of_an_evaluation() -> None:
    run = of(RECIPE, *PARTIAL, "eval.tasks=[]", "eval.prompts=64")
    assert [each.what.partition(" beside")[0] for each in of_requests(run)] == [
        "a round of 2,048 tokens",
        "a response of 20,480 tokens of the evaluation",
    ]


@pytest.mark.parametrize("nodes", [None, *TOOL.SIZES])
@pytest.mark.parametrize("colocated", [True, False])
def test_every_recipe_s_limits_leave_it_time(nodes: int | None, colocated: bool) -> None:
    checked: dict[str, list[Held]] = {}
    for name in recipes():
        config = TOOL.recipe(name) if nodes is None else TOOL.scaled(name, nodes, colocated, "disk")
        config = config.model_copy(update={"plan": config.plan.model_copy(update={"gpu": GPU})})
        key = str(
            (
                config.parallel,
                config.rollout,
                config.batch,
                config.model,
                config.sglang,
                config.faults,
                config.eval,
            )
        )
        if key not in checked:
            checked[key] = list(held(resolve_run(config, published=True)))
            assert len(checked[key]) == 7 + len(evaluation_tasks(config))
            for each in checked[key]:
                each.require()
    assert len(checked) > 10


def test_a_dry_run_refuses_a_limit_with_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", RECIPE, "--dry-run", f"plan.gpu={GPU}", "faults.requests.request_s=100"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert (
        "faults.requests.request_s: a response of 20,480 tokens beside 61 others at its server"
        " takes" in said
    )
    assert "faults.requests.request_s allows 100" in said and "Traceback" not in said
