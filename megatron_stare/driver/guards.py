"""Judges a step by the guards' rules, before and after its updates, and says what the run is to do about it.

The rules are those of observability/metrics/rules.py that have settings in the section `guards`. What a step is
compared with comes from the metrics of the run, so a resume goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_stare.config.guards_section import GuardsConfig
from megatron_stare.errors import GuardError, RollBack
from megatron_stare.observability.metrics.conditions import Condition, Judge, Spike
from megatron_stare.observability.metrics.rules import LEAST_AGREEMENT, RULES, said
from megatron_stare.records.metric import Metric

METRICS = (
    *(
        metric
        for name, what, key in (
            ("loss", "loss/policy", "loss"),
            ("grad_norm", "the largest gradient norm of the step's updates", "grad_norm"),
            ("agreement", "the mean difference of engine and trainer", "agreement"),
        )
        for metric in (
            Metric(
                f"guard/{name}",
                "spreads",
                f"of {what}, its distance from the median of the guards.window steps before it",
                f"below guards.{key}.spreads",
            ),
            Metric(
                f"guard/{name}_spike",
                "0 or 1",
                f"1: {what} is guards.{key}.spreads or more away from that median",
                f"0; 1 is an alert, or what guards.{key}.action says",
            ),
        )
    ),
    Metric(
        "guard/entropy_outside",
        "0 or 1",
        "1: entropy/mean is below guards.entropy.low or above guards.entropy.high",
        "0; 1 is an alert, or what guards.entropy.action says",
    ),
    Metric(
        "guard/rollbacks",
        "rollbacks",
        "of the run so far; missing before the first",
        "few; guards.rollbacks more than that stop the run",
    ),
    Metric("guard/left_out", "prompts", "that rollbacks left out of the data so far", "a few steps' batches"),
    Metric(
        "update/held",
        "updates",
        "not taken because their gradient norm was a spike, with guards.grad_norm.action: stop or rollback",
        "0",
    ),
)

ENDS = ("stop", "rollback")


@dataclass(frozen=True)
class Fired:
    """A guard whose figure is out of bounds at a step, and what is to be done. text: what was measured."""

    step: int
    guard: str
    action: str
    text: str
    prompts: tuple[int, ...]  # cursors of the step's prompts


# In the order in which a step's reasons are told.
BY_GUARD = {
    name: next(r for r in RULES.values() if r.guard == name) for name in ("loss", "grad_norm", "agreement", "entropy")
}


class Guards:
    """The guards of a run.

    Args:
        dtype: of the model in training.
    """

    def __init__(self, config: GuardsConfig, dtype: str) -> None:
        self._config = config
        self._actions = {name: getattr(config, name).action for name in BY_GUARD}
        self._conditions = {name: _configured(name, config, dtype) for name in BY_GUARD}
        self._judge = Judge(self._conditions)
        self.fired: list[Fired] = []  # of the last step

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Takes the metrics of a resumed run's steps, oldest first: figures are compared with those of the whole
        run."""
        for row in rows:
            self._judge.remember(row)

    def norm_limit(self, agreement: Mapping[str, float]) -> float:
        """The gradient norm above which an update is not to be taken; inf: none is.

        Args:
            agreement: metrics of the step's log-prob pass, as far as engine and trainer were compared there. Where
                they are a spike that ends the run, no update is to be taken: the limit is 0.
        """
        if self._actions["agreement"] in ENDS and self._judge.judge("agreement", agreement).holds:
            return 0.0
        spike = self._conditions["grad_norm"]
        assert isinstance(spike, Spike)
        return spike.limit(self._judge.windows["grad_norm"]) if self._actions["grad_norm"] in ENDS else math.inf

    def judge(self, step: int, metrics: Mapping[str, float], prompts: Sequence[int]) -> dict[str, float]:
        """The guards' metrics of a step, from the trainer's; `fired` is what they say is to be done.

        Args:
            prompts: cursors of the step's prompts.
        """
        told: dict[str, float] = {}
        self.fired = []
        for name, rule in BY_GUARD.items():
            found = self._judge.judge(name, metrics)
            if self._actions[name] == "off" or not found.measured:  # there is nothing to compare with
                continue
            if "away" in found.measured:
                told[f"guard/{name}"] = float(found.measured["away"])
            told[rule.flag] = float(found.holds)
            if found.holds:
                text = said(rule.error, metrics, found)
                self.fired.append(Fired(step, name, self._actions[name], text, tuple(prompts)))
        self._judge.remember(metrics)
        return told

    @property
    def ends(self) -> bool:
        """Whether the last step is to end the run, or to send it back, so that its state is not to be kept."""
        return any(each.action in ENDS for each in self.fired)

    def heed(self, rollbacks: int) -> None:
        """Ends the run where the last step's figures say so, after they were logged and before the step is saved.

        Args:
            rollbacks: made so far.

        Raises:
            RollBack: the run is to go back and leave the step's prompts out.
            GuardError: it is to stop, or too often went back.
        """
        ending = sorted((each for each in self.fired if each.action in ENDS), key=lambda each: ENDS.index(each.action))
        if not ending:
            return
        first = ending[0]
        where, text = f"step {first.step}", "; ".join(each.text for each in ending)
        fix = f"look at the step's batch in the folder guards/, or change guards.{first.guard}"
        if first.action == "stop":
            raise GuardError(text, where=where, fix=fix)
        if rollbacks >= self._config.rollbacks:
            raise GuardError(
                f"{text}; the run has gone back {rollbacks} times already",
                where=where,
                fix=f"{fix}, or guards.rollbacks",
            )
        raise RollBack(first.step, text, first.prompts)


def _configured(name: str, config: GuardsConfig, dtype: str) -> Condition:
    """The condition of a guard as a run sets it."""
    rule = BY_GUARD[name]
    if name == "entropy":
        low, high = config.entropy.low, config.entropy.high
        return rule.given(low=-math.inf if low is None else low, high=math.inf if high is None else high)
    least = LEAST_AGREEMENT[dtype] if name == "agreement" else -math.inf
    return rule.given(spreads=getattr(config, name).spreads, steps=config.window, known=config.known, least=least)
