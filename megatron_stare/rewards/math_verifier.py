r"""The verifier of mathematical answers: the last \boxed{...} of a response against the reference, by math-verify.

Strict about where the answer stands (an answer outside a box earns nothing, so a policy cannot be paid for listing
guesses), lenient about how it is written (1/2, 0.5 and \frac{1}{2} are equal). Runs in reward workers; no torch.
"""

from __future__ import annotations

import logging
import re

from math_verify import LatexExtractionConfig
from math_verify import parse as parse_math
from math_verify import verify as equal_math

# It warns once a process that its own time limit is off. Ours is outside: see rewards/verifier_pool.py.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BOX = re.compile(r"\\boxed\s*\{")
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)

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
"""(response, reference, reward) that `self_test` grades."""


def verify(response: str, answer: str) -> float:
    r"""1.0 if the content of the last \boxed{...} of the response equals `answer`, else 0.0.

    There is no time limit in here: math-verify's own uses signal.alarm, which raises outside the main thread and then
    grades everything as wrong. The reward pool's wall-clock limit bounds the call.
    """
    given, wanted = last_boxed(response), last_boxed(answer) or answer
    if given is None:
        return 0.0
    given, wanted = _bare(given), _bare(wanted)
    if not given:
        return 0.0
    if given == wanted:  # also what math-verify cannot parse: names, choices
        return 1.0
    return float(equal_math(_parsed(wanted), _parsed(given), timeout_seconds=None))


def answer_start(response: str) -> int:
    r"""Where the last \boxed{...} begins, characters from the start; -1 if there is none with something in it."""
    box, content = _last_box(response), last_boxed(response)
    return box.start() if box and content and _bare(content) else -1


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}; None if there is none, or if its braces do not close (a cut-off answer)."""
    box = _last_box(text)
    if box is None:
        return None
    start = at = box.end()
    depth = 1
    while at < len(text):
        if text[at] == "\\":
            at += 1  # \{ and \} are printed braces and need not balance
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start:at]
        at += 1
    return None


def _last_box(text: str) -> re.Match[str] | None:
    boxes = list(_BOX.finditer(text))
    return boxes[-1] if boxes else None


def self_test() -> list[str]:
    """Grades `KNOWN_ANSWERS`; one line for each that comes out wrong, so an empty list is a pass.

    math-verify turns its own failures (a parser of another version, say) into "not equal", which would look like a
    policy that never learns.
    """
    return [
        f"{response!r} against {answer!r} earns {got}, expected {reward}"
        for response, answer, reward in KNOWN_ANSWERS
        if (got := verify(response, answer)) != reward
    ]


def _bare(text: str) -> str:
    """Without the dollars of inline mathematics, whose delimiters would end the box early in math-verify's eyes."""
    return text.replace(r"\$", "").replace("$", "").strip()


def _parsed(text: str) -> list[object]:
    return parse_math(f"\\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None)
