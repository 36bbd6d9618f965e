"""Manages the replicas' workers during a run: calls all workers together, excludes lost replicas,
and restarts lost replicas in the background. The module health.py tracks the replicas' states and
decides which actions each state allows. This module, fleet.py, calls and restarts replicas
according to the replicas' states.

Each restart runs in its own thread. The thread ends the worker of the lost replica, creates a new
worker in the same place, and brings up the worker's engine. The next weight update then includes
the restarted replica.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.process.interruption import wait_for
from megatron_stare.process.workers import Handle, WorkerLostError, Workers
from megatron_stare.rollout.engines.engine import EngineLostError, ModelInfo
from megatron_stare.rollout.engines.state import publishes
from megatron_stare.rollout.fleet.health import SERVING, SYNCED, FleetHealth, Health, RestartRule
from megatron_stare.run_dir.heartbeat import tell_progress

LOST = (EngineLostError, WorkerLostError)
PATIENCE_S = 1.0  # shortest pause between two attempts to reach a server that the run did not start
LEAVE_S = 10.0  # time limit for ending workers that are still coming up


class Fleet:
    """The replicas of a run.

    Code that sends requests to a replica must report the answered requests and the lost requests to
    `health`. While a call that sends requests to a replica is in progress, no other code may call
    that replica.

    Args:
        workers: the workers that hold the engines, one engine each. The constructor brings up all
            engines at once.
        back_off_s: see FleetHealth.

    Raises:
        UserError: a replica does not come up.
    """

    def __init__(self, workers: Workers, rule: RestartRule, back_off_s: float) -> None:
        self.workers = workers
        self.infos: list[ModelInfo] = workers.call("bring_up")
        self.health = FleetHealth(len(self.infos), rule, back_off_s)
        for number, info in enumerate(self.infos):
            self.health.came_up(number)
            if publishes(info.state):
                self.health.synced(number, info.weight_version, proved=True)
        # of all replicas together; targets and bucket layouts stay valid until this count rises
        self.losses = 0
        self._patient, self._back_off_s = rule.most is None, rule.back_off_s
        self._coming: dict[int, Future[ModelInfo]] = {}  # replicas that are restarting
        self._holds = rule.held  # whether restarts need to be allowed
        self._held = rule.held  # True: no restart begins
        self._closed, self._lock = threading.Event(), threading.Lock()
        # transitions since the last `metrics`, by the state they led to
        self._counts: Counter[str] = Counter()
        self.news: list[str] = []  # lines for the run's output, which `take_news` removes

    def serves(self, replica: int) -> bool:
        """Returns True if the replica may receive requests."""
        return self.health.state(replica) in SERVING

    def require_serving(self) -> None:
        """Raises NoEngineError if no replica may receive requests."""
        self.health.require(SERVING)

    def call(
        self,
        method: str,
        *args: Any,
        among: Collection[int] | None = None,
        states: Collection[Health] = SYNCED,
        beside: Sequence[Handle] = (),
    ) -> dict[int, Any]:
        """Calls `method` of every replica whose state is in `states`. Waits for all calls. Returns
        the results by replica. If a replica is lost during the call of `method`, the results have
        no entry for this replica.

        Args:
            among: numbers of replicas. A replica with another number is not called. None means that
                replicas with all numbers may be called.
            beside: calls of other workers. The calls of the replicas depend on the calls in
                `beside`. An error of a call in `beside` is raised at once.

        Raises:
            NoEngineError: no replica returned a result.
            UserError: a call failed, but the called replica is not lost.
        """
        asked = [
            number for number in self.health.require(states) if among is None or number in among
        ]
        handles: dict[int, Handle] = {}
        results: dict[int, Any] = {}
        errors: list[Exception] = []
        for number in asked:
            with self._seen(number, errors):
                handles[number] = self.workers.start_on(number, method, *args)
        if beside:
            with contextlib.suppress(*LOST):  # the waits below attribute the error to a replica
                self.workers.wait([*handles.values(), *beside])
            self.workers.wait(beside)
        for number, handle in handles.items():
            with self._seen(number, errors):
                (results[number],) = self.workers.wait([handle])
        if errors:
            raise errors[0]
        if not results:
            self.health.require(())
        return results

    @contextlib.contextmanager
    def _seen(self, replica: int, errors: list[Exception]) -> Iterator[None]:
        """Handles an error that a call to a replica raises. Marks the replica as lost if the
        error's class is in the tuple `LOST`, and otherwise appends the error to `errors`."""
        try:
            yield
        except LOST as error:
            self.lose(replica, error.what)
        except Exception as error:
            errors.append(error)

    def find_lost(self, among: Collection[int]) -> bool:
        """Checks whether the given replicas are alive. Returns True if this check found at least
        one lost replica.

        Args:
            among: numbers of the replicas to check.
        """
        before = self.losses
        with contextlib.suppress(UserError):  # only losses matter here
            self.call("check", among=among)
        return self.losses > before

    def lose(self, replica: int, why: str) -> None:
        """Records that a replica is lost, unless the replica already counts as lost or is starting.
        Restarts the replica if a restart is allowed now."""
        with self._lock:
            if self.health.state(replica) in (Health.DEAD, Health.STARTING):
                return  # already recorded
            self.losses += 1
            self.health.lost(replica, why, time.monotonic())
            self._begin_due()

    def look(self) -> None:
        """Updates the state of every replica whose restart has succeeded or failed since the
        previous call. Restarts every lost replica for which a restart is allowed now
        (FleetHealth.due)."""
        with self._lock:
            for replica in [replica for replica, coming in self._coming.items() if coming.done()]:
                coming = self._coming.pop(replica)
                if error := coming.exception():
                    said = (
                        error.what
                        if isinstance(error, UserError)
                        else f"{type(error).__name__}: {error}"
                    )
                    self.health.lost(replica, f"it did not come up: {said}", time.monotonic())
                else:
                    self.infos[replica] = coming.result()
                    self.health.came_up(replica)
            self._begin_due()

    def allow_restarts(self) -> None:
        """Allows restarts of lost replicas until `hold_restarts` is called. Replicas that are lost
        after the call of `allow_restarts` may restart too."""
        with self._lock:
            self._held = False
            self._begin_due()

    def hold_restarts(self) -> None:
        """Prevents new restarts of replicas until `allow_restarts` is called. If replicas are
        already restarting, waits until each of these replicas has come up or has failed to come up.
        If a replica comes up during the wait, the fleet can call the replica after the wait. If
        `RestartRule.held` is False, restarts need no permission, and this method does nothing.

        This method reports progress during the wait, so that the wait does not count as a hang of
        the run's current phase. A hang of a starting replica is still detected, because a starting
        replica has its own time limit.
        """
        if not self._holds:
            return
        with self._lock:
            self._held = True
            coming = list(self._coming.values())
        for each in coming:
            with contextlib.suppress(Exception):  # `look` reports it
                wait_for(each, meanwhile=tell_progress)
        self.look()

    def _begin_due(self) -> None:
        if self._held:
            return
        now = time.monotonic()
        for replica in self.health.due(now):
            self.health.begun_again(replica, now)
            future: Future[ModelInfo] = Future()
            self._coming[replica] = future
            threading.Thread(
                target=self._bring_back, args=(replica, future), name="restart", daemon=True
            ).start()

    def _bring_back(self, replica: int, future: Future[ModelInfo]) -> None:
        """Ends the worker of a lost replica, then brings up a new replica in the same place. If the
        replica uses an external server (`sglang.urls`), this method retries the start of the
        replica until the external server is up. `close` ends these retries."""
        pause_s = max(self._back_off_s, PATIENCE_S)
        try:
            self.workers.replace(replica)
            while True:
                try:
                    (info,) = self.workers.wait([self.workers.start_on(replica, "bring_up")])
                    break
                except UserError:
                    if not self._patient or self._closed.wait(pause_s):
                        raise
            future.set_result(info)
        except BaseException as error:
            future.set_exception(error)

    def take_news(self) -> list[str]:
        """Removes and returns all new messages about the replicas. Each message is one line."""
        self._take()
        told, self.news = self.news, []
        return told

    def metrics(self) -> dict[str, float]:
        """Returns the number of serving replicas, and the number of transitions into each state
        since the previous call."""
        self._take()
        counts, self._counts = self._counts, Counter()
        into = {f"engine/{state.value}": float(counts[state.value]) for state in Health}
        return {"engine/serving": float(len(self.health.among(SERVING))), **into}

    def _take(self) -> None:
        while self.health.transitions:
            transition = self.health.transitions.popleft()
            self._counts[transition.after.value] += 1
            if transition.why:
                self.news.append(str(transition))

    def close(self) -> None:
        """Ends all workers, including workers that are restarting. Idempotent."""
        self._closed.set()
        self.workers.close()
        wait(self._coming.values(), timeout=LEAVE_S)
