"""From responses to figures: classes of equal answers, words of reflection, and the record's
numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_stare.evaluation.estimates import wilson_interval
from megatron_stare.evaluation.response import Response, answer_classes
from megatron_stare.evaluation.results import Answered, default_ks, problem_row, results_of, table
from megatron_stare.records.words import BEHAVIOURS, reflection_counts
from megatron_stare.rewards.verifier import VERIFIERS, make_verifier, normal_answer_of
from megatron_stare.run_dir.run_files import evaluation_figures


def response(
    answer: str | None,
    right: bool = False,
    text: str = "",
    tokens: int = 10,
    cut: bool = False,
    prompt: int = 0,
) -> Response:
    status = "ok" if answer is not None else "timeout"
    reward = float(right) if answer is not None else None
    return Response(
        prompt,
        0,
        text or f"so {answer}",
        tokens,
        "length" if cut else "stop",
        reward,
        status,
        answer,
    )


def never(pairs):
    raise AssertionError(f"asked of {pairs}")


def test_answers_are_the_same_by_their_normal_form_or_by_the_verifier() -> None:
    asked = []

    def judged(pairs):
        asked.extend(pairs)
        return [
            (text, reference) in {("so sqrt8/2", "sqrt2"), ("so 0.5", "1/2")}
            for text, reference in pairs
        ]

    one = [response(a) for a in ("sqrt2", "sqrt8/2", "", "x", "sqrt2")]
    other = [response(a) for a in ("1/2", "7", "0.5", "8", "0.5", None)]
    assert answer_classes([one, other], judged) == [[0, 0, None, 1, 0], [0, 1, 0, 2, 0, None]]
    # the later text is judged, the earlier answer is its reference; two integers need no judge, nor
    # equal forms
    assert ("so sqrt8/2", "sqrt2") in asked and ("so sqrt2", "sqrt8/2") not in asked
    assert not any(text == "so 8" and reference == "7" for text, reference in asked)
    assert len(asked) == len(set(asked)) == 3 + 5


def test_a_class_is_known_by_its_first_answer() -> None:
    """b is a and c is b, but c is not a: classes depend on the order of samples alone, not on what
    was judged first."""
    like = {("so b", "a"), ("so c", "b")}
    found = answer_classes(
        [[response(a) for a in "abc"]], lambda pairs: [pair in like for pair in pairs]
    )
    assert found == [[0, 0, 1]]


def test_integers_alone_need_no_verifier() -> None:
    assert answer_classes([[response("1"), response("-1"), response("1")]], never) == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("verifier", "same", "another"),
    [
        ("math", [r"\boxed{1,234}", r"so $\boxed{1234}$", r"\boxed{1234.0}"], r"\boxed{1235}"),
        ("math", [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{1/2}"], r"\boxed{-\frac12}"),
        ("math", [r"\boxed{\text{Paris}}", r"\boxed{paris}"], r"\boxed{Rome}"),
        ("math", [r"\boxed{\left(1, 2\right)}", r"\boxed{(1,2)}"], r"\boxed{(2,1)}"),
        ("dapo", ["Answer: 1,234 dollars", "answer: $1234$"], "Answer: 12"),
        ("dapo_boxed", [r"\boxed{\frac12}", r"\boxed{\frac{1}{2}}"], r"\boxed{1}"),
        ("exact", ["<answer> Paris</answer>", r"\boxed{Paris}"], r"\boxed{paris}"),
        ("numeric", [r"\boxed{1/2}", "<answer>0.5</answer>"], r"\boxed{0.25}"),
        ("choice", [r"\boxed{C, A}", r"\boxed{\text{A and (C)}}"], r"\boxed{A}"),
        ("arithmetic", ["1+2=003", "0+3= 3 "], "1+2=4"),
        ("math + 0.1 * format", [r"\boxed{2}", r"\boxed{2.0}"], r"\boxed{3}"),
    ],
)
def test_a_verifiers_normal_form(verifier: str, same: list[str], another: str) -> None:
    verify = make_verifier(verifier)
    normal = normal_answer_of(verify)
    assert normal is not None
    (form,) = {normal(text) for text in same}
    assert form and normal(another) not in (form, "")
    assert normal("I do not know") == ""
    for text in same:  # it serves as the reference of others
        assert float(verify(text, form)) >= 1.0
    assert float(verify(another, form)) < 1.0


def test_verifiers_that_name_no_answer_are_known() -> None:
    # the first needs its package, and none of the two names an answer
    others = VERIFIERS.keys() - {"reasoning_gym", "environment"}
    silent = {name for name in others if normal_answer_of(make_verifier(name)) is None}
    # of signs the reference is the problem, which many answers fit
    assert silent == {"format", "math_verify", "signs"}


def test_words_of_reflection_are_whole_and_counted_once() -> None:
    text = (
        "Wait, let me double-check. Hmm, what if we verify it another way? Alternatively: awaiting"
        " a checklist."
    )
    assert reflection_counts(text) == {"verification": 2, "backtracking": 2, "alternatives": 3}
    assert reflection_counts("Let’s try\u2019s WAIT wait.wait") == {
        "verification": 0,
        "backtracking": 3,
        "alternatives": 1,
    }
    # parts of other words
    assert set(reflection_counts("wait_ errors2 \u00e9error").values()) == {0}
    words = [word for words in BEHAVIOURS.values() for word in words]
    assert len(words) == len(set(words)) and all(word == word.lower() for word in words)
    for category, listed in BEHAVIOURS.items():
        for word in listed:
            assert reflection_counts(f"({word})") == {
                each: int(each == category) for each in BEHAVIOURS
            }


FOUR = [
    Answered(
        [response("3", True, "a b"), response("3", True, "a  b"), response("4"), response("")],
        [0, 0, 1, None],
    ),
    Answered([response("5", tokens=2, cut=True)] * 3 + [response("6", True, "wait")], [0, 0, 0, 1]),
    Answered([response("7", True, f"by {way}") for way in "wxyz"], [0] * 4),
]


def test_the_figures_of_three_problems() -> None:
    found = results_of(FOUR, [0, 1, 2], default_ks(4))
    value = {name: each["value"] for name, each in found["results"].items()}
    assert value == pytest.approx(
        {
            "avg@4": (0.5 + 0.25 + 1) / 3,
            "pass@1": (0.5 + 0.25 + 1) / 3,
            "pass@2": (5 / 6 + 3 / 6 + 1) / 3,
            "pass@4": 1.0,
            # of the six pairs of the first: right alone (3, 3), (3, -) x 2, tied (3, 4) x 2, wrong
            # (4, -)
            "maj@2": ((3 + 1) / 6 + (3 / 2) / 6 + 1) / 3,
            "maj@4": (1 + 0 + 1) / 3,
        }
    )
    assert all(each["low"] <= each["value"] <= each["high"] for each in found["results"].values())
    assert found["full_solve"] == pytest.approx(1 / 3)
    assert found["length_mean"] == pytest.approx((4 * 10 + 3 * 2 + 10 + 4 * 10) / 12)
    assert found["truncated"] == pytest.approx(3 / 12)
    assert found["distinct_answers"] == pytest.approx((2 + 2 + 1) / 3)
    # white space makes no other solution
    assert found["distinct_solutions"] == pytest.approx((1 + 1 + 4) / 3)
    assert found["reflection"] == {
        "verification": 0,
        "backtracking": pytest.approx(1 / 12),
        "alternatives": 0,
    }


def test_calls_of_tools_are_counted_where_there_are_any() -> None:
    called = [
        replace(response("3", True), calls=[{"failed": failed} for failed in each])
        for each in ((), (False, True), (False,), (False,))
    ]
    found = results_of([Answered(called, None)], [0], [1])
    assert (found["tool_calls"], found["tool_calls_failed"]) == (1.0, 0.25)
    assert problem_row(Answered(called[:2], None), [1])["tool_calls"] == 1.0
    record = {**found, "problems": 1, "decoding": {"samples": 4}, "failures": 0}
    assert "tool calls a response" in table({"own": record})
    assert evaluation_figures(found)["tool_calls_failed"] == 0.25
    assert not {"tool_calls", "tool_calls_failed"} & results_of(FOUR, [0, 1, 2], [1]).keys()


def test_a_file_without_calls_is_read() -> None:
    before = response("3", True).record()
    assert before.pop("calls") == () and Response.read(before) == response("3", True)


def test_without_answers_there_is_no_majority() -> None:
    silent = [Answered(each.responses, None) for each in FOUR]
    found = results_of(silent, [0, 1, 2], [1, 4])
    assert found["results"].keys() == {"avg@4", "pass@1", "pass@4"}
    assert found["distinct_answers"] is None
    assert "majority" not in problem_row(silent[0], [1, 4])


def test_the_row_of_a_problem() -> None:
    row = problem_row(FOUR[0], [1, 2, 4])
    assert (row["samples"], row["right"], row["majority"], row["distinct_answers"]) == (
        4,
        2,
        "3",
        2,
    )
    assert (row["pass@2"], row["maj@2"]) == pytest.approx((5 / 6, 4 / 6))
    assert problem_row(FOUR[1], [4])["majority"] == "5"
    unheard = Answered([response(None), response("")], [None, None])
    assert (problem_row(unheard, [2])["majority"], problem_row(unheard, [2])["failures"]) == (
        None,
        1,
    )


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (32, (1, 2, 4, 8, 16, 32))]
)
def test_the_ks_that_nobody_asked_for(samples: int, ks: tuple[int, ...]) -> None:
    assert default_ks(samples) == ks


def test_the_table_has_a_column_a_task() -> None:
    record = {"problems": 3, "failures": 1, "greedy": None, "decoding": {"samples": 4}}
    other = {**record, "failures": 0, "greedy": 0.5, "decoding": {"samples": 2}}
    lines = table(
        {
            "aime": record | results_of(FOUR, [0, 1, 2], [4]),
            "sums": (
                other | results_of([Answered(e.responses[:2], None) for e in FOUR], [0, 1, 2], [2])
            ),
        }
    ).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["aime", "sums"]
    low, high = (wilson_interval([0.5, 0.25, 1.0])[at] for at in (1, 2))
    shown = ["0.583", f"[{low:.3f},", f"{high:.3f}]", "-"]
    assert next(line for line in lines if line.startswith("avg@4")).split()[1:] == shown
    assert [line.split()[-1] for line in lines if line.startswith(("greedy", "maj@4"))] == [
        "-",
        "0.500",
    ]
    assert any(
        line.startswith("responses not verified") and line.split()[3:] == ["1", "-"]
        for line in lines
    )
