"""Calls a verifier that runs in an HTTP server. Such a verifier can run on another machine, be
written in another language, or use a model as judge.

The server receives a POST request with the body {"response": ..., "answer": ...} and replies with a
number or {"reward": number}. If the run has `data.columns`, the body also contains "columns". The
module runs in reward workers. The time limit of an answer (`reward.timeout_s`) covers all requests
for this answer together, including retries.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

ATTEMPTS = 5
"""Maximum number of attempts to send an answer. A retry follows a failed connection or an HTTP
status that allows a retry."""

_FIRST_PAUSE_S = 0.1  # wait before the second attempt; doubled before each further one
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_REPLY = 1 << 20  # bytes


class HttpVerifier:
    """A verifier `(response, answer, *, columns) -> reward` that calls a server.

    Args:
        url: http://... or https://...
        first_pause_s: pause before the second attempt, seconds. The pause doubles before each
            further attempt.
    """

    def __init__(self, url: str, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._url, self._pause_s = url, first_pause_s

    def __call__(
        self, response: str, answer: str, *, columns: Mapping[str, Any] | None = None
    ) -> float:
        """Returns the server's reward.

        Raises:
            ConnectionError: all attempts failed.
            ValueError: the server refuses the request, or its reply is not a number.
        """
        asked = {"response": response, "answer": answer}
        body = json.dumps({**asked, "columns": columns} if columns else asked).encode()
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self._pause_s * 2 ** (attempt - 1))
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request) as reply:
                    return _reward(reply.read(_LONGEST_REPLY))
            except urllib.error.HTTPError as error:
                if error.code not in _LATER:
                    raise ValueError(f"{self._url} answered {error.code} {error.reason}") from error
                failure: Exception = error
            except (OSError, http.client.HTTPException) as error:
                failure = error
        raise ConnectionError(
            f"{self._url} did not answer in {ATTEMPTS} attempts: {failure}"
        ) from failure


def _reward(reply: bytes) -> float:
    try:
        said = json.loads(reply)
        said = said["reward"] if isinstance(said, dict) else said
    except (ValueError, KeyError) as error:
        raise ValueError(
            f'expected a number or {{"reward": number}}, got {reply[:80]!r}'
        ) from error
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise ValueError(f"the server's reward is {said!r}, not a number")
    return float(said)
