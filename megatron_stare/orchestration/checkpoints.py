"""The run's checkpoints as the driver sees them: begun by all ranks, written while training goes on, then completed."""

from __future__ import annotations

from megatron_stare.config.schema import Config
from megatron_stare.interruption import uninterrupted
from megatron_stare.orchestration.groups import TrainerGroup
from megatron_stare.run_state import RunDir, RunState, Staged


class Checkpoints:
    """At most one is under way. Until it is completed it is no checkpoint, and the one before stays the newest."""

    def __init__(self, config: Config, ranks: TrainerGroup, run_dir: RunDir) -> None:
        self._config, self._ranks, self._dir = config, ranks, run_dir
        self._under_way: Staged | None = None

    def save(self, state: RunState) -> None:
        """Begins one of this state, after completing the one under way; returns when training may go on.

        Raises:
            UserError: it, or the one before, cannot be written.
        """
        self.finish()
        staged = self._dir.stage(state)
        self._ranks.save(str(staged.folder))
        self._under_way = staged
        if not self._config.checkpoint.background:
            self.finish()

    def look(self) -> None:
        """Completes the one under way if all ranks have written their part. Raises UserError where one could not."""
        if self._under_way is not None and self._ranks.saved():
            self.finish()

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits for the one under way and completes it.

        Args:
            timeout_s: of the wait, seconds; None: that of any call of the ranks.

        Raises:
            UserError: it cannot be written, or was not in this time.
        """
        if self._under_way is None:
            return
        self._ranks.wait_saved(timeout_s)
        with uninterrupted():  # what is half completed could not be completed any more
            staged, self._under_way = self._under_way, None
            self._ranks.finish_save()
            self._dir.complete(staged, self._config.run.keep_checkpoints)
