"""A user's own sink, complete: posts alerts and evaluations to a chat. Explained in
docs/sinks.md."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.request import Request, urlopen

from megatron_stare.observability.sink import Alert, RunOutline, Sink


class Chat(Sink):
    """Posts to the address in the environment variable CHAT_URL."""

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s

    def start(self, run: RunOutline) -> None:
        self._url, self._name = os.environ["CHAT_URL"], run.config.run.name

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        for alert in changed:
            self._post(alert.announce())

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._post(f"after step {record['step']}: pass@1 {record['pass1']:.3f}")

    def _post(self, text: str) -> None:
        body = json.dumps({"text": f"{self._name}, {text}"}).encode()
        urlopen(
            Request(self._url, body, {"Content-Type": "application/json"}), timeout=self._timeout_s
        ).close()
