"""One aligned, plain line a step, and a sober estimate of the time left."""

import io
import math

import pytest

from megatron_stare.observability.metrics.rules import Watch
from megatron_stare.observability.terminal.progress import RemainingTime, StepPrinter, clock

METRICS = {
    "reward/mean": 0.734,
    "entropy/mean": 0.1119,
    "entropy/target": 0.1,
    "stare/gate": 1.0,
    "response/length_mean": 17.3,
    "perf/tokens_per_s": 4210.2,
    "time/step_s": 1.21,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(*steps, total=260, out=None):
    out = out or io.StringIO()
    printer, watch = StepPrinter(total, out=out), Watch()
    for step, metrics in steps:
        printer.step(step, metrics)
        printer.alerts(watch.add(step, metrics), tuple(watch.active.values()))
    return out.getvalue().splitlines()


def test_the_line_says_it_all():
    (line,) = printed((12, METRICS))
    assert (
        line
        == "step  12/260  reward 0.734  entropy 0.112 (target 0.100)  gate on   length   17.3  "
        " 4,210 tok/s   1.21 s/step  left 5:00"
    )


def test_columns_stay_in_place():
    off = METRICS | {
        "stare/gate": 0.0,
        "response/length_mean": 1234.5,
        "perf/tokens_per_s": 98.0,
        "time/step_s": 12.0,
    }
    first, second = printed((1, METRICS), (100, off))
    for word in ("reward", "entropy", "gate", "length", "tok/s", "s/step", "left"):
        assert first.index(word) == second.index(word)
    assert "gate off" in second


def test_a_method_without_target_or_gate_has_no_such_columns():
    (line,) = printed((1, {"reward/mean": 0.5, "entropy/mean": 0.2, "time/step_s": 1.0}))
    assert line == "step   1/260  reward 0.500  entropy 0.200   1.00 s/step  left 4:19"


def test_a_metric_missing_once_leaves_a_dash_in_its_column():
    first, second = printed(
        (1, METRICS), (2, {k: v for k, v in METRICS.items() if k != "reward/mean"})
    )
    assert "reward     -  entropy" in second
    assert len(first) == len(second)


def test_no_metrics_and_nan_are_no_reason_to_fail():
    bare, nan = printed((1, {}), (2, {"reward/mean": math.nan, "time/step_s": math.nan}))
    assert bare.startswith("step   1/260")
    assert "reward   nan" in nan


@pytest.mark.parametrize(
    ("out", "no_color", "term", "coloured"),
    [
        (Terminal, "", "xterm", True),
        (Terminal, "1", "xterm", False),
        (Terminal, "", "dumb", False),
        (io.StringIO, "", "xterm", False),
    ],
)
def test_colour_only_on_a_terminal_that_wants_it(monkeypatch, out, no_color, term, coloured):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    (line,) = printed((1, METRICS), out=out())
    assert ("\033[" in line) is coloured


def test_notes_and_warnings(capsys):
    printer = StepPrinter(3)  # stdout of the moment, so that redirection and capture work
    printer.note("checkpoint written")
    printer.warn("3 answers timed out")
    assert capsys.readouterr().out == "checkpoint written\nwarning: 3 answers timed out\n"


def test_phases_and_progress_print_nothing():
    out = io.StringIO()
    with StepPrinter(3, out=out) as printer:
        printer.start("runs/a", "stare")
        printer.restore([{"step": 1, "reward/mean": 0.5}])
        with printer.phase("rollout"):
            printer.rollout_progress(1, 2)
    assert out.getvalue() == "run directory runs/a\n"


def test_an_alert_is_a_line_when_it_begins_and_one_when_it_is_over():
    failing = METRICS | {"reward/crashes": 2.0}
    lines = printed(*((step, failing if step in (3, 4) else METRICS) for step in range(1, 13)))
    remarks = [(i, line) for i, line in enumerate(lines) if not line.startswith("step")]
    assert remarks == [
        (3, "warning: step 3: verifying answers: 2 crashed"),
        (10, "over: reward failures (steps 3 to 4)"),  # after the line of step 9
    ]


def test_the_last_step_has_nothing_left():
    assert printed((260, METRICS))[0].endswith("left 0:00")


def test_remaining_time_forgets_the_warm_up_and_caps_a_stall():
    remaining = RemainingTime(window=5)
    assert remaining.left(10) is None
    remaining.add(60.0)
    assert remaining.left(10) == 600.0
    remaining.add(1.0)
    assert remaining.left(10) == 10.0
    for seconds in (1.0, 1.0, 1.0, 100.0):
        remaining.add(seconds)
    # 100 s counts as three medians
    assert remaining.left(10) == pytest.approx(10 * (4 * 1.0 + 3.0) / 5)
    for _ in range(5):
        remaining.add(2.0)
    assert remaining.left(10) == 20.0


def test_clock():
    assert [clock(s) for s in (0, 61, 301, 3661, 90061)] == [
        "0:00",
        "1:01",
        "5:01",
        "1:01:01",
        "1d 01:01:01",
    ]
