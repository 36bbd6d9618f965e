"""Evaluations with the environment `tools`: their calls, what their record names, a kill in a call,
and the prompts that tasks ask."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.real_tokenizers import tokenizer
from support.runs import ROOT, TIMEOUT_S, environment

from megatron_stare.commands.evaluate.offline_evaluation import read, run
from megatron_stare.config.load import load_config
from megatron_stare.config.schema import Config
from megatron_stare.tasks.task import evaluation_tasks

MODEL = ROOT / "assets/tiny-chat"
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
OWN = Path(__file__).parent / "own_tools.py"
TOOLS = {
    "name": "tools",
    "tools": [f"{OWN}:code_interpreter"],
    "max_turns": 3,
    "max_calls": 2,
    "turn_tokens": 100,
}
RESPONSES = 6 * (2 + 1)  # the greedy ones too


def settings(folder: Path) -> list[str]:
    rows = folder / "sums.jsonl"
    sums = [(10 + 7 * n % 90, 11 + 13 * n % 88) for n in range(6)]
    rows.write_text(
        "".join(
            f"{json.dumps({'prompt': f'What is {a}+{b}?', 'answer': str(a + b)})}\n"
            for a, b in sums
        )
    )
    return [
        f"model.path={MODEL}",
        "runtime.runner=inline",
        "parallel.tensor=1",
        "rollout.threads=1",
        "rollout.max_batch=4",
        "data.source=files",
        f"data.path={rows}",
        f"data.eval_path={rows}",
        "data.chat_template=true",
        f"rollout.environment={json.dumps(TOOLS)}",
        "rollout.max_prompt_tokens=320",
        "rollout.max_new_tokens=128",
        "reward.verifier=math_verify",
        "eval.prompts=6",
        "eval.samples=2",
        "eval.seed=11",
    ]


def evaluated(out: Path, given: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record of an evaluation in this process, and the stored responses in their order."""
    opened = read(load_config(QUICKSTART, given), MODEL, [])
    record = run(opened, out, lambda _: lambda *_: None, lambda _: None)["held-out"]
    return record, stored(out)


def stored(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["greedy"], row["prompt"], row["sample"]))


def made(log: Path) -> Counter[str]:
    """Counts of the calls, by their code."""
    return Counter(json.loads(line)[1] for line in log.read_text().splitlines())


@pytest.mark.wide
@pytest.mark.distributed
def test_an_evaluation_calls_tools_and_is_the_same_after_a_kill_in_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path)
    log, order = tmp_path / "quiet", tmp_path / "order"
    monkeypatch.setenv("KILL_AT", str(order))
    monkeypatch.setenv("TOOL_LOG", str(log))
    record, rows = evaluated(tmp_path / "whole", given)
    calls = made(log)
    assert calls.total() > 12
    assert len(rows) == RESPONSES
    # answers of the tools are the environment's, and are counted but are not what the policy said
    assert any("<tool_call>" in row["text"] for row in rows)
    assert not any("<tool_response>" in row["text"] for row in rows)
    of_calls = [call for row in rows if not row["greedy"] for call in row["calls"]]
    sampled = sum(not row["greedy"] for row in rows)
    assert record["tool_calls"] == len(of_calls) / sampled
    assert record["tool_calls_failed"] == sum(call["failed"] for call in of_calls) / len(of_calls)
    assert all(call.keys() >= {"turn", "name", "asked", "answer", "failed"} for call in of_calls)
    assert sum(len(row["calls"]) for row in rows) >= calls.total()  # some ran nothing
    assert record["decoding"] == {
        "samples": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 128,
        "seed": 11,
    }
    assert json.loads(record["asked"]["environment"]) == TOOLS  # its budgets among them
    about = json.loads((tmp_path / "whole/evaluation.json").read_text())["tasks"]["held-out"]
    assert about["environment"] == TOOLS and about["seed"] == 11

    log = tmp_path / "log"
    monkeypatch.setenv("TOOL_LOG", str(log))
    order.write_text(str(calls.total() * 2 // 3))
    command = [sys.executable, "-m", "megatron_stare.cli", "eval", QUICKSTART, *given]
    killed = subprocess.run(
        [*command, f"--checkpoint={MODEL}", f"--out={tmp_path / 'out'}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = stored(tmp_path / "out")
    assert 0 < len(before) < RESPONSES
    again, found = evaluated(tmp_path / "out", given)
    assert again == record
    assert found == rows
    assert [row for row in found if row in before] == before
    # those of responses that were cut are made again, no others
    twice = made(log) - calls
    assert 0 < twice.total() < calls.total() * 2 // 3 and not calls - made(log)


@pytest.mark.parametrize("where", ["data", "task"])
def test_prompts_of_an_evaluation_are_rendered_with_the_values_for_the_template(
    where: str, tmp_path: Path
) -> None:
    """Uses Qwen3's published template, which opens with an empty thought where thinking is off, and
    with the tools."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 2+3?", "answer": "5"}\n')
    thoughtless = {"chat_template_kwargs": {"enable_thinking": False}}
    task = {"name": "sums", "prompts": 1, **(thoughtless if where == "task" else {})}
    config = Config.model_validate(
        {
            "model": {"path": str(MODEL)},
            "data": {
                "source": "files",
                "eval_path": str(rows),
                "chat_template": True,
                **(thoughtless if where == "data" else {}),
            },
            "rollout": {
                "environment": {"name": "tools", "tools": [f"{OWN}:add"]},
                "max_prompt_tokens": 2000,
            },
            "eval": {"tasks": [task]},
        }
    )
    qwen3 = tokenizer("qwen3")
    (asked,) = evaluation_tasks(config)
    (problem,) = asked.problems(qwen3)
    made_by = asked.environment(qwen3)
    wanted = qwen3.apply_chat_template(
        [{"role": "user", "content": "What is 2+3?"}],
        tools=made_by._format._tools,
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=False,
    )
    assert list(problem.token_ids) == wanted
    text = qwen3.decode(wanted)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") and '"add"' in text
    # as the turns that the environment opens behind answers of tools
    assert made_by._format.between([{"role": "tool", "content": "5"}])[1].endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    made_by.close()
