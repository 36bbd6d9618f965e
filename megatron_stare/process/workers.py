"""Defines one interface for all kinds of workers. Runners (cluster/) implement the interface
`Workers`. The trainer's group and the engines' pool call the workers through this interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from megatron_stare.errors import UserError

# A running call, or its result: an ObjectRef with Ray, the value itself inline. As an argument of
# another call it passes between workers without the driver.
Handle = Any


class WorkerLostError(UserError):
    """Raised if a worker process died or did not answer in time."""


class WorkerSilentError(WorkerLostError):
    """Raised if a worker did not answer in time."""


class Workers(ABC):
    """A fixed number of workers of the same kind."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def start_on(self, worker: int, method: str, *args: Any) -> Handle:
        """Starts a call of the method `method` on the worker with index `worker`, and returns a
        handle for the result. If the workers are processes, `start_on` does not wait for the
        result."""

    @abstractmethod
    def wait(
        self,
        handles: Sequence[Handle],
        on_done: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Returns the results in the order of `handles`, or raises a worker's error.

        When the call with the handle `handles[i]` finishes, `wait` calls `on_done(i)`. `timeout_s`
        is the longest wait for the next result, in seconds. None: the usual limit.
        """

    @abstractmethod
    async def result(self, handle: Handle) -> Any:
        """Async version of `wait` for one handle. If the workers are processes, `result` does not
        block the event loop.

        Returns the result, or raises the worker's own error. Raises WorkerLostError if the worker
        died or if the call took longer than the time limit of a call.
        """

    @abstractmethod
    def share(self, value: Any) -> Handle:
        """Stores one copy of a value for all workers, and returns a handle with which every worker
        can fetch the value."""

    def replace(self, worker: int) -> None:
        """Ends one worker and starts a new worker in its place. The old worker may hang or be dead.
        The method `replace` does not return before the new worker is ready.

        Any thread may call `replace`, but no other thread may call this worker at the same time.
        Raises UserError if the worker cannot be created.
        """
        raise WorkerLostError(f"{type(self).__name__} cannot make a worker anew")

    @abstractmethod
    def close(self) -> None:
        """Ends the workers. If a worker still responds, the worker cleans up before it ends.
        Closing twice is allowed."""

    def start(self, method: str, *args: Any) -> list[Handle]:
        """Starts a call of the method `method` on every worker. Returns one handle for each worker,
        in the order of the workers."""
        return [self.start_on(worker, method, *args) for worker in range(len(self))]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls the method `method` on every worker, and returns the results in the order of the
        workers."""
        return self.wait(self.start(method, *args))
