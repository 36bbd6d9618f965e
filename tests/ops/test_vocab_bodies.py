"""Every body of the log-prob operator against float64 autograd: the extremes, and the gradient over
the logits."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from test_vocab_parallel import case, moments, reference
from torch import Tensor

from megatron_stare.ops import vocab_chunked, vocab_reference
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy

BODIES = ["reference", "chunked"]


def columns(*values: float, rows: int = 3, width: int = 11) -> Tensor:
    """[rows, width] logits of 0 but for the given first ones."""
    logits = torch.zeros(rows, width)
    logits[:, : len(values)] = torch.tensor(values)
    return logits


EXTREMES = {
    "all 1e4": (torch.full((3, 11), 1e4), 11),
    "all -1e4": (torch.full((3, 11), -1e4), 11),
    "one hot": (columns(1e4), 11),
    "one out": (columns(-1e4), 11),
    "both": (columns(1e4, -1e4), 11),
    "large and close": (1e4 + torch.arange(11.0).repeat(3, 1) / 8, 11),
    "uniform": (columns(), 11),
    "negative beside padding": (case(2)[0][:3, :11] - 50, 8),
    "-inf columns": (columns(-torch.inf, 1.0, -torch.inf), 11),
    "all but one -inf": (torch.where(torch.arange(11) == 2, 3.0, -torch.inf).repeat(3, 1), 11),
    "odd width": (3 * torch.randn(3, 13, generator=torch.Generator().manual_seed(0)), 13),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str, temperature: float, body: str) -> None:
    logits, real = EXTREMES[name]
    logits = logits.clone()
    logits[:, real:] = 100.0  # padding that would take everything
    targets = torch.tensor([2, 1, real - 1])
    ours = logits.clone().requires_grad_()
    log_prob, entropy, p2, p2_log_p = log_prob_and_entropy(
        ours,
        targets,
        vocab_size=real,
        temperature=temperature,
        entropy_gradient=True,
        second_moment=True,
        body=body,
    )
    truth = logits.double().requires_grad_()
    want = reference(truth, targets, real, temperature)
    torch.testing.assert_close(log_prob.double(), want[0], atol=3e-6, rtol=2e-7)
    torch.testing.assert_close(entropy.double(), want[1], atol=3e-6, rtol=0)
    for got, wanted in zip((p2, p2_log_p), moments(logits, real, temperature), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=2e-6)
    # a column of -inf may be a target, whose log-prob has no gradient
    finite = log_prob.detach().isfinite()
    (log_prob[finite].sum() + 2 * entropy.sum()).backward()
    # by hand, because autograd's own gradient of -inf columns is nan
    log_p = (logits[:, :real].double() / temperature).log_softmax(1)
    p = log_p.exp()
    slope = torch.where(p > 0, p * (log_p + want[1].detach()[:, None]), 0.0)
    hot = torch.nn.functional.one_hot(targets, real).double()
    gradient = (finite[:, None] * (hot - p) - 2 * slope) / temperature
    torch.testing.assert_close(ours.grad[:, :real].double(), gradient, atol=5e-6, rtol=1e-5)
    assert not ours.grad[:, real:].any()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("shape", [(0, 7), (1, 7), (1, 1), (5, 1)])
def test_no_row_one_row_one_column(shape: tuple[int, int], body: str) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(shape[0]) % shape[1]
    ours, truth = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = log_prob_and_entropy(ours, targets, vocab_size=shape[1], entropy_gradient=True, body=body)
    want = reference(truth, targets, shape[1], 1.0)
    for mine, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), wanted, atol=1e-6, rtol=1e-6)
    (got[0].sum() - got[1].sum()).backward()
    (want[0].sum() - want[1].sum()).backward()
    torch.testing.assert_close(ours.grad.double(), truth.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_gradcheck_of_both_outputs(body: str, temperature: float) -> None:
    logits, targets, real = case(1, n=4, v=9, real=7)
    assert torch.autograd.gradcheck(
        lambda x: log_prob_and_entropy(
            x, targets, vocab_size=real, temperature=temperature, entropy_gradient=True, body=body
        ),
        logits.double().requires_grad_(),
    )


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bodies_agree_over_many_blocks(
    monkeypatch, dtype: torch.dtype, entropy_gradient: bool
) -> None:
    monkeypatch.setattr(vocab_chunked, "ROWS", 1)
    monkeypatch.setattr(vocab_chunked, "BLOCK", 64)  # blocks of three rows, and a last one of one
    logits, targets, real = case(8, n=31, v=24, real=19)
    results = []
    for body in BODIES:
        ours = logits.to(dtype).requires_grad_()
        outputs = log_prob_and_entropy(
            ours,
            targets,
            vocab_size=real,
            temperature=0.9,
            entropy_gradient=entropy_gradient,
            second_moment=True,
            body=body,
        )
        (outputs[0].sum() + (outputs[1].sum() if entropy_gradient else 0)).backward()
        results.append((*outputs, ours.grad))
    for one, other in zip(*results, strict=True):
        near = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(one.dtype, 2e-6)
        torch.testing.assert_close(one, other, atol=near, rtol=near)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("real", [19, 24])
def test_gradient_over_the_logits_is_the_gradient(body: str, dtype: torch.dtype, real: int) -> None:
    logits, targets, _ = case(9, real=real)
    gradients = []
    for overwrite in (False, True):
        leaf = logits.clone().to(dtype).requires_grad_()
        mine = leaf * 1
        log_prob, entropy = log_prob_and_entropy(
            mine,
            targets,
            vocab_size=real,
            entropy_gradient=True,
            body=body,
            overwrite_logits=overwrite,
        )
        (log_prob.sum() + entropy.sum()).backward()
        gradients.append(leaf.grad)
        assert torch.equal(mine.detach(), leaf.grad) == overwrite  # that is where it was written
    assert torch.equal(*gradients)


@pytest.mark.parametrize("body", BODIES)
def test_a_backward_that_needs_overwritten_logits_raises(body: str) -> None:
    logits, targets, real = case(10)
    mine = logits.requires_grad_() * 1
    log_prob, _ = log_prob_and_entropy(
        mine, targets, vocab_size=real, body=body, overwrite_logits=True
    )
    other = mine.square().sum()  # saves the logits
    log_prob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.sum().backward()


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_gradient_is_no_part_of_the_logits_graph(overwrite: bool) -> None:
    logits, targets, real = case(10)
    mine = logits.requires_grad_() * 1
    log_prob, _ = log_prob_and_entropy(mine, targets, vocab_size=real, overwrite_logits=overwrite)
    (gradient,) = torch.autograd.grad(log_prob.sum(), mine)
    assert not gradient.requires_grad


@pytest.mark.parametrize("second_moment", [False, True])
@pytest.mark.parametrize("body", [vocab_reference, vocab_chunked])
def test_a_rank_that_holds_padding_alone(body: ModuleType, second_moment: bool) -> None:
    """Its largest logit is -inf, so that it weighs nothing beside the other ranks'."""
    logits, nowhere = torch.full((2, 5), 100.0), torch.full((2,), -1)
    got = body.sums(logits, nowhere, 0, 1.0, second_moment)
    assert got.tolist() == [[-torch.inf] * 2] + [[0.0] * 2] * (5 if second_moment else 3)
    out = torch.full((2, 5), 7.0)
    zeros = torch.zeros(2)
    body.gradient(logits, nowhere, 0, 1.0, zeros, zeros, zeros, zeros, out)
    assert not out.any()


def test_a_leaf_is_not_overwritten() -> None:
    logits, targets, real = case(11)
    with pytest.raises(ValueError, match="leaf"):
        log_prob_and_entropy(
            logits.requires_grad_(), targets, vocab_size=real, overwrite_logits=True
        )


def test_another_consumer_of_the_logits_gets_its_gradient_too() -> None:
    logits, targets, real = case(12)
    gradients = []
    for overwrite in (False, True):
        leaf = logits.clone().requires_grad_()
        mine = leaf * 1
        log_prob, _ = log_prob_and_entropy(
            mine, targets, vocab_size=real, overwrite_logits=overwrite
        )
        (log_prob.sum() + (3 * mine).sum() + mine[:2].sum()).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
