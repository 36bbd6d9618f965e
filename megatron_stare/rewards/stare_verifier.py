r"""Implements the verifier of STARE: an answer is right if at least one of three methods accepts
it.

All three methods look for the answer in the same part of the response, called the answer region.
The verifier determines the answer region in two steps.

First, the verifier looks for a tag, to select a part of the response. It tries the tags in the
order <answer>, </thinking>, </think>, and uses the first tag that occurs anywhere in the response.
For the tag <answer>, the selected text is the text inside the last <answer>. For the tag
</thinking> or </think>, the selected text is the text after the last occurrence of the tag. If the
response contains none of the three tags, the selected text is the whole response.

Second, the verifier shortens the selected text. If the selected text contains a mark such as 'Final
Answer' or 'Conclusion', the answer region is the text after the mark's last occurrence. If the
selected text contains no mark, the verifier takes the last 10 paragraphs of the selected text as
one text. The answer region is then the last 300 characters of this one text.

The first method lets math-verify extract an answer from the answer region and compare this answer
with the reference. The second method lets math-verify extract an answer from the last box in the
answer region and compare this answer with the reference. The third method is
rewards/math_verifier.py, which compares the content of the answer region's last box with the
reference. In place of the third method, STARE's released code (hp-luo/STARE,
verl/utils/reward_score/math_stare.py, lines 32-82 and 212-230) uses mathruler. No box is required:
a bare number at the end of the response counts as an answer. Runs in reward workers.
"""

from __future__ import annotations

import logging

from math_verify import parse
from math_verify import verify as equal_math

from megatron_stare.rewards import math_verifier
from megatron_stare.rewards.final_answer import last_boxed

logging.getLogger("math_verify").setLevel(logging.ERROR)  # as in rewards/math_verifier.py

_SEEN, _PARAGRAPHS = 300, 10  # characters and paragraphs at the end that count if there is no mark
# marks of an answer, and the text to strip after a mark's last occurrence; the first mark found
# counts
_MARKS = (
    ("最终答案", "："),
    ("**答案**", "："),
    ("Final Answer", ":"),
    ("答案：", "："),
    ("**Answer**", ":"),
    ("Answer:", ":"),
    ("总结", "："),
    ("Conclusion", ":"),
)

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"So the total is \boxed{42}.", "42", 1.0),
    ("Adding up.\nAnswer: 42", "42", 1.0),
    ("<think>It is 41.</think>The answer is 42.", "42", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    ("<think>It is 42.</think>The answer is 41.", "42", 0.0),
    (r"<answer>\boxed{41}</answer>", "42", 0.0),
    ("I do not know.", "42", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if at least one of the three methods accepts the response's answer, else 0.0."""
    region = answer_region(response)
    boxed = last_boxed(region)
    if _read(region, answer):
        return 1.0
    return float(boxed is not None and (math_verifier.equal(answer, boxed) or _read(boxed, answer)))


def answer_region(response: str) -> str:
    """Returns the answer region: the part of a response in which all three methods look for the
    answer."""
    if "<answer>" in response:
        region = response.rpartition("<answer>")[2].partition("</answer>")[0]
    else:
        closed = next((tag for tag in ("</thinking>", "</think>") if tag in response), None)
        region = response.rpartition(closed)[2] if closed else response
    for mark, colon in _MARKS:
        if mark in region:
            return region.rpartition(mark)[2].replace(colon, "").replace("**", "").strip()
    return "\n\n".join(region.split("\n\n")[-_PARAGRAPHS:])[-_SEEN:].strip()


def normal_answer(response: str) -> str:
    """Applies math_verifier.normal_answer to the answer region (see `answer_region`). Returns "" if
    the region has no box."""
    return math_verifier.normal_answer(answer_region(response))


def _read(text: str, answer: str) -> bool:
    """Returns True if math-verify finds an answer in a text and this answer equals the
    reference."""
    found = parse(text, parsing_timeout=None)
    if len(found) < 2:  # success yields an expression and its text; fewer items mean failure
        return False
    if found[1] == answer:
        return True
    return bool(
        equal_math(parse(f"\\boxed{{{answer}}}", parsing_timeout=None), found, timeout_seconds=None)
    )
