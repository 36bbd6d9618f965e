"""Workers on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron_stare.process.workers import Handle, Workers


class Threads(Workers):
    """Workers that take one call at a time each, beside each other, as Ray's actors do."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = [(worker, ThreadPoolExecutor(1)) for worker in workers]

    def __len__(self) -> int:
        return len(self._workers)

    def start_on(self, worker: int, method: str, *args: Any) -> Future[Any]:
        target, thread = self._workers[worker]
        taken = [arg.result() if isinstance(arg, Future) else arg for arg in args]
        return thread.submit(getattr(target, method), *taken)

    def wait(
        self,
        handles: Sequence[Handle],
        on_done: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        return [handle.result() if isinstance(handle, Future) else handle for handle in handles]

    async def result(self, handle: Handle) -> Any:
        return await asyncio.wrap_future(handle)

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        for worker, thread in self._workers:
            thread.submit(worker.close).result()
            thread.shutdown()
