"""Compares four controllers of STARE's weights W and M: how closely does the entropy follow its
target?

    gate        W and M are fixed, and act while the batch's entropy is below the target
    adaptive    a gate whose W and M move by a fixed amount in every step
    pi          W and M follow the gap and the sum of the gaps, without a forecast
    predictive  the method `stare_predictive`: forecasts the step's change of entropy, learns the
                forecast's gain, and chooses W and M for the change that leads to the target

Each controller gets the same number of settings. The setting with the least error in the nominal
condition, on seeds of its own, is used in all conditions. The error is the root mean square of the
exact entropy minus the target.

    python benchmarks/laboratory/control.py --out benchmarks/results/laboratory_control.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from simulate import Sample, coupled, gradient, log_softmax_at, sample
from torch import Tensor
from twins import StareTwin, State, Tokens
from worlds import World, first_state, rare

from megatron_stare.algorithms.sensitivity import is_rare
from megatron_stare.algorithms.stare_predictive import StarePredictive

sys.path.append(str(Path(__file__).parents[1]))
from machine import machine

W_MAX, M_MIN = 5.0, 0.05  # what every controller may use
STEPS, GROUP, LR, TARGET = 500, 16, 1.0, 0.6
SWEEP_SEED, SEED = 1, 2  # of the worlds in which settings are chosen, and compared


@dataclass(frozen=True)
class Control(StareTwin):
    """STARE C2 whose weights a controller chooses. The base class is the gate."""

    variant: str = "C2"
    share: float = 0.3
    amplify_max: float = W_MAX
    attenuate_min: float = M_MIN

    @property
    def needs_phi(self) -> bool:
        return True

    def aim(self, state: State, batch: Sample, path: Callable[[int], float], step: int) -> State:
        """Chooses W and M for a step. `path` gives the target of every step."""
        return replace(self, entropy_target=path(step)).control(state, batch.entropy.mean(-1))

    def learn(self, state: State, change: Tensor) -> State:
        """Reads the measured change of the entropy, [K] nats, of the step's own tokens."""
        return state


@dataclass(frozen=True)
class Pi(Control):
    """A PI controller: the strength of both weights between none (0) and the largest (1)."""

    proportional: float = 3.0
    integral: float = 0.1

    def start(self, seeds: int) -> State:
        return {**super().start(seeds), "sum": torch.zeros(seeds, dtype=torch.float64)}

    def aim(self, state: State, batch: Sample, path: Callable[[int], float], step: int) -> State:
        gap = 1 - batch.entropy.mean(-1) / path(step)
        total = state["sum"] + gap
        wanted = self.proportional * gap + self.integral * total
        strength = wanted.clamp(0, 1)
        # a sum that would only saturate the strength further does not grow
        held = (wanted - strength) * gap > 0
        return {
            **state,
            "sum": torch.where(held, state["sum"], total),
            "amplify": 1 + strength * (self.amplify_max - 1),
            "attenuate": 1 - strength * (1 - self.attenuate_min),
        }


@dataclass(frozen=True, kw_only=True)
class AlongPath(StarePredictive):
    """The project's method with a target of any form, for [K] seeds at once."""

    path: Callable[[int], float]

    def target(self, step: Tensor) -> Tensor:
        return torch.full_like(step, self.path(int(step[0])))


@dataclass(frozen=True)
class Predictive(Control):
    """The project's method `stare_predictive`, whose own code controls the weights.

    `sign`: -1 negates the forecast, to see whether the controller notices.
    """

    approach: float = 0.2
    trust: float = 0.15
    sign: float = 1.0

    def method(self, path: Callable[[int], float]) -> AlongPath:
        return AlongPath(
            path=path,
            entropy_target=path(0),
            amplify=self.amplify,
            attenuate=self.attenuate,
            amplify_max=self.amplify_max,
            attenuate_min=self.attenuate_min,
            approach=self.approach,
            trust=self.trust,
        )

    def start(self, seeds: int) -> State:
        return {
            name: torch.full((seeds,), value, dtype=torch.float64)
            for name, value in self.method(constant).initial_state().items()
        }

    def rare(self, tokens: Tokens, sign: int) -> Tensor:
        assert tokens.phi is not None
        return super().rare(tokens, sign) & is_rare(tokens.phi)

    def aim(self, state: State, batch: Sample, path: Callable[[int], float], step: int) -> State:
        assert batch.phi is not None
        tokens = Tokens(
            batch.old_log_prob, batch.old_log_prob, batch.entropy, batch.advantage, None, batch.phi
        )
        change = -self.sign * batch.advantage * batch.phi
        plus, minus = (torch.where(self.rare(tokens, sign), change, 0.0) for sign in (1, -1))
        statistics = {
            "entropy": batch.entropy.mean(-1),
            "predictive/plain": change.mean(-1),
            "predictive/plus": plus.mean(-1),
            "predictive/minus": minus.mean(-1),
        }
        return self.method(path).control(state, statistics)

    def learn(self, state: State, change: Tensor) -> State:
        return self.method(constant).observe(state, change)


def constant(step: int) -> float:
    return TARGET


def prompts_that_share(seeds: int, seed: int) -> World:
    """Returns a world in which the weights can both raise and lower the entropy at the target."""
    return rare(seeds, rarity=1.0, better=0.1, coupling=0.75, seed=seed)


def other_prompts_later(seeds: int, seed: int) -> World:
    later = prompts_that_share(seeds, seed + 1000).rewards
    return replace(prompts_that_share(seeds, seed), later=later, changes_at=250)


@dataclass(frozen=True)
class Condition:
    """A training of its own kind; the defaults are the nominal training.

    `target`: target of a step.
    `lr`: factor on the learning rate of a step.
    `stale`: True samples from the policy before the last update.
    `world`: makes the worlds.
    `judged`: the steps whose error counts.
    `negated`: True shows the predictive controller a negated forecast.
    """

    target: Callable[[int], float] = constant
    lr: Callable[[int], float] = lambda step: 1.0
    stale: bool = False
    world: Callable[[int, int], World] = prompts_that_share
    judged: tuple[int, int] = (250, STEPS)
    negated: bool = False


def ramp(begins: float, ends: float) -> Callable[[int], float]:
    """Returns a target that moves between steps 200 and 400."""
    return lambda step: begins + (ends - begins) * min(max((step - 200) / 200, 0.0), 1.0)


CONDITIONS: dict[str, Condition] = {
    "nominal": Condition(),
    "target_step": Condition(lambda step: 0.6 if step < 250 else 0.8),
    "ramp_down": Condition(ramp(0.9, 0.5), judged=(200, 400)),
    "ramp_up": Condition(ramp(0.5, 0.9), judged=(200, 400)),
    "lr_schedule": Condition(lr=lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS))),
    "stale": Condition(stale=True),
    "new_data": Condition(world=other_prompts_later),
    "gain_halved": Condition(lr=lambda step: 1.0 if step < 250 else 0.5),
    "negated": Condition(negated=True),
}


def settings_of(name: str) -> Iterator[Control]:
    """Yields the 12 settings of a controller that are tried."""
    if name == "gate":
        for w, m in itertools.product((1.5, 2.0, 3.0, W_MAX), (M_MIN, 0.2, 0.5)):
            yield Control(amplify=w, attenuate=m)
    elif name == "adaptive":
        for rate, start in itertools.product((0.01, 0.02, 0.05, 0.1), (1.0, 1.5, 3.0)):
            yield Control(adaptive=True, adapt_rate=rate, amplify=start, attenuate=1 / start)
    elif name == "pi":
        for p, i in itertools.product((3.0, 10.0, 30.0, 100.0), (0.1, 0.3, 1.0)):
            yield Pi(proportional=p, integral=i)
    else:
        for approach, trust in itertools.product((0.1, 0.2, 0.35, 0.5), (0.15, 0.3, 0.6)):
            yield Predictive(approach=approach, trust=trust, amplify=3.0, attenuate=0.2)


CONTROLLERS = ("gate", "adaptive", "pi", "predictive")


def exact_entropy(world: World, logits: Tensor) -> Tensor:
    """Returns the mean entropy of a response's choices, [K] nats, by enumeration."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    entropies = -(p * log_p).sum(-1)
    reach = torch.ones((*logits.shape[:2], 1), dtype=torch.float64)
    entropy = torch.zeros(logits.shape[:2], dtype=torch.float64)
    for level in range(world.depth):
        first = first_state(world.actions, level)
        here = slice(first, first + world.actions**level)
        entropy += (reach * entropies[:, :, here]).sum(-1)
        reach = (reach[..., None] * p[:, :, here]).flatten(2)
    return (entropy / world.depth).mean(-1)


def errors(control: Control, condition: Condition, seeds: int, seed: int) -> Tensor:
    """Trains and returns each seed's error, [K] nats."""
    world = condition.world(seeds, seed)
    if condition.negated and isinstance(control, Predictive):
        control = replace(control, sign=-1.0)
    logits, before = world.logits.clone(), world.logits.clone()
    generator = torch.Generator().manual_seed(seed)
    state, squares = control.start(seeds), []
    for step in range(STEPS):
        source = before if condition.stale else logits
        batch = sample(world, source, step, GROUP, generator, with_phi=True)
        before = logits.clone()
        state = control.aim(state, batch, condition.target, step)
        scale = LR * condition.lr(step) * logits.shape[1] * world.depth
        slope = gradient(world, logits, batch, control, state, moved=condition.stale)
        logits += coupled(slope, world.coupling).mul_(scale)
        here, there = (log_softmax_at(each, batch.state) for each in (logits, before))
        change = -(here.exp() * here).sum(-1) + (there.exp() * there).sum(-1)
        state = control.learn(state, change.mean(-1))
        if step >= condition.judged[0] and step < condition.judged[1]:
            squares.append((exact_entropy(world, logits) - condition.target(step + 1)) ** 2)
    return torch.stack(squares).mean(0).sqrt()


def compared(found: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compares the predictive controller with the best of the others: the mean paired ratio of
    errors, geometric, with the upper end of its 95 % interval over seeds."""
    means = {name: float(values.mean()) for name, values in found.items()}
    best = min((name for name in found if name != "predictive"), key=means.__getitem__)
    logs = (found["predictive"] / found[best]).log()
    half = 1.984 * float(logs.std()) / math.sqrt(len(logs))
    middle = float(logs.mean())
    return {
        "error": means,
        "best_other": best,
        "ratio": math.exp(middle),
        "ratio_upper": math.exp(middle + half),
    }


def of_job(job: tuple[Control, str, int, int]) -> Tensor:
    """Returns `errors` of a controller in a condition, in a process of the pool."""
    control, condition, seeds, seed = job
    torch.set_num_threads(1)
    return errors(control, CONDITIONS[condition], seeds, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        chosen, tried = {}, {}
        for name in CONTROLLERS:
            settings = list(settings_of(name))
            jobs = [(each, "nominal", args.seeds // 2, SWEEP_SEED) for each in settings]
            means = [float(found.mean()) for found in pool.map(of_job, jobs, chunksize=1)]
            chosen[name] = settings[means.index(min(means))]
            tried[name] = [round(mean, 5) for mean in means]
            print(name, tried[name], chosen[name], flush=True)
        told: dict[str, Any] = {
            "machine": machine(),
            "seeds": args.seeds,
            "chosen": {name: str(each) for name, each in chosen.items()},
            "sweep": tried,
            "conditions": {},
        }
        for name in CONDITIONS:
            jobs = [(chosen[each], name, args.seeds, SEED) for each in CONTROLLERS]
            found = pool.map(of_job, jobs, chunksize=1)
            told["conditions"][name] = compared(dict(zip(CONTROLLERS, found, strict=True)))
            print(name, json.dumps(told["conditions"][name]), flush=True)
            args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
