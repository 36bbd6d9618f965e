"""Tensors that a trainer's rank holds, found without the code that moves them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megatron_stare.megatron.trainer import Trainer


def tensors_of(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """All that a rank's policy consists of, found without the code under test; by the part that it
    belongs to."""
    policy = trainer.policy
    for chunk in policy.model:
        for parameter in chunk.parameters():
            yield "parameters", parameter
            yield "gradients", parameter.main_grad
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield "gradients", buffer.grad_data
            if buffer.param_data is not None:
                yield "parameters", buffer.param_data
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield "optimizer", parameter
                if parameter.grad is not None:
                    yield "gradients", parameter.grad
        yield from (
            ("optimizer", x) for state in part.optimizer.state.values() for x in state.values()
        )
    for chunk in policy.reference.model if policy.reference is not None else ():
        yield from (("reference", parameter) for parameter in chunk.parameters())


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes of the storages of every part, each storage counted with the first part that has it."""
    found, seen = dict.fromkeys(("parameters", "gradients", "optimizer", "reference"), 0), set()
    for part in found:
        for of, tensor in tensors_of(trainer):
            storage = tensor.untyped_storage()
            if of == part and storage._cdata not in seen:
                seen.add(storage._cdata)
                found[part] += storage.nbytes()
    return found
