"""What a verifier is, and the one that a configuration names. Runs in reward workers, so torch stays out.

A verifier is any function `(response text, reference answer) -> reward`. It may be slow, hang or raise:
`rewards/verifier_pool.py` runs it in a process of its own and bounds it.

Its module may also have `self_test() -> list of faults`, run before anything else, and `answer_start(response) -> int`:
the character where the answer begins as the verifier's parser sees it, -1 where no answer stands in the right format.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import SupportsFloat

from megatron_stare.errors import ConfigError
from megatron_stare.registry import resolve

Verifier = Callable[[str, str], SupportsFloat]
AnswerStart = Callable[[str], int]

VERIFIERS = {
    "arithmetic": "megatron_stare.rewards.arithmetic_verifier.verify",
    "math": "megatron_stare.rewards.math_verifier.verify",
}


def make_verifier(name: str) -> Verifier:
    """The verifier called `name`, proven on answers whose verdict is known where its module has a `self_test`.

    Args:
        name: 'arithmetic', 'math', or the dotted path of a function.

    Raises:
        ConfigError: unknown name (with a suggestion), a module that does not import, not a function, or a verifier
            that gets known answers wrong here.
    """
    where = "reward.verifier"
    verify = resolve(name, VERIFIERS, where)
    if not callable(verify):
        raise ConfigError(f"{name!r} is not a function", where=where)
    self_test = getattr(sys.modules[verify.__module__], "self_test", None)
    if self_test is not None and (failures := self_test()):
        raise ConfigError(f"the verifier gets known answers wrong: {'; '.join(failures)}", where=where)
    return verify


def answer_start_of(verify: Verifier) -> AnswerStart | None:
    """What says where an answer begins, where the verifier's module has it."""
    return getattr(sys.modules[verify.__module__], "answer_start", None)
