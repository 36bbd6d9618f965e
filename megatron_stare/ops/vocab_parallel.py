"""Computes, from the logits at a position, the log-prob of the target token and the entropy of the
distribution. The vocabulary dimension of the logits can be split over ranks.

One pass over the logits computes log-prob and entropy. The pass over the logits applies the
temperature, masks padded vocabulary columns, accumulates in float32, and needs one collective of
four numbers per token. In the formulas, z is a row's logits, m is the maximum of z over all ranks,
and d is (z - m) / temperature:

    s = sum_v exp(d_v)                t = sum_v d_v exp(d_v)
    log p_y = d_y - ln s              H = ln s - t / s
    d log p_y / dd = 1[y] - p         dH / dd = -p (ln p + H)

The entropy sensitivity (algorithms/sensitivity.py) needs two more sums, q and u. The sums q and u
come from the same pass and the same collective as the sums s and t:

    q = sum_v exp(d_v)^2              u = sum_v d_v exp(d_v)^2
    sum_v p_v^2 = q / s^2             sum_v p_v^2 ln p_v = (u - q ln s) / s^2

The operations on the [N, V] logits have three implementations, which the parameter `body` selects.
The implementation in vocab_reference.py is plain PyTorch. The implementation in vocab_chunked.py
processes the logits in blocks that stay in cache. The implementation in vocab_triton.py consists of
kernels that read every logit once.

Shape legend: N = tokens, V = vocabulary columns of this rank, R = ranks.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_gather_into_tensor

from megatron_stare.ops import vocab_chunked, vocab_reference

Body = Literal["auto", "reference", "chunked", "triton"]


def log_prob_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    entropy_gradient: bool = False,
    second_moment: bool = False,
    body: Body = "auto",
    overwrite_logits: bool = False,
) -> tuple[Tensor, ...]:
    """Returns log-prob and entropy of every row.

    Args:
        logits: [N, V] logits of this rank's columns. Rank r of `group` holds columns r V to (r + 1)
            V - 1.
        targets: [N] int64, indices into the whole vocabulary, below vocab_size.
        vocab_size: number of real columns. All further columns are padding and have probability 0.
        temperature: divisor of the logits, above 0.
        group: tensor-parallel ranks; None: this rank holds every column.
        entropy_gradient: whether the entropy carries a gradient. Without a gradient, the entropy
            costs nothing in backward.
        second_moment: whether to return the sums of the entropy sensitivity too. These sums never
            carry a gradient.
        body: implementation to use. 'auto' uses the Triton kernels on GPUs that can run these
            kernels, else the chunked implementation.
        overwrite_logits: whether backward overwrites the logits with their gradient. No later code
            may then need the logits. Backward increments autograd's version counter, so another
            backward that needs the logits raises an error. Other code that reads the logits gets
            the gradient instead, without an error.

    Returns:
        log_prob [N] and entropy [N] in nats, equal on every rank of `group`. The dtype is float32,
        or float64 for float64 logits. With `second_moment`, the function also returns sum p^2 [N]
        and sum p^2 ln p [N] over the vocabulary.

    Raises:
        ValueError: backward would overwrite logits that are a leaf, or the implementation does not
            support these logits.
    """
    if overwrite_logits and logits.is_leaf and logits.requires_grad:
        raise ValueError("logits that are a leaf would be overwritten by their own gradient")
    problem = Problem(vocab_size, temperature, group, entropy_gradient, second_moment, body)
    return _LogProbAndEntropy.apply(logits, targets, problem, overwrite_logits)


@dataclass(frozen=True)
class Problem:
    """Arguments of log_prob_and_entropy that define the computation. The docstring of
    log_prob_and_entropy describes each argument."""

    vocab_size: int
    temperature: float = 1.0
    group: ProcessGroup | None = None
    entropy_gradient: bool = False
    second_moment: bool = False
    body: Body = "auto"

    def columns(self, width: int) -> tuple[int, int]:
        """Returns the index of this rank's first column, and how many of the rank's `width` columns
        are not padding."""
        start = (self.group.rank() if self.group is not None else 0) * width
        return start, min(max(self.vocab_size - start, 0), width)


@dataclass(frozen=True)
class Rows:
    """Values that the backward pass needs in addition to the logits. Each field is a tensor [N]
    with one value per row.

    `local`: int64 index of the target token's column among this rank's columns, or -1 if another
        rank has this column.
    `m`: the maximum of a row's logits over the columns of all ranks. The field m has the dtype of
        the row sums, and this dtype can represent m exactly.
    `s`: the softmax denominator sum_v exp(d_v) of a row over the columns of all ranks, in float64.
    `entropy`: the entropy of a row over the columns of all ranks, in float64.
    """

    local: Tensor
    m: Tensor
    s: Tensor
    entropy: Tensor

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(*(each[rows] for each in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def measure(logits: Tensor, targets: Tensor, problem: Problem) -> tuple[tuple[Tensor, ...], Rows]:
    """Returns the outputs of log_prob_and_entropy without gradient, and the `Rows` that
    `write_gradient` needs.

    Every rank of the group must call `measure`, because `measure` runs the collective.
    """
    start, real = problem.columns(logits.shape[1])
    here = (targets >= start) & (targets < start + real)
    local = torch.where(here, targets - start, -1)
    body = _body(problem.body, logits)
    sums = body.sums(logits, local, real, problem.temperature, problem.second_moment)
    m, s, t, z_target, *squares = _merge(sums, problem)
    log_s = s.log()
    # z - (m + ln s) would lose digits that are small relative to m
    log_prob = (z_target - m) / problem.temperature - log_s
    entropy = log_s - t / s
    moments: tuple[Tensor, ...] = ()
    if problem.second_moment:
        q, u = squares
        moments = (q / s**2, (u - q * log_s) / s**2)
    found = tuple(each.to(sums.dtype) for each in (log_prob, entropy, *moments))
    return found, Rows(local, m.to(sums.dtype), s, entropy)


def write_gradient(
    logits: Tensor,
    rows: Rows,
    problem: Problem,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    """Writes the gradient with respect to the logits [N, V] into `out`. `out` may be the tensor of
    the logits.

    Let d be (z - m) / temperature. The gradient with respect to a logit z is exp(d) (a + b d), with
    the same factors a and b for all columns of a row. The gradient with respect to the target's
    logit has one more term: grad_log_prob / temperature. The function computes a and b in float64,
    and then rounds a and b to the dtype of `rows.m`.

    Args:
        grad_log_prob: [N].
        grad_entropy: [N], or None if the entropy carries no gradient.
    """
    real = problem.columns(logits.shape[1])[1]
    per_weight = 1 / (rows.s * problem.temperature)
    a, b = -grad_log_prob * per_weight, None
    if grad_entropy is not None:
        b = -grad_entropy * per_weight
        a = a + b * (rows.entropy - rows.s.log())
    hit = grad_log_prob / problem.temperature
    dtype = rows.m.dtype
    a, b, hit = a.to(dtype), None if b is None else b.to(dtype), hit.to(dtype)
    body = _body(problem.body, logits)
    body.gradient(logits, rows.local, real, problem.temperature, rows.m, a, b, hit, out)


class _LogProbAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, problem: Problem, overwrite: bool
    ) -> tuple[Tensor, ...]:
        (log_prob, entropy, *moments), rows = measure(logits, targets, problem)
        ctx.save_for_backward(logits, *rows.tensors())
        ctx.problem, ctx.overwrite = problem, overwrite
        ctx.mark_non_differentiable(*moments, *(() if problem.entropy_gradient else (entropy,)))
        return log_prob, entropy, *moments

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        # raises if the logits were written to since, even by another backward of this function
        logits, *saved = ctx.saved_tensors
        logits = logits.detach()  # shares the version counter
        out = logits if ctx.overwrite else torch.empty_like(logits)
        of_entropy = grad_entropy if ctx.problem.entropy_gradient else None
        write_gradient(logits, Rows(*saved), ctx.problem, grad_log_prob, of_entropy, out)
        if ctx.overwrite:
            torch.autograd.graph.increment_version(out)  # kernels write without notifying autograd
        return out, None, None, None


def _body(name: Body, logits: Tensor) -> ModuleType:
    if name == "auto":
        name = "triton" if _runs_triton(logits) else "chunked"
    if name == "triton":
        from megatron_stare.ops import vocab_triton  # not every machine has Triton

        return vocab_triton
    return {"reference": vocab_reference, "chunked": vocab_chunked}[name]


def _runs_triton(logits: Tensor) -> bool:
    """Returns True if the Triton kernels support the logits, which must be bfloat16, float16 or
    float32 on a GPU of sm_80 or newer."""
    if (
        logits.device.type != "cuda"
        or logits.dtype == torch.float64
        or importlib.util.find_spec("triton") is None
    ):
        return False
    return torch.cuda.get_device_capability(logits.device) >= (8, 0)


def _merge(sums: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    """Combines the row sums of all ranks into row sums over the whole vocabulary. The tensor `sums`
    [4 or 6, N] contains this rank's m, s, t and z_target for every row and, with `second_moment`,
    also q and u. One all-gather exchanges 16 or 24 bytes per token and rank. If the largest logit
    of a row is not finite, the function returns m = 0 for this row.

    This function combines the row sums in float64. `measure` then computes log-probs and entropies
    from the combined sums, also in float64. A combination in float32 would double the rounding
    error of the row sums. Float64 costs little here, because a tensor of row sums has only one
    element per row and rank.
    """
    group = problem.group
    if group is None or group.size() == 1:
        m, *others = sums.double().unbind(0)
        return torch.where(m.isfinite(), m, 0.0), *others
    parts = sums.new_empty(group.size(), *sums.shape)
    all_gather_into_tensor(parts.view(-1), sums.contiguous().view(-1), group=group)
    m_r, s_r, t_r, z_r, *squares_r = parts.double().unbind(1)  # each [R, N]
    m_all = m_r.max(0).values
    m_all = torch.where(m_all.isfinite(), m_all, 0.0)
    shift = torch.where(m_r.isfinite(), (m_r - m_all) / problem.temperature, -torch.inf)
    scale = shift.exp()
    merged = [m_all, (scale * s_r).sum(0), _shifted(t_r, s_r, shift, scale), z_r.sum(0)]
    if squares_r:
        q_r, u_r = squares_r
        merged += [(scale**2 * q_r).sum(0), _shifted(u_r, q_r, shift, scale**2)]
    return tuple(merged)


def _shifted(t_r: Tensor, s_r: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Computes the sum t or the sum u for each of the N rows of logits.

    In the formulas, z is a row's logits, m is the maximum of z over the columns of all ranks, and d
    is (z - m) / temperature. For each row, t is the sum of d exp(d) over the columns of all ranks,
    and u is the sum of d exp(d)^2 over the same columns. Both sums add up products d * w, in which
    w is a weight. The weight w is exp(d) in the terms of t, and exp(d)^2 in the terms of u. Every
    argument is a tensor [R, N] with one value for each rank and each row of logits.

    Args:
        t_r: each rank's sum of d w over the rank's own columns, computed with the rank's own
            maximum m_r instead of m.
        s_r: each rank's sum of w over the rank's own columns, also computed with m_r instead of m.
        shift: (m_r - m) / temperature, the number that must be added to (z - m_r) / temperature to
            obtain d.
        scale: factor by which a rank's own weight w must be multiplied to obtain the w that belongs
            to m: exp(shift) for the sum t, and exp(shift)^2 for the sum u.
    """
    return torch.where(scale > 0, scale * (t_r + shift * s_r), 0.0).sum(0)
