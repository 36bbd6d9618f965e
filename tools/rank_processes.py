"""Processes of one machine that become the ranks of a layout."""

from __future__ import annotations

import multiprocessing
from multiprocessing.pool import Pool

import torch


def rank_processes(world: int) -> Pool:
    """`world` processes of one thread each, forked from one that has imported Megatron: to import
    it takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_stare.megatron.trainer", "transformers.models.auto"])
    return context.Pool(world, torch.set_num_threads, (1,))
