"""The only package that imports megatron.core: layout, model, optimizer, passes over a batch, checkpoints."""
