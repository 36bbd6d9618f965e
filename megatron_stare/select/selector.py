"""Selects tokens in another trainer's batch, and multiplies the advantage of each token by a
weight.

Shape legend: B is the number of rows of this rank, T is the number of columns of the padded batch,
and N is the number of tokens of a flat batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_gather, all_reduce, get_rank

from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.stapo import SpuriousTokens, Stapo
from megatron_stare.algorithms.stapo_stare import StapoStare
from megatron_stare.algorithms.stare import Stare
from megatron_stare.algorithms.twenty_entropy import TwentyEntropy
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import TokenBatch

METHODS: dict[str, type[Grpo]] = {
    "stare": Stare,
    "stapo": Stapo,
    "stapo_stare": StapoStare,
    "twenty_entropy": TwentyEntropy,
}
_LARGEST_INDEX = 2**32  # ordering keys hold an index in 32 bits
_FAULTS = {
    1: "log_probs or entropies of masked tokens are NaN or infinite",
    2: "advantages of masked tokens are NaN or infinite",
    3: "a row, a sequence or an index is negative, or an index is 2^32 or larger",
}


@dataclass(frozen=True)
class Selected:
    """Result of one call of `Selector.update`. The tensors describe the tokens of this rank. Each
    tensor has the shape of the given mask.

    `weights`: float32 factor on every token's advantage. Inside the given mask, the factor is 0 for
        tokens that the method removes from the loss. Outside the given mask, the factor is 1, but
        has no effect, because every value of `advantages` outside the mask is 0.
    `advantages`: float32 product of the given advantages and `weights`; 0 outside the mask.
    `codes`: int8 code of each token's set: 1 is L+, -1 is L-, 2 is U+, -2 is U-, 0 is no set. A
        closed gate does not change the codes.
    `counted`: bool, True for tokens that count in the denominator of a mean over tokens.
    `metrics`: numbers to log, the same on every rank.
    """

    weights: Tensor
    advantages: Tensor
    codes: Tensor
    counted: Tensor
    metrics: dict[str, float]


class Selector:
    """Multiplies the advantage of each token by a weight that a method such as STARE computes for
    the token. Keeps the state of the method's gate and controllers from one update to the next.

    Args:
        method: a name in METHODS.
        group: process group of the ranks that hold different tokens of the batch. If `group` is
            None, this process holds the whole batch, even if torch.distributed runs.
        settings: the method's own settings, such as `share=0.1` or `entropy_target=0.3`. Settings
            of the loss (clip_high and others) belong to the trainer.

    Raises:
        ConfigError: the method or a setting is unknown or invalid.
    """

    def __init__(
        self, method: str = "stare", *, group: ProcessGroup | None = None, **settings: Any
    ) -> None:
        self.method, self.group, self.updates = method, group, 0
        self._rule = _rule(method, settings)
        self._state = {
            name: torch.tensor(value, dtype=torch.float64)
            for name, value in self._rule.initial_state().items()
        }

    @property
    def settings(self) -> dict[str, Any]:
        """Returns all settings of the method, as plain values."""
        return {name: _plain(getattr(self._rule, name)) for name in _own_settings(type(self._rule))}

    def update(
        self,
        log_probs: Tensor,
        entropies: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        rows: Tensor | None = None,
        sequence: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Selected:
        """Selects tokens and updates the controllers by one step. Every rank of the group must call
        this method once per rollout batch, even a rank without tokens.

        Args:
            log_probs: [B, T] or [N] log-probs of the sampled tokens before the update, nats.
            entropies: same shape as `log_probs`, entropies of the same policy, nats.
            advantages: same shape as `log_probs`, or [B] with one advantage for each row.
            mask: same shape as `log_probs`, true where the policy sampled the token and the token
                carries loss.
            rows: [B] int64 index of each row in the whole batch. If `rows` is None, the rows of all
                ranks are numbered consecutively, in the order of the group's ranks. Among tokens of
                equal surprisal, the token with the lower row index comes first.
            sequence: [N] int64 index of each token's response in the whole batch, for flat input.
            index: [N] int64 index of each token in the whole batch, unique and below 2^32, for flat
                input.

        Raises:
            DataError: shapes do not match, values inside the mask are not finite, an index is out
                of range, or two rows have the same index. Errors about values and indices are
                raised on every rank of the group.
        """
        _check_shapes(log_probs, entropies, advantages, mask, rows, sequence, index)
        if mask.dim() == 2 and advantages.dim() == 1:
            advantages = advantages[:, None].expand(mask.shape)
        shape, mask = mask.shape, mask.bool()
        fault = self._fault(log_probs, entropies, advantages, mask)
        if mask.dim() == 2:
            sequence, index, number = self._numbered(mask, rows, fault)
        else:
            assert sequence is not None and index is not None
            if _least(index) < 0 or _most(index) >= _LARGEST_INDEX or _least(sequence) < 0:
                fault = 3
            number = self._largest([fault, _most(sequence) + 1], mask.device)[1]
        columns = (log_probs, entropies, advantages, mask, sequence, index)
        batch = _token_batch([each.detach().reshape(-1) for each in columns], number)
        if self._rule_needs_lengths():
            lengths = torch.zeros(number, dtype=torch.int64, device=mask.device)
            batch.sequence_lengths = self._sum(
                lengths.index_add_(0, batch.sequence, batch.loss_mask.long())
            )
        return self._select(batch, shape)

    def state_dict(self) -> dict[str, Any]:
        """Returns a dict of plain Python values, without tensors. The dict contains the method, its
        settings and its state. The values are the same on every rank."""
        return {
            "version": 1,
            "method": self.method,
            "settings": self.settings,
            "state": {name: float(value) for name, value in self._state.items()},
            "updates": self.updates,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continues from a saved state.

        Raises:
            ConfigError: the state belongs to another method, to other settings or to a newer
                version.
        """
        if saved.get("version") != 1:
            raise ConfigError(
                f"the saved state has format {saved.get('version')!r}, and this version reads 1",
                fix="load it with the version of stare-select that wrote it",
            )
        now = {"method": self.method, **self.settings}
        then = {"method": saved["method"], **saved["settings"]}
        changed = sorted(
            name for name in now.keys() | then.keys() if now.get(name) != then.get(name)
        )
        if changed:
            raise ConfigError(
                "the saved state has other settings: "
                + ", ".join(f"{n} was {then.get(n)!r}, now {now.get(n)!r}" for n in changed),
                fix="use the saved settings, or start with a new Selector",
            )
        self._state = {
            name: torch.tensor(saved["state"][name], dtype=torch.float64) for name in self._state
        }
        self.updates = int(saved["updates"])

    def _select(self, batch: TokenBatch, shape: torch.Size) -> Selected:
        rule, device = self._rule, batch.loss_mask.device
        known = gather_statistics(lambda known: rule.requests(batch, known), self.group)
        state = {name: value.to(device) for name, value in self._state.items()}
        state = rule.control(state, known)
        self._state, self.updates = state, self.updates + 1
        narrowed = rule.narrowed(batch, known)
        weights = torch.ones_like(batch.advantage)
        if isinstance(rule, Stare):
            weights = rule.weights(narrowed.kept, known, state)
        weights = torch.where(batch.loss_mask & ~narrowed.kept.loss_mask, 0.0, weights)
        metrics = rule.metrics(known, state)
        if "entropy" in known:
            metrics["entropy/mean"] = known["entropy"]  # type: ignore[assignment]
        return Selected(
            weights=weights.view(shape),
            advantages=(weights * batch.advantage).view(shape),
            codes=rule.selected(batch, known).to(torch.int8).view(shape),
            counted=narrowed.counted.view(shape),
            metrics={name: float(value) for name, value in metrics.items()},
        )

    def _rule_needs_lengths(self) -> bool:
        return getattr(self._rule, "gate", "batch") == "sample"

    def _fault(self, log_probs: Tensor, entropies: Tensor, advantages: Tensor, mask: Tensor) -> int:
        """Returns this rank's error code: a key of _FAULTS, or 0 if there is no fault."""
        if not (log_probs.isfinite() & entropies.isfinite())[mask].all():
            return 1
        return 0 if advantages.isfinite()[mask].all() else 2

    def _numbered(
        self, mask: Tensor, rows: Tensor | None, fault: int
    ) -> tuple[Tensor, Tensor, int]:
        """Returns two tensors [B, T] and the number of sequences. The first tensor contains the
        index of each token's sequence. The second tensor contains the index of each token in the
        padded batch of all ranks."""
        here, device = mask.shape[0], mask.device
        if rows is None:
            rows = torch.arange(here, device=device) + self._rows_before(here, device)
        rows = rows.to(device)
        if _least(rows) < 0:
            fault = 3
        _, number, width = self._largest([fault, _most(rows) + 1, mask.shape[1]], device)
        if number * width > _LARGEST_INDEX or number > 2**26:
            raise DataError(
                f"{number} rows of {width} columns are too many to number",
                where="rows",
                fix="number the rows of the whole batch from 0",
            )
        used = torch.zeros(number, dtype=torch.int64, device=device)
        taken = self._sum(used.index_add_(0, rows, mask.any(1).long()))
        if (taken > 1).any():
            twice = int(taken.argmax())
            raise DataError(
                f"{int(taken.max())} rows have the number {twice}",
                where="rows",
                fix="give each row of the whole batch its own number, on all ranks together",
            )
        columns = torch.arange(mask.shape[1], device=device)
        return rows[:, None].expand(mask.shape), rows[:, None] * width + columns, number

    def _rows_before(self, here: int, device: torch.device) -> int:
        if self.group is None:
            return 0
        mine = torch.tensor([here], device=device)
        all_ = [torch.zeros_like(mine) for _ in range(self.group.size())]
        all_gather(all_, mine, group=self.group)
        return sum(int(each) for each in all_[: get_rank(self.group)])

    def _largest(self, numbers: list[int], device: torch.device) -> list[int]:
        """Returns the maximum of each number over the ranks of the group. The first number is the
        rank's error code: a key of _FAULTS, or 0 if the rank found no error. Raises DataError if
        the error code of any rank is not 0."""
        table = torch.tensor(numbers, dtype=torch.int64, device=device)
        if self.group is not None:
            all_reduce(table, ReduceOp.MAX, group=self.group)
        found = [int(each) for each in table]
        if found[0]:
            raise DataError(_FAULTS[found[0]], fix="look for them on every rank of the group")
        return found

    def _sum(self, table: Tensor) -> Tensor:
        if self.group is not None:
            all_reduce(table, group=self.group)
        return table


def _most(numbers: Tensor) -> int:
    return int(numbers.max()) if numbers.numel() else 0


def _least(numbers: Tensor) -> int:
    return int(numbers.min()) if numbers.numel() else 0


def _token_batch(columns: list[Tensor], number: int) -> TokenBatch:
    log_prob, entropy, advantage, mask, sequence, index = columns
    # padding may hold anything, NaN included
    log_prob, entropy, advantage = (
        torch.where(mask, each.to(torch.float32), 0.0) for each in (log_prob, entropy, advantage)
    )
    return TokenBatch(
        log_prob=log_prob,
        old_log_prob=log_prob,
        rollout_log_prob=log_prob,
        entropy=entropy,
        advantage=advantage,
        loss_mask=mask,
        sequence=sequence,
        position=torch.zeros_like(index),  # no rule of METHODS reads positions
        index=index,
        num_sequences=number,
    )


def _check_shapes(
    log_probs: Tensor,
    entropies: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor | None,
    sequence: Tensor | None,
    index: Tensor | None,
) -> None:
    shape = tuple(mask.shape)
    if mask.dim() not in (1, 2):
        raise DataError(f"mask has shape {shape}, not [B, T] or [N]", where="mask")
    expected = {"log_probs": (log_probs, [shape]), "entropies": (entropies, [shape])}
    expected["advantages"] = (advantages, [shape, shape[:1]])
    if mask.dim() == 2:
        if sequence is not None or index is not None:
            raise DataError("sequence and index are for flat input", fix="pass rows, or nothing")
        if rows is not None:
            expected["rows"] = (rows, [shape[:1]])
    elif sequence is None or index is None or rows is not None:
        raise DataError("flat input needs sequence and index, and no rows", where="mask")
    else:
        expected |= {"sequence": (sequence, [shape]), "index": (index, [shape])}
    for name, (value, shapes) in expected.items():
        if tuple(value.shape) not in shapes:
            raise DataError(f"has shape {tuple(value.shape)}, and mask {shape}", where=name)


def _own_settings(of: type[Grpo]) -> list[str]:
    """Returns the names of a method's own settings, without the settings of the loss."""
    loss = {each.name for each in fields(Grpo)}
    return [each.name for each in fields(of) if each.name not in loss]


def _rule(method: str, settings: Mapping[str, Any]) -> Grpo:
    if method not in METHODS:
        raise ConfigError(
            f"{method!r} does not weigh the tokens of a batch",
            where="method",
            fix=f"one of {', '.join(METHODS)}; other methods change the loss itself",
        )
    of, given = METHODS[method], dict(settings)
    own, hints = _own_settings(of), get_type_hints(of)
    for name, value in given.items():
        if name not in own:
            of_loss = name in {each.name for each in fields(of)}
            what = "belongs to the trainer's loss" if of_loss else f"is no setting of {method}"
            raise ConfigError(what, where=name, fix=f"settings are {', '.join(own)}")
        if get_origin(hints[name]) is Literal and value not in get_args(hints[name]):
            choices = ", ".join(map(str, get_args(hints[name])))
            raise ConfigError(f"{value!r} is none of {choices}", where=name)
    try:
        if isinstance(given.get("spurious"), Mapping):
            given["spurious"] = SpuriousTokens(**given["spurious"])
        return of(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), where=method) from error


def _plain(value: Any) -> Any:
    if isinstance(value, SpuriousTokens):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return value
