"""The environment `tools`: what the policy is told, asked and answered, and what is trained on."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.glossary import explained
from transformers import AutoTokenizer

from megatron_stare.config.schema import Config
from megatron_stare.data.encode import PromptEncoder
from megatron_stare.environments import tools as tools_module
from megatron_stare.environments.chat import LeftOut
from megatron_stare.environments.environment import Turn, make_environment
from megatron_stare.environments.sandboxes import Ran
from megatron_stare.environments.tools import FolderSearch, Tools
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.observability.metrics.step_metrics import tool_metrics
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.rollout.sources.kept import from_bytes, to_bytes
from megatron_stare.rollout.sources.under_way import UnderWay
from megatron_stare.run_dir.json_lines import read_jsonl, write_atomically
from megatron_stare.run_dir.rollout_files import rollout_rows

ROOT = Path(__file__).parents[2]
CHAT = ROOT / "assets/tiny-chat"
OWN = str(Path(__file__).parent / "own_tools.py")
TOKENIZER = AutoTokenizer.from_pretrained(CHAT)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def config(limit: int = 2000, chat: bool = True, max_prompt: int = 2000, **settings: Any) -> Config:
    settings.setdefault("tools", [f"{OWN}:add", f"{OWN}:fails"])
    return Config.model_validate(
        {
            "model": {"path": str(CHAT)},
            "data": {"chat_template": chat},
            "rollout": {
                "environment": {"name": "tools", **settings},
                "max_new_tokens": limit,
                "max_prompt_tokens": max_prompt,
            },
        }
    )


def tools(limit: int = 2000, **settings: Any) -> Tools:
    made = config(limit, **settings)
    found = make_environment(made.rollout.environment, made, TOKENIZER)
    assert isinstance(found, Tools)
    return found


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script:
    """A policy that says what it is told to, and a journal that remembers."""

    def __init__(self, *turns: str, end: int = END, limit: int = 2000) -> None:
        self.turns, self.contexts, self.limits = list(turns), [], []  # type: ignore[var-annotated]
        self.calls: list[tuple[str, Any, bool]] = []
        self.recorded: list[Any] = []
        self.end, self.limit = end, limit

    async def __call__(
        self,
        context: Sequence[int],
        max_new_tokens: int | None = None,
        stop: Any = (),
        branch: Any = None,
    ) -> Turn:
        text = self.turns[len(self.contexts)]
        self.contexts.append(list(context))
        self.limits.append(max_new_tokens)
        ends = {each: text.index(each) for each in stop if each in text}
        ended = min(ends, key=ends.__getitem__, default=None)
        if ended is not None:
            text = text[: ends[ended] + len(ended)]
        ids = TOKENIZER(text, add_special_tokens=False).input_ids + [self.end] * (ended is None)
        kept = ids[: max_new_tokens or len(ids)]
        reason: Any = "stop" if kept == ids else "length"
        log_probs = torch.full((len(kept),), -0.5)
        return Turn(
            torch.tensor(kept, dtype=torch.int32),
            log_probs,
            ((7, len(kept)),),
            reason,
            text,
            stop=ended,
        )

    async def call(self, tool: Any, request: Any, *, idempotent: bool = False) -> Any:
        number = len(self.calls)
        self.calls.append((tool.__name__, request, idempotent))
        if number < len(self.recorded):
            return self.recorded[number]
        return json.loads(json.dumps(await tool(request, f"id{number}")))


def prompt(environment: Tools, text: str = "What is 2+3?") -> Prompt:
    ids = PromptEncoder(environment.config, TOKENIZER)(text, "here")
    return Prompt(0, "0", text, "5", ids)


def run(environment: Tools, script: Script) -> Trajectory:
    return asyncio.run(environment.run(prompt(environment), script))


def answers(found: Trajectory) -> list[str]:
    return [each["answer"] for each in found.calls]


def test_tokens_are_those_of_the_template_and_only_sampled_ones_carry_loss() -> None:
    """The whole conversation, rendered at once."""
    environment = tools()
    asked = call("add", first=2, second=3)
    script = Script(asked, "The answer is 5.")
    found = run(environment, script)
    whole = TOKENIZER.apply_chat_template(
        [
            {"role": "user", "content": "What is 2+3?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"function": {"name": "add", "arguments": {"first": 2, "second": 3}}}
                ],
            },
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "The answer is 5."},
        ],
        tools=environment._format._tools,
        tokenize=True,
        return_dict=False,
    )
    ids = [*prompt(environment).token_ids, *found.tokens.tolist()]
    assert ids == whole[: len(ids)]
    assert TOKENIZER.decode(whole[len(ids) :]) == "\n"  # behind the end of the last turn
    trained = [
        *TOKENIZER(asked, add_special_tokens=False).input_ids,
        END,
        *TOKENIZER("The answer is 5.", add_special_tokens=False).input_ids,
        END,
    ]
    assert found.tokens[found.loss_mask].tolist() == trained
    assert not found.log_probs[~found.loss_mask].any()
    assert script.contexts[1] == ids[: len(script.contexts[1])]
    assert found.finish_reason == "stop"
    assert found.turns == 2
    (made,) = found.calls
    assert (made["name"], made["asked"], made["answer"]) == ("add", {"first": 2, "second": 3}, "5")
    assert made["tokens"] == int((~found.loss_mask).sum())


def test_the_policy_is_told_of_its_tools_and_of_the_templates_other_values() -> None:
    environment = tools(tools=[{"name": f"{OWN}:repeats", "once": True}])
    text = TOKENIZER.decode(prompt(environment).token_ids)
    (line,) = [line for line in text.splitlines() if line.startswith('{"')]
    assert json.loads(line) == {
        "type": "function",
        "function": {
            "name": "repeats",
            "description": "Repeats a text.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "description": "any text"}},
                "required": ["text"],
            },
        },
    }
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    tokenizer.chat_template = "{{ thinks }}" + TOKENIZER.chat_template
    made = config()
    made.data.chat_template_kwargs["thinks"] = "aloud"
    assert tokenizer.decode(PromptEncoder(made, tokenizer)("x", "here")).startswith("aloud")


def test_a_fault_of_a_call_is_an_answer() -> None:
    bad = "<tool_call>\n{'name': 1}\n</tool_call>"
    script = Script(
        "\n".join((call("add", first="x"), call("fails", text="way"), call("gone"), bad)),
        call("add"),
        "<tool_call>\n{",
        call("add", first=1, third=3),
        "done",
    )
    found = run(tools(), script)
    first, fails, gone, unread, missing, opened, third = answers(found)
    assert first.startswith("Error: argument first:")
    assert fails == "Error: ValueError: no way"
    assert gone == "Error: there is no tool 'gone'; there are add, fails"
    assert unread.startswith("Error: the call cannot be read, not JSON")
    assert missing.startswith("Error: argument first:")
    assert opened.startswith("Error: the call cannot be read, it is not closed")
    assert third.startswith("Error: argument third:")
    assert all(each["failed"] for each in found.calls)
    assert [name for name, *_ in script.calls] == ["fails"]  # the others were never made
    assert [each["turn"] for each in found.calls] == [1, 1, 1, 1, 2, 3, 4]


def test_calls_of_one_turn_are_answered_in_their_order() -> None:
    found = run(tools(), Script("\n".join(call("add", first=n) for n in range(5)), "done"))
    assert answers(found) == list("01234")
    assert [bool(each["tokens"]) for each in found.calls] == [True, False, False, False, False]
    assert TOKENIZER.decode(found.tokens).count("<tool_response>") == 5


def test_256_slow_calls_run_at_once_and_hold_no_other_response_up() -> None:
    """Each of them ends only when all have begun; the last one begins when a response that calls
    another tool has ended."""
    environment = tools(tools=[f"{OWN}:waits", f"{OWN}:add"], call_seconds=60)

    def begin(one: str) -> asyncio.Task[Trajectory]:
        return asyncio.create_task(environment.run(prompt(environment), Script(one, "done")))

    async def go() -> list[Trajectory]:
        slow = [begin(call("waits", text=str(n))) for n in range(255)]
        quick = await begin(call("add", first=7))
        assert not any(each.done() for each in slow)
        return [quick, *await asyncio.gather(*slow, begin(call("waits", text="255")))]

    quick, *found = asyncio.run(go())
    assert answers(quick) == ["7"]
    assert [answers(each) for each in found] == [[str(n)] for n in range(256)]


def test_budgets() -> None:
    one = call("add", first=1)
    found = run(tools(max_calls=3), Script(f"{one}\n{one}", f"{one}\n{one}", "done"))
    assert answers(found) == ["1", "1", "1", "Error: the limit of 3 calls is reached"]

    found = run(tools(max_turns=2), Script(one, one))
    assert found.turns == 2
    assert len(found.calls) == 1

    script = Script(one, "done")
    found = run(tools(turn_tokens=9), script)
    assert script.limits == [9]
    assert (len(found), found.finish_reason, found.calls) == (9, "length", ())

    found = run(
        tools(tools=[f"{OWN}:never"], call_seconds=0.01), Script(call("never", text=""), "d")
    )
    assert answers(found) == ["Error: no answer in 0.01 seconds"]

    found = run(tools(answer_characters=4), Script(call("add", first=10**8), "done"))
    assert answers(found) == ["1000\n... 5 characters left out"]


def test_seconds_are_counted_as_recorded_so_that_a_repeated_response_is_the_same() -> None:
    one = call("add", first=1)
    script = Script(one, one, one, "done")
    script.recorded = [{"text": "slow", "failed": False, "seconds": 3.0}] * 2
    found = run(tools(seconds=5.0), script)
    assert answers(found) == ["slow", "slow", "Error: the time of 5 seconds for calls is used up"]


def test_a_programs_wait_for_a_worker_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Box:
        async def run(self, code: str, seconds: float) -> Ran:
            return Ran("1\n", False, 3.0)

    monkeypatch.setattr(tools_module, "make_sandbox", lambda *_: Box())
    one = call("code_interpreter", code="print(1)")
    found = run(tools(tools=["code_interpreter"], seconds=5.0), Script(one, one, one, "done"))
    assert answers(found) == ["1", "1", "Error: the time of 5 seconds for calls is used up"]


def test_an_environment_that_is_closed_closes_its_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Box:
        def close(self) -> None:
            closed.append("box")

    monkeypatch.setattr(tools_module, "make_sandbox", lambda *_: Box())
    environment = tools(tools=["code_interpreter", f"{OWN}:add"])
    environment.close()
    assert closed == ["box"]


def test_no_room_for_an_answer_ends_the_response() -> None:
    asked = call("add", first=1)
    whole = run(tools(), Script(asked, "done"))
    to_answer = len(whole) - len(TOKENIZER("done").input_ids) - 1
    for limit, cut in ((to_answer, True), (to_answer + 1, False)):
        script = Script(asked, "done")
        found = run(tools(limit), script)
        assert (len(script.contexts) == 1) == cut
        if cut:
            assert found.finish_reason == "length"
            assert found.loss_mask.all()
            assert len(found.calls) == 1  # it was made


def test_a_turn_that_ends_by_another_token_is_the_last() -> None:
    other = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    found = run(tools(), Script(call("add", first=1), end=other))
    assert found.calls == ()
    assert found.tokens[-1] == other


def test_a_tool_is_given_its_calls_id_and_once_means_never_again() -> None:
    made = [{"name": f"{OWN}:repeats", "once": True}, f"{OWN}:add"]
    script = Script(f"{call('repeats', text='x')}\n{call('add', first=1)}", "done")
    found = run(tools(tools=made), script)
    assert json.loads(answers(found)[0]) == {"text": "x", "id": "id0"}
    assert [(name, again) for name, _, again in script.calls] == [("repeats", False), ("add", True)]
    script = Script(
        call("repeats", text="x", call_id="mine"), "done"
    )  # no argument of the policy's
    assert answers(run(tools(tools=made), script))[0].startswith("Error: argument call_id")


@pytest.mark.parametrize("name", ["evaluates", "evaluates_later"])
def test_a_tool_that_exits_is_a_fault_of_its_call(name: str) -> None:
    script = Script(
        call(name, text="exit()"), call(name, text="exit(3)"), call(name, text="2"), "d"
    )
    assert answers(run(tools(tools=[f"{OWN}:{name}"]), script)) == [
        "Error: RuntimeError: the tool tried to end the process (None)",
        "Error: RuntimeError: the tool tried to end the process (3)",
        "2",
    ]


@pytest.mark.parametrize("name", ["looks_up", "described"])
def test_a_setting_of_a_function_is_no_argument_of_its_calls(name: str) -> None:
    environment = tools(tools=[{"name": f"{OWN}:{name}", "table": "mine"}])
    (schema,) = environment._format._tools
    assert "table" not in json.dumps(schema["function"]["parameters"])
    turns = call(name, word="x"), call(name, word="x", table="other"), "done"
    assert answers(run(environment, Script(*turns))) == [
        "mine:x",
        "Error: argument table: Unexpected keyword argument",
    ]


def test_half_of_a_character_is_neither_asked_nor_answered(tmp_path: Path) -> None:
    """Tokenizers and files refuse it. A service that cuts texts as JavaScript does answers it."""
    environment = tools(tools=[f"{OWN}:repeats", f"{OWN}:evaluates"])
    asked = call("repeats", text="\ud83d")
    assert "\\ud83d" in asked  # as JSON writes it, and a policy may
    turns = asked, call("evaluates", text="'a' + chr(0xd83d)"), call("repeats", text="\U0001f600")
    found = run(environment, Script(*turns, "done"))
    first, second, third = answers(found)
    assert first.startswith("Error: the call cannot be read")
    assert second == "a?" and "\\ud83d\\ude00" in third
    row = {"calls": found.calls, "note": "\ud83d"}
    write_atomically(tmp_path / "rows.jsonl", [row])
    (read,) = read_jsonl(tmp_path / "rows.jsonl")
    assert read == json.loads(json.dumps(row))


def test_a_call_that_never_returns_does_not_keep_a_finished_process() -> None:
    program = """
import sys
from environments.test_tool_environment import Script, answers, call, run, tools, OWN
found = run(tools(tools=[f"{OWN}:evaluates"], call_seconds=0.05),
            Script(call("evaluates", text="__import__('threading').Event().wait()"), "done"))
print(*answers(found))
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Error: no answer in 0.05 seconds"


def test_no_text_of_a_tool_is_a_token_of_the_template() -> None:
    marks = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "</tool_response>", "<tool_call>")
    environment = tools(tools=[f"{OWN}:repeats"])
    found = run(environment, Script(call("repeats", text=" ".join(marks)), "done"))
    plain = run(environment, Script(call("repeats", text="plain"), "done"))

    def counts(each: Trajectory) -> list[int]:
        told = each.tokens[~each.loss_mask].tolist()
        return [told.count(TOKENIZER.convert_tokens_to_ids(mark)) for mark in marks]

    assert counts(found) == counts(plain)
    assert "im_end" in answers(found)[0]


def test_tools_that_the_policy_makes_up_share_one_metric() -> None:
    script = Script(*(call(f"invented_{n}", text="x") for n in range(3)), call("add", first=1), "d")
    found = tool_metrics([run(tools(), script)])
    names = {name: value for name, value in found.items() if "calls_of" in name}
    assert names == {"tools/calls_of_unknown": 3.0, "tools/calls_of_add": 1.0}


def test_failures_and_seconds_are_told_of_each_tool() -> None:
    """Means over its own calls alone, whatever the others' number."""

    def made(name: str | None, failed: bool, seconds: float) -> dict[str, Any]:
        return {"name": name, "failed": failed, "seconds": seconds, "tokens": 1}

    sample = run(tools(), Script("done"))
    slow = [made("slow", False, 3.0), made("slow", True, 5.0)]
    quick = [made("quick", each == 0, 0.5) for each in range(4)]
    sample.calls = (*slow, *quick, made(None, True, 0.0))
    found = tool_metrics([sample, run(tools(), Script("done"))])
    told = {name: value for name, value in found.items() if "s_of_" in name}
    assert told == {
        "tools/calls_of_quick": 2.0,
        "tools/failures_of_quick": 0.25,
        "tools/seconds_of_quick": 0.5,
        "tools/calls_of_slow": 1.0,
        "tools/failures_of_slow": 0.5,
        "tools/seconds_of_slow": 4.0,
    }
    explained(told)


def test_functions_that_never_return_end_the_run_before_all_threads_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are four threads. The first call that goes on after its time is an answer to the
    policy; the second ends the run. A call that does return gives its thread back."""
    monkeypatch.setattr(tools_module, "THREADS", 4)
    pipes = [str(tmp_path / f"pipe{n}") for n in range(3)]
    for pipe in pipes:
        os.mkfifo(pipe)
    environment = tools(tools=[f"{OWN}:reads"], call_seconds=0.05)

    def asks(pipe: str) -> Trajectory:
        return run(environment, Script(call("reads", path=pipe), "d"))

    def lets_go(pipe: str) -> None:
        with open(pipe, "w") as end:
            end.write("x")

    assert answers(asks(pipes[0])) == ["Error: no answer in 0.05 seconds"]
    lets_go(pipes[0])
    (held,) = environment._held
    assert held.result(timeout=60) == "x"
    assert answers(asks(pipes[1])) == ["Error: no answer in 0.05 seconds"]
    with pytest.raises(UserError, match=r"2 calls of tools go on .* a call of 'reads'"):
        asks(pipes[2])
    for pipe in pipes[1:]:
        lets_go(pipe)


def test_a_call_that_waits_for_a_thread_loses_none_of_its_time(tmp_path: Path) -> None:
    """The only thread is held beyond the first call's time, which begins with that call."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    environment = tools(tools=[f"{OWN}:reads", f"{OWN}:add"], call_seconds=0.05)
    environment._threads = tools_module.DaemonThreads(1)

    def lets_go() -> None:
        while not environment._held:
            pass
        pipe.write_text("x")

    releases = threading.Thread(target=lets_go)
    releases.start()
    turn = f"{call('reads', path=str(pipe))}\n{call('add', first=1)}"
    found = run(environment, Script(turn, "done"))
    releases.join()
    assert answers(found) == ["Error: no answer in 0.05 seconds", "1"]
    assert found.calls[1]["seconds"] < found.calls[0]["seconds"]


def test_a_call_that_waits_for_a_thread_is_not_made_if_its_response_is_cut(tmp_path: Path) -> None:
    pipe, mark = tmp_path / "pipe", tmp_path / "mark"
    os.mkfifo(pipe)
    environment = tools(tools=[f"{OWN}:reads", f"{OWN}:marks"])
    environment._threads = threads = tools_module.DaemonThreads(1)

    def begin(one: str) -> asyncio.Task[Trajectory]:
        return asyncio.create_task(environment.run(prompt(environment), Script(one, "done")))

    async def cut() -> None:
        holds, waits = begin(call("reads", path=str(pipe))), begin(call("marks", path=str(mark)))
        while not threads._waiting:
            await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        pipe.write_text("x")
        await holds

    asyncio.run(cut())
    threads.submit(str).result(timeout=60)  # the only thread has come to the calls before this one
    assert not mark.exists()


def test_metrics_and_stored_responses_have_the_calls() -> None:
    one = call("add", first=1)
    used = run(tools(), Script(f"{one}\n{call('fails', text='')}", "<tool_call>\n", "done"))
    unused = run(tools(), Script("done"))
    found = tool_metrics([used, unused])
    assert found["tools/calls"] == 1.5
    assert found["tools/used"] == 0.5
    assert found["tools/failed"] == pytest.approx(2 / 3)
    assert found["tools/malformed"] == pytest.approx(1 / 3)
    assert found["tools/turns"] == 2.0
    assert found["tools/tokens"] == int((~used.loss_mask).sum()) / 2
    assert (found["tools/calls_of_add"], found["tools/calls_of_fails"]) == (0.5, 0.5)
    assert (found["tools/failures_of_add"], found["tools/failures_of_fails"]) == (0.0, 1.0)
    assert tool_metrics([unused]) == {}
    rows = rollout_rows(1, [used, unused], 2)
    assert json.loads(json.dumps(rows[0]))["calls"] == list(used.calls)
    assert "calls" not in rows[1]
    kept = UnderWay(used.prompt, 0, 1)
    kept.finish(used)
    ((again,),) = from_bytes(to_bytes([[kept]]))
    assert again.trajectory is not None
    assert list(again.trajectory.calls) == list(used.calls)
    assert again.trajectory.turns == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": [f"{OWN}:no_words"]}, "cannot be described to the policy"),
        ({"tools": [f"{OWN}:no_type"]}, "cannot be described to the policy"),
        ({"tools": [f"{OWN}:add", f"{OWN}:add"]}, "two tools are called 'add'"),
        ({"tools": [f"{OWN}:ad"]}, "ad"),
        ({"tools": ["serach"]}, "search"),
        ({"tools": []}, "at least 1"),
        ({"tools": [{"name": f"{OWN}:add", "once": "yes"}]}, "once is 'yes'"),
        ({"tools": [{"name": "search", "folder": "nowhere"}]}, "there is no text in 'nowhere'"),
        ({"max_turns": 0}, "must be at least 1"),
        ({"chat": False}, "tools need prompts in the form of a chat"),
        ({"tools": ["code_interpreter"], "sandbox_url": "http://x"}, "a sandbox_url is set"),
        ({"tools": ["code_interpreter"], "sandbox": "remote"}, "needs a sandbox_url"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tools(**settings)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ messages[0].content }}", "does not write calls"),
        (TOKENIZER.chat_template.replace("tools", "gone"), "does not tell the policy"),
        (TOKENIZER.chat_template.replace("<|im_end|>", "."), "sampling does not stop"),
        (
            TOKENIZER.chat_template.split('<|im_end|>\n{% elif message.role == "tool"')[0]
            + "{%- endif -%}{%- endfor -%}",
            "special token",
        ),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
    ],
)
def test_a_template_that_does_not_serve_is_refused(template: str | None, message: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    tokenizer.chat_template = template
    made = config()
    with pytest.raises(ConfigError, match=message):
        make_environment(made.rollout.environment, made, tokenizer)


def test_a_template_that_rewrites_the_last_turn_keeps_what_was_sampled() -> None:
    """Like Qwen3's, which adds empty thoughts to a last turn of the assistant alone."""
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    adds = (
        '{{ turn("assistant") }}{% if loop.last %}<think></think>{% endif %}{{ message.content }}'
    )
    before = '{{ turn("assistant") }}{{ message.content }}'
    assert before in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(before, adds)
    made = config()
    other = make_environment(made.rollout.environment, made, tokenizer)
    assert isinstance(other, Tools)
    said = [{"role": "tool", "name": "call", "content": "5"}]
    assert other._format.between(said) == tools()._format.between(said)


FORGETFUL = TOKENIZER.chat_template.replace(
    '{{ turn("assistant") }}{{ message.content }}',
    '{{ turn("assistant") }}{{ message.content.split("</think>")[-1].lstrip("\\n") }}',
)
# the opening of a turn begins to think, which an answered turn does not show
OPENING = FORGETFUL.replace(
    '{{ turn("assistant") }}{%- endif -%}', '{{ turn("assistant") }}<think>\n{%- endif -%}'
)


def thinking(template: str, policy: str, limit: int = 2000, max_prompt: int = 2000) -> Tools:
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    tokenizer.chat_template = template
    made = config(limit, max_prompt=max_prompt, earlier_thinking=policy)
    found = make_environment(made.rollout.environment, made, tokenizer)
    assert isinstance(found, Tools)
    return found


@pytest.mark.parametrize("template", [FORGETFUL, OPENING], ids=["forgetful", "opening"])
def test_a_turn_follows_the_history_that_the_template_writes(template: str) -> None:
    """With the policy `branch`: each turn's context is the template's, and every sampled token is
    trained after what it was sampled after."""
    environment = thinking(template, "branch")
    opens = "" if template == FORGETFUL else "<think>\n"
    thought = ("" if opens else "<think>\n") + "2 and 3\n</think>\n\n"
    asked = call("add", first=2, second=3)
    script = Script(thought + asked, thought + asked, "no thought")
    encoder = PromptEncoder(environment.config, environment.tokenizer)
    given = Prompt(0, "0", "", "5", encoder("What is 2+3?", "here"))
    found = asyncio.run(environment.run(given, script))

    arguments = {"first": 2, "second": 3}
    calls = [{"function": {"name": "add", "arguments": arguments}}]
    messages: list[Any] = [{"role": "user", "content": "What is 2+3?"}]
    for number, context in enumerate(script.contexts):
        whole = environment.tokenizer.apply_chat_template(
            messages,
            tools=environment._format._tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        assert context == whole, number
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "5"},
        ]
    assert [branch.context for branch in found.branches] == [
        tuple(context) for context in script.contexts[1:]
    ]
    assert found.loss_mask.all() and found.turns == 3
    first, second, third = (found.tokens[a:b].tolist() for a, b in found.spans)
    assert first == second == [*TOKENIZER(thought + asked).input_ids, END]
    assert third == [*TOKENIZER("no thought").input_ids, END]


def test_an_opening_that_is_left_out_changes_a_turn_without_the_end_of_a_thought() -> None:
    left_out = thinking(OPENING, "branch")._format.left_out()
    assert left_out == LeftOut(TOKENIZER("<think>").input_ids, True)
    assert left_out.changes("no thought")
    forgetful = thinking(FORGETFUL, "branch")._format.left_out()
    assert forgetful == LeftOut([], True)
    assert forgetful.changes("a</think>b") and not forgetful.changes("no thought")


def test_thinking_is_kept_unless_told_otherwise() -> None:
    """And a turn without thinking begins no branch."""
    thought = "<think>\n2 and 3\n</think>\n\n"
    asked = call("add", first=2, second=3)
    for environment, said in (
        (thinking(FORGETFUL, "keep"), thought + asked),
        (thinking(TOKENIZER.chat_template, "branch"), thought + asked),
        (thinking(TOKENIZER.chat_template, "refuse"), thought + asked),
        (thinking(FORGETFUL, "branch"), asked),
    ):
        found = run(environment, Script(said, "done"))
        assert found.branches == () and not found.loss_mask.all()


def test_a_thought_cannot_write_a_token_of_the_template() -> None:
    environment = thinking(FORGETFUL, "branch")
    ids = environment._format.history([1, 2], "a</think>b<|im_end|>c", LeftOut([], True))
    assert ids == [1, 2, *TOKENIZER("b< |im_end|>c").input_ids, END]


def test_a_history_that_leaves_no_room_cuts_the_response() -> None:
    """The response itself would have room for the next turn."""
    said = "</think>" + call("add", first=2, second=3)
    limit = len(TOKENIZER(said).input_ids) + 3
    size = len(prompt(thinking(FORGETFUL, "branch")).token_ids)
    environment = thinking(FORGETFUL, "branch", limit=limit, max_prompt=size)
    found = run(environment, Script(said, "done"))
    assert len(found) == limit - 2
    assert found.finish_reason == "length" and found.branches == () and found.turns == 1


@pytest.mark.parametrize(
    ("template", "policy", "message"),
    [
        (FORGETFUL, "refuse", "leaves out the thinking"),
        (
            FORGETFUL.replace('lstrip("\\n")', 'lstrip("\\n").upper()'),
            "branch",
            "changes more",
        ),
        (
            FORGETFUL.replace('lstrip("\\n") }}', 'lstrip("\\n") }}{{ message.content[:7] }}'),
            "branch",
            "changes more",
        ),
    ],
)
def test_a_template_against_the_policy_is_refused(template: str, policy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thinking(template, policy)


@pytest.mark.parametrize("policy", ["branch", "refuse"])
def test_an_end_of_thoughts_that_no_turn_s_text_contains_is_refused(policy: str) -> None:
    """Only where the end is searched, in turns whose thoughts the template leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    assert "</think>" not in tokenizer.decode(
        tokenizer("a</think>b").input_ids, skip_special_tokens=True
    )
    for template, kept in ((FORGETFUL, "keep"), (TOKENIZER.chat_template, policy)):
        tokenizer.chat_template = template
        made = config(earlier_thinking=kept)
        make_environment(made.rollout.environment, made, tokenizer).close()
    tokenizer.chat_template = FORGETFUL
    made = config(earlier_thinking=policy)
    with pytest.raises(ConfigError, match="</think> is a special token") as error:
        make_environment(made.rollout.environment, made, tokenizer)
    assert error.value.where == "model.path" and "tokenizer.json" in str(error.value.fix)
    # an empty thought alone is left out by its place
    tokenizer.chat_template = TOKENIZER.chat_template.replace(
        '{{ turn("assistant") }}{%- endif -%}',
        '{{ turn("assistant") }}<think>\n\n</think>\n\n{%- endif -%}',
    )
    made = config(earlier_thinking="branch")
    make_environment(made.rollout.environment, made, tokenizer).close()


def test_search_finds_the_passage_that_fits_best(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("The capital of Elbonia is Mudville.\n\nElbonia has no sea.")
    (tmp_path / "deep/b.md").write_text("Mudville has ten gates, and Elbonia no capital elsewhere.")
    (tmp_path / "c.csv").write_text("capital Mudville Elbonia")
    search = FolderSearch(folder=str(tmp_path), results=2)
    assert search("capital of Elbonia?") == (
        "[a.txt] The capital of Elbonia is Mudville.\n\n"
        "[deep/b.md] Mudville has ten gates, and Elbonia no capital elsewhere."
    )
    assert search("zebra") == "Nothing was found."
    made = [{"name": "search", "folder": str(tmp_path), "results": 1}]
    found = run(tools(tools=made), Script(call("search", query="sea"), "done"))
    assert answers(found) == ["[a.txt] Elbonia has no sea."]


def test_search_ranks_as_its_formula_does(tmp_path: Path) -> None:
    """BM25 of every passage, written out."""
    draw = random.Random(5)
    passages = [[f"w{draw.randrange(30)}" for _ in range(draw.randrange(1, 40))] for _ in range(99)]
    (tmp_path / "a.txt").write_text("\n\n".join(map(" ".join, passages)))
    search = FolderSearch(folder=str(tmp_path), results=4)
    mean = sum(map(len, passages)) / len(passages)

    def score(passage: list[str], words: set[str]) -> float:
        total = 0.0
        for word in sorted(words):
            having = sum(word in each for each in passages)
            rarity = math.log(1 + (len(passages) - having + 0.5) / (having + 0.5))
            weight = 1.2 * (1 - 0.75 + 0.75 * len(passage) / mean)
            total += rarity * passage.count(word) * 2.2 / (passage.count(word) + weight)
        return total

    for _ in range(50):
        words = {f"w{draw.randrange(33)}" for _ in range(draw.randrange(1, 5))}
        scores = [score(each, words) for each in passages]
        best = sorted(range(len(passages)), key=lambda n: (-scores[n], n))[:4]
        wanted = [" ".join(passages[n]) for n in best if scores[n] > 0]
        assert re.findall(r"\[a.txt\] (.*)", search(" ".join(words))) == wanted
