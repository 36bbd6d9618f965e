"""Posts alerts to a service as JSON, with retries and without delaying training. An environment
variable holds the service's address."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Event
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pydantic import Field

from megatron_stare.errors import UserError
from megatron_stare.observability.metrics.glossary import explained
from megatron_stare.observability.sink import WHERE, Alert, RunOutline, Sink
from megatron_stare.observability.sinks.delivery import Background, Delivered

ROOM = 100  # alerts that may wait
KEPT = 1000  # newest posted alerts that are recorded
CLOSE_S = 10.0  # for alerts still waiting when the run ends


class Webhook(Sink):
    """Posts an alert twice: when the alert begins, and when the alert ends. The address is secret,
    so files and messages never contain the address.

    Args:
        env: name of the environment variable that holds the address.
        attempts: number of attempts to post an alert.
        timeout_s: seconds that the service may take to answer.
        back_off_s: seconds to wait before the second attempt. The wait doubles with each further
            attempt.
    """

    def __init__(
        self,
        *,
        env: Annotated[str, Field(min_length=1)] = "MEGATRON_STARE_WEBHOOK",
        attempts: Annotated[int, Field(ge=1)] = 3,
        timeout_s: Annotated[float, Field(gt=0)] = 10.0,
        back_off_s: Annotated[float, Field(ge=0)] = 1.0,
    ) -> None:
        self._env = env
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._back_off_s = back_off_s
        self._background: Background | None = None

    def start(self, run: RunOutline) -> None:
        self._url = os.environ.get(self._env, "")
        if urlsplit(self._url).scheme not in ("http", "https"):
            raise UserError(
                f"the environment variable {self._env} holds no http address to post alerts to",
                where=f"{WHERE}[webhook].env",
                fix=f"export {self._env}=https://..., or leave the sink webhook out",
            )
        self._about = {
            "run": run.config.run.name,
            "dir": str(run.dir),
            "host": socket.gethostname(),
        }
        self._delivered = Delivered.read(run.dir / "webhook_delivered.json")
        self._background = Background("webhook", ROOM)

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        # a step repeated after a resume gives an equal alert; after a rollback, steps are others
        new = [alert for alert in changed if _entry(alert) not in self._delivered.alerts]
        if self._background and new:
            self._background.call(partial(self._post_all, new, self._background.closing))

    def close(self) -> None:
        background, self._background = self._background, None
        if background and not background.close(CLOSE_S):
            raise TimeoutError(f"alerts were not taken within {CLOSE_S:g} s of the end")

    def _post_all(self, alerts: Sequence[Alert], closing: Event) -> None:
        """Posts several alerts, each as a JSON request body. Raises ConnectionError if the service
        did not accept every alert. A failed alert does not prevent the posting of later alerts."""
        failed, posted = [], []
        for alert in alerts:
            said = self._post(json.dumps({**self._about, **_told(alert)}).encode(), closing)
            if said:
                failed.append(said)
            else:
                posted.append(_entry(alert))
        # recorded after delivery: a run killed here delivers twice rather than never
        self._delivered.alerts = [*self._delivered.alerts, *posted][-KEPT:]
        self._delivered.write()
        if failed:
            raise ConnectionError(
                f"{len(failed)} alerts were not taken in {self._attempts} attempts ({failed[-1]})"
            )

    def _post(self, body: bytes, closing: Event) -> str:
        """Posts one alert to the service. The argument `body` is the alert as JSON. Returns "" if
        the service accepted the alert. If no attempt succeeded, returns the name of the last
        attempt's error. If the error has an HTTP status, the status follows the name. The returned
        text does not contain the address."""
        said = ""
        for attempt in range(self._attempts):
            if attempt:
                # the run's end interrupts this wait
                closing.wait(self._back_off_s * 2 ** (attempt - 1))
            try:
                request = Request(self._url, body, {"Content-Type": "application/json"})
                with urlopen(request, timeout=self._timeout_s):
                    return ""
            except Exception as error:  # URLError, HTTPException, a timeout while reading, ...
                said = type(error).__name__ + (f" {error.code}" if hasattr(error, "code") else "")
        return said


def _entry(alert: Alert) -> list[str | bool | int]:
    return [alert.name, alert.over, alert.last_step]


def _told(alert: Alert) -> Mapping[str, Any]:
    entry = explained(alert.metric)
    return {
        "step": alert.last_step,
        "alert": alert.name,
        "state": "over" if alert.over else "began",
        "metric": alert.metric or None,
        "value": alert.value if math.isfinite(alert.value) else None,
        "range": entry.healthy if entry else None,
        "text": alert.announce(),  # the text that chats show
    }
