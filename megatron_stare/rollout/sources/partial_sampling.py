"""Partial rollouts: long responses are cut at the end of a step and continued in a later one.

More prompt groups are under way than a step takes. All responses of theirs that are not finished
grow together, by so many tokens a round, until enough groups are whole; the others are kept as they
are, with the weight version of every token, and grow on in the next step before new prompts are
begun. Rounds are cut by tokens and not by the clock (as in Kimi k1.5, arXiv 2501.12599, section
2.6.2), so which groups a step takes hangs on seeds and weights alone; the groups beyond a step's
are those of APRIL (arXiv 2509.18521).

Shape legend: a group is all of a prompt's responses.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_stare.records.batch import SamplingParams
from megatron_stare.records.metric import Metric
from megatron_stare.rollout.sources.group_sampling import Group, Groups, informative, tokens_of
from megatron_stare.rollout.sources.kept import from_bytes, to_bytes
from megatron_stare.rollout.sources.rollout_source import (
    Collected,
    Progress,
    PromptStream,
    Rollouts,
)
from megatron_stare.rollout.sources.under_way import UnderWay

METRICS = (
    Metric(
        "partial/rounds",
        "rounds",
        "in which the step's responses grew",
        "1 to the longest by partial.tokens",
    ),
    Metric(
        "partial/continued",
        "share",
        "responses trained on that have tokens of more than one version",
        "that of the long ones; near 0 groups wait for their step and nothing is gained",
    ),
    Metric("partial/unfinished", "responses", "cut and kept at the end of the step", "any"),
    Metric(
        "partial/kept_tokens",
        "tokens",
        "of all responses kept, those of whole groups that wait included",
        "steady",
    ),
)


class PartialGroups(Groups):
    """The first groups, in the order of their prompts, that are whole.

    Between two steps every prompt that was taken from the stream and not trained on is kept here,
    so each is used once. A group that is whole waits only for older ones, and a response grows in
    every step: no token is older than ceil(max_new_tokens / tokens) - 1 + (under_way - 1) // groups
    versions.

    With dynamic sampling (see InformativeGroups) a group without two different rewards is dropped
    once it is whole, and others are begun in its place after the round. Where so many refills did
    not give enough, the step is filled up with the groups it dropped, the first ones first.

    Args:
        groups: prompt groups a step.
        samples: responses a prompt.
        under_way: prompt groups at a time, at least `groups`.
        tokens: that responses grow by in a round.
        refills: of a step, the one it begins with included; None: groups are taken whatever their
            rewards.
    """

    def __init__(
        self,
        prompts: PromptStream,
        groups: int,
        samples: int,
        under_way: int,
        tokens: int,
        refills: int | None = None,
    ) -> None:
        if under_way < groups:
            raise ValueError(f"a step takes {groups} groups, and {under_way} are under way")
        self._prompts, self._groups, self._samples = prompts, groups, samples
        self._most, self._tokens, self._refills = under_way, tokens, refills
        self._under_way: list[list[UnderWay]] = []  # in the order of their prompts

    async def collect(
        self,
        rollouts: Rollouts,
        params: SamplingParams,
        progress: Progress,
        settled: Callable[[], None],
    ) -> Collected:
        """See Groups. Waits for round after round, each for its last token and last verdict;
        unblocked by them, or by the first error. What was kept is then of no use, and the run
        ends."""
        dropped: list[Group] = []
        rounds, refills = 0, 1
        self._refill(params.step)
        while True:
            await rollouts.carry_on(self._unfinished(), params, progress, tokens=self._tokens)
            rounds += 1
            if self._refills is not None:
                dropped += self._drop()
            whole = [group for each in self._under_way if (group := whole_group(each))]
            if len(whole) >= self._groups:
                break
            if self._refills is not None and refills < self._refills:
                refills += self._refill(params.step)
            if not self._unfinished():
                break
        taken = whole[: self._groups]
        gone = {group[0].prompt.cursor for group in taken}
        self._under_way = [each for each in self._under_way if each[0].prompt.cursor not in gone]
        settled()
        step = sorted(
            taken + dropped[: self._groups - len(taken)], key=lambda group: group[0].prompt.cursor
        )
        metrics = self._metrics(step, rounds)
        if self._refills is not None:
            metrics |= _dropping(taken, dropped, step, refills)
        return Collected([trajectory for group in step for trajectory in group], metrics)

    def kept(self) -> Callable[[], bytes]:
        """See Groups."""
        now = [[response.copy() for response in group] for group in self._under_way]
        return lambda: to_bytes(now)

    def restore(self, kept: bytes) -> None:
        """See Groups."""
        self._under_way = from_bytes(kept)

    def _refill(self, step: int) -> bool:
        """Begins as many groups as there is room for; whether there is any."""
        room = self._most - len(self._under_way)
        self._under_way += [
            [UnderWay(prompt, index, step) for index in range(self._samples)]
            for prompt in self._prompts.take(room)
        ]
        return room > 0

    def _unfinished(self) -> list[UnderWay]:
        return [
            response
            for group in self._under_way
            for response in group
            if response.trajectory is None
        ]

    def _drop(self) -> list[Group]:
        """Lets go of whole groups that teach nothing."""
        found = [
            group
            for each in self._under_way
            if (group := whole_group(each)) and not informative(group)
        ]
        gone = {group[0].prompt.cursor for group in found}
        self._under_way = [each for each in self._under_way if each[0].prompt.cursor not in gone]
        return found

    def _metrics(self, step: list[Group], rounds: int) -> dict[str, float]:
        responses = [response for group in step for response in group]
        kept = [response for group in self._under_way for response in group]
        return {
            "partial/rounds": rounds,
            "partial/continued": sum(
                len({v for v, _ in r.versions if v >= 0}) > 1 for r in responses
            )
            / len(responses),
            "partial/unfinished": sum(response.trajectory is None for response in kept),
            "partial/kept_tokens": sum(response.tokens for response in kept),
        }


def whole_group(responses: list[UnderWay]) -> Group:
    """Its trajectories, in order; none where one is not finished."""
    found = [response.trajectory for response in responses if response.trajectory is not None]
    return found if len(found) == len(responses) else []


def _dropping(
    taken: list[Group], dropped: list[Group], step: list[Group], refills: int
) -> dict[str, float]:
    """The metrics of dynamic sampling; see InformativeGroups."""
    left = taken + dropped  # nothing else has left those under way
    trained = sum(map(tokens_of, step))
    rewards = [t.reward for group in left for t in group if t.reward is not None]
    return {
        "sampling/rounds": refills,
        "sampling/dropped": len(dropped) / len(left),
        "sampling/filled_up": len(step) - len(taken),
        "sampling/waste": 1 - trained / sum(map(tokens_of, left)),
        "sampling/reward_mean": sum(rewards) / len(rewards) if rewards else float("nan"),
    }
