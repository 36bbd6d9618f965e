"""Saves and loads checkpoints of model, optimizer, schedule and random states, with
megatron.core.dist_checkpointing.

Each rank saves its tensors as parts of the whole model's tensors, so a checkpoint loads into any
parallel layout. Each rank has its own random states. If a resume changes the layout, the random
states restart from the run's seed. See docs/checkpoints.md for the settings that can change on a
resume. `load_start` fills a new policy from a Hugging Face folder, or from a checkpoint that was
converted from a Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import queue
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_stare.errors import DataError
from megatron_stare.megatron.backend.cpu_backend import backend, substituted
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.checkpoint.background_save import BackgroundSave
from megatron_stare.megatron.model.model import load_hf, named_parameters, unwrap
from megatron_stare.megatron.optimizer.optimizer import loss_scale_of
from megatron_stare.megatron.optimizer.optimizer_state import load_state, sharded_state
from megatron_stare.megatron.upstream import begin_save, load_common
from megatron_stare.megatron.upstream import load as load_tensors
from megatron_stare.models.shape import ModelShape
from megatron_stare.process.memory import SharedMappings
from megatron_stare.weights.files.hf_folder import HfFolder
from megatron_stare.weights.files.torch_dist import TorchDist, check_files, is_checkpoint


class Saver:
    """Saves checkpoints of one layout. Later saves reuse the information that the ranks exchanged
    for the first save.

    If several data-parallel ranks hold the same part of a tensor, only one of these ranks writes
    the part. The parts are distributed such that all data-parallel ranks write similar amounts of
    data.

    Args:
        writers: number of files per rank. A separate process writes each file.
    """

    def __init__(self, layout: Layout, writers: int) -> None:
        self._layout = layout
        whole = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=writers)
        self._strategy = FullyParallelSaveStrategyWrapper(
            whole, layout.dp_group, do_cache_distribution=True
        )
        self._first = True

    def begin(
        self,
        folder: str,
        model: list[nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        reference: Sequence[nn.Module] = (),
    ) -> BackgroundSave:
        """Begins to write the checkpoint into `folder`, which must exist and be empty. Training may
        change the state as soon as `begin` returns. After all ranks have finished the save, the
        caller renames the folder to its final name. All ranks must call `begin`.

        Args:
            reference: model chunks of a reference policy that the run refreshes. A fixed reference
                policy is not saved.
        """
        # Megatron passes its writers' reports through a separate process, which costs every rank
        # seconds and another import of torch. Here the process that gathers the reports reads them.
        reports = substituted(filesystem_async, "_results_queue", queue.SimpleQueue())
        with backend(), reports:
            state = _state(model, optimizer, scheduler, self._layout, reference, loading=False)
            apply_factories(state)
            dict_list_map_inplace(partial(_as_its_own, SharedMappings()), state)
            request = begin_save(state, folder, self._strategy, validate=self._first)
        self._first = False
        return BackgroundSave(request, folder)


def save(
    folder: str,
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    layout: Layout,
    reference: Sequence[nn.Module] = (),
) -> None:
    """Writes one checkpoint and waits until it is complete; see `Saver.begin`."""
    Saver(layout, writers=2).begin(folder, model, optimizer, scheduler, reference).finish()


def load(
    folder: str,
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    layout: Layout,
    reference: Sequence[nn.Module] = (),
) -> None:
    """Restores the state that `save` wrote. The current parallel layout may differ from the
    parallel layout at the time of the save.

    Raises:
        DataError: files are missing or truncated, or the checkpoint's tensors do not match this
            model and optimizer.
    """
    check_files(folder)
    with backend(), _explained(folder):
        common = load_common(folder)
        wanted = _state(model, optimizer, scheduler, layout, reference, loading=True)
        # older checkpoints do not record context parallelism
        if {"context": 1, **common.get("layout", {})} != _sizes(layout, model):
            del wanted["random"]
        # a part that several data-parallel ranks hold is read by one of them and sent to the others
        read_once = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(folder), layout.dp_group
        )
        state = load_tensors(wanted, folder, read_once)
        for i, chunk in enumerate(model):
            unwrap(chunk).load_state_dict(state[f"model{i}"])
        for i, chunk in enumerate(reference):
            unwrap(chunk).load_state_dict(state[f"reference{i}"])
        load_state(
            optimizer, _parameters_by_chunk(model), state["optimizer"], state["optimizer_step"]
        )
        scheduler.load_state_dict(state["scheduler"])
        if (scale := loss_scale_of(optimizer)) is not None:
            scale.load_state_dict(state["loss_scale"])
        if "random" in wanted:
            _set_random_states(state["random"])


def load_weights(folder: str | Path, model: Sequence[nn.Module]) -> None:
    """Fills a model's parameters from any distributed checkpoint that contains these parameters,
    e.g. a converted checkpoint.

    Raises:
        DataError: the checkpoint does not contain these parameters.
    """
    with backend(), _explained(str(folder)):
        wanted = {f"model{i}": _parameters(chunk) for i, chunk in enumerate(model)}
        _ask_for_saved_names(wanted, folder)
        state = load_tensors(wanted, str(folder))
        for i, chunk in enumerate(model):
            # strict=False, because only extra states are left out
            unwrap(chunk).load_state_dict(state[f"model{i}"], strict=False)


def _as_its_own(shared: SharedMappings, part: Any) -> Any:
    """Protects a checkpoint part in host memory against later changes, so that forked writers save
    the part's current values. Returns the part to save.

    Ordinary memory (neither shared nor pinned) is not copied here, because a fork copies ordinary
    memory on write. For a contiguous checkpoint part in ordinary memory, this function returns a
    tensor that uses the part's memory. The storage of this tensor has exactly the size of the part.
    If this function returned a view of a larger tensor, Megatron would copy the view. This function
    copies memory that the rank and its writers share, and also copies pinned memory, which CUDA
    maps. If shared memory and pinned memory were not copied, the writers could save values of the
    next step.
    """
    if not isinstance(part, ShardedTensor) or part.data.device.type != "cpu":
        return part
    data, storage = part.data.detach(), part.data.untyped_storage()
    if shared.overlap(storage.data_ptr(), storage.nbytes()) or data.is_pinned():
        return replace(part, data=data.clone())
    if data.is_contiguous():
        # memory wrapped by numpy could not be resized
        return replace(part, data=torch.from_dlpack(data))
    return part


def _parameters(chunk: nn.Module) -> dict[str, Any]:
    parts = unwrap(chunk).sharded_state_dict()
    return {name: part for name, part in parts.items() if not _EXTRA_STATE.search(name)}


# each numbered expert of a grouped GEMM has its own extra state
_EXTRA_STATE = re.compile(r"_extra_state\d*$")


# Pairs of names of the same norm. Before experts, Transformer Engine's layers save the norm under
# its own name. Local layers save it as if it were fused into the next linear layer, as it is in
# layers without experts. In latent attention the two are swapped.
_NORMS = (
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight"),
    ("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight"),
)


def _ask_for_saved_names(wanted: dict[str, Any], folder: str | Path) -> None:
    """Renames the norms in `wanted` if the checkpoint has other names for the same norms.

    Transformer Engine's layers and Megatron's local layers save some norms under different names.
    """
    saved = TorchDist(folder).sizes
    for part in nested_values(wanted):
        for mine, others in (*_NORMS, *(names[::-1] for names in _NORMS)):
            other = part.key.removesuffix(mine) + others if isinstance(part, ShardedTensor) else ""
            if other in saved and part.key.endswith(mine) and part.key not in saved:
                part.key = other


@contextlib.contextmanager
def _explained(folder: str) -> Iterator[None]:
    """Context manager that raises a DataError if Megatron or torch reports that the loaded
    checkpoint does not fit the model and optimizer."""
    try:
        yield
    except (CheckpointingException, CheckpointException, KeyError, ValueError) as error:
        if isinstance(error, CheckpointException):  # from several ranks
            error = next(failure for failure, _ in error.failures.values())
        first_line = (str(error).strip('"').splitlines() or [type(error).__name__])[0]
        reason = first_line.split(": [")[0]  # without the list of all names
        raise DataError(
            f"the checkpoint does not fit this model and optimizer: {reason}",
            where=folder,
            fix="the layout may change on a resume, the model and the kind of optimizer may not",
        ) from error


def _state(
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    layout: Layout,
    reference: Sequence[nn.Module],
    *,
    loading: bool,
) -> dict[str, Any]:
    parameters = _parameters_by_chunk(model)
    state: dict[str, Any] = dict(parameters)
    for i, chunk in enumerate(reference):
        weights = unwrap(chunk).sharded_state_dict()
        add_prefix_for_sharding(weights, "reference.")  # the policy's tensors have the same names
        state[f"reference{i}"] = weights
    state["optimizer"], step = sharded_state(optimizer, parameters, loading=loading)
    if (scale := loss_scale_of(optimizer)) is not None:
        for part in state["optimizer"]:
            # optimizers of a chain share one scaler, and their number depends on the layout
            part.pop("grad_scaler", None)
        state["loss_scale"] = scale.state_dict()
    state["scheduler"] = scheduler.state_dict()
    if not loading:
        state["optimizer_step"] = step
        state["layout"] = _sizes(layout, model)
    state["random"] = ShardedObject("random", _random_states(), (layout.world,), (layout.rank,))
    return state


def _parameters_by_chunk(model: Sequence[nn.Module]) -> dict[str, Any]:
    """Returns the sharded state of each model chunk separately. The states are not merged, because
    two chunks of a virtual pipeline use the same layer names."""
    return {f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(model)}


def _sizes(layout: Layout, model: Sequence[nn.Module]) -> dict[str, int]:
    """Returns the layout's sizes. A resume restores the random states only if the layout's sizes
    equal the sizes in the checkpoint."""
    return {
        "tensor": layout.tp,
        "pipeline": layout.pp,
        "virtual_pipeline": len(model),
        "context": layout.cp,
        "data": layout.dp,
        "expert": layout.ep,
    }


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
        states["tracker"] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    # a run that was saved on a CPU has none of a GPU: those of the start stay
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def load_start(model: list[nn.Module], path: str, shape: ModelShape, layout: Layout) -> None:
    """Fills every parameter from the folder at `path`, which is a Hugging Face folder or a
    checkpoint. Each rank reads only the parts that it holds.

    Raises:
        DataError: a tensor is missing, has the wrong shape, or is not finite in float16.
    """
    if is_checkpoint(Path(path)):
        load_weights(path, model)
    else:
        load_hf(model, HfFolder(path), shape, layout)
    for name, parameter in named_parameters(model):
        if parameter.dtype == torch.float16 and not bool(parameter.isfinite().all()):
            raise DataError(
                f"{name} is not finite in float16, whose largest number is 65,504",
                where=path,
                fix="train in bfloat16 or float32: model.dtype",
            )
