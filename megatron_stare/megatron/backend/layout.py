"""Joins the process group of all ranks and divides it into Megatron's parallel groups. Only this
module reads Megatron's global state."""

from __future__ import annotations

import datetime
import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch.distributed import ProcessGroup

from megatron_stare.config.schema import ParallelConfig
from megatron_stare.errors import UserError
from megatron_stare.megatron.backend.cpu_backend import backend, uses_cuda
from megatron_stare.process.network import reserved


@dataclass(frozen=True)
class Layout:
    """Place of this rank in the parallel layout, and the process groups of this rank."""

    rank: int
    world: int
    tp_rank: int
    tp: int
    pp_rank: int
    pp: int
    dp_rank: int
    dp: int
    cp_rank: int
    cp: int
    ep: int
    expert_dp_rank: int  # its index among the replicas of this rank's experts
    tp_group: ProcessGroup
    # ranks that hold different tokens of the batch: other sequences, or other chunks of them
    dp_group: ProcessGroup
    cp_group: ProcessGroup  # ranks that hold different chunks of the same sequences
    stage_group: ProcessGroup  # all ranks of this pipeline stage
    model_group: ProcessGroup  # ranks that together hold the whole model, this rank included

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def is_reporting_rank(self) -> bool:
        """True on the one rank that reports results. The reporting rank is in the last pipeline
        stage and is first in its tensor, data and context groups."""
        return self.last_stage and self.tp_rank == self.dp_rank == self.cp_rank == 0


def require_alone() -> None:
    """Raises UserError if this process belongs to a process group of torch.distributed already."""
    if dist.is_initialized():
        raise UserError(
            "this process belongs to a process group of torch.distributed already",
            where="runtime.runner",
            fix="leave it by torch.distributed.destroy_process_group(), or run in another process",
        )


def join(
    parallel: ParallelConfig, rank: int, init_method: str, seed: int, timeout_s: float
) -> Layout:
    """Initialises torch.distributed (NCCL with CUDA, otherwise gloo) and Megatron's groups. Before
    a process calls `join` again, the process must call `leave`.

    Args:
        init_method: rendezvous address of the ranks, 'tcp://host:port' or 'file:///path'.
        seed: seed of Megatron's random states.
        timeout_s: longest wait for a collective, seconds.

    Raises:
        UserError: this rank cannot reach the rendezvous.
    """
    cuda = torch.cuda.is_available()
    # Free an old model, which is a reference cycle: its process groups keep dozens of threads that
    # wake up constantly.
    gc.collect()
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store = _meeting_store(init_method, rank, parallel.world_size, limit)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=init_method if store is None else None,
            store=store,
            rank=rank,
            world_size=parallel.world_size,
            timeout=limit,
        )
    except dist.DistNetworkError as error:
        raise UserError(
            f"rank {rank} cannot meet the other ranks: {str(error).splitlines()[0]}",
            where=init_method,
            fix="the port is taken or unreachable; start again, and another port is chosen",
        ) from error
    layout = cut_world(parallel, rank, timeout_s)
    if cuda:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        torch.manual_seed(seed)
    return layout


def _meeting_store(
    init_method: str, rank: int, world: int, limit: datetime.timedelta
) -> dist.Store | None:
    """Creates the TCPStore through which the ranks find each other, if the address `init_method`
    starts with tcp://. Rank 0 serves the TCPStore on the port of this address. If rank 0 has
    reserved the port, the TCPStore takes over the reserved socket. Returns None for all other
    addresses, because torch then creates the store itself."""
    place = init_method.removeprefix("tcp://")
    if place == init_method:
        return None
    host, _, port = place.rpartition(":")
    held = reserved(place)  # on every rank, since each reserved a port, of which one is used
    return dist.TCPStore(
        host,
        int(port),
        world,
        is_master=rank == 0,
        timeout=limit,
        master_listen_fd=None if held is None else held.detach(),
    )


def cut_world(parallel: ParallelConfig, rank: int, timeout_s: float) -> Layout:
    """Divides all ranks of the run into Megatron's parallel groups, and returns the place of this
    rank in the layout. The process group of all ranks must already be initialised.

    Args:
        timeout_s: longest wait for a collective, seconds. Groups do not inherit the timeout of the
            whole process group.
    """
    with backend():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline
            if parallel.virtual_pipeline > 1
            else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            # experts stay whole: cutting them would need gathers of uneven sizes
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=timeout_s / 60,
        )
        if not uses_cuda():
            # without dropout nothing draws random numbers from the tracker; the CUDA tracker cannot
            # exist here
            tensor_parallel.random.initialize_rng_tracker(
                inference_rng_tracker=True, force_reset=True
            )
    # experts are spread over data-parallel ranks: then only the whole world holds the whole model
    model_group = (
        parallel_state.get_model_parallel_group() if parallel.expert == 1 else dist.group.WORLD
    )
    assert model_group is not None
    return Layout(
        rank=rank,
        world=parallel.world_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp=parallel.tensor,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp=parallel.pipeline,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp=parallel.context,
        ep=parallel.expert,
        expert_dp_rank=parallel_state.get_expert_data_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        cp_group=parallel_state.get_context_parallel_group(),
        stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        model_group=model_group,
    )


def leave() -> None:
    """Destroys all process groups, so that this process can join another layout."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    RotaryEmbedding.forward.cache_clear()  # its cache keeps models alive, and their groups
