"""A verifier for CheckAgain: the first of its turns, which stand on lines of their own. The tiny
model has never seen a second turn."""


def verify(response: str, answer: str) -> float:
    """1.0 where the first turn ends in the answer."""
    return float(response.partition("\n")[0].endswith(f"={answer}"))
