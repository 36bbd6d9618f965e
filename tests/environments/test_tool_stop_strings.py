"""The environment `tools` with stop strings: a turn ends with its call, and the environment writes
the end of the turn that the policy was not asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.test_tool_environment import (
    CHAT,
    END,
    FORGETFUL,
    OWN,
    TOKENIZER,
    Script,
    answers,
    call,
    prompt,
    run,
    tools,
)
from safetensors.torch import load_file
from support import replicas
from transformers import AutoTokenizer

from megatron_stare.environments.environment import make_environment
from megatron_stare.environments.tools import Tools
from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.sglang.protocol import generate_body
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.rollout_source import Rollouts

CLOSE = "</tool_call>"
(CLOSED,) = TOKENIZER(CLOSE).input_ids
ADDS = call("add", first=2, second=3)


@pytest.mark.parametrize("stop", [CLOSE, [CLOSE, "no"]])
def test_a_turn_ends_with_its_call_and_the_template_s_end_follows(stop: Any) -> None:
    """All tokens are those of a turn that the policy ended itself; the end carries no loss."""
    whole = run(tools(), Script(ADDS, "It is 5."))
    found = run(tools(stop=stop), Script(f"{ADDS}\n{ADDS}", "It is 5."))
    at = len(TOKENIZER(ADDS).input_ids)
    assert found.tokens.tolist() == whole.tokens.tolist() and found.tokens[at] == END
    assert whole.loss_mask[at] and not found.loss_mask[at] and not found.log_probs[at]
    assert found.loss_mask[:at].all() and (found.turns, answers(found)) == (2, ["5"])
    assert torch.equal(found.loss_mask[at + 1 :], whole.loss_mask[at + 1 :])
    assert found.calls[0]["tokens"] == int((~found.loss_mask).sum())
    assert found.text == whole.text and found.finish_reason == "stop"


def test_a_turn_that_a_stop_string_ends_without_a_call_is_the_last() -> None:
    found = run(tools(stop="```"), Script("```python\nprint(1)\n```", "more"))
    assert (found.turns, found.finish_reason, found.calls) == (1, "stop", ())
    assert TOKENIZER.decode(found.tokens) == "```" and found.loss_mask.all()


def test_a_new_branch_has_the_end_once() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    tokenizer.chat_template = FORGETFUL
    made = tools(stop=CLOSE, earlier_thinking="branch").config
    environment = make_environment(made.rollout.environment, made, tokenizer)
    assert isinstance(environment, Tools)
    script = Script(f"<think>\n2 and 3\n</think>\n\n{ADDS}", "It is 5.")
    found = run(environment, script)
    assert found.loss_mask.all() and len(found.branches) == 1
    assert script.contexts[1][: len(script.contexts[0])] == script.contexts[0]
    assert TOKENIZER.decode(script.contexts[1]).count(f"{CLOSE}<|im_end|>\n<|im_start|>user") == 1


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "does not end in an ASCII character"),
        ([CLOSE, "é"], "'é' does not end in an ASCII character"),
        ("a<|im_end|>", "contains the special token"),
    ],
)
def test_a_stop_string_that_cannot_be_one_is_refused_at_the_start(stop: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        tools(stop=stop)
    assert "rollout.environment.stop" in str(error.value)


def test_an_engine_s_turns_end_there_and_a_server_is_asked_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model ends its turns behind their calls by itself, so both settings sample the same
    tokens, as noise is keyed on the place in the response. A last turn lacks its end."""
    monkeypatch.setattr(replicas, "TOKENIZER", TOKENIZER)
    monkeypatch.setenv("TOOL_LOG", str(tmp_path / "log"))
    asked: list[GenerateRequest] = []

    class Engine(LocalEngine):
        def submit(self, requests: Any, params: SamplingParams) -> None:
            asked.extend(requests)
            super().submit(requests, params)

    engine = Engine(str(CHAT), 5)
    engine.begin_weight_update(0)
    engine.update_weights(list(load_file(CHAT / "model.safetensors").items()))
    engine.end_weight_update()
    params = SamplingParams(1.0, 160, seed=3, step=1, stop_token_ids=(END,))

    def sampled(**settings: Any) -> list[Trajectory]:
        environment = tools(160, tools=[f"{OWN}:code_interpreter"], max_turns=2, **settings)
        texts = ("What is 10+20?", "What is 33+45?")
        prompts = [
            Prompt(at, str(at), text, "", prompt(environment, text).token_ids)
            for at, text in enumerate(texts)
        ]
        pool = EnginePool(replicas.Replicas([engine]))
        return Rollouts(pool, environment, replicas.judged).make(prompts, 3, params)

    free, found = sampled(), sampled(stop=CLOSE)
    called = 0
    for one, other in zip(found, free, strict=True):
        size = len(one)
        assert one.tokens.tolist() == other.tokens[:size].tolist()
        assert other.tokens[size:].tolist() == [END] * (one.tokens[-1] == CLOSED)
        ends = [
            at
            for at, token in enumerate(one.tokens.tolist())
            if token == END and at and one.tokens[at - 1] == CLOSED and other.loss_mask[at]
        ]
        called += len(ends)
        wanted = other.loss_mask[:size].clone()
        wanted[ends] = False
        assert torch.equal(one.loss_mask, wanted)
        both = one.log_probs[wanted], other.log_probs[:size][wanted]
        torch.testing.assert_close(*both, rtol=0, atol=1e-5)
        assert json.dumps([each["asked"] for each in one.calls]) == json.dumps(
            [each["asked"] for each in other.calls]
        )
    assert called > 3
    told = [generate_body(each, params, "r")["sampling_params"] for each in asked]
    # the tokens whose texts may complete the stop string
    completing = frozenset([END, CLOSED, *TOKENIZER(">").input_ids])
    assert {frozenset(each["stop_token_ids"]) for each in told} == {frozenset([END]), completing}
    assert {each["stop"] for each in told} == {None}  # servers would look at text
