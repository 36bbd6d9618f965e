"""Defines verifiers and finds a verifier by its name in the configuration. The module runs in
reward workers, so it does not import torch.

A verifier is any function `(response text, reference answer) -> reward`. A verifier is allowed to
be slow, to hang or to raise an error, because `rewards/verifier_pool.py` runs every verifier in
separate processes with a time limit.

The verifier's module may also define a sequence `KNOWN_ANSWERS` and three functions:

- `KNOWN_ANSWERS` contains triples (response, answer, reward). Every worker first tests the verifier
  on the triples of `KNOWN_ANSWERS`. For each triple, the worker grades the response with the
  verifier and compares the result with the triple's reward.

- `self_test()` tests behaviour that `KNOWN_ANSWERS` cannot cover, and returns a list of faults.

- `answer_start(response)` returns the character index (int) at which the verifier finds the answer.
  `answer_start` returns -1 if the response has no answer in the right format.

- `normal_answer(response)` returns a normal form (str) of the response's answer, or "" if the
  response has no answer. Answers that differ only in notation have the same normal form. A normal
  form can serve as a reference answer. Majority votes compare normal forms (docs/evaluation.md).

The keyword-only parameters of a verifier are its settings, which the configuration sets, as in
`{name: my_pkg.verify, tolerance: 0.1}`. The run itself passes the parameters `columns` and
`responses` to the verifier, so these two parameters are not settings. If a verifier has a
keyword-only parameter `columns`, the verifier receives a dict with columns of the prompt's data
row. The setting `data.columns` selects the columns that the dict contains. If the first parameter
is called `responses`, the verifier is called with the list of all responses to a prompt and returns
a list of rewards.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_stare.errors import ConfigError
from megatron_stare.registry import Extension, resolve, settings_of

Verifier = Callable[..., Any]
AnswerStart = Callable[[str], int]
NormalAnswer = Callable[[str], str]
KnownAnswer = tuple[Any, ...]
"""A tuple (response, answer, reward) or (response, answer, reward, columns). For a verifier of
groups, response and reward are lists."""

VERIFIERS = {
    "arithmetic": "megatron_stare.rewards.arithmetic_verifier.verify",
    "choice": "megatron_stare.rewards.choice_verifier.verify",
    "dapo": "megatron_stare.rewards.dapo_verifier.verify",
    "dapo_boxed": "megatron_stare.rewards.dapo_boxed_verifier.verify",
    "environment": "megatron_stare.rewards.verifier.by_environment",
    "exact": "megatron_stare.rewards.exact_verifier.verify",
    "format": "megatron_stare.rewards.format_verifier.verify",
    "math": "megatron_stare.rewards.math_verifier.verify",
    "math_verify": "megatron_stare.rewards.math_verify_verifier.verify",
    "numeric": "megatron_stare.rewards.numeric_verifier.verify",
    "reasoning_gym": "megatron_stare.data.reasoning_gym.verify",
    "signs": "megatron_stare.rewards.signs_verifier.verify",
    "stare": "megatron_stare.rewards.stare_verifier.verify",
}

_WHERE = "reward.verifier"
_COLUMNS, _GROUP = "columns", "responses"  # parameters that the run sets
_TERM = re.compile(r"(?:([+-]?(?:\d+\.?\d*|\.\d+))\s+\*\s+)?(\S+)")


@dataclass(frozen=True)
class Asked:
    """Inputs that a verifier needs or accepts, in addition to response and answer.

    `groups`: True if the verifier receives all responses to a prompt at once.
    `columns`: True if the verifier accepts columns of the prompt's data row.
    `needs_columns`: True if the verifier cannot be called without columns.
    """

    groups: bool = False
    columns: bool = False
    needs_columns: bool = False


def by_environment(response: str, answer: str) -> float:
    """Placeholder for the verifier of a run whose environment gives the rewards. This function is
    never called."""
    raise AssertionError("the environment judges its responses")


class WeightedSum:
    """Verifier that adds up weighted rewards of other verifiers, such as 'math + 0.1 * format'.

    Args:
        terms: weights and verifiers. The sum takes `answer_start` from the first verifier that has
            an `answer_start`, and `normal_answer` from the first verifier that has a
            `normal_answer`.
    """

    def __init__(self, terms: Sequence[tuple[float, Verifier]]) -> None:
        self.terms = terms
        starts = [start for _, verify in terms if (start := answer_start_of(verify)) is not None]
        self.answer_start = starts[0] if starts else None
        answers = [
            normal for _, verify in terms if (normal := normal_answer_of(verify)) is not None
        ]
        self.normal_answer = answers[0] if answers else None

    def __call__(self, response: str, answer: str) -> float:
        return rewards_of(self, [response], answer)[0]


def asked_by(verify: Verifier) -> Asked:
    """Returns which inputs a verifier needs or accepts, according to the parameters of its
    function."""
    if isinstance(verify, WeightedSum):
        found = [asked_by(term) for _, term in verify.terms]
        return Asked(
            any(each.groups for each in found),
            any(each.columns for each in found),
            any(each.needs_columns for each in found),
        )
    try:
        parameters = inspect.signature(verify).parameters
    except (TypeError, ValueError):  # not written in Python: no signature
        return Asked()
    columns = parameters.get(_COLUMNS)
    columns = columns if columns and columns.kind is columns.KEYWORD_ONLY else None
    return Asked(
        groups=next(iter(parameters), "") == _GROUP,
        columns=columns is not None,
        needs_columns=columns is not None and columns.default is columns.empty,
    )


def rewards_of(
    verify: Verifier,
    responses: Sequence[str],
    answer: str,
    columns: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Calls a verifier on the responses to one prompt. Passes `columns` only to a verifier that
    accepts columns. A verifier of groups gets all responses in one call, and any other verifier is
    called once for each response.

    Returns:
        The reward of each response, as the verifier returned it.

    Raises:
        ValueError: a verifier of groups returned more or fewer rewards than there are responses.
    """
    if isinstance(verify, WeightedSum):
        parts = [
            [weight * float(each) for each in rewards_of(term, responses, answer, columns)]
            for weight, term in verify.terms
        ]
        return [sum(each) for each in zip(*parts, strict=True)]
    asked = asked_by(verify)
    given = {_COLUMNS: dict(columns or {})} if asked.columns else {}
    if not asked.groups:
        return [verify(response, answer, **given) for response in responses]
    found = list(verify(list(responses), answer, **given))
    if len(found) != len(responses):
        raise ValueError(f"{len(found)} rewards for {len(responses)} responses")
    return found


def make_verifier(verifier: Extension | str) -> Verifier:
    """Makes a verifier from its name and settings. If the verifier's module defines `KNOWN_ANSWERS`
    or `self_test`, tests the verifier with them.

    Args:
        verifier: one of VERIFIERS, the dotted path of a function, 'file.py:function', the URL of a
            server (see rewards/http_verifier.py), or a sum of these such as 'math + 0.1 * format',
            with spaces around + and *.

    Raises:
        ConfigError: the name or a setting is unknown, the module cannot be imported, the name does
            not refer to a function, or the verifier grades known answers wrong on this machine.
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
    """Returns the verifier's attribute `answer_start` or, if there is no such attribute, the
    function `answer_start` in the verifier's module. Returns None if the verifier has no
    `answer_start` function."""
    return getattr(verify, "answer_start", None) or getattr(_module(verify), "answer_start", None)


def normal_answer_of(verify: Verifier) -> NormalAnswer | None:
    """Returns the verifier's attribute `normal_answer` or, if there is no such attribute, the
    function `normal_answer` in the verifier's module. Returns None if the verifier has no
    `normal_answer` function."""
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
    settings = settings_of(verifier, function, _WHERE, given=(_COLUMNS,))
    verify = partial(function, **settings) if settings else function
    _check_signature(verify, name)
    module = _module(verify)
    # known answers hold for the default settings, if every setting has a default
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
    """Raises ConfigError if a function cannot be called with one response and an answer. This check
    rejects reward functions written for other trainers, because many of these functions take lists
    of completions."""
    if not _callable_with_two(verify):
        signature = inspect.signature(verify)
        raise ConfigError(
            f"{name!r} takes {signature}, but a verifier is called with one response and its"
            " answer",
            where=_WHERE,
            fix=(
                "define it as verify(response: str, answer: str) -> float; a keyword-only `columns`"
                " gets other columns of the data, a first parameter `responses` the whole group"
            ),
        )


def _callable_with_two(verify: Verifier) -> bool:
    """Returns True if the signature of a verifier allows a call with a response and an answer. The
    check does not call the verifier. If the verifier has a keyword-only parameter `columns`, the
    signature must allow a call with a response, an answer and `columns`. Returns False for a
    function with a parameter `completions`."""
    try:
        signature = inspect.signature(verify)
    except (TypeError, ValueError):  # not written in Python: no signature
        return True
    try:
        signature.bind("", "", **({_COLUMNS: {}} if asked_by(verify).columns else {}))
    except TypeError:
        return False
    return "completions" not in signature.parameters


def _faults(verify: Verifier, known: Sequence[KnownAnswer]) -> list[str]:
    """Returns one line of text for each known answer to which the verifier gives a wrong reward."""
    faults = []
    for response, answer, reward, *columns in known:
        several = not isinstance(response, str)
        try:
            found = rewards_of(verify, response if several else [response], answer, *columns)
            got: object = [float(each) for each in found] if several else float(found[0])
        except Exception as error:  # a user's function may raise anything
            got = f"{type(error).__name__}: {error}"
        if got != (list(reward) if several else reward):
            faults.append(f"{response!r} against {answer!r} earns {got}, expected {reward}")
    return faults


def _module(verify: Verifier) -> Any:
    verify = verify.func if isinstance(verify, partial) else verify  # a verifier with settings
    return sys.modules[verify.__module__]
