"""A user's method that needs the sums over the vocabulary and does not say more."""

from dataclasses import dataclass

from megatron_stare.algorithms.grpo import Grpo


@dataclass(frozen=True, kw_only=True)
class ReadsSums(Grpo):
    @property
    def needs_second_moment(self) -> bool:
        return True
