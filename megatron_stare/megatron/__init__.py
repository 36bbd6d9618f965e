"""Contains the layout, the model, the optimizer, the passes over a batch, and the checkpoints. No
module outside this package imports megatron.core, except select/slime.py."""

from megatron_stare.process.silence_upstreams import quiet_upstreams
from megatron_stare.process.vector_maths import settle

settle()  # before anything in here runs
quiet_upstreams()  # every process that imports megatron.core imports this module
