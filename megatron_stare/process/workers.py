"""Workers behind one interface, wherever they live. Runners (cluster/) implement it; whoever has
work for them - the trainer's group, the engines' pool - speaks through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from megatron_stare.errors import UserError

# A call under way, or its result: an ObjectRef with Ray, the value itself inline. As an argument of
# other calls it travels between workers without passing through the driver.
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
        """Starts a call on one worker and returns at once where it can."""

    @abstractmethod
    def wait(
        self,
        handles: Sequence[Handle],
        on_done: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """The results, in order. Raises what a worker raised. `on_done` is told each handle's
        number as it finishes; `timeout_s` is the longest wait for one of them, seconds, where it is
        not that of every call."""

    @abstractmethod
    async def result(self, handle: Handle) -> Any:
        """Async `wait` for one handle; does not block the event loop where workers are processes.

        Ends with the result, the worker's error or end, or the limit of one call.
        """

    @abstractmethod
    def share(self, value: Any) -> Handle:
        """Puts a value where every worker can take it from, once."""

    def replace(self, worker: int) -> None:
        """Ends one worker, however it stands, and makes it anew where it was. Waits until that is
        done; may be called from any thread, while nobody else calls this worker. Raises UserError
        where it cannot be made."""
        raise WorkerLostError(f"{type(self).__name__} cannot make a worker anew")

    @abstractmethod
    def close(self) -> None:
        """Ends the workers; they clean up first where they can. Closing twice is allowed."""

    def start(self, method: str, *args: Any) -> list[Handle]:
        """Starts a call on every worker."""
        return [self.start_on(worker, method, *args) for worker in range(len(self))]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Every worker's result."""
        return self.wait(self.start(method, *args))
