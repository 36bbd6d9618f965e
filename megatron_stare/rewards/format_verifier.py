r"""Grades only the form of a response, not whether its answer is right. If the response contains
<think> or </think>, the final answer must come after </think>.

Use this verifier as one term of a weighted sum of verifiers, such as `math + 0.1 * format`. Runs in
reward workers and does not import torch.
"""

from __future__ import annotations

from megatron_stare.rewards.final_answer import final_answer, final_answer_start

_OPEN, _CLOSE = "<think>", "</think>"

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"\boxed{1}", "2", 1.0),
    (r"<think>hm</think> \boxed{1}", "2", 1.0),
    (r"hm</think> \boxed{1}", "2", 1.0),
    (r"<think>hm \boxed{1}", "1", 0.0),
    (r"<think>\boxed{1}</think> so it is", "1", 0.0),
    (r"<think>a</think><think>b</think>\boxed{1}", "1", 0.0),
    (r"\boxed{}", "1", 0.0),
    ("The answer is 1.", "1", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if the final answer follows </think>, is not empty, and has the closing brace of
    its box or the closing tag </answer>. Otherwise returns 0.0. A response without <think> and
    </think> can also get 1.0.

    A response is allowed to contain </think> without <think>, because some chat templates put
    <think> into the prompt.
    """
    opened, closed = response.count(_OPEN), response.count(_CLOSE)
    if closed > 1 or opened > closed or (opened and response.index(_OPEN) > response.index(_CLOSE)):
        return 0.0
    behind = response.rpartition(_CLOSE)[2]
    given = final_answer(behind)
    return float(given is not None and bool(given.strip()))


answer_start = final_answer_start
