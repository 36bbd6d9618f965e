"""Defines the two splits of prompts, the seed of each split, and a hash that is used in place of a
random number generator.

A random number generator has a state, but a hash of counters has none. With the hash, a program can
generate the problem at index 10^6 without generating the earlier problems. A resumed run does not
need to restore the state of a random number generator. This module imports no libraries, so tools
can use the tasks without torch.
"""

from __future__ import annotations

from typing import Literal

Split = Literal["train", "eval"]

# arbitrary, but fixed, so that runs with different seeds are evaluated on the same problems
EVAL_SEED = 20_260_619

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def stream_seed(run_seed: int, split: Split) -> int:
    """Returns the seed of a split. The training split uses the seed of the run. The evaluation
    split uses the same seed in every run."""
    return run_seed if split == "train" else EVAL_SEED


def counter_hash(*counters: int) -> int:
    """Returns a 64-bit hash of the integers in `counters`. The hash depends on the order of the
    integers. One round of splitmix64 mixes each integer into the hash.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = 0
    for counter in counters:
        z = ((state ^ (counter & _MASK)) + _GOLDEN) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        state = z ^ (z >> 31)
    return state
