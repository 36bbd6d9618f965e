"""One interface for workers of every kind. Runners (cluster/) implement the `Workers` interface.
The trainer's group and the engines' pool use the interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from megatron_stare.errors import UserError

# A running call, or its result: an ObjectRef with Ray, the value itself inline. As an argument of
# another call it passes between workers without the driver.
Handle = Any


class WorkerLostError(UserError):
    """A worker process died or did not answer in time."""


class WorkerSilentError(WorkerLostError):
    """A worker did not answer in time."""


class Workers(ABC):
    """A fixed number of equal workers."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def start_on(self, worker: int, method: str, *args: Any) -> Handle:
        """Starts a call on one worker; returns at once if the workers are processes."""

    @abstractmethod
    def wait(
        self,
        handles: Sequence[Handle],
        on_done: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Returns the results in order, or raises a worker's error.

        Calls `on_done` with a handle's number when that handle finishes. `timeout_s`, seconds,
        replaces the longest wait for one call.
        """

    @abstractmethod
    async def result(self, handle: Handle) -> Any:
        """Async `wait` for one handle; does not block the event loop if workers are processes.

        Returns the result, or raises the worker's own error. Raises WorkerLostError if the worker
        died or the call exceeded the time limit of one call.
        """

    @abstractmethod
    def share(self, value: Any) -> Handle:
        """Stores a value once, where every worker can fetch it."""

    def replace(self, worker: int) -> None:
        """Ends one worker, whatever its state, and recreates the worker in the same place. Returns
        when the new worker is ready.

        May be called from any thread, while nobody else calls this worker. Raises UserError if the
        worker cannot be created.
        """
        raise WorkerLostError(f"{type(self).__name__} cannot make a worker anew")

    @abstractmethod
    def close(self) -> None:
        """Ends the workers, which clean up first if they can. Closing twice is allowed."""

    def start(self, method: str, *args: Any) -> list[Handle]:
        """Starts a call on every worker."""
        return [self.start_on(worker, method, *args) for worker in range(len(self))]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Returns every worker's result."""
        return self.wait(self.start(method, *args))
