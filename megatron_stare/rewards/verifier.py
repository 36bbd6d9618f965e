"""Definition and lookup of verifiers, which a configuration names. Runs in reward workers, so torch
stays out.

A verifier is any function `(response text, reference answer) -> reward`. It may be slow, hang or
raise: `rewards/verifier_pool.py` runs it in a process of its own and bounds it.

Its module may also have `KNOWN_ANSWERS`, triples (response, answer, reward) that every worker
grades before anything else, `self_test() -> list of faults`, for what triples cannot say, and
`answer_start(response) -> int`: the character where the answer begins as the verifier's parser sees
it, -1 where no answer stands in the right format. And `normal_answer(response) -> str`: the answer
in a normal form, which is the same for answers that differ in notation alone, and serves as a
reference; "" where there is none. Majorities are counted by it (docs/evaluation.md).

Keyword-only parameters of the function are its settings: `{name: my_pkg.verify, tolerance: 0.1}` in
YAML.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsFloat

from megatron_stare.errors import ConfigError
from megatron_stare.registry import Extension, resolve, settings_of

Verifier = Callable[[str, str], SupportsFloat]
AnswerStart = Callable[[str], int]
NormalAnswer = Callable[[str], str]
KnownAnswer = tuple[str, str, float]

VERIFIERS = {
    "arithmetic": "megatron_stare.rewards.arithmetic_verifier.verify",
    "choice": "megatron_stare.rewards.choice_verifier.verify",
    "dapo": "megatron_stare.rewards.dapo_verifier.verify",
    "dapo_boxed": "megatron_stare.rewards.dapo_boxed_verifier.verify",
    "exact": "megatron_stare.rewards.exact_verifier.verify",
    "format": "megatron_stare.rewards.format_verifier.verify",
    "math": "megatron_stare.rewards.math_verifier.verify",
    "math_verify": "megatron_stare.rewards.math_verify_verifier.verify",
    "numeric": "megatron_stare.rewards.numeric_verifier.verify",
    "signs": "megatron_stare.rewards.signs_verifier.verify",
    "stare": "megatron_stare.rewards.stare_verifier.verify",
}

_WHERE = "reward.verifier"
_TERM = re.compile(r"(?:([+-]?(?:\d+\.?\d*|\.\d+))\s+\*\s+)?(\S+)")


class WeightedSum:
    """A verifier whose reward is a sum of others' rewards, such as 'math + 0.1 * format'.

    Args:
        terms: weight and verifier; the first that says where an answer begins, or what it is, says
            it for all.
    """

    def __init__(self, terms: Sequence[tuple[float, Verifier]]) -> None:
        self._terms = terms
        starts = [start for _, verify in terms if (start := answer_start_of(verify)) is not None]
        self.answer_start = starts[0] if starts else None
        answers = [
            normal for _, verify in terms if (normal := normal_answer_of(verify)) is not None
        ]
        self.normal_answer = answers[0] if answers else None

    def __call__(self, response: str, answer: str) -> float:
        return sum(weight * float(verify(response, answer)) for weight, verify in self._terms)


def make_verifier(verifier: Extension | str) -> Verifier:
    """The verifier of a name, with its settings, proven on answers whose verdict is known where its
    module has any.

    Args:
        verifier: one of VERIFIERS, the dotted path of a function, 'file.py:function', the URL of a
            server (see rewards/http_verifier.py), or a sum 'math + 0.1 * format' of such, with
            spaces around its signs.

    Raises:
        ConfigError: unknown name or setting (with a suggestion), a module that does not import, not
            a function, or a verifier that gets known answers wrong here.
    """
    verifier = Extension.read(verifier)
    name = verifier.name
    parts = [_TERM.fullmatch(part.strip()) for part in re.split(r"\s\+\s", name)]
    if not all(parts):
        raise ConfigError(
            f"{name!r} is neither a verifier nor a sum of verifiers",
            where=_WHERE,
            fix="write it as in 'math + 0.1 * format'",
        )
    if verifier.settings and len(parts) > 1:
        raise ConfigError(
            f"settings belong to one verifier, but {name!r} is a sum",
            where=f"{_WHERE}.{next(iter(verifier.settings))}",
            fix="name a function of your own that adds them up",
        )
    terms = [
        (float(part[1] or 1), _proven(Extension(part[2], verifier.settings)))
        for part in parts
        if part
    ]
    return terms[0][1] if terms == [(1.0, terms[0][1])] else WeightedSum(terms)


def answer_start_of(verify: Verifier) -> AnswerStart | None:
    """Function of the verifier or its module that gives the position where an answer begins; None
    if neither has it."""
    return getattr(verify, "answer_start", None) or getattr(_module(verify), "answer_start", None)


def normal_answer_of(verify: Verifier) -> NormalAnswer | None:
    """Function of the verifier or its module that gives an answer's normal form; None if neither
    has it."""
    return getattr(verify, "normal_answer", None) or getattr(_module(verify), "normal_answer", None)


def _proven(verifier: Extension) -> Verifier:
    name = verifier.name
    if name.startswith(("http://", "https://")):
        from megatron_stare.rewards.http_verifier import HttpVerifier

        settings_of(verifier, HttpVerifier, _WHERE)
        return HttpVerifier(name)
    function = resolve(name, VERIFIERS, _WHERE)
    if not callable(function):
        raise ConfigError(f"{name!r} is not a function", where=_WHERE)
    settings = settings_of(verifier, function, _WHERE)
    verify = partial(function, **settings) if settings else function
    _check_signature(verify, name)
    module = _module(verify)
    # known answers are those of its defaults, where it has defaults for all settings
    faults = _faults(
        function if _callable_with_two(function) else verify, getattr(module, "KNOWN_ANSWERS", ())
    )
    if self_test := getattr(module, "self_test", None):
        faults += self_test()
    if faults:
        raise ConfigError(
            f"the verifier gets known answers wrong: {'; '.join(faults)}", where=_WHERE
        )
    return verify


def _check_signature(verify: Verifier, name: str) -> None:
    """Raises ConfigError for a function that cannot be called with a response and an answer, as
    rewards of other trainers cannot, which are given lists."""
    if not _callable_with_two(verify):
        signature = inspect.signature(verify)
        raise ConfigError(
            f"{name!r} takes {signature}, but a verifier is called with one response and its"
            " answer",
            where=_WHERE,
            fix=(
                "define it as verify(response: str, answer: str) -> float; other columns of the"
                " data are not passed to it"
            ),
        )


def _callable_with_two(verify: Verifier) -> bool:
    """Returns True if a function can be called with a response and an answer alone, and takes no
    `completions`."""
    try:
        signature = inspect.signature(verify)
    except (TypeError, ValueError):  # of a function that is not Python's
        return True
    try:
        signature.bind("", "")
    except TypeError:
        return False
    return "completions" not in signature.parameters


def _faults(verify: Verifier, known: Sequence[KnownAnswer]) -> list[str]:
    """One line for each known answer that comes out wrong."""
    faults = []
    for response, answer, reward in known:
        try:
            got: object = float(verify(response, answer))
        except Exception as error:  # whatever a user's function raises
            got = f"{type(error).__name__}: {error}"
        if got != reward:
            faults.append(f"{response!r} against {answer!r} earns {got}, expected {reward}")
    return faults


def _module(verify: Verifier) -> Any:
    verify = verify.func if isinstance(verify, partial) else verify  # one with settings
    return sys.modules[verify.__module__]
