"""Defines errors that the user can fix. `cli.py` prints a UserError without a traceback and exits
with the error's exit code."""

from __future__ import annotations

import contextlib
import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class UserError(Exception):
    """Error that the user can fix.

    `exit_code`: exit code of a command that fails with this error. The exit code is 75 if the
        machines caused the error and the run can be resumed. For any other UserError, the exit code
        is 2.

    Args:
        what: the fault, in one sentence.
        where: file, line or configuration key of the fault.
        fix: suggested remedy.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        # positional args only, so that the error survives pickling
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __reduce__(self):
        return (_rebuild, (type(self), self.what, self.where, self.fix))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  fix: {self.fix}" if self.fix else text


def _rebuild(cls: type[UserError], what: str, where: str | None, fix: str | None) -> UserError:
    return cls(what, where=where, fix=fix)


class ConfigError(UserError):
    """Raised if the configuration contains an invalid or unsupported value."""


class DataError(UserError):
    """Raised if a prompt, model or checkpoint file is missing or malformed."""


class UnusableCheckpointError(DataError):
    """Raised if a checkpoint is unusable, but an earlier checkpoint of the run is usable."""

    def __init__(self, error: DataError, run_dir: Path, older: int) -> None:
        """Names the step of the earlier checkpoint in the error message.

        Args:
            older: step of the earlier checkpoint.
        """
        super().__init__(
            error.what,
            where=error.where,
            fix=(
                f"put it back as it was written, or continue from the checkpoint of step {older}:"
                f" --from-step {older}"
            ),
        )
        self.run_dir, self.older = run_dir, older


class WeightVersionError(UserError):
    """Raised if a token was sampled with weights of an unexpected version."""


class RewardFailureError(UserError):
    """Raised if too many answers could not be verified."""


class NonFiniteError(UserError):
    """Raised if the loss or gradient of several consecutive updates is not finite, or if an engine
    computes log-probs that are not finite."""


class GuardError(UserError):
    """Raised if a guard stops the run because a metric of a step is out of bounds."""


class RollBack(Exception):
    """Raised if a run must be rolled back to its newest checkpoint, and must leave out some prompts
    afterwards.

    Args:
        step: step that caused the rollback.
        why: the measured reason.
        prompts: cursors of the prompts to leave out.
    """

    def __init__(self, step: int, why: str, prompts: Sequence[int]) -> None:
        super().__init__(step, why, prompts)
        self.step, self.why, self.prompts = step, why, tuple(prompts)

    def __str__(self) -> str:
        return f"step {self.step}: {self.why}"


def unknown_name(key: str, known: Iterable[str], where: str) -> ConfigError:
    """Returns the ConfigError for a name that is not in `known`. The error suggests the known name
    that is most similar, or lists all known names."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
    return ConfigError(f"unknown name {key!r}", where=where, fix=fix)


@contextlib.contextmanager
def exits_refused(where: str | None = None) -> Iterator[None]:
    """Raises UserError if code in this context calls sys.exit. Without this error, a call of
    sys.exit(0) in the user's code would end the run with exit code 0, as if the run had finished.

    Args:
        where: configuration key that the error message names.
    """
    try:
        yield
    except SystemExit as error:
        raise UserError(
            f"sys.exit({error.code!r}) was called {users_line(error)}".rstrip(),
            where=where,
            fix="raise an error there instead",
        ) from error


def users_line(error: BaseException) -> str:
    """Returns a text '(file:line, in function)' that names the line of the user's code that led to
    an error. Returns '' if the traceback contains only code of this project.

    The text names the line of the innermost frame outside this project and outside installed
    libraries. For example, suppose that the user's code calls the library json, and that json
    raises an error. The text then gives the line of the user's code that calls json, not the line
    of json that raises the error. A verifier can itself be part of an installed library, so that
    the traceback contains no frame of user code. The text then names the line of the outermost
    frame outside this project.
    """
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)
    ]
    if not frames:
        return ""
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen"))]
    frame = own[-1] if own else frames[0]
    return f"({frame.filename}:{frame.lineno}, in {frame.name})"


_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "list": "a list, such as [{0}] or [a, b]",
    "dict": "a section of settings",
    "model": "a section of settings",
}
_BOUNDS = {
    "greater_than": ("must be above", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be below", "lt"),
    "less_than_equal": ("must be at most", "le"),
}


def in_words(error: Mapping[str, Any]) -> str:
    """Returns a readable message for an error that pydantic reports about a value. For a kind of
    error that `in_words` does not know, the message is the text that pydantic wrote."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]:g}"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    stem = kind.removesuffix("_from_float").removesuffix("_parsing").removesuffix("_type")
    if stem in _KINDS and kind != stem:
        return f"must be {_KINDS[stem].format(error['input'])}"
    return str(error["msg"]).removeprefix("Value error, ")
