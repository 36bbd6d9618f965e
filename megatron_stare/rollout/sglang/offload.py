"""Memory that SGLang servers give back while the trainer computes on the same device.

A server that was started with --enable-memory-saver (CUDA only) lets go of weights and key/value cache; any other, a
CPU server among them, accepts the calls and keeps everything. Both drop the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_stare.rollout.sglang.client import SGLangClient, everywhere


async def release(clients: Sequence[SGLangClient]) -> None:
    """Waits until every server is idle, paused, and has let go of weights and cache.

    A server with a request under way would die of it, so they are paused first and asked whether they are idle.
    """
    await everywhere(*(client.pause("abort") for client in clients))
    await everywhere(*(client.flush() for client in clients))
    await everywhere(*(client.release_memory() for client in clients))


async def resume(clients: Sequence[SGLangClient]) -> None:
    """Waits until every server has its memory again, whose contents are undefined; they stay paused."""
    await everywhere(*(client.resume_memory() for client in clients))
