"""The engines of evaluations where no trainer is beside them, or another set of engines is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.runs import ROOT

from megatron_stare.config.engines_alone import engines_alone, evaluation_engines
from megatron_stare.config.load import validate
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.planning.preflight import check

OURS = "http://127.0.0.1:1"
SERVED = {"python": sys.executable, "colocated": True, "seeds": True, "cache_tokens": 4000}


def config(**sections: Any) -> Config:
    lengths = {"max_prompt_tokens": 16, "max_new_tokens": 32}
    tree = {
        "model": {"path": str(ROOT / "assets/tiny-adder")},
        "data": {"source": "arithmetic"},
        **sections,
    }
    return validate(tree | {"rollout": lengths | sections.get("rollout", {})}, "test.yaml")


def test_engines_without_a_trainer_share_nothing_with_one() -> None:
    run = config(rollout={"engine": "sglang"}, sglang=SERVED, moe={"routing_replay": True})
    alone = engines_alone(run, "/elsewhere")
    assert (alone.sglang.colocated, alone.moe.routing_replay, alone.model.path) == (
        False,
        False,
        "/elsewhere",
    )
    assert engines_alone(run).model.path == run.model.path
    # a process that evaluates is on no server's GPU, so handles of its memory reach none
    assert (run.sglang.sync, alone.sglang.sync) == ("tensor", "disk")
    apart = run.model_copy(update={"sglang": run.sglang.model_copy(update={"colocated": False})})
    assert engines_alone(apart).sglang.sync == "tensor"
    restored = {"sglang": run.sglang, "moe": run.moe, "model": run.model}
    assert alone.model_copy(update=restored) == run


def test_evaluations_have_the_engines_that_they_name() -> None:
    assert evaluation_engines(config()) is None
    started = evaluation_engines(config(rollout={"engines": 3}, eval={"prompts": 4, "engines": 2}))
    assert started is not None and started.rollout.engines == 2
    sglang = SERVED | {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"}
    algorithm = {"name": "grpo", "correction": {"mode": "truncate"}}
    served = {
        "rollout": {"engine": "sglang", "engines": 3},
        "sglang": sglang,
        "algorithm": algorithm,
    }
    attached = evaluation_engines(config(**served, eval={"prompts": 4, "urls": [OURS]}))
    assert attached is not None
    # not how training's are started, which is refused beside servers that run already
    # which they must have
    assert attached.sglang.kv_cache_dtype == "fp8_e4m3" and attached.sglang.quantization == "fp8"
    assert (attached.sglang.urls, attached.sglang.python, attached.sglang.cache_tokens) == (
        [OURS],
        None,
        None,
    )
    assert (attached.sglang.seeds, attached.sglang.colocated, attached.rollout.engines) == (
        True,
        False,
        1,
    )
    served["sglang"] = {**sglang, "quantization": None}  # which servers on CPUs cannot have
    check(config(**served, eval={"prompts": 4, "urls": [OURS]}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"eval": {"urls": [OURS]}}, "eval.urls names servers, and the engine 'local' has none"),
        (
            {
                "rollout": {"engine": "sglang"},
                "sglang": SERVED,
                "eval": {"urls": [OURS], "engines": 1},
            },
            "eval.engines: eval.engines starts engines and eval.urls names running ones",
        ),
        (
            {
                "rollout": {"engine": "sglang"},
                "sglang": SERVED | {"device": "cuda"},
                "eval": {"engines": 1},
            },
            "eval.engines: the evaluation's own engines are started on this machine, and cannot be",
        ),
        (
            {"rollout": {"engine": "sglang"}, "sglang": SERVED, "eval": {"urls": ["http://far:1"]}},
            "eval.urls: http://far:1 is not on loopback, so it must ask for a key",
        ),
    ],
)
def test_engines_that_evaluations_cannot_have(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(config(**sections))
    assert message in str(error.value)
