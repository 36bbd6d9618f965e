"""The report of where verifiers disagree."""

from __future__ import annotations

import json
import sys

from support.runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import compare_verifiers


def test_disagreements_are_counted_and_written(tmp_path, capsys):
    cases = [
        {"response": r"\boxed{B}", "answer": "B", "label": 1},
        {"response": r"\boxed{b}", "answer": "B", "label": 1},
        {"response": r"\boxed{A, B}", "gold": "A, B", "label": 0},
        {"response": r"\boxed{12}", "answer": "12", "label": 1},
    ]
    file, out = tmp_path / "answers.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(case) + "\n" for case in cases))
    arguments = [str(file), "--verifiers", "exact", "choice", "--workers", "1"]
    assert compare_verifiers.main([*arguments, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "exact: 3 right; against the labels 1 wrong ones rewarded, 1 right ones refused" in said
    assert (
        "choice: 3 right, 1 crash; against the labels 1 wrong ones rewarded, 1 right ones refused"
        in said
    )
    assert "exact and choice disagree on 2" in said
    rewards = [json.loads(line)["rewards"] for line in out.read_text().splitlines()]
    assert rewards == [{"exact": 0.0, "choice": 1.0}, {"exact": 1.0, "choice": "crash"}]
    file.write_text('{"response": "a"}\n')
    assert compare_verifiers.main(arguments) == 2
    assert "answers.jsonl:1" in capsys.readouterr().err
