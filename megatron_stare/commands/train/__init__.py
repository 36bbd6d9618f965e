"""Trains from the command line as `megatron-stare train`, and from Python as
`megatron_stare.run`."""
