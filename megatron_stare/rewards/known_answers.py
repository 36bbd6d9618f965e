"""Tests the verifier of a run before the first step. The user writes a file of answers, with the
reward that each answer deserves. A pool of verifier processes grades the answers in the file. If a
reward from the pool differs from the reward in the file, an error ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.registry import Extension
from megatron_stare.rewards.verifier_pool import VerifierPool

_WHERE = "reward.known_answers"
_SHOWN = 5  # maximum number of faults in an error message


def read_known_answers(path: str | Path) -> list[tuple[str, str, float]]:
    """Reads triples (response, answer, reward) from a file of JSON lines {"response": ...,
    "answer": ..., "reward": ...}.

    Raises:
        ConfigError: the file cannot be read, is empty, or has an invalid line. The error names an
            invalid line as file:line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r} ({error.strerror})", where=_WHERE) from error
    known = [
        _known(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not known:
        raise ConfigError(f"{str(path)!r} has no answers", where=_WHERE)
    return known


def open_pool(verifier: Extension | str, config: Config, workers: int) -> VerifierPool:
    """Starts a pool of verifier processes. Each process first tests the verifier on the list
    `KNOWN_ANSWERS` in the verifier's module. The user can write a file of known answers and name
    the file in the setting `reward.known_answers`. If `verifier` equals the setting
    `reward.verifier`, the pool also tests the verifier on the known answers in this file.

    Raises:
        ConfigError: `VerifierPool` or `prove` raises ConfigError, or the run cannot provide the
            verifier's inputs. No process is left running after an error.
    """
    verifier, reward = Extension.read(verifier), config.reward
    pool = VerifierPool(verifier, workers, reward.timeout_s)
    try:
        _check_given(pool, verifier, config)
        if reward.known_answers is not None and verifier == reward.verifier:
            prove(pool, reward.known_answers)
    except BaseException:
        pool.close()
        raise
    return pool


def _check_given(pool: VerifierPool, verifier: Extension, config: Config) -> None:
    """Raises ConfigError if the verifier requires columns of the data, but the setting
    `data.columns` names no columns. If the run sets neither `data.path` nor `data.mixture`, the
    setting `data.columns` is not checked. Also raises ConfigError if the run's `reward.verifier`
    needs complete prompt groups, but the run uses partial rollouts. Verifiers other than
    `reward.verifier` are allowed to need complete prompt groups."""
    data = config.data
    if pool.needs_columns and (data.path or data.mixture) and not data.columns:
        raise ConfigError(
            f"the verifier {verifier.name!r} reads `columns` of the data, and data.columns names"
            " none",
            where="data.columns",
            fix="name those it reads, or set data.columns=all",
        )
    if pool.judges_groups and verifier == config.reward.verifier and config.partial.tokens:
        raise ConfigError(
            f"the verifier {verifier.name!r} judges the responses of a prompt together, and"
            " partial rollouts finish them in different steps",
            where="partial.tokens",
            fix="set partial.tokens=null, or a verifier of single responses",
        )


def prove(pool: VerifierPool, path: str | Path) -> None:
    """Checks that a pool gives the expected reward to every known answer in a file. The pool's time
    limit applies to each answer.

    Raises:
        ConfigError: `read_known_answers` raises ConfigError, or the verifier gives no reward for an
            answer, or a reward differs from the reward in the file.
    """
    known = read_known_answers(path)
    verdicts = pool.verify([(response, answer) for response, answer, _ in known])
    faults = [
        f"{response[-80:]!r} against {answer[:80]!r} "
        + (
            f"earns {verdict.reward}"
            if verdict.status == "ok"
            else f"gives {verdict.status} {verdict.detail}".rstrip()
        )
        + f", expected {reward}"
        for (response, answer, reward), verdict in zip(known, verdicts, strict=True)
        if verdict.reward != reward
    ]
    if faults:
        raise ConfigError(
            f"the verifier gets {len(faults)} of {len(known)} known answers wrong:"
            f" {'; '.join(faults[:_SHOWN])}",
            where=_WHERE,
            fix="mend the verifier, or the file",
        )


def _known(line: bytes, where: str) -> tuple[str, str, float]:
    try:
        fields: Any = json.loads(line.decode())
        return str(fields["response"]), str(fields["answer"]), float(fields["reward"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            'expected {"response": text, "answer": text, "reward": number}',
            where=f"{_WHERE}, {where}",
        ) from error
