"""The panel says what the run says at every size, and the terminal is given back however the run
ends."""

import io
import math
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from support.interrupts import interruptible

from megatron_stare.observability.metrics.rules import Watch
from megatron_stare.observability.terminal.live import LiveDisplay, make_display
from megatron_stare.observability.terminal.live_chart import (
    bar,
    line,
    progress_bar,
    scale_of,
    strip,
    trend,
)
from megatron_stare.observability.terminal.progress import StepPrinter

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
RUN_DIR = "runs/quickstart-20261002-125955"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def metrics(step, **more):
    return {
        "reward/mean": step / 100,
        "entropy/mean": 0.11,
        "entropy/target": 0.1,
        "stare/gate": float(step % 10 < 3),
        "response/length_mean": 17.3,
        "perf/tokens_per_s": 4210.2,
        "optimizer/grad_norm": 0.5,
        "time/rollout_s": 0.2,
        "time/update_s": 0.8,
        "time/step_s": 1.0,
    } | more


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_display(clock):
    opened = []

    def start(total=100, width=80, height=30):
        console = Console(
            file=Terminal(),
            force_terminal=True,
            width=width,
            height=height,
            color_system="truecolor",
        )
        opened.append(LiveDisplay(total, console, auto_refresh=False, now=clock))
        opened[-1].start(RUN_DIR, "stare C2")
        return opened[-1]

    yield start
    for display in opened:
        display.close()


def shown(display, width=80, height=30):
    """The panel now, as plain lines."""
    console = Console(file=io.StringIO(), width=width, height=height)
    display._console.size = (width, height)
    console.print(display._panel())
    return console.file.getvalue().splitlines()


def show(display, watch, step, row):
    """A step and its alerts, as the monitor tells them."""
    display.step(step, row)
    display.alerts(watch.add(step, row), tuple(watch.active.values()))


def printed(display):
    return display._console.file.getvalue()


def find(lines, word):
    return next(line for line in lines if word in line)


def test_it_shows_where_the_run_is(open_display):
    display = open_display()
    for step in range(1, 41):
        display.step(step, metrics(step))
    lines = shown(display, 120)
    assert RUN_DIR in lines[0]
    assert "stare C2" in lines[0]
    progress = find(lines, "step  40/100")
    assert " 40%" in progress
    assert "left 1:00" in progress
    numbers = find(lines, "reward")
    for part in ("reward 0.400 ↗", "length 17.3 →", "4,210 tok/s →", "grad norm 0.500 →"):
        assert part in numbers
    head = find(lines, "entropy 0.110")
    assert "target 0.100 ±25%" in head
    assert "gate on, 30% of 40 steps" in head
    axis = [
        label for label in ("0.05", "0.1", "0.15") if any(f" {label} " in line for line in lines)
    ]
    assert len(axis) == 3  # a scale from 0 in round values
    assert find(lines, "│ update").count("█") > 3 * find(lines, "│ rollout").count("█")


def test_the_phase_under_way_and_its_time(open_display, clock):
    display = open_display()
    assert "no step yet" in "".join(shown(display))
    with display.phase("rollout"):
        clock.seconds = 2.5
        display.rollout_progress(64, 256)
        now = find(shown(display), "responses")
        assert "rollout  2.50 s" in now
        assert "64/256 responses" in now
    assert "between phases" in "".join(shown(display))
    with display.phase("update"):
        clock.seconds = 200
        lines = shown(display)
    assert "update  3:18" in find(lines, "update")
    assert not any("responses" in line for line in lines)
    assert "2.50 s" in find(lines, "rollout")  # of this step, before its figures are in


def test_phases_after_the_figures_stay_until_the_next_step(open_display, clock):
    display = open_display()
    display.step(1, metrics(1))
    with display.phase("checkpoint"):
        clock.seconds += 3
    assert "3.00 s" in find(shown(display), "checkpoint")
    display.step(2, metrics(2))
    assert not any("checkpoint" in line for line in shown(display))


def test_a_phase_that_fails_is_over(open_display):
    display = open_display()
    with pytest.raises(ValueError, match="x"), display.phase("update"):
        raise ValueError("x")
    assert "between phases" in "".join(shown(display))


@pytest.mark.parametrize("width", [20, 38, 45, 60, 80, 140, 200])
def test_it_fits(open_display, width):
    display, watch = open_display(), Watch()
    for step in range(1, 60):
        row = metrics(
            step, **{"reward/crashes": 1.0, "response/truncated": 0.5, "entropy/mean": 0.3}
        )
        show(display, watch, step, row)
    with display.phase("rollout"):
        display.rollout_progress(1000, 100_000)
        for height in (2, 3, 4, 5, 6, 8, 10, 13, 17, 29):
            lines = shown(display, width, height)
            assert 1 <= len(lines) < height
            assert max(map(len, lines)) <= width - 2  # ^C must not wrap
            assert "step  59" in "".join(lines)
            if height >= 6 and width >= 60:
                # the last to go but the phase
                assert "▲ step 1: verifying answers: 1 crashed" in "".join(lines)


def test_a_method_without_target_or_gate(open_display):
    display = open_display()
    for step in range(1, 10):
        row = {k: v for k, v in metrics(step).items() if k not in ("entropy/target", "stare/gate")}
        display.step(step, row)
    text = "\n".join(shown(display))
    assert "entropy 0.110" in text
    assert "target" not in text
    assert "gate" not in text


def test_missing_and_nan_metrics(open_display):
    display = open_display()
    display.step(1, {})
    assert "step   1/100" in "".join(shown(display))
    display.step(2, metrics(2) | {"reward/mean": math.nan, "time/step_s": math.nan})
    display.step(3, {"entropy/mean": math.nan, "optimizer/grad_norm": math.inf})
    assert "entropy –" in "".join(shown(display))
    assert "length –" in "".join(shown(display))


def test_a_resumed_run_continues_its_charts(open_display):
    display = open_display()
    display.restore([{"step": step} | metrics(step) for step in range(1, 51)])
    lines = shown(display)
    assert "step  50/100" in find(lines, "step")
    assert "entropy 0.110" in find(lines, "entropy")
    display.step(51, metrics(51))
    lines = shown(display)
    assert "step  51/100" in find(lines, "step")
    assert "left 0:49" in find(lines, "left")


def test_an_alert_is_printed_when_it_begins_and_when_it_is_over_and_listed_meanwhile(open_display):
    display, watch = open_display(), Watch()
    for step in range(1, 13):
        show(display, watch, step, metrics(step, **{"reward/crashes": float(step in (3, 4))}))
        listed = [
            line for line in shown(display) if "▲ step 3: verifying answers: 1 crashed" in line
        ]
        assert len(listed) == (3 <= step <= 8)
    assert "✓ over: reward failures (steps 3 to 4)" in "".join(shown(display))
    display.close()
    assert printed(display).count("warning: step 3: verifying answers: 1 crashed") == 1
    # printed, and in the last panel
    assert printed(display).count("over: reward failures (steps 3 to 4)") == 2


def test_markup_in_texts_is_text(open_display):
    display = open_display()
    display.note("[red]note[/red]")
    display.warn("[/nothing]")
    display.start("runs/[bold]x", "[b]")
    assert "[red]note[/red]" in printed(display)
    assert "warning: [/nothing]" in printed(display)
    assert "[b]  runs/[bold]x" in shown(display)[0]


def test_the_last_panel_says_how_it_ended(open_display):
    stopped, finished = open_display(), open_display(total=2)
    for display in (stopped, finished):
        display.step(1, metrics(1))
        display.step(2, metrics(2))
        display.close()
        display.close()
    assert "stopped after step 2" in printed(stopped)
    assert "finished" in printed(finished)
    for display in (stopped, finished):
        assert printed(display).count(HIDE) == printed(display).count(SHOW) == 1
        assert printed(display).endswith(SHOW)


def test_a_step_is_cheap(open_display):
    display = open_display()
    costs = []
    for step in range(1, 201):
        start = time.perf_counter()
        with display.phase("rollout"):
            pass
        display.step(step, metrics(step))
        costs.append(time.perf_counter() - start)
    assert sorted(costs)[100] < 1e-3


@pytest.mark.parametrize(
    ("out", "term", "kind"),
    [
        (Terminal, "xterm-256color", LiveDisplay),
        (Terminal, "dumb", StepPrinter),
        (io.StringIO, "xterm-256color", StepPrinter),
        (type("Latin", (Terminal,), {"encoding": "iso-8859-1"}), "xterm-256color", StepPrinter),
    ],
)
def test_the_panel_is_for_terminals_that_can_show_it(monkeypatch, out, term, kind):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours in a log are one thing, a panel in it another
    with make_display(10, out()) as display:
        assert type(display) is kind


def test_no_color_is_respected_and_the_band_still_visible(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    with make_display(10, out) as display:
        display.step(1, metrics(1))
    assert "\x1b[3" not in out.getvalue().replace("\x1b[3F", "")
    assert "░" in out.getvalue()


SCRIPT = """
import sys, time
from megatron_stare.observability.terminal.live import make_display
with make_display(5) as display:
    display.start("runs/x", "stare")
    display.step(1, {"reward/mean": 0.5})
    print("a line of someone else")
    with display.phase("rollout"):
        print("ready", file=sys.stderr, flush=True)
        if sys.argv[1] == "raise":
            raise RuntimeError("boom")
        time.sleep(60)
"""


@pytest.mark.parametrize("how", ["raise", "interrupt"])
def test_the_terminal_is_given_back(how):
    master, slave = pty.openpty()
    env = os.environ | {"TERM": "xterm", "PYTHONUTF8": "1", "COLUMNS": "80", "LINES": "24"}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdout=slave,
        stderr=subprocess.PIPE,
        env=env,
        preexec_fn=interruptible,
    )
    os.close(slave)
    assert child.stderr.readline() == b"ready\n"
    if how == "interrupt":
        child.send_signal(signal.SIGINT)
    output = b""
    try:
        while data := os.read(master, 1 << 16):
            output += data
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(master)
    errors = child.stderr.read().decode()
    child.stderr.close()
    child.wait()
    text = output.decode()
    assert "stopped after step 1" in text
    assert "a line of someone else" in text
    assert text.rindex(SHOW) > text.rindex(HIDE)
    # stderr is not the terminal here, so the traceback is where it was sent and not in the panel's
    # place
    assert ("RuntimeError: boom" if how == "raise" else "KeyboardInterrupt") in errors
    assert child.returncode != 0


def test_the_chart():
    near = scale_of([0.1, 0.12], (0.075, 0.125), 4)
    assert (near.low, near.high) == pytest.approx((0.0, 0.15))
    assert list(near.band_rows) == [2, 3]  # a row is 0.0375
    assert near.ticks == pytest.approx({0: 0.0, 1: 0.05, 2: 0.1, 3: 0.15})
    far = scale_of([2.4], (0.075, 0.125), 4)
    assert (far.low, far.high, list(far.band_rows)) == (0.0, 3.0, [0])
    assert (scale_of([], None, 4).low, scale_of([], None, 4).high) == (0.0, 1.0)
    assert scale_of([-0.4, 0.3], None, 4).low < -0.4 + 1e-9
    assert line([0.001, 0.149], near, 2) == ["⢸ ", "⢸ ", "⢸ ", "⡸ "]
    assert line([0.04, 0.04, 0.08, 0.08], near, 2) == ["  ", " ⣀", "⣀⠇", "  "]


def test_methods_with_a_target_and_without_share_one_scale():
    """So that a panel of STARE and one of GRPO can be held side by side."""
    values = [0.11, 0.13, 0.1]
    with_target, without = scale_of(values, (0.09, 0.15), 8), scale_of(values, None, 8)
    assert (with_target.low, with_target.row, with_target.ticks) == (
        without.low,
        without.row,
        without.ticks,
    )
    assert list(without.band_rows) == []


def test_a_gap_breaks_the_line_and_values_beyond_the_axis_stay_on_it():
    scale = scale_of([0.1], (0.075, 0.125), 4)
    rows = line([9.0, 9.0, math.nan, math.nan, -9.0, -9.0], scale, 4)
    assert rows == ["⠉   ", "    ", "    ", "  ⣀ "]


def test_free_height_goes_to_the_charts(open_display):
    """Entropy first; where there is height for both, the reward has a third of it. Nothing stays
    empty."""
    display = open_display()
    for step in range(1, 60):
        display.step(step, metrics(step, **{"entropy/mean": 0.3 - step / 250}))

    def plotted(lines):
        start = next(i for i, each in enumerate(lines) if each.startswith("│ entropy"))
        return (
            next(i for i, each in enumerate(lines) if "gate" in each and "entropy" not in each)
            - start
            - 1
        )

    low, high = shown(display, 100, 14), shown(display, 100, 30)
    assert not any(each.startswith("│ reward  ") for each in low)
    assert plotted(low) == 5 and plotted(high) == 12
    reward = next(i for i, each in enumerate(high) if each.startswith("│ reward  "))
    drawn = [each for each in high[reward + 1 :] if any("\u2800" < c <= "\u28ff" for c in each)]
    assert len(drawn) >= 3  # it rises through its chart
    assert len(high) == 29


def test_a_run_without_rewards_shows_its_losses(open_display):
    display = open_display()
    for step in range(1, 41):
        measured = {"heldout/loss": 0.75} if step == 20 else {}
        display.step(step, {"loss/policy": 1 / step, "optimizer/grad_norm": 0.5, **measured})
    numbers = find(shown(display), "grad norm 0.500")
    assert "loss 0.0250 ↘   held-out 0.750" in numbers
    display = open_display()
    display.step(1, metrics(1) | {"loss/policy": 0.25})
    assert "loss" not in "".join(shown(display))


def test_the_newest_result_stands_beside_the_reward(open_display):
    display = open_display()
    display.step(1, metrics(1))
    assert not any("pass@1" in each for each in shown(display, 130))
    display.evaluated("pass@1", 0.5, 0)
    display.evaluated("pass@1", 0.7812, 20)
    display.evaluated("aime avg@4", 0.25, 20)
    numbers = find(shown(display, 130), "reward 0.010")
    assert (
        "pass@1 0.781 (step 20)" in numbers
        and "aime avg@4 0.250 (step 20)" in numbers
        and "0.500 (" not in numbers
    )


def test_the_strip_has_two_steps_a_character():
    assert strip([0, 0, 0, 1, 1, 0, 1, 1], 5) == "─╼╾━ "
    assert strip([1] * 100 + [0, 0], 2) == "━─"


def test_bars():
    assert bar(0.5, 8) == "████    "
    assert bar(0.0, 4) == "▏   "
    assert bar(7.0, 4) == "████"
    assert progress_bar(0.5, 5) == ("━━╸", "──")
    assert progress_bar(1.0, 4) == ("━━━━", "")


def test_trends():
    assert trend([1.0, 2.0, 3.0]) == " "
    assert trend([1.0] * 20) == "→"
    assert trend([1.0] * 10 + [1.5] * 10) == "↗"
    assert trend([1.0] * 10 + [0.5, math.nan] * 5) == "↘"
    assert trend([1.0, 2.0] * 10) == "→"
