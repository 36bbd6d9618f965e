"""Selects the groups of trajectories for each training step. A group consists of all trajectories
of one prompt.

Without dynamic sampling, a step trains on the groups of the next prompts, whatever the rewards of
these groups are. With dynamic sampling, a step trains on informative groups, in which the rewards
differ. If there are too few informative groups, the step also trains on uninformative groups.
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
        "rounds of prompts in which the step's responses were sampled",
        "1 or 2; at batch.max_rounds, too few groups have different rewards",
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
        "groups with equal rewards that were taken because the rounds gave too few other groups",
        "0",
    ),
    Metric(
        "sampling/given_back",
        "groups",
        "surplus groups after the last one taken, whose prompts went back to the stream",
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
        "mean reward over all sampled groups, including dropped ones",
        "rises; reward/mean covers only the groups taken",
    ),
)


Group = list[Trajectory]


class Groups(ABC):
    """Makes a step's trajectories from a stream of prompts."""

    @abstractmethod
    async def collect(
        self,
        rollouts: Rollouts,
        params: SamplingParams,
        progress: Progress,
        settled: Callable[[], None],
    ) -> Collected:
        """Returns the verified trajectories of one step, as complete groups in canonical order.

        Waits until all returned trajectories are verified; see Rollouts.made.

        Args:
            settled: called when this method is done with the stream, and no longer takes or returns
                prompts. A method that may use the stream until its end never calls `settled`.
        """

    def kept(self) -> Callable[[], bytes]:
        """Takes a snapshot for a checkpoint, between two steps. The snapshot contains the prompts
        that were taken from the stream but not trained on. Most subclasses keep no prompts between
        steps and return an empty snapshot.

        Returns a function that serializes the snapshot. The returned function may be called later,
        during the next step.
        """
        return lambda: b""

    def restore(self, kept: bytes) -> None:
        """Restores a snapshot from `kept`, the bytes of the serialized snapshot. Raises DataError
        if the snapshot cannot be restored."""
        if kept:
            raise DataError(
                "the checkpoint holds responses under way, but this run does not cut responses"
            )


class EveryGroup(Groups):
    """Selects the groups of the next prompts, whatever the rewards of the groups are.

    Args:
        groups: number of prompt groups per step.
        samples: number of trajectories per prompt.
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
    """Implements dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): selects the first
    informative groups, in prompt order. A group is informative if its trajectories have different
    rewards.

    If all verified rewards of a group are equal, all advantages of the group are 0, and the group
    is dropped. The comparison of rewards uses the verifier's rewards, not the shaped rewards.
    Prompts are sampled in rounds. The selection of groups does not depend on timing or on the
    length of responses. A complete group can be used only if all groups before it in canonical
    order are complete too. The selection is final as soon as the groups that can be used include
    enough informative groups. When the selection is final, the sampling of all other groups is
    cancelled. Prompts that come after the last used group return to the stream for the next step.

    If all rounds together yield too few informative groups, the step also includes some
    uninformative groups, in prompt order, so that the step has enough groups. The uninformative
    groups contribute no gradient. If the loss is divided by the number of tokens, this number
    includes the tokens of the uninformative groups in the step.

    Args:
        groups: number of prompt groups per step.
        samples: number of trajectories per prompt.
        per_round: number of prompt groups that are sampled together in one round. The product of
            `per_round` and `most_rounds` must be at least `groups`.
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
        """See Groups. At the end of a round, this method returns the round's unused prompts to the
        stream. The unused prompts are all prompts that follow the prompt of the last used group. A
        `collect` method can call `settled` to tell its caller that the method no longer uses the
        prompt stream. This `collect` method may use the prompt stream at any time before it
        returns, and therefore never calls `settled`."""
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
    """Selects, among the groups of one round, the groups that a step uses. Examines the complete
    groups in prompt order, up to the first incomplete group. The selection is final as soon as the
    examined groups include `wanted` informative groups.

    Args:
        prompts: the round's prompts, in canonical order.
        wanted: number of informative groups needed.
    """

    def __init__(self, prompts: Sequence[Prompt], wanted: int) -> None:
        self._cursors = [prompt.cursor for prompt in prompts]
        self._wanted = wanted
        self._whole: dict[int, Group] = {}
        self._used = 0  # length of the complete prefix of groups, up to the last group needed

    def enough(self, group: Sequence[Trajectory]) -> bool:
        """Adds a complete group. Returns True if the selection of the round's groups is now
        final."""
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
        """Returns the used groups of the round, in prompt order: all groups up to and including the
        last group that the step needs. Returns all groups of the round if the round has too few
        informative groups."""
        return [self._whole[cursor] for cursor in self._cursors[: self._used]]


def informative(group: Sequence[Trajectory]) -> bool:
    """Returns True if the verified rewards of a group differ. If the rewards differ, the advantages
    of the group are not all 0."""
    return len({trajectory.reward for trajectory in group if trajectory.judged}) > 1


def tokens_of(trajectories: Sequence[Trajectory]) -> int:
    """Returns the number of response tokens of all trajectories."""
    return sum(len(trajectory) for trajectory in trajectories)
