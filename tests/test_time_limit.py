"""--stop-after: what it takes for a time, and when no more step fits."""

from __future__ import annotations

import pytest

from megatron_stare.cli import main
from megatron_stare.errors import ConfigError
from megatron_stare.process.time_limit import TimeLimit, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3h50m", 13_800),
        ("90m", 5_400),
        ("2h", 7_200),
        ("5400", 5_400),
        ("45s", 45),
        ("1d12h", 129_600),
        ("1h0m5s", 3_605),
    ],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "3:50", "50m3h", "-5", "1.5h", "h", "3 h", "soon"])
def test_what_is_no_time_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        seconds_of(text)
    assert main(["train", "configs/quickstart.yaml", f"--stop-after={text}"]) == 2
    assert "--stop-after: " in capsys.readouterr().err


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_and_a_save_must_fit() -> None:
    """Steps of 50 s and a save of 20 s: 1.1 * 70 + 10 = 87 s are needed before the limit at 1000
    s."""
    clock = Clock()
    limit = TimeLimit(1000.0, begun=0.0, clock=clock)
    limit.begin_step()
    assert not limit.passed_before_another(0.0)
    for begun in range(150, 901, 50):
        clock.now = begun
        limit.begin_step()
        assert not limit.passed_before_another(20.0), begun
    clock.now = 913.0
    assert not limit.passed_before_another(20.0)
    clock.now = 913.1
    assert limit.passed_before_another(20.0)
    assert not limit.passed_before_another(19.0)


def test_the_longest_of_the_newest_steps_counts() -> None:
    clock = Clock()
    limit = TimeLimit(2000.0, begun=0.0, clock=clock)
    limit.begin_step()
    for took in (500.0, *[10.0] * 9):  # ten steps: the first, slow one is still among them
        clock.now += took
        limit.begin_step()
    clock.now = 1500.0
    assert limit.passed_before_another(0.0)
    clock.now = 700.0
    limit.begin_step()
    clock.now = 1500.0
    assert not limit.passed_before_another(0.0)


def test_what_a_loss_takes_is_no_step() -> None:
    """Steps of 10 s. One is lost after 5, and the run is open again 400 s later: the next takes 10
    s as ever."""
    clock = Clock()
    limit = TimeLimit(2000.0, begun=0.0, clock=clock)
    limit.begin_steps()
    for _ in range(3):
        limit.begin_step()
        clock.now += 10.0
    clock.now += 395.0
    limit.begin_steps()
    for _ in range(2):
        limit.begin_step()
        clock.now += 10.0
    limit.begin_step()
    clock.now = 1978.0  # 1.1 * 10 + 10 s are needed
    assert not limit.passed_before_another(0.0)
    clock.now = 1980.0  # what was known before the loss is known still
    assert limit.passed_before_another(0.0)


def test_before_the_first_step_only_what_is_left_counts() -> None:
    clock = Clock()
    for now, passed in ((989.0, False), (991.0, True)):
        clock.now = now
        limit = TimeLimit(1000.0, begun=0.0, clock=clock)
        limit.begin_step()
        assert limit.passed_before_another(0.0) is passed
    assert not TimeLimit(None, 0.0, clock).passed_before_another(1e9)
