"""Makes Megatron run on this rank's device, a GPU or a CPU. Contains the parallel layout with its
process groups, and the functions that run in place of CUDA calls on a rank without a GPU."""
