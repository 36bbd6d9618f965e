"""The Triton kernels against float64: on a GPU where there is one, else through Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")  # conftest.py asks for its interpreter

from test_vocab_bodies import EXTREMES
from test_vocab_parallel import case, moments, reference
from torch import Tensor

from megatron_stare.ops import vocab_triton
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """Several blocks a row, so that the running maximum moves."""
    for settings in (vocab_triton.FORWARD, vocab_triton.BACKWARD):
        monkeypatch.setitem(settings, "BLOCK", 16)
        monkeypatch.setitem(settings, "num_warps", 1)


def run(
    logits: Tensor, targets: Tensor, real: int, *, overwrite: bool = False, **options
) -> tuple[Tensor, ...]:
    """Outputs, and the gradient of their mix, on the CPU."""
    leaf = logits.to(DEVICE).clone().requires_grad_()
    outputs = log_prob_and_entropy(
        leaf * 1,
        targets.to(DEVICE),
        vocab_size=real,
        body="triton",
        overwrite_logits=overwrite,
        **options,
    )
    mix = outputs[0].sum()
    if options.get("entropy_gradient"):
        mix = mix + 2 * outputs[1].sum()
    mix.backward()
    return tuple(x.detach().cpu() for x in (*outputs, leaf.grad))


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str) -> None:
    logits, real = EXTREMES[name]
    logits = logits.clone()
    logits[:, real:] = 100.0
    targets = torch.tensor([2, 1, real - 1])
    log_prob, entropy, p2, p2_log_p, _ = run(
        logits, targets, real, temperature=0.6, second_moment=True
    )
    want = reference(logits.double(), targets, real, 0.6)
    torch.testing.assert_close(log_prob.double(), want[0], atol=3e-6, rtol=2e-7)
    torch.testing.assert_close(entropy.double(), want[1], atol=3e-6, rtol=0)
    for got, wanted in zip((p2, p2_log_p), moments(logits, real, 0.6), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "real"), [(61, 61), (64, 50), (7, 7), (1, 1)])
def test_values_and_gradients(
    dtype: torch.dtype, entropy_gradient: bool, width: int, real: int
) -> None:
    logits, targets, real = case(14, n=5, v=width, real=real)
    logits = logits.to(dtype)
    logits[:, real:] = 60.0
    options = {"temperature": 0.7, "entropy_gradient": entropy_gradient, "second_moment": True}
    log_prob, entropy, p2, p2_log_p, gradient = run(logits, targets, real, **options)
    truth = logits.double().requires_grad_()
    want = reference(truth, targets, real, 0.7)
    (want[0].sum() + (2 * want[1].sum() if entropy_gradient else 0)).backward()
    torch.testing.assert_close(log_prob.double(), want[0].detach(), atol=3e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want[1].detach(), atol=3e-6, rtol=1e-6)
    for got, wanted in zip((p2, p2_log_p), moments(logits, real, 0.7), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=2e-6)
    near = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(dtype, 5e-6)
    torch.testing.assert_close(gradient.double(), truth.grad, atol=near, rtol=near)
    assert not gradient[:, real:].any()
    over = run(logits, targets, real, overwrite=True, **options)[-1]
    assert torch.equal(over, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_passes_launch_one_kernel(monkeypatch, dtype: torch.dtype) -> None:
    """The log-prob pass asks for the squares and the training pass does not. What either launches
    is the same binary with the same arguments, so the sums they share are equal bit for bit; those
    of two binaries need not be."""
    logits, targets, real = case(14, n=5, v=61, real=50)
    logits, targets = logits.to(DEVICE, dtype), targets.to(DEVICE)
    launched, kernel = [], vocab_triton._sums

    class Seen:
        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                launched.append((grid, arguments, constants))
                kernel[grid](*arguments, **constants)

            return launch

    monkeypatch.setattr(vocab_triton, "_sums", Seen())
    with_squares, without = (
        vocab_triton.sums(logits, targets, real, 0.7, asked) for asked in (True, False)
    )
    (grid, arguments, constants), (other_grid, others, other_constants) = launched
    assert (grid, constants) == (other_grid, other_constants)
    for mine, theirs in zip(arguments, others, strict=True):
        # of the output, which is another, all that a compilation depends on
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape, mine.stride()) == (
                theirs.dtype,
                theirs.shape,
                theirs.stride(),
            )
        else:
            assert mine == theirs
    assert with_squares.shape == (6, 5)
    assert torch.equal(with_squares[:4], without)


def test_overwritten_logits_are_not_used_again() -> None:
    logits, targets, real = case(10)
    mine = logits.to(DEVICE).requires_grad_() * 1
    log_prob, _ = log_prob_and_entropy(
        mine, targets.to(DEVICE), vocab_size=real, body="triton", overwrite_logits=True
    )
    other = mine.square().sum()
    log_prob.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_no_rows_and_not_a_number() -> None:
    empty = run(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), 8)
    assert empty[0].shape == (0,) and empty[-1].shape == (0, 8)
    logits, targets, real = case(15, n=4, v=40, real=33)
    logits[1, 20] = torch.nan
    log_prob, entropy, gradient = run(logits, targets, real)
    for got in (log_prob, entropy, gradient[:, :real].sum(1)):
        assert got.isnan().tolist() == [False, True, False, False]


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        log_prob_and_entropy(
            torch.zeros(2, 4, dtype=torch.float64, device=DEVICE),
            torch.zeros(2, dtype=torch.int64, device=DEVICE),
            vocab_size=4,
            body="triton",
        )
