"""Which settings a method refuses: each limit from both sides."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_stare.algorithms.shaping import LengthPenalty
from megatron_stare.config.load import build_method
from megatron_stare.errors import ConfigError

CLIPPED = (
    "grpo",
    "dapo",
    "gtpo",
    "grpo_s",
    "gspo",
    "stare",
    "stapo",
    "twenty_entropy",
    "clip_cov",
    "cispo",
)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "kl_cov", "share": 1.0, "coef": 0.0},
        {"name": "twenty_entropy", "share": 1.0},
        {"name": "clip_cov", "share": 1.0, "cov_low": 0.0, "cov_high": 0.1},
        {"name": "gtpo", "alpha1": 0.0, "alpha2": 0.1, "eps": 0.0},
        {"name": "gtpo", "alpha1": 0.9, "alpha2": 0.1},
        {"name": "gtpo", "alpha2": 0.0, "entropy_clamp": [0.0, 0.5]},
        {"name": "grpo_s", "beta1": 0.0, "beta2": 0.1, "eps": 0.0},
        {"name": "grpo_s", "beta1": 0.9, "beta2": 0.1},
        {"name": "stare", "share": 1.0, "amplify": 1.0, "attenuate": 1.0},
        {"name": "stare", "share": 0.0, "attenuate": 0.1, "rare_below": 0.999},
        {"name": "stapo", "tau_p": 0.999, "quantile": 1.0},
        {"name": "stapo", "quantile": 0.0},
    ],
    ids=str,
)
def test_what_lies_just_within_is_taken(settings: dict[str, Any]) -> None:
    build_method(settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "kl_cov", "share": 1.001}, "share must lie in"),
        ({"name": "kl_cov", "share": 0.0}, "share must lie in"),
        ({"name": "kl_cov", "coef": -0.001}, "coef be at least 0"),
        ({"name": "twenty_entropy", "share": 1.001}, "share must lie in"),
        ({"name": "twenty_entropy", "share": 0.0}, "share must lie in"),
        ({"name": "clip_cov", "share": 1.001}, "share must lie in"),
        ({"name": "clip_cov", "share": 0.0}, "share must lie in"),
        ({"name": "clip_cov", "cov_low": 5.0}, "cov_low below cov_high"),
        ({"name": "gtpo", "alpha1": -0.001}, "at least 0"),
        ({"name": "gtpo", "alpha2": -0.001}, "at least 0"),
        ({"name": "gtpo", "eps": -1e-9}, "at least 0"),
        ({"name": "gtpo", "alpha1": 0.0, "alpha2": 0.0}, "one alpha above"),
        ({"name": "gtpo", "entropy_clamp": [-0.001, 1.0]}, "entropy_clamp"),
        ({"name": "gtpo", "entropy_clamp": [1.0, 1.0]}, "entropy_clamp"),
        ({"name": "grpo_s", "beta1": 0.0, "beta2": 0.0}, "one beta above"),
        ({"name": "stare", "share": 1.001}, "share must lie in"),
        ({"name": "stare", "share": -0.001}, "share must lie in"),
        ({"name": "stare", "amplify": 0.999}, "amplify must be at least 1"),
        ({"name": "stare", "attenuate": 0.0}, "attenuate in"),
        ({"name": "stare", "attenuate": 1.001}, "attenuate in"),
        ({"name": "stare", "rare_below": 0.0}, "rare_below"),
        ({"name": "stare", "rare_below": 1.0}, "rare_below"),
        ({"name": "stapo", "tau_p": 0.0}, "tau_p"),
        ({"name": "stapo", "tau_p": 1.0}, "tau_p"),
        ({"name": "stapo", "quantile": 1.001}, "quantile"),
    ],
    ids=str,
)  # fmt: skip
def test_what_lies_just_outside_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_method(settings)


@pytest.mark.parametrize("name", CLIPPED)
def test_every_method_with_a_clip_keeps_its_limits(name: str) -> None:
    """And those of what all methods have, whose aggregation wants its constant."""
    for wrong in (
        {"clip_low": 0.0},
        {"clip_low": 1.001},
        {"clip_high": 0.0},
        {"aggregation": "dr_grpo"},
    ):
        with pytest.raises(ConfigError, match=r"clip_low must lie in|needs length_norm"):
            build_method({"name": name, **wrong})
    build_method({"name": name, "clip_low": 1.0, "clip_high": 0.001})


def test_the_least_share_from_which_a_prompt_is_easy() -> None:
    with pytest.raises(ValueError, match="easy_from"):
        LengthPenalty(easy_from=0.0)
    with pytest.raises(ValueError, match="easy_from"):
        LengthPenalty(easy_from=1.001)
    LengthPenalty(easy_from=1.0)
