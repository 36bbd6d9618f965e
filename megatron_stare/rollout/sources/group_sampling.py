"""Which prompt groups a step trains on: those that come, or those that teach something (dynamic
sampling).

Shape legend: a group is all of a prompt's trajectories.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_stare.errors import DataError
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.metric import Metric
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.rollout.sources.rollout_source import (
    Collected,
    Progress,
    PromptStream,
    Rollouts,
)

METRICS = (
    Metric(
        "sampling/rounds",
        "rounds",
        "of prompts that the step was sampled in",
        "1 or 2; the most allowed: too few groups differ",
    ),
    Metric(
        "sampling/dropped",
        "share",
        "groups that were dropped because their rewards are all equal",
        "any; near 1 a step costs many times its batch",
    ),
    Metric(
        "sampling/filled_up",
        "groups",
        "that teach nothing and were taken all the same, as the rounds gave too few",
        "0",
    ),
    Metric(
        "sampling/given_back",
        "groups",
        "behind the last one taken, whose prompts went back to the stream",
        "any",
    ),
    Metric(
        "sampling/waste",
        "share",
        "sampled tokens that were not trained on",
        "rises with sampling/dropped",
    ),
    Metric(
        "sampling/reward_mean",
        "reward",
        "mean over all groups that were sampled, dropped ones too",
        "rises; reward/mean is of the groups taken",
    ),
)


Group = list[Trajectory]


class Groups(ABC):
    """Makes a step's trajectories of a stream of prompts."""

    @abstractmethod
    async def collect(
        self,
        rollouts: Rollouts,
        params: SamplingParams,
        progress: Progress,
        settled: Callable[[], None],
    ) -> Collected:
        """Trajectories of as many whole groups as a step takes, verified, in canonical order.

        Waits for their verdicts; see Rollouts.made.

        Args:
            settled: called once no more prompts will be taken, nor given back, where that is known
                before the end.
        """

    def kept(self) -> Callable[[], bytes]:
        """Snapshot, between two steps, of the prompts taken and not trained on, for a checkpoint;
        most keep none.

        The bytes are made when the result is called, which may be in the middle of the next step.
        """
        return lambda: b""

    def restore(self, kept: bytes) -> None:
        """Goes on with what `kept` gave. Raises DataError where that cannot be."""
        if kept:
            raise DataError(
                "the checkpoint holds responses under way, but this run does not cut responses"
            )


class EveryGroup(Groups):
    """The groups of the next prompts, whatever their rewards.

    Args:
        groups: prompt groups a step.
        samples: trajectories a prompt.
    """

    def __init__(self, prompts: PromptStream, groups: int, samples: int) -> None:
        self._prompts, self._groups, self._samples = prompts, groups, samples

    async def collect(
        self,
        rollouts: Rollouts,
        params: SamplingParams,
        progress: Progress,
        settled: Callable[[], None],
    ) -> Collected:
        """See Groups."""
        prompts = self._prompts.take(self._groups)
        settled()
        return Collected(await rollouts.made(prompts, self._samples, params, progress), {})


class ReturnablePrompts(PromptStream, Protocol):
    """See data.prompt_queue.PromptQueue."""

    def give_back(self, n: int) -> None: ...


class InformativeGroups(Groups):
    """The first groups, in the order of their prompts, whose rewards differ: dynamic sampling
    (DAPO, arXiv 2503.14476, section 3.2).

    A group whose verified rewards are all equal has no advantage and is dropped, by the verifier's
    rewards and not the shaped ones. Prompts are sampled in rounds. Which groups are taken does not
    depend on the clock, nor on how long responses are: it is settled when the first groups in
    canonical order, all of them whole, hold enough that are informative. What is still being
    sampled then is given up, and prompts behind the last group taken go back to the stream, for the
    next step.

    Where the rounds did not give enough, the step is filled up with dropped groups, the first ones
    first: they push nothing, but their tokens count where a loss is divided by tokens.

    Args:
        groups: prompt groups a step.
        samples: trajectories a prompt.
        per_round: prompt groups that are sampled together; times `most_rounds` at least `groups`.
    """

    def __init__(
        self,
        prompts: ReturnablePrompts,
        groups: int,
        samples: int,
        per_round: int,
        most_rounds: int,
    ) -> None:
        if per_round * most_rounds < groups:
            raise ValueError(f"{most_rounds} rounds of {per_round} groups cannot give {groups}")
        self._prompts, self._groups, self._samples = prompts, groups, samples
        self._per_round, self._most_rounds = per_round, most_rounds

    async def collect(
        self,
        rollouts: Rollouts,
        params: SamplingParams,
        progress: Progress,
        settled: Callable[[], None],
    ) -> Collected:
        """See Groups. What is given up goes back to the stream, so prompts are settled at the end
        alone."""
        taken: list[Group] = []
        dropped: list[Group] = []
        sampled, rounds, surplus = 0, 0, 0
        while len(taken) < self._groups and rounds < self._most_rounds:
            asked = self._prompts.take(self._per_round)
            first = _Settled(asked, self._groups - len(taken))
            made = await rollouts.made(asked, self._samples, params, progress, first.enough)
            rounds, sampled = rounds + 1, sampled + tokens_of(made)
            used = first.groups()
            surplus = len(asked) - len(used)
            self._prompts.give_back(surplus)
            taken += [group for group in used if informative(group)]
            dropped += [group for group in used if not informative(group)]
        short = self._groups - len(taken)
        step = sorted(taken + dropped[:short], key=lambda group: group[0].prompt.cursor)
        trained = sum(tokens_of(group) for group in step)
        everything = [t.reward for group in taken + dropped for t in group if t.reward is not None]
        metrics = {
            "sampling/rounds": rounds,
            "sampling/dropped": len(dropped) / len(taken + dropped),
            "sampling/filled_up": short,
            "sampling/given_back": surplus,
            "sampling/waste": 1 - trained / sampled,
            "sampling/reward_mean": sum(everything) / len(everything)
            if everything
            else float("nan"),
        }
        return Collected([trajectory for group in step for trajectory in group], metrics)


class _Settled:
    """Decides when the whole groups of a round settle which of its groups are used.

    Args:
        prompts: of the round, in canonical order.
        wanted: informative groups.
    """

    def __init__(self, prompts: Sequence[Prompt], wanted: int) -> None:
        self._cursors = [prompt.cursor for prompt in prompts]
        self._wanted = wanted
        self._whole: dict[int, Group] = {}
        self._used = 0  # groups from the first on that are whole, up to the last that is needed

    def enough(self, group: Sequence[Trajectory]) -> bool:
        """Takes a whole group; whether the round is settled with it."""
        self._whole[group[0].prompt.cursor] = sorted(group, key=lambda t: t.sample_index)
        while (
            self._wanted
            and self._used < len(self._cursors)
            and self._cursors[self._used] in self._whole
        ):
            self._wanted -= informative(self._whole[self._cursors[self._used]])
            self._used += 1
        return self._wanted == 0

    def groups(self) -> list[Group]:
        """The groups that are used: those up to the last that is needed, or all."""
        return [self._whole[cursor] for cursor in self._cursors[: self._used]]


def informative(group: Sequence[Trajectory]) -> bool:
    """Returns True if the verified rewards of a prompt differ, so that it has advantages."""
    return len({trajectory.reward for trajectory in group if trajectory.judged}) > 1


def tokens_of(trajectories: Sequence[Trajectory]) -> int:
    """Tokens of the responses."""
    return sum(len(trajectory) for trajectory in trajectories)
