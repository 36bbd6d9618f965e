"""Through whose hands a request and a weight go, by a trace of a run: few, and each for a
reason."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
import torch
from support.runs import INLINE, ROOT, SMALL, model

from megatron_stare.config.load import load_config
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.train import train

PACKAGE = "megatron_stare"
ON_THE_WAY = tuple(
    f"{PACKAGE}.{folder}"
    for folder in ("cluster", "megatron.export", "process", "rollout", "weights")
)
CALLERS = {"InlineWorkers", "EngineWorker"}  # carry any call, whatever it is about


def held(values: Iterable[Any], kind: type, depth: int = 2) -> bool:
    """Finds a value of the kind among these values and in lists of them."""
    for value in values:
        if isinstance(value, kind):
            return True
        if depth and isinstance(value, list | tuple) and held(value[:3], kind, depth - 1):
            return True
    return False


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> dict[type, set[str]]:
    """Names of the classes whose methods are given a request, or a tensor during a weight sync, or
    give one, in a run of one step."""
    seen: dict[type, set[str]] = {GenerateRequest: set(), torch.Tensor: set()}
    syncing: list[FrameType] = []

    def note(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or f"/{PACKAGE}/" not in code.co_filename:
            return
        if code is EnginePool.update_weights.__code__:
            syncing.append(frame) if event == "call" else syncing.clear()
        values = dict(frame.f_locals)
        owner = type(values.pop("self", None))
        if not owner.__module__.startswith(ON_THE_WAY):
            return
        # and the rest of the positionals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 1]
        passed = [values[name] for name in names if name in values] if event == "call" else [result]
        if held(passed, GenerateRequest):
            seen[GenerateRequest].add(owner.__name__)
        if syncing and held(passed, torch.Tensor):
            seen[torch.Tensor].add(owner.__name__)

    folder = tmp_path_factory.mktemp("trace") / "run"
    settings = {**SMALL, **INLINE, "run.steps": 1, "eval.prompts": 0, "run.dir": folder}
    words = [model(), *(f"{key}={value}" for key, value in settings.items())]
    config = load_config(ROOT / "configs/quickstart.yaml", words)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        train(config)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


def test_a_weight_passes_four_nouns(hands: dict[type, set[str]]) -> None:
    """A rank's stream, a bucket (its layout names the tensors), the stream of all ranks, the fleet;
    then an engine has it, whose ledger counts it."""
    passed = hands[torch.Tensor] - CALLERS - {"BucketLayout", "LocalEngine", "WeightLedger"}
    assert passed == {"PolicyStream", "Bucket", "TrainerWeights", "Fleet"}


def test_a_request_to_an_engine_passes_at_most_eight_objects(hands: dict[type, set[str]]) -> None:
    assert {"Serving", "Dispatch", "EngineWorker", "LocalEngine"} <= hands[GenerateRequest]
    assert len(hands[GenerateRequest] | CALLERS) <= 8
