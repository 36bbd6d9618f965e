"""A verifier that tosses a coin by the response. In a file of its own, which verifier workers load
without PyTorch."""

from __future__ import annotations

import hashlib


def verify(response: str, answer: str) -> float:
    """0 or 1 by the response's hash."""
    return float(hashlib.sha256(response.encode()).digest()[0] & 1)
