"""The post-mortem gives worked figures, and names the fields that a dump lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from megatron_stare.errors import DataError
from megatron_stare.select import explain
from megatron_stare.select.explain import Row, figures, main, read, stability

ENTROPY, SURPRISAL = "entropy, nats", "surprisal of sampled tokens, nats"
PACKED = "rare tokens kept when selected by micro-batch, share"


def row(step: int = 1, **more: Any) -> Row:
    arrays = {
        name: np.array(value) for name, value in more.items() if isinstance(value, (list, tuple))
    }
    return Row(step=step, **{**more, **arrays})


def by_name(rows: list[Row], **more: Any) -> dict[str, dict[int, float]]:
    return {figure.name: figure.by_step for figure in figures(rows, **more)}


def test_only_sampled_tokens_count() -> None:
    tools = row(
        entropy=[1.0, 9.0, 3.0],
        log_probs=[-1.0, -9.0, -2.0],
        rollout_log_probs=[-1.5, 0.0, -2.0],
        mask=[True, False, True],
        tokens=[1, 2, 3],
    )
    found = by_name([tools])
    assert found[ENTROPY] == {1: 2.0}
    assert found[SURPRISAL] == {1: 1.5}
    assert found["log-prob of engine and trainer, mean difference, nats"] == {1: 0.25}
    assert found["response length, tokens or words"] == {1: 2.0}


def test_quadrants_hold_all_advantage() -> None:
    rows = [
        row(log_probs=[-float(at) for at in range(1, 11)], advantages=[2.0]),
        row(log_probs=[-float(at) for at in range(1, 21)], advantages=[-1.0] * 20),
    ]
    found = by_name(rows)
    sides = {side: found[f"advantage in {side}, share"][1] for side in ("L+", "L-", "U+", "U-")}
    # of 10 positive tokens one is rare (2 of 40), of 20 negative tokens two are (2 of 40)
    assert sides == {"L+": 0.05, "L-": 0.05, "U+": 0.45, "U-": 0.45}


def test_a_micro_batch_of_likely_tokens_selects_others() -> None:
    sure = [row(log_probs=[-0.1] * 9 + [-0.2], advantages=[1.0]) for _ in range(3)]
    unsure = row(log_probs=[-1.0 - at / 10 for at in range(10)], advantages=[1.0])
    # of 40 tokens the four rarest are the unsure response's; by itself it selects one
    assert stability([*sure, unsure], 1) == 0.25
    assert stability([*sure, unsure], 4) == 1.0
    assert np.isnan(stability([row(log_probs=[-1.0], advantages=[0.0])], 1))


def test_signs_of_a_leak() -> None:
    rows = [
        row(prompt="is it 42?", group="a", gold="42", text="so yes", reward=1.0),
        row(prompt="is it 42?", group="a", gold="42", text="so yes", reward=0.0),
        row(prompt="how much", group="b", gold="17", text="", reward=1.0),
        row(prompt="how", group="c", gold="4", text="a a a a a a", reward=0.5),
    ]
    found = by_name(rows)
    assert found["prompts that contain their answer, share"] == {1: 0.5}
    assert found["rewarded responses without a token, share"] == {1: 0.5}
    assert found["different responses to a prompt, share"][1] == pytest.approx((0.5 + 1 + 1) / 3)
    assert found["repeated 4-grams, share"] == {1: pytest.approx(2 / 3)}
    assert found["reward"] == {1: 0.625}


def test_each_absent_field_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [
        {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": step, "uid": "a_0_0"}
        for step in (1, 2)
    ]
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "neither entropies nor log-probs" in shown
    assert f"{ENTROPY:54}absent: entropy\n" in shown
    assert f"{PACKED:54}absent: log_probs, advantages\n" in shown
    assert f"{'reward and length, correlation':54}nothing varies\n" in shown
    assert f"{'reward':54}    1.0000    1.0000    1.0000    1.0000\n" in shown


def test_the_first_sentence_tells_the_collapse(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(step, entropy=[0.8 / step]) for step in (1, 2, 3)]
    assert explain.verdict(figures(rows)) == (
        "The entropy went from 0.800 nats at step 1 to 0.267 at step 3; it first fell below half"
        " of its start at step 3."
    )
    kept = [row(step, log_probs=[-0.8]) for step in (1, 2)]
    assert explain.verdict(figures(kept)).endswith("and never below half of its start.")
    assert "surprisal of sampled tokens went from 0.800" in explain.verdict(figures(kept))


def test_dumps_of_every_trainer_are_read(tmp_path: Path) -> None:
    sample = {  # of a reward function that gives numpy's numbers
        "tokens": torch.tensor([7, 8, 1, 2, 3]),
        "response_lengths": 3,
        "loss_masks": torch.tensor([1, 0, 1]),
        "rewards": -0.5,
        "log_probs": torch.tensor([-1.0, -5.0, -3.0]),
        "entropy": torch.tensor([0.5, 5.0, 1.5]),
        "advantages": torch.tensor([-0.5, -0.5, -0.5]),
        "rollout_position": 1,
    }
    nothing = torch.tensor([])
    empty = {"response_lengths": 0, "loss_masks": nothing, "log_probs": nothing}
    empty |= {"entropy": nothing, "advantages": nothing}
    torch.save(
        {
            "format_version": 2,
            "rollout_id": 4,
            "samples": [sample, {**sample, **empty, "rollout_position": 0}],
            "raw_reward": [0.0, np.float64(1.0)],
        },
        tmp_path / "4.pt",
    )
    table = {"step": [5], "prompt": [[{"role": "user", "content": "1+1="}]], "completion": ["2"]}
    table |= {"correct": [1.0], "other": [float("nan")], "advantage": [0.25], "answer": ["2"]}
    parquet.write_table(pa.table(table), tmp_path / "completions_00005.parquet")
    slime, cancelled, trl = read([tmp_path])
    assert cancelled.tokens is not None and len(cancelled.tokens) == 0
    assert by_name([slime, cancelled])["response length, tokens or words"] == {4: 1.0}
    assert (slime.step, slime.reward, slime.kept("log_probs").tolist()) == (4, 1.0, [-1.0, -3.0])
    assert slime.tokens is not None and slime.tokens.tolist() == [1, 2, 3]
    assert (trl.step, trl.group, trl.text, trl.reward) == (5, "1+1=", "2", 1.0)
    assert trl.advantages is not None and trl.advantages.tolist() == [0.25]


def test_a_file_that_is_cut_off_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"input": "1+1=", "output": "two\u2028lines", "gts": "2", "score": 1.0, "step": 1}
    whole = {**entry, "uid": "a_0_0"}
    padding = {**entry, "output": "", "score": 0.0, "uid": f"pad{'0f' * 16}_3_0"}
    lines = [json.dumps(each, ensure_ascii=False) for each in (whole, padding)]
    (tmp_path / "1.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    torch.save({"format_version": 2, "rollout_id": 4, "samples": []}, tmp_path / "4.pt")
    cut = (tmp_path / "4.pt").read_bytes()[:200]
    (tmp_path / "4.pt").write_bytes(cut)
    (tmp_path / "5.pt").write_bytes(b"")
    (tmp_path / "6.jsonl").write_text(lines[0][:20])
    (only,) = read([tmp_path])  # without verl's row of padding
    assert only.text == "two\u2028lines"
    said = capsys.readouterr().err
    assert [
        name for name in ("1.jsonl", "4.pt", "5.pt", "6.jsonl") if f"{name}: cannot" in said
    ] == [
        *("4.pt", "5.pt", "6.jsonl"),
    ]


def test_a_response_without_a_sampled_token_gives_no_figure_of_tokens() -> None:
    masked = row(
        log_probs=[-1.0], rollout_log_probs=[-1.0], advantages=[1.0], mask=[False], entropy=[1.0]
    )
    assert not any(by_name([masked]).get(name) for name in (ENTROPY, SURPRISAL, PACKED))
    kept = row(log_probs=[-2.0], rollout_log_probs=[-1.0], advantages=[1.0], entropy=[3.0])
    assert by_name([masked, kept])[ENTROPY] == {1: 3.0}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is no dump and contains none"),
        ("a.jsonl", b"", "no file of the dumps has a response"),
        ("a.jsonl", b'{"step": 1}', "a.jsonl: cannot be read: KeyError"),
        ("a.parquet", b"not parquet", "a.parquet: cannot be read: ArrowInvalid"),
    ],
)
def test_what_is_no_dump_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(DataError):
        read([tmp_path / "missing"])
