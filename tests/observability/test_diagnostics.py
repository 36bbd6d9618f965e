"""The report's charts of forecasts and signals, and the fit they state."""

import math

import pytest
from test_report import Page

from megatron_stare.algorithms import gradient_norm
from megatron_stare.observability.metrics.paired import forecast_fit
from megatron_stare.observability.report.diagnostic_charts import (
    ENTROPIES,
    PROBABILITIES,
    parts,
    token_norms,
)
from megatron_stare.observability.report.page import write_report
from megatron_stare.run_dir.json_lines import to_line
from megatron_stare.run_dir.run_files import read_runs

EVERY = 5
SCALE, LR = 50.0, 0.01


def make_run(directory, steps=40, forecast=True, **more):
    directory.mkdir()
    (directory / "config.yaml").write_text(f"run: {{name: {directory.name}}}\n")
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "reward/mean": 0.5,
                "entropy/mean": 0.2,
                "optimizer/lr": LR * step / steps,
            }
            if forecast:
                rate = -0.01 + 0.0001 * step
                row |= {
                    "forecast/entropy_change": rate,
                    "forecast/rare_share": 0.1,
                    "forecast/neutral_weight": 2.0,
                }
                masses = ("common_plus", "rare_plus", "common_minus", "rare_minus")
                row |= {
                    f"forecast/mass_{name}": value
                    for name, value in zip(masses, (-1, 0.5, 1, -2), strict=True)
                }
                if step % EVERY == 0:
                    row["forecast/measured_change"] = SCALE * row["optimizer/lr"] * rate
                row |= {
                    "signal/length_right": 20.0,
                    "signal/length_wrong": 30.0,
                    "signal/repetition": 0.01,
                }
            file.write(to_line({**row, **more}))
    return directory


def page_of(tmp_path, *runs):
    return Page(write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8"))


def test_the_fit():
    # sum f m = 1*1 + 2*3 + -1*-2 = 9, sum f^2 = 6
    fit = forecast_fit([1.0, 2.0, -1.0], [1.0, 3.0, -2.0])
    assert fit.scale == pytest.approx(1.5)
    assert fit.correlation == pytest.approx(
        (9 - 3 * (2 / 3) * (2 / 3)) / math.sqrt((6 - 4 / 3) * (14 - 4 / 3))
    )
    assert (fit.same_sign, fit.points) == (1.0, 3)
    assert forecast_fit([1.0, 1.0], [1.0, -1.0]).same_sign == 0.5
    assert math.isnan(forecast_fit([1.0], [2.0]).correlation)
    assert forecast_fit([], []) is None
    assert forecast_fit([0.0], [1.0]) is None


def test_what_was_recorded_is_drawn(tmp_path):
    page = page_of(
        tmp_path, make_run(tmp_path / "run", **{"stare/gate": 1.0, "stare/amplify": 1.5})
    )
    for words in (
        "Entropy forecast",
        "correlation 1.00, same sign in 100% of 8 steps, scale 50.0",
        "U+ common, rewarded",
        "Dashed: the weight that STARE used.",
        "Signs of reward hacking",
        "Solid: right. Dashed: wrong.",
    ):
        assert words in page.text
    assert "Answers in the right format" not in page.text  # the verifier did not say


def test_a_forecast_is_compared_at_the_steps_that_were_measured(tmp_path):
    (change, *_), _ = (part.charts for part in parts(read_runs([make_run(tmp_path / "run")])))
    assert list(change.lines[0].steps) == list(range(EVERY, 41, EVERY))
    assert list(change.targets[0].values) == pytest.approx(list(change.lines[0].values))


def test_one_measurement_has_no_correlation(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "run", steps=EVERY))
    assert "same sign in 100% of 1 steps" in page.text
    assert "correlation nan" not in page.text


def test_several_runs(tmp_path):
    runs = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b"),
        make_run(tmp_path / "old", forecast=False),
    ]
    page = page_of(tmp_path, *runs)
    for words in (
        "Pull on the entropy, a",
        "Pull on the entropy, b",
        "a: correlation 1.00",
        "b: correlation 1.00",
    ):
        assert words in page.text
    assert "Pull on the entropy, old" not in page.text


def test_a_run_without_them_has_no_such_parts(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "old", forecast=False))
    assert "Entropy forecast" not in page.text
    assert "reward hacking" not in page.text


def test_the_proxys_precision_and_what_its_tokens_did_in_all(tmp_path):
    sets = {
        "forecast/precision_plus": 0.75,
        "forecast/a_phi_plus": -0.5,
        "forecast/a_phi_common_minus": -0.25,
    }
    bounds = {
        "gradient/logit_norm": 2.0,
        "gradient/logit_norm_low": 1.0,
        "gradient/logit_norm_high": 3.0,
    }
    run = make_run(tmp_path / "run", **sets, **bounds)
    rows = (run / "metrics.jsonl").read_text().replace('a_phi_plus": -0.5', 'a_phi_plus": null', 1)
    (run / "metrics.jsonl").write_text(rows)  # the first step had none
    entropy, _ = parts(read_runs([run]))
    charts = {chart.title: chart for chart in entropy.charts}
    assert [line.label for line in charts["Proxy precision"].lines] == ["L+"]
    first, second = charts["Cumulative ΣÂΦ"].lines
    assert (first.label, second.label) == ("L+", "U−")
    assert list(first.values) == pytest.approx([-0.5 * step for step in range(40)])
    assert list(second.values) == pytest.approx([-0.25 * step for step in range(1, 41)])
    norm = charts["Gradient in the logits"]
    assert norm.lines[0].values[0] == 2.0
    assert [line.values[0] for line in norm.targets] == pytest.approx([1.0, 3.0])


def test_an_outlier_does_not_flatten_the_others(tmp_path):
    run = make_run(tmp_path / "run", steps=60)
    rows = (run / "metrics.jsonl").read_text().replace('weight": 2.0', 'weight": -900.0', 1)
    (run / "metrics.jsonl").write_text(rows)
    entropy, _ = parts(read_runs([run]))
    weight = next(chart for chart in entropy.charts if chart.title == "W*")
    assert -900 in weight.lines[0].values
    assert (weight.y_floor, weight.y_limit) == (-2.4, 2.4)


def test_norms_of_tokens_are_a_table_of_the_newest_measurement(tmp_path):
    assert (gradient_norm.PROBABILITIES, gradient_norm.ENTROPIES) == (PROBABILITIES, ENTROPIES)
    cells = {f"gradient/token_norm_{n}": 0.05 * n for n in range(20)}
    cells |= {f"gradient/token_share_{n}": n / 190 for n in range(20)}
    run = make_run(tmp_path / "run", steps=3, **cells)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(to_line({"step": 4, "reward/mean": 0.5}))
    found = token_norms(read_runs([run])[0])
    assert found.step == 3 and found.columns == [
        "below 0.1",
        "0.1 to 0.5",
        "0.5 to 1.5",
        "1.5 and above",
    ]
    assert [row[0] for row in found.rows] == [
        *("below 0.002", "0.002 to 0.05", "0.05 to 0.5", "0.5 to 0.9", "0.9 and above"),
    ]
    assert [float(row[1]) for row in found.rows] == [1.41, 1.41, 1.38, 1, 0.447]
    assert found.rows[0][2][0] is None and found.rows[4][2][0] == ("0.800", "8.42%")
    page = page_of(tmp_path, run)
    assert "The gradient of a token" in page.text and "0.800 (8.42%)" in page.text
    assert "The gradient of a token" not in page_of(tmp_path, make_run(tmp_path / "none")).text
