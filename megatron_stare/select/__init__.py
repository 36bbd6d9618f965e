"""STARE's selection for any trainer: weights of tokens, exact over the whole batch.

`Selector` takes log-probs, entropies, advantages and a mask, and returns weighted advantages. The
wheel `stare-select` is built from this folder and from the modules that it imports; it needs torch
and numpy only (tools/stare_select).
"""

from megatron_stare.select.selector import Selected as Selected
from megatron_stare.select.selector import Selector as Selector

__version__ = "0.1.0"
