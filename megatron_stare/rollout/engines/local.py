"""Implements an in-process engine: a transformers model on the CPU, by default in float32. The
engine is meant for models of a few million parameters. For larger models, use an engine with
servers, such as SGLang.

The engine reads the config files of the model's Hugging Face folder, but not the weight files. The
weights come from the weight sync. The driver sends requests and receives results through the
interface in engine.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatron_stare.errors import NonFiniteError
from megatron_stare.models import family_named
from megatron_stare.process.memory import keep_freed
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.decode import ATTENTION, Decoded, decode_batch
from megatron_stare.rollout.engines.engine import (
    Engine,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    WeightUpdateError,
    check_params,
    check_requests,
)
from megatron_stare.rollout.engines.model_folder import model_stop_token_ids, read_model_config
from megatron_stare.rollout.engines.state import EngineState, advance, require
from megatron_stare.weights.sync.stream import tensor_checksum


class LocalEngine(Engine):
    """Engine that decodes requests in batches with a key/value cache.

    Args:
        model_path: Hugging Face folder; its weight files are not read.
        max_batch: maximum number of responses decoded together.
        threads: number of torch's CPU threads in the whole process; None: unchanged.
        dtype: compute dtype.

    Raises:
        DataError: the folder has no usable config.
    """

    def __init__(
        self,
        model_path: str,
        max_batch: int = 256,
        threads: int | None = None,
        dtype: str = "float32",
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        if threads is not None:
            torch.set_num_threads(threads)
        keep_freed()
        config = read_model_config(model_path)
        self._vocab_size = int(config.vocab_size)
        self._context_length = int(config.max_position_embeddings)
        self._stop_token_ids = model_stop_token_ids(model_path)
        self._max_batch = max_batch
        # random initial weights must not move the trainer's generator
        with torch.random.fork_rng(devices=[]):
            self._model: nn.Module | None = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
            )
        self._model.eval().requires_grad_(False)
        family = family_named(config.model_type, model_path)
        # parameters under a checkpoint's names and in its shapes
        self._parameters: dict[str, Tensor] = {}
        # tied weights appear once, as the embedding
        for name, parameter in self._model.named_parameters():
            self._parameters |= family.checkpoint_views(name, parameter)
        # experts' biases are not parameters, but checkpoints contain them
        self._parameters |= {
            name: buffer for name, buffer in self._model.named_buffers() if family.float32(name)
        }
        self._state = EngineState.DIRTY
        self._version: int | None = None
        self._ledger: WeightLedger | None = None
        self._prove = True  # setting of the open update
        self._waiting: deque[tuple[GenerateRequest, SamplingParams]] = deque()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        require(self._state, EngineState.HEALTHY, "generate")
        check_params(params)
        check_requests(requests, params, self.model_info())
        self._waiting.extend((request, params) for request in requests)

    def collect(self, wait_s: float) -> list[GenerateResult]:
        """Decodes up to `max_batch` of the waiting requests, oldest first; see Engine.

        Raises NonFiniteError if the logits are not finite.
        """
        if not self._waiting:
            return []
        requests: list[GenerateRequest] = []
        params = self._waiting[0][1]
        # other sampling parameters need another batch
        while self._waiting and len(requests) < self._max_batch and self._waiting[0][1] == params:
            requests.append(self._waiting.popleft()[0])
        # equal prompts become neighbours; a batch runs each distinct prompt once
        requests.sort(key=lambda request: (len(request.input_ids), request.input_ids))
        with torch.inference_mode():
            decoded = decode_batch(self._model, requests, params)
        self._check_finite(requests, decoded)
        return [
            self._result(request, each) for request, each in zip(requests, decoded, strict=True)
        ]

    def abort(self) -> None:
        self._waiting.clear()

    def begin_weight_update(self, version: int, prove: bool = True) -> None:
        self._state = advance(self._state, EngineState.UPDATING)
        self._prove = prove
        self._version = None
        self._ledger = WeightLedger(
            version, {name: p.shape for name, p in self._parameters.items()}
        )

    def update_weights(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        ledger = self._open_session("update weights")
        try:
            for name, tensor in named_tensors:
                ledger.receive(name, tensor)
                self._parameters[name].copy_(tensor)
        except Exception:
            self._fail()
            raise

    def end_weight_update(self) -> dict[str, str]:
        ledger = self._open_session("end the weight update")
        try:
            ledger.require_complete()
            checksums = {
                name: self._checksum(name, dtype) for name, dtype in ledger.received.items()
            }
        except Exception:
            self._fail()
            raise
        self._state = advance(
            self._state, EngineState.HEALTHY if self._prove else EngineState.UNPROVED
        )
        self._version, self._ledger = ledger.version, None
        return checksums

    def _checksum(self, name: str, dtype: torch.dtype) -> str:
        return tensor_checksum(self._parameters[name].to(dtype)) if self._prove else ""

    def model_info(self) -> ModelInfo:
        return ModelInfo(
            self._version, self._state, self._vocab_size, self._context_length, self._stop_token_ids
        )

    def close(self) -> None:
        if self._state is not EngineState.DEAD:
            self._state = advance(self._state, EngineState.DEAD)
        self._version = self._ledger = self._model = None
        self._parameters = {}

    def _open_session(self, action: str) -> WeightLedger:
        require(self._state, EngineState.UPDATING, action)
        assert self._ledger is not None
        return self._ledger

    def _fail(self) -> None:
        self._state, self._ledger = advance(self._state, EngineState.DIRTY), None

    def _check_finite(
        self, requests: Sequence[GenerateRequest], decoded: Sequence[Decoded]
    ) -> None:
        """Raises NonFiniteError if a log-prob is not finite. The error names the first request that
        has a non-finite log-prob."""
        # one check for all responses
        if bool(torch.cat([each.log_probs for each in decoded]).isfinite().all()):
            return
        broken = (
            request
            for request, each in zip(requests, decoded, strict=True)
            if not each.log_probs.isfinite().all()
        )
        raise NonFiniteError(
            f"the model's logits are not finite (weights of version {self._version})",
            where=f"request {next(broken).rid}",
            fix="look at the gradient norm and learning rate of the last steps",
        )

    def _result(self, request: GenerateRequest, decoded: Decoded) -> GenerateResult:
        assert self._version is not None
        return GenerateResult(
            rid=request.rid,
            output_ids=decoded.ids,
            output_log_probs=decoded.log_probs,
            versions=((self._version, decoded.ids.numel()),) if decoded.ids.numel() else (),
            finish_reason=decoded.finish_reason,
            prompt_tokens=len(request.input_ids),
        )


class WeightLedger:
    """Records which parameters one weight update has delivered. Checks that every parameter in
    `expected` arrives exactly once and in the right shape. `expected` maps parameter names to
    shapes.

    An SGLang server reports success even if an update contains an unknown parameter name.
    LocalEngine uses this class to check that an update contains every parameter and no unknown
    name.
    """

    def __init__(self, version: int, expected: Mapping[str, torch.Size]) -> None:
        self.version = version
        self.received: dict[str, torch.dtype] = {}  # name to the dtype it was sent in
        self._expected = expected

    def receive(self, name: str, tensor: Tensor) -> None:
        """Records one parameter.

        Raises:
            WeightUpdateError: the name is unknown or repeated, or the shape is wrong.
        """
        if name not in self._expected:
            hint = (
                " (the embeddings are tied, so it is not sent)" if name == "lm_head.weight" else ""
            )
            raise WeightUpdateError(f"the model has no parameter {name!r}{hint}")
        if name in self.received:
            raise WeightUpdateError(f"parameter {name!r} was sent twice in one update")
        if tensor.shape != self._expected[name]:
            raise WeightUpdateError(
                f"parameter {name!r} was sent as {list(tensor.shape)}, the model has"
                f" {list(self._expected[name])}"
            )
        self.received[name] = tensor.dtype

    def require_complete(self) -> None:
        """Raises WeightUpdateError if a parameter is missing."""
        missing = [name for name in self._expected if name not in self.received]
        if missing:
            raise WeightUpdateError(
                f"{len(missing)} of {len(self._expected)} parameters were not sent in the update to"
                f" version {self.version}: {_some(missing)}"
            )


def _some(names: Iterable[str], shown: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest
