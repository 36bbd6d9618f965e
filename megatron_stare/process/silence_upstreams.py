"""What upstreams say at import and in normal use, and what is no news to a user: left unsaid, here and nowhere else."""

from __future__ import annotations

import os
import warnings

# deprecations between megatron-core and torch: by the start of the message, because torch blames whoever called
DEPRECATIONS = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"`load_state_dict` is deprecated",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
)


def quiet_upstreams() -> None:
    """Silences them in this process, before it imports them; processes that are forked from it inherit that.

    megatron-core says at import what it does without CUDA libraries, and later what would be faster with them; README
    says it once. transformers draws bars over files that take a blink.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    for message in DEPRECATIONS:
        warnings.filterwarnings("ignore", message, category=FutureWarning)
