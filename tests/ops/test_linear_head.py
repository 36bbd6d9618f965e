"""The three ways through the output layer give the same numbers, and the chunked ones refuse what
they cannot do: on a GPU where there is one, but for what speaks gloo or raises there only after the
fact."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.ops.linear_head import LinearHead, Mode, _check_local
from megatron_stare.ops.vocab_parallel import Problem

MODES = ["materialised", "gradient_in_forward", "recompute"]
CHUNKED = MODES[1:]
N, HIDDEN, WIDTH, REAL = 23, 6, 24, 19
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(
    dtype: torch.dtype = torch.float64, n: int = N, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, and what a loss knows of every token: an old log-prob and an
    advantage."""
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(WIDTH, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    old = -3 - torch.rand(n, generator=generator, dtype=torch.float64)
    advantage = torch.randn(n, generator=generator, dtype=torch.float64)
    return tuple(x.to(device) for x in (hidden, weight, torch.arange(n) % REAL, old, advantage))


def clipped(old: Tensor, advantage: Tensor):
    """A token-local loss with a kink, an entropy term and something to log."""

    def loss_of(log_prob: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (log_prob - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.5, 2.0) * advantage)
        return -(surrogate + 0.1 * entropy * advantage.sign()).sum() / 7, {"ratio": ratio.detach()}

    return loss_of


def run(
    mode: Mode,
    chunk: int,
    dtype: torch.dtype = torch.float64,
    *,
    of_entropy: bool = True,
    n: int = N,
    **options,
):
    """The loss, what it logged, both gradients, and the scores."""
    hidden, weight, targets, *known = case(dtype, n, DEVICE)
    hidden.requires_grad_(), weight.requires_grad_()
    head = LinearHead(Problem(REAL, 0.8, entropy_gradient=of_entropy), mode, chunk)
    scored = head.compute_log_probs(hidden, weight, targets)
    loss, logged = head.loss(hidden, weight, targets, clipped(*known), **options)
    loss.backward()
    return loss.detach(), logged["ratio"], hidden.grad, weight.grad, *scored


def test_how_far_a_slope_may_move() -> None:
    """By a thousandth of the largest one: rounding, not another token."""
    slopes = torch.tensor([0.01, -1.0, 0.5])
    _check_local(slopes + torch.tensor([9e-4, 0.0, -9e-4]), slopes)
    for moved in ([1.1e-3, 0.0, 0.0], [0.0, 0.0, -1.1e-3]):
        with pytest.raises(RuntimeError, match="couples tokens"):
            _check_local(slopes + torch.tensor(moved), slopes)


@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize("mode", CHUNKED)
def test_chunked_equals_materialised(mode: Mode, chunk: int, of_entropy: bool) -> None:
    for got, wanted in zip(
        run(mode, chunk, of_entropy=of_entropy),
        run("materialised", 1, of_entropy=of_entropy),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


def test_materialised_equals_autograd() -> None:
    loss, _, of_hidden, of_weight, log_prob, _ = run("materialised", 1)
    hidden, weight, targets, *known = case(device=DEVICE)
    hidden.requires_grad_(), weight.requires_grad_()
    log_p = (torch.nn.functional.linear(hidden, weight[:REAL]) / 0.8).log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    wanted, _ = clipped(*known)(log_p.gather(1, targets[:, None]).squeeze(1), entropy)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(log_prob, log_p.gather(1, targets[:, None]).squeeze(1).detach())
    torch.testing.assert_close(of_hidden, hidden.grad)
    torch.testing.assert_close(of_weight, weight.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_the_bits_that_training_sees(mode: Mode, dtype: torch.dtype) -> None:
    hidden, weight, targets, *_ = case(dtype, device=DEVICE)
    head = LinearHead(Problem(REAL, 0.8), mode, chunk=5)
    log_prob, entropy = head.compute_log_probs(hidden, weight, targets)
    seen: list[tuple[Tensor, Tensor]] = []

    def loss_of(*scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(scores)
        return scores[0].sum(), {}

    head.loss(hidden.requires_grad_(), weight.requires_grad_(), targets, loss_of)
    assert torch.equal(seen[-1][0], log_prob) and torch.equal(seen[-1][1], entropy)


@pytest.mark.parametrize("mode", MODES)
def test_no_rows(mode: Mode) -> None:
    loss, ratio, of_hidden, of_weight, *scored = run(mode, 5, n=0)
    assert loss == 0 and ratio.shape == (0,) and all(x.shape == (0,) for x in scored)
    assert of_hidden.shape == (0, HIDDEN) and not of_weight.any()


@pytest.mark.parametrize("mode", CHUNKED)
def test_a_stand_in_for_the_weights_gradient_changes_nothing_else(mode: Mode) -> None:
    """On CUDA autograd's hooks of a parameter without gradient run in another thread."""
    buffers = [torch.zeros(WIDTH, HIDDEN, device=DEVICE) for _ in range(2)]
    without = run(mode, 5, torch.bfloat16, weight_gradient=buffers[0])
    beside = run(mode, 5, torch.bfloat16, weight_gradient=buffers[1], stand_in=True)
    assert without[3] is None
    assert beside[3].shape == (WIDTH, HIDDEN) and beside[3].dtype == torch.bfloat16
    assert torch.equal(*buffers) and torch.equal(without[0], beside[0])
    assert torch.equal(without[2], beside[2])


@pytest.mark.parametrize("mode", CHUNKED)
def test_weight_gradient_is_added_to_a_buffer_in_float32(mode: Mode) -> None:
    buffer = torch.ones(WIDTH, HIDDEN, device=DEVICE)
    *_, none, _, _ = run(mode, 1, torch.bfloat16, weight_gradient=buffer)
    assert none is None
    inputs = case(torch.bfloat16, device=DEVICE)
    hidden, weight, targets, *known = (x.double() if x.is_floating_point() else x for x in inputs)
    truth = LinearHead(Problem(REAL, 0.8, entropy_gradient=True))
    loss, _ = truth.loss(hidden, weight.requires_grad_(), targets, clipped(*known))
    loss.backward()
    # every row's logits are rounded to bfloat16, and their gradient: less than a part in 100, row
    # by row at random. The sum over rows, were it kept in bfloat16 beside the 1, would be off by up
    # to 23 roundings of 2^-8
    torch.testing.assert_close(buffer.double() - 1, weight.grad, atol=0.02, rtol=0.02)
    assert (buffer != buffer.bfloat16()).any()


def test_a_loss_that_couples_tokens_is_refused() -> None:
    hidden, weight, targets, *_ = case()
    head = LinearHead(Problem(REAL), "gradient_in_forward", chunk=5)
    with pytest.raises(RuntimeError, match="couples tokens"):
        head.loss(
            hidden.requires_grad_(), weight, targets, lambda log_prob, _: (log_prob.sum().exp(), {})
        )


def test_a_scaled_loss() -> None:
    hidden, weight, targets, *known = case()
    head = LinearHead(Problem(REAL), "gradient_in_forward", chunk=5)
    gradients = []
    for scale in (1.0, 3.0):
        mine = weight.clone().requires_grad_()
        (scale * head.loss(hidden.requires_grad_(), mine, targets, clipped(*known))[0]).backward()
        gradients.append(mine.grad)
    torch.testing.assert_close(3 * gradients[0], gradients[1])
    buffer = torch.zeros_like(weight)
    loss, _ = head.loss(
        hidden, weight.requires_grad_(), targets, clipped(*known), weight_gradient=buffer
    )
    with pytest.raises(RuntimeError, match="must not be scaled"):
        (3 * loss).backward()


def _split(rank: int, init: str, world: int, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    hidden, weight, targets, *known = case()
    mine = weight.chunk(world)[rank].clone().requires_grad_()
    problem = Problem(REAL, 0.8, dist.group.WORLD, entropy_gradient=True)
    loss, _ = LinearHead(problem, mode, 5).loss(
        hidden.requires_grad_(), mine, targets, clipped(*known)
    )
    loss.backward()
    dist.all_reduce(hidden.grad)
    dist.destroy_process_group()
    return loss.detach(), hidden.grad, mine.grad


@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_split_vocabulary(ranks, mode: Mode) -> None:
    loss, _, of_hidden, of_weight, *_ = (x.cpu() for x in run("materialised", 1))
    # 19 of 24 columns in four parts: the last rank holds one
    results = ranks.run(_split, 4, 4, mode)
    for result in results:
        torch.testing.assert_close(result[0], loss)
        torch.testing.assert_close(result[1], of_hidden)
    torch.testing.assert_close(torch.cat([result[2] for result in results]), of_weight)
