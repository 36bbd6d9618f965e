"""Makes Megatron run on this rank's device, a GPU or a CPU. Contains the parallel layout with its
process groups, and the functions that replace CUDA calls on a CPU."""
