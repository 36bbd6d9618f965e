"""Makes STARE's token selection available to other trainers. Tokens are selected among all tokens
of the batch, over all ranks and without approximation.

`Selector` takes log-probs, entropies, advantages and a mask, and returns weighted advantages. The
wheel `stare-select` is built from this folder and from the modules that this folder imports. The
wheel depends only on torch and numpy. The files that build the wheel are in tools/stare_select.
"""

from megatron_stare.select.selector import Selected as Selected
from megatron_stare.select.selector import Selector as Selector

__version__ = "0.1.0"
