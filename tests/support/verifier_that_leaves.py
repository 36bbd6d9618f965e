"""A verifier module whose test of itself ends as a program's would."""

import sys


def verify(response: str, answer: str) -> float:
    return 1.0


def self_test() -> list[str]:
    sys.exit(3)
