"""Log-prob and entropy over split vocabularies against float64 autograd, in every split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.ops import vocab_parallel
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy


def reference(
    logits: Tensor, targets: Tensor, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """In float64 and in the plainest way."""
    log_p = (logits[:, :vocab_size].double() / temperature).log_softmax(1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def moments(logits: Tensor, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    """sum p^2 and sum p^2 ln p in float64."""
    log_p = (logits[:, :vocab_size].double() / temperature).log_softmax(1)
    p2 = (2 * log_p).exp()
    return p2.sum(1), torch.where(p2 > 0, p2 * log_p, 0.0).sum(1)


def case(seed: int, n: int = 7, v: int = 24, real: int = 19) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, v, generator=generator) * 3
    return logits, torch.randint(0, real, (n,), generator=generator), real


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_of_both_outputs(temperature: float) -> None:
    logits, targets, real = case(0)
    ours = logits.clone().requires_grad_()
    log_prob, entropy = log_prob_and_entropy(
        ours, targets, vocab_size=real, temperature=temperature, entropy_gradient=True
    )
    truth = logits.double().requires_grad_()
    want_log_prob, want_entropy = reference(truth, targets, real, temperature)
    torch.testing.assert_close(log_prob.double(), want_log_prob, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=2e-6, rtol=1e-6)
    mix = torch.linspace(-1, 2, len(targets))
    (log_prob @ mix + entropy @ mix.flip(0)).backward()
    (want_log_prob @ mix.double() + want_entropy @ mix.flip(0).double()).backward()
    torch.testing.assert_close(ours.grad.double(), truth.grad, atol=2e-6, rtol=1e-5)


def test_gradcheck_in_float64() -> None:
    logits, targets, real = case(1, n=4, v=9, real=7)
    assert torch.autograd.gradcheck(
        lambda x: log_prob_and_entropy(
            x, targets[:4], vocab_size=real, temperature=1.3, entropy_gradient=True
        ),
        logits.double().requires_grad_(),
    )


def test_padded_columns_have_no_probability_and_no_gradient() -> None:
    logits, targets, real = case(2)
    logits = logits - 50  # every real logit negative: zero columns would dominate
    logits[:, real:] = 0.0
    ours = logits.clone().requires_grad_()
    log_prob, entropy = log_prob_and_entropy(ours, targets, vocab_size=real, entropy_gradient=True)
    want = reference(logits, targets, real, 1.0)
    torch.testing.assert_close(log_prob.double(), want[0], atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want[1], atol=2e-5, rtol=1e-6)
    (log_prob.sum() + entropy.sum()).backward()
    assert ours.grad[:, real:].abs().max() == 0


@pytest.mark.parametrize("scale", [0.0, 1e4, -1e4])
def test_extremes_are_finite(scale: float) -> None:
    logits = torch.zeros(3, 8)
    logits[:, 2] = scale
    ours = logits.clone().requires_grad_()
    log_prob, entropy = log_prob_and_entropy(
        ours, torch.tensor([2, 0, 7]), vocab_size=8, entropy_gradient=True
    )
    want = reference(logits, torch.tensor([2, 0, 7]), 8, 1.0)
    torch.testing.assert_close(log_prob.double(), want[0], atol=1e-3, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want[1], atol=1e-6, rtol=1e-6)
    (log_prob.sum() + entropy.sum()).backward()
    assert ours.grad.isfinite().all()


def test_minus_infinity_logits() -> None:
    logits, targets, real = case(3)
    logits[:, 5] = -torch.inf
    targets = torch.where(targets == 5, 6, targets)
    ours = logits.clone().requires_grad_()
    log_prob, entropy = log_prob_and_entropy(ours, targets, vocab_size=real, entropy_gradient=True)
    (log_prob.sum() + entropy.sum()).backward()
    assert ours.grad.isfinite().all()
    torch.testing.assert_close(
        entropy.double(), reference(logits, targets, real, 1.0)[1], atol=2e-6, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("dtype", "capability", "installed", "taken"),
    [
        (torch.bfloat16, (8, 0), True, True),
        (torch.float32, (9, 0), True, True),
        (torch.float64, (9, 0), True, False),
        (torch.bfloat16, (7, 5), True, False),
        (torch.bfloat16, (9, 0), False, False),
    ],
)
def test_which_logits_the_kernels_take(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    capability: tuple[int, int],
    installed: bool,
    taken: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        vocab_parallel.importlib.util, "find_spec", lambda name: object() if installed else None
    )
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    assert vocab_parallel._runs_triton(on_gpu) == taken  # type: ignore[arg-type]
    assert not vocab_parallel._runs_triton(torch.zeros(1, dtype=dtype))


def test_no_rows() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    log_prob, entropy = log_prob_and_entropy(
        logits, torch.zeros(0, dtype=torch.int64), vocab_size=8
    )
    assert log_prob.shape == entropy.shape == (0,)
    log_prob.sum().backward()
    assert logits.grad.shape == (0, 8)


def test_entropy_without_gradient_is_marked_so() -> None:
    logits, targets, real = case(4)
    log_prob, entropy = log_prob_and_entropy(logits.requires_grad_(), targets, vocab_size=real)
    assert log_prob.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])  # uniform, spread, and all on one column
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_second_moments(scale: float, temperature: float) -> None:
    logits, targets, real = case(6)
    logits = scale * logits
    logits[:, real:] = 100.0  # padding that would take everything
    plain = log_prob_and_entropy(logits, targets, vocab_size=real, temperature=temperature)
    asked = log_prob_and_entropy(
        logits, targets, vocab_size=real, temperature=temperature, second_moment=True
    )
    # what is trained on does not move
    assert torch.equal(asked[0], plain[0]) and torch.equal(asked[1], plain[1])
    for got, want in zip(asked[2:], moments(logits, real, temperature), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=2e-6)


def test_second_moments_carry_no_gradient() -> None:
    logits, targets, real = case(7)
    ours = logits.clone().requires_grad_()
    log_prob, entropy, p2, p2_log_p = log_prob_and_entropy(
        ours, targets, vocab_size=real, entropy_gradient=True, second_moment=True
    )
    assert not p2.requires_grad and not p2_log_p.requires_grad
    (log_prob.sum() + entropy.sum()).backward()
    want = logits.clone().requires_grad_()
    log_prob, entropy = log_prob_and_entropy(want, targets, vocab_size=real, entropy_gradient=True)
    (log_prob.sum() + entropy.sum()).backward()
    assert torch.equal(ours.grad, want.grad)


def _split_rank(rank: int, init: str, world: int, real: int) -> tuple[Tensor, ...]:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    logits, _, _ = case(5, n=9, v=24, real=real)
    targets = torch.arange(9) * (real - 1) // 8  # targets on every rank that has real columns
    mine = logits.chunk(world, dim=1)[rank].clone().requires_grad_()
    log_prob, entropy, p2, p2_log_p = log_prob_and_entropy(
        mine,
        targets,
        vocab_size=real,
        temperature=0.9,
        group=dist.group.WORLD,
        entropy_gradient=True,
        second_moment=True,
    )
    (log_prob.sum() + 2 * entropy.sum()).backward()
    dist.destroy_process_group()
    return log_prob.detach(), entropy.detach(), p2, p2_log_p, mine.grad


@pytest.mark.distributed
# 11 of 24: a rank with padding alone
@pytest.mark.parametrize(("world", "real"), [(2, 19), (4, 19), (4, 11)])
def test_split_over_ranks_equals_whole(ranks, world: int, real: int) -> None:
    results = ranks.run(_split_rank, world, world, real)
    logits, _, _ = case(5, n=9, v=24, real=real)
    targets = torch.arange(9) * (real - 1) // 8
    truth = logits.double().requires_grad_()
    want_log_prob, want_entropy = reference(truth, targets, real, 0.9)
    (want_log_prob.sum() + 2 * want_entropy.sum()).backward()
    want_p2, want_p2_log_p = moments(logits, real, 0.9)
    for log_prob, entropy, p2, p2_log_p, _ in results:
        torch.testing.assert_close(log_prob.double(), want_log_prob, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(entropy.double(), want_entropy, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(p2.double(), want_p2, atol=1e-6, rtol=2e-6)
        torch.testing.assert_close(p2_log_p.double(), want_p2_log_p, atol=1e-6, rtol=2e-6)
    gradient = torch.cat([result[-1] for result in results], dim=1)
    torch.testing.assert_close(gradient.double(), truth.grad, atol=3e-6, rtol=1e-5)


def _padded_rank(
    rank: int, init: str, world: int, second_moment: bool
) -> tuple[tuple[Tensor, ...], list[int]]:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    sent = []

    def counted(out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        sent.append(mine.nbytes)
        dist.all_gather_into_tensor(out, mine, group=group)

    vocab_parallel.all_gather_into_tensor = counted
    try:
        logits, _, real = case(13, n=50, v=61, real=61)
        # padded as Megatron pads: to a multiple that depends on the ranks
        width = -(-real // (8 * world)) * 8
        padded = torch.cat([logits, torch.full((50, width * world - real), 50.0)], dim=1)
        targets = torch.arange(50) % real  # on every rank
        mine = padded[:, rank * width : (rank + 1) * width].contiguous()
        outputs = log_prob_and_entropy(
            mine, targets, vocab_size=real, group=dist.group.WORLD, second_moment=second_moment
        )
    finally:
        vocab_parallel.all_gather_into_tensor = dist.all_gather_into_tensor
        dist.destroy_process_group()
    return outputs, sent


@pytest.mark.distributed
@pytest.mark.parametrize("second_moment", [False, True])
def test_a_padded_vocabulary_is_the_same_in_every_split(ranks, second_moment: bool) -> None:
    logits, _, real = case(13, n=50, v=61, real=61)
    whole = log_prob_and_entropy(
        logits, torch.arange(50) % real, vocab_size=real, second_moment=second_moment
    )
    for world in (1, 2, 4):
        results = ranks.run(_padded_rank, world, world, second_moment)
        for outputs, sent in results:
            # one collective, 4 or 6 numbers
            assert sent == ([50 * (24 if second_moment else 16)] if world > 1 else [])
            for mine, first, wanted in zip(outputs, results[0][0], whole, strict=True):
                assert torch.equal(mine, first)  # the same bits on every rank
                torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=0)
