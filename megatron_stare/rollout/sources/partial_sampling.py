"""Implements partial rollouts: long responses are cut at the end of a step and continued in a later
step.

A group consists of all responses to one prompt. The number of groups in progress is at least the
number of groups that a step trains on, and normally larger. In each round, every unfinished
response grows until the response is finished or has grown by a fixed number of tokens. Rounds
continue until enough groups are complete. At the end of a step, unfinished responses are kept with
the weight version of every token. Unfinished responses continue in the next step, together with
responses to new prompts.

As in Kimi k1.5 (arXiv 2501.12599, section 2.6.2), a round is limited by a number of tokens, not by
a time. The speed of the engines therefore does not affect which responses finish in a round. The
selection of groups depends only on seeds and weights. As in APRIL (arXiv 2509.18521), more groups
are sampled than a step takes.
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
    """Selects complete groups for each step. If more groups are complete than a step needs, selects
    the groups whose prompts come first in the prompt stream.

    Between steps, this object keeps every prompt that was taken from the stream but neither trained
    on nor dropped. Each prompt of the stream is therefore used at most once. If more groups are
    complete than the current step needs, the surplus groups wait for a later step. The surplus
    groups are the complete groups whose prompts come last in the prompt stream. A complete group
    never waits while the current step still needs groups. Each unfinished response grows in every
    step. The age of a token, in weight versions, is therefore at most `ceil(max_new_tokens /
    tokens) - 1 + (under_way - 1) // groups`.

    If dynamic sampling is off, this object drops no groups. If dynamic sampling is on (see
    InformativeGroups), this object drops every complete group whose rewards are all equal. If a
    step still needs complete groups after a round, new groups replace the dropped groups. If a step
    still has too few groups after its last allowed refill, dropped groups fill up the step, in the
    order in which they were dropped.

    Args:
        groups: number of prompt groups per step.
        samples: number of responses per prompt.
        under_way: number of prompt groups in progress at a time, at least `groups`.
        tokens: number of tokens by which each unfinished response grows in a round.
        refills: maximum number of refills per step, including the refill at the start of the step.
            If `refills` is None, dynamic sampling is off, and the selection of groups ignores
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
        self._under_way: list[list[UnderWay]] = []  # in prompt order

    async def collect(
        self,
        rollouts: Rollouts,
        params: SamplingParams,
        progress: Progress,
        settled: Callable[[], None],
    ) -> Collected:
        """See Groups. Runs rounds. Each round ends when all tokens of the round are sampled, and
        all responses that finished in the round have rewards. If this method fails, the kept
        responses are unusable and the run must end."""
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
        """Begins new groups until the maximum number of groups is in progress. Returns True if
        there was room for at least one new group."""
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
        """Removes and returns the complete groups in which all rewards are equal."""
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
    """Returns the trajectories of a complete group, in sample order. Returns [] if any response of
    the group is unfinished."""
    found = [response.trajectory for response in responses if response.trajectory is not None]
    return found if len(found) == len(responses) else []


def _dropping(
    taken: list[Group], dropped: list[Group], step: list[Group], refills: int
) -> dict[str, float]:
    """Computes the metrics of dynamic sampling; see InformativeGroups."""
    left = taken + dropped  # these are all groups that left `_under_way` in this step
    trained = sum(map(tokens_of, step))
    rewards = [t.reward for group in left for t in group if t.reward is not None]
    return {
        "sampling/rounds": refills,
        "sampling/dropped": len(dropped) / len(left),
        "sampling/filled_up": len(step) - len(taken),
        "sampling/waste": 1 - trained / sum(map(tokens_of, left)),
        "sampling/reward_mean": sum(rewards) / len(rewards) if rewards else float("nan"),
    }
