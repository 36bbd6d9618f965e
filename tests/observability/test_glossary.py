"""docs/metrics.md is what the code declares; what runs log is held against it in
support/glossary.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.glossary import explained, names

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_metric_docs  # noqa: E402  # a script

from megatron_stare.observability.metrics import conditions, glossary, rules  # noqa: E402

# what the texts say of alerts, as text: 1e-3 and not 0.001
SAID = {
    "group/degenerate": f"{rules.DEGENERATE_SHARE:g}",
    "response/truncated": f"{rules.TRUNCATED_SHARE:g}",
    "rollout/logprob_diff_max": "1e-3",
    "agreement/trend": f"below {conditions.TREND:g} (alert)",
    "entropy/mean": f"in under {conditions.HALVING_STEPS} steps (alert)",
    "optimizer/grad_norm": f"median of the last {conditions.GRAD_WINDOW} steps (alert above)",
}


@pytest.fixture(scope="module")
def declared() -> list[make_metric_docs.Metric]:
    return make_metric_docs.declared()


def test_the_page_is_made_of_what_is_declared(declared: list[make_metric_docs.Metric]) -> None:
    assert (ROOT / "docs/metrics.md").read_text() == make_metric_docs.page(declared), (
        "run tools/make_metric_docs.py"
    )
    assert names() == {metric.name for metric in declared}  # as the other tests read the page


def test_what_sinks_say_of_a_metric_is_what_is_declared(
    declared: list[make_metric_docs.Metric],
) -> None:
    assert glossary.FILE.read_text() == make_metric_docs.listed(declared), (
        "run tools/make_metric_docs.py"
    )
    assert all(glossary.explained(metric.name) == metric for metric in declared)
    assert glossary.explained("agreement/max_of_age_3") == glossary.explained(
        "agreement/max_of_age_<n>"
    )
    assert glossary.explained("agreement/max_of_age_3") and glossary.explained("own/metric") is None


def test_the_table_of_rules_is_that_of_the_code() -> None:
    assert make_metric_docs.RULES_PAGE.read_text() == make_metric_docs.rules_page(), (
        "run tools/make_metric_docs.py"
    )
    rows = [
        line.split(" | ")
        for line in make_metric_docs.rules_page().splitlines()
        if line.count("|") == 6
    ]
    assert [
        row[0].removeprefix("| ") for row in rows if row[0].removeprefix("| ") in rules.RULES
    ] == [*rules.RULES]


def test_every_rule_names_metrics_that_the_glossary_has() -> None:
    for rule in rules.RULES.values():
        named = (*rule.told_by, *rule.when.metrics, *filter(None, [rule.flag]))
        assert named and all(map(glossary.explained, named)), rule.name


def test_every_declaration_says_all_of_it(declared: list[make_metric_docs.Metric]) -> None:
    assert len(declared) > 100
    for metric in declared:
        assert all((metric.unit, metric.meaning, metric.healthy)), metric.name
        assert metric.name.count("/") == 1


def test_the_limits_of_alerts_are_those_that_are_said(
    declared: list[make_metric_docs.Metric],
) -> None:
    healthy = {metric.name: metric.healthy for metric in declared}
    for name, limit in SAID.items():
        assert limit in healthy[name], name
    assert float(SAID["rollout/logprob_diff_max"]) == rules.LOGPROB_DIFF
    assert (
        f"{conditions.OFF_TARGET_STEPS} steps outside a quarter" in healthy["entropy/mean"]
        and conditions.BAND == 0.25
    )
    assert "within ten times" in healthy["optimizer/grad_norm"] and conditions.GRAD_SPIKE == 10


def test_a_name_that_is_not_declared_is_found() -> None:
    explained(["step", "reward/mean", "agreement/max_of_age_12", "agreement/p999"])
    for name in (
        "reward/median",
        "agreement/max_of_age_x",
        "time/lunch_s",
        "reward/mean2",
        "eval/mine",
    ):
        with pytest.raises(AssertionError, match=name):
            explained(["reward/mean", name])


def test_a_name_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_stare.observability.metrics import step_metrics

    twice = (*step_metrics.METRICS, step_metrics.METRICS[0])
    monkeypatch.setattr(step_metrics, "METRICS", twice)
    with pytest.raises(ValueError, match="reward/mean is declared twice"):
        make_metric_docs.declared()
