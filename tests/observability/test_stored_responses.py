"""The page's data is what the rollout files hold: nothing lost, paired by prompt, evenly thinned
where room lacks."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_runs import synthetic_run

from megatron_stare.errors import DataError
from megatron_stare.observability.report import rollouts_page
from megatron_stare.observability.report.rollouts_page import (
    BLOCK,
    Stored,
    pairs,
    stored_responses,
    write_rollouts,
)
from megatron_stare.run_dir.json_lines import to_line, write_atomically
from megatron_stare.run_dir.rollout_files import read_rollouts, rollout_file, rollout_files
from megatron_stare.run_dir.run_files import read_run


def unpacked(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def response(step: int, number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "cursor": 10 * step + number,
        "sample": number,
        "prompt": f"question {number}",
        "response": f"answer {number} of step {step}",
        "answer": "7",
        "reward": float(number % 2),
        "tokens": 5 + number,
        **more,
    }


def run_of(folder: Path, steps: list[list[dict[str, Any]]]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: made}\nalgorithm: {name: grpo}\n")
    (folder / "metrics.jsonl").write_text(
        "".join(to_line({"step": n}) for n in range(1, len(steps) + 1))
    )
    for step, rows in enumerate(steps, start=1):
        write_atomically(rollout_file(folder / "rollouts", step), rows)
    return folder


def shown(stored: Stored, row: int) -> tuple[dict[str, Any], Any]:
    """Text and numbers of a row, found as the page finds them."""
    block, place = stored.rows["at"][row]
    numbers = stored.rows["numbers"][row]
    return unpacked(stored.texts[block])[place], None if numbers < 0 else unpacked(
        stored.numbers[numbers]
    )[place]


def test_every_response_is_found_through_its_row(tmp_path: Path) -> None:
    number = 2 * BLOCK + 3  # of one step: three blocks
    by_token = {
        "text": ["a", "b"],
        "surprisal": [0.1, None],
        "entropy": [0.2, 0.3],
        "advantage": 1.0,
        "weight": [[2.0, 2]],
        "selected": "+.",
        "rare": "rc",
    }
    steps = [
        [response(1, i) for i in range(number)],
        [response(2, 0, by_token=by_token), response(2, 1)],
    ]
    stored = stored_responses(read_run(run_of(tmp_path / "run", steps)))
    assert len(stored) == number + 2 and len(stored.texts) == 4 and len(stored.numbers) == 1
    for row, record in enumerate([*steps[0], *steps[1]]):
        text, numbers = shown(stored, row)
        assert (text["prompt"], text["response"]) == (record["prompt"], record["response"])
        assert numbers == record.get("by_token")
        assert [
            stored.rows[name][row] for name in ("step", "cursor", "sample", "reward", "tokens")
        ] == [record[name] for name in ("step", "cursor", "sample", "reward", "tokens")]
    assert (stored.rows["plus"][number], stored.rows["minus"][number]) == (1, 0)
    assert stored.rows["plus"][number + 1] is None  # not 0: it was not written with its tokens
    assert stored.left_out == (0, 0)
    assert set(stored.reasons) == {1, 2}


def test_evaluations_are_a_task_of_their_own(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [[response(1, 0)]])
    sample = {"prompt": "2+2=", "response": "4", "answer": "4", "reward": None}
    records = [{"step": 1, "weights": "trained", "task": "sums", "samples": [sample]}]
    write_atomically(run / "eval.jsonl", records)
    stored = stored_responses(read_run(run))
    assert list(stored.tasks) == ["training", "evaluation, sums"]
    assert stored.rows["task"] == [0, 1] and stored.rows["reward"][1] is None
    assert shown(stored, 1)[0]["response"] == "4"


def test_without_room_an_even_choice_is_kept_and_the_rest_counted(tmp_path: Path) -> None:
    run = read_run(
        run_of(tmp_path / "run", [[response(step, i) for i in range(4)] for step in range(1, 41)])
    )
    whole = stored_responses(run)
    room = sum(map(len, whole.texts)) // 4
    part = stored_responses(run, text_bytes=room)
    assert sum(map(len, part.texts)) <= room
    kept = sorted(set(part.rows["step"]))
    assert 8 <= len(kept) <= 10 and kept[0] == 1
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert max(gaps) <= 8 and kept[-1] >= 36  # not the first quarter alone
    assert part.left_out == (160 - len(part), 0)


def test_of_far_more_files_than_fit_only_some_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(
        run_of(tmp_path / "run", [[response(step, i) for i in range(4)] for step in range(1, 41)])
    )
    files = rollout_files(run.directory / "rollouts")
    read: list[Path] = []
    monkeypatch.setattr(
        rollouts_page, "read_rollouts", lambda file: (read.append(file), read_rollouts(file))[1]
    )
    size = sum(file.stat().st_size for file in files)
    part = stored_responses(run, text_bytes=size // 16, number_bytes=0)
    assert 8 <= len(read) <= 10 and read[0] == files[0] and read[-1] in files[-5:]
    assert part.left_out[0] == 160 - len(part) and len(part) <= 4 * len(read)


def test_without_room_for_numbers_the_texts_stay(tmp_path: Path) -> None:
    run = read_run(synthetic_run(tmp_path / "run", "held", 5))
    # the first block stays: a page without any would show nothing
    stored = stored_responses(run, number_bytes=0)
    assert len(stored.numbers) == 1
    write_atomically(
        rollout_file(run.directory / "rollouts", 4),
        [r | {"step": 4} for r in lines(run.directory, 5)],
    )
    stored = stored_responses(run, number_bytes=0)
    assert len(stored.numbers) == 1 and stored.left_out == (0, 4)
    places = zip(stored.rows["numbers"], stored.rows["step"], strict=True)
    assert {step for number, step in places if number >= 0} == {4}


def lines(run: Path, step: int) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in rollout_file(run / "rollouts", step).read_text().splitlines()
    ]


def test_two_runs_are_paired_by_prompt_the_same_sample_first() -> None:
    def stored(*keys: tuple[str, int, int]) -> Stored:
        return Stored(
            "x", keys=[("training", prompt, step, sample) for prompt, step, sample in keys]
        )

    first = stored(("p", 1, 0), ("p", 1, 1), ("q", 1, 0), ("r", 2, 0))
    second = stored(("p", 1, 1), ("q", 9, 5), ("p", 1, 7), ("s", 1, 0))
    assert pairs([first, second]) == [[0, 2], [1, 0], [2, 1], [3, -1], [-1, 3]]
    assert pairs([first]) == [[0], [1], [2], [3]]
    other_task = Stored("x", keys=[("evaluation", "p", 1, 0)])
    assert pairs([stored(("p", 1, 0)), other_task]) == [[0, -1], [-1, 0]]


def test_nothing_that_a_model_wrote_is_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    run = run_of(tmp_path / "run", [[response(1, 0, prompt=evil, response=evil, answer=evil)]])
    page = write_rollouts([run], tmp_path / "page.html").read_text()
    assert "alert(1)" not in page
    assert "default-src 'none'" in page and not re.search(r"https?://", page)
    # the same for the same files
    assert page == write_rollouts([run], tmp_path / "page.html").read_text()


def test_half_of_a_character_is_shown_as_a_question_mark(tmp_path: Path) -> None:
    """Files keep it as an escape; a page is UTF-8."""
    run = run_of(tmp_path / "run", [[response(1, 0, response="so \ud83d it is")]])
    assert "so ? it is" in str(shown(stored_responses(read_run(run)), 0))
    write_rollouts([run], tmp_path / "page.html")


def test_what_cannot_be_shown_says_why(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [[]])
    with pytest.raises(
        DataError,
        match=r"no sampled responses are stored[\s\S]*run\.rollouts_every.*tuning samples none",
    ):
        write_rollouts([run], tmp_path / "page.html")
    with pytest.raises(DataError, match="3 runs are given"):
        write_rollouts([run] * 3, tmp_path / "page.html")
    rollout_file(run / "rollouts", 1).write_text("{broken\n" + to_line(response(1, 0)))
    with pytest.raises(DataError, match=r"step_000001\.jsonl:1"):
        write_rollouts([run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
