"""Log-prob and entropy over a vocabulary, and the three ways through the output layer: errors, time
beside the float32 formulation, and the share of the device's copy bandwidth that the kernels
reach."""

from __future__ import annotations

from typing import Any

import torch
from clock import exact_products, fastest
from torch import Tensor
from verdict import Bound

from megatron_stare.ops.linear_head import LinearHead
from megatron_stare.ops.vocab_parallel import Problem, log_prob_and_entropy

GPU_ONLY = (
    "forward, share of copy bandwidth",
    "forward and backward, share of copy bandwidth",
    "forward and backward, times the float32 formulation is slower",
    "gradient_in_forward, time over materialised",
    "recompute, time over materialised",
)
BOUNDS: dict[str, Bound] = {
    "log-prob, largest error (nats)": ("<=", 1e-4),
    "entropy, largest error (nats)": ("<=", 1e-4),
    "gradient, largest error of the largest entry": ("<=", 1e-2),
    "heads' weight gradients, largest difference": ("<=", 1e-2),
    "forward, share of copy bandwidth": (">=", 0.85),
    "forward and backward, share of copy bandwidth": (">=", 0.75),
    "forward and backward, times the float32 formulation is slower": (">=", 4.0),
    "gradient_in_forward, time over materialised": ("<=", 1.10),
    "recompute, time over materialised": ("<=", 1.40),
}


def run(cpu: bool) -> dict[str, Any]:
    exact_products()
    where, dtype = ("cpu", torch.float32) if cpu else ("cuda", torch.bfloat16)
    rows, columns, hidden = (64, 257, 32) if cpu else (8192, 151_936, 2048)
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(where, dtype)
    targets = torch.randint(0, columns, (rows,), generator=generator).to(where)
    figures = {
        **errors(logits, targets),
        **bandwidth(logits, targets),
        **heads(rows, columns, hidden, where, dtype),
    }
    return {
        "figures": figures,
        "sizes": {"rows": rows, "columns": columns, "hidden": hidden, "dtype": str(dtype)},
    }


def errors(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Against float64, of the first rows."""
    few, taken = logits[:64].clone().requires_grad_(), targets[:64]
    exact = few.detach().double().requires_grad_()
    log_p = exact.log_softmax(1)
    wanted = log_p.gather(1, taken[:, None]).squeeze(1)
    log_prob, entropy = log_prob_and_entropy(few, taken, vocab_size=logits.shape[1])
    entropy = entropy.detach()
    (gradient,) = torch.autograd.grad(log_prob.sum(), few)
    (truth,) = torch.autograd.grad(wanted.sum(), exact)
    return {
        "log-prob, largest error (nats)": float((log_prob - wanted).detach().abs().max()),
        "entropy, largest error (nats)": float(
            (entropy + (log_p.exp() * log_p).sum(1)).detach().abs().max()
        ),
        "gradient, largest error of the largest entry": float(
            (gradient - truth).abs().max() / truth.abs().max()
        ),
    }


def bandwidth(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Forward reads every logit once; backward reads each once more and writes its gradient in its
    place."""
    columns, size = logits.shape[1], logits.numel() * logits.element_size()
    other = torch.empty_like(logits)
    copied = 2 * size / fastest(lambda: other.copy_(logits))

    def forward() -> None:
        with torch.no_grad():
            log_prob_and_entropy(logits, targets, vocab_size=columns)

    def both() -> None:
        leaf = logits.detach().requires_grad_()
        ours, _ = log_prob_and_entropy(
            leaf.view_as(leaf), targets, vocab_size=columns, overwrite_logits=True
        )
        ours.sum().backward()

    def plain() -> None:
        # a quarter, as it needs several float32 copies
        leaf = logits[: len(logits) // 4].detach().requires_grad_()
        log_p = leaf.float().log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1).detach()
        (log_p.gather(1, targets[: len(leaf), None]).sum() + 0 * entropy.sum()).backward()

    slow = 4 * fastest(plain)  # before `both`, which leaves other logits behind
    ahead, whole = fastest(forward), fastest(both)
    return {
        "forward, share of copy bandwidth": size / ahead / copied,
        "forward and backward, share of copy bandwidth": 3 * size / whole / copied,
        "forward and backward, times the float32 formulation is slower": slow / whole,
        "copy bandwidth, GB/s": copied / 1e9,
    }


def heads(rows: int, columns: int, hidden: int, where: str, dtype: torch.dtype) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(rows, hidden, generator=generator).to(where, dtype).requires_grad_()
    weight = (
        (torch.randn(columns, hidden, generator=generator) / hidden**0.5)
        .to(where, dtype)
        .requires_grad_()
    )
    targets = torch.randint(0, columns, (rows,), generator=generator).to(where)
    gradients, seconds = {}, {}
    for mode in ("materialised", "gradient_in_forward", "recompute"):
        head = LinearHead(Problem(columns), mode, max(rows // 8, 8))  # type: ignore[arg-type]
        buffer = torch.zeros(columns, hidden, device=where)

        def once(head: LinearHead = head, buffer: Tensor = buffer) -> None:
            loss, _ = head.loss(
                states, weight, targets, lambda log_prob, _: (log_prob.mean(), {}), buffer
            )
            loss.backward()

        once()
        gradients[mode] = (buffer if weight.grad is None else weight.grad.float()).clone()
        seconds[mode] = fastest(once)
        states.grad = weight.grad = None
    whole = gradients.pop("materialised")
    apart = max(
        float((each - whole).abs().max() / whole.abs().max()) for each in gradients.values()
    )
    return {
        "heads' weight gradients, largest difference": apart,
        "gradient_in_forward, time over materialised": seconds["gradient_in_forward"]
        / seconds["materialised"],
        "recompute, time over materialised": seconds["recompute"] / seconds["materialised"],
    }
