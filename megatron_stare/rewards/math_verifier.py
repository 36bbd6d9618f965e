r"""The verifier of mathematical answers: the last box of a response against the reference, by math-verify.

Strict about where the answer stands (an answer outside a box earns nothing, so a policy cannot be paid for listing
guesses), lenient about how it is written (1/2, 0.5 and \frac{1}{2} are equal). What math-verify reads wrongly is
settled before it, see `rewards/answer_text.py`. Runs in reward workers; no torch.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from math_verify import LatexExtractionConfig
from math_verify import parse as parse_math
from math_verify import verify as equal_math

from megatron_stare.rewards import answer_text
from megatron_stare.rewards.boxes import last_box, last_boxed

# It warns once a process that its own time limit is off. Ours is outside: see rewards/verifier_pool.py.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)
_WITHOUT_UNITS = (
    replace(_EXTRACTION[0], normalization_config=replace(_EXTRACTION[0].normalization_config, units=False)),
)
_LONGEST = 1_000  # characters that are read as mathematics; the longest reference of MATH-500 has 159

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"So the total is \boxed{42}.", "42", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{\dfrac{\sqrt{8}}{2}}", r"\sqrt{2}", 1.0),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
    (r"\boxed{1,234}", "1234", 1.0),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
    (r"\boxed{\text{(B)}}", r"\text{(B)}", 1.0),
    (r"First \boxed{42}, no: \boxed{41}", "42", 0.0),
    (r"\boxed{41, 42}", "42", 0.0),
    (r"\boxed{(2, 1)}", "(1, 2)", 0.0),
    (r"\boxed{-42}", "42", 0.0),
    ("The answer is 42.", "42", 0.0),
    (r"\boxed{42", "42", 0.0),
    (r"\boxed{}", "42", 0.0),
)
"""(response, reference, reward) that every worker grades as it starts. math-verify turns its own failures (a parser of
another version, say) into "not equal", which would look like a policy that never learns."""


def verify(response: str, answer: str) -> float:
    r"""1.0 if the content of the last box of the response equals `answer`, else 0.0.

    There is no time limit in here: math-verify's own uses signal.alarm, which raises outside the main thread and then
    grades everything as wrong. The reward pool's wall-clock limit bounds the call.
    """
    given, wanted = last_boxed(response), last_boxed(answer) or answer
    return float(given is not None and equal(wanted, given))


def equal(wanted: str, given: str) -> bool:
    """Whether two answers mean the same, `wanted` being the reference, which says how an answer may be written."""
    if len(wanted) > _LONGEST or len(given) > _LONGEST:
        return wanted.strip() == given.strip()
    in_words = r"\text" in wanted
    wanted, given = answer_text.bare(wanted), answer_text.bare(given)
    if not given or not wanted:
        return False
    if answer_text.alike(wanted, given):  # also what math-verify cannot parse: names, choices
        return True
    if answer_text.must_be_written_alike(wanted, given) or answer_text.of_another_kind(wanted, given):
        return False
    if (named := answer_text.word(wanted)) is not None and len(named) > 1:
        if in_words or named == answer_text.word(given):  # else it may be a product: mgh
            return named == answer_text.word(given)
    elif answer_text.one_value(wanted) and answer_text.hedges(given):
        return False
    if "=" not in given:
        wanted = answer_text.without_name(wanted)
    if given.endswith("%") and not wanted.endswith("%") and equal(wanted, given.removesuffix("%").removesuffix("\\")):
        return True
    numbers = answer_text.number(wanted), answer_text.number(given)
    if numbers[0] is not None and numbers[1] is not None:
        return answer_text.same_number(numbers[0], numbers[1])
    given = answer_text.intervals(given) or given
    extraction = _WITHOUT_UNITS if answer_text.ends_in_a_name(wanted) else _EXTRACTION
    first, second = (
        parse_math(f"\\boxed{{{text}}}", extraction_config=extraction, parsing_timeout=None) for text in (wanted, given)
    )
    return equal_math(first, second, timeout_seconds=None, allow_set_relation_comp=True)


def normal_answer(response: str) -> str:
    """The content of the last box: of a number or a fraction of whole numbers its value, of words small letters, of all
    else what is written, without what only dresses it. "" if there is nothing in it."""
    given = last_boxed(response)
    if given is None:
        return ""
    if len(given) > _LONGEST:
        return given.strip()
    text = answer_text.bare(given)
    if (value := answer_text.exact_value(text)) is not None:
        return str(value)
    named = answer_text.word(text)
    return named if named and len(named) > 1 else answer_text.tidy(text)


def answer_start(response: str) -> int:
    r"""Where the last box begins, characters from the start; -1 if there is none with something in it."""
    box = last_box(response)
    if not box or not box.content:
        return -1
    return box.start if len(box.content) > _LONGEST or answer_text.bare(box.content) else -1
