"""A verifier for CheckAgain: what stands before the environment's word. The tiny model has never seen a second turn."""


def verify(response: str, answer: str) -> float:
    """1.0 where the first turn ends in the answer."""
    return float(response.partition(";0+")[0].endswith(f"={answer}"))
