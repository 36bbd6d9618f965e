"""Whole runs whose servers are lost, or do not start: what becomes of the run, and what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest
from support import sglang_servers as servers
from support.runs import metrics, model, train
from test_train_sglang import LIMIT, SGLANG, Run, is_step

from megatron_stare.run_dir.heartbeat import beat_file, read_beat

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
]
SERVE = "megatron_stare.rollout.engines.sglang.serve"
ALONE = {"runtime.runner": "inline", "parallel.tensor": 1, "run.steps": 1}


def test_a_run_goes_on_though_a_server_is_killed(tmp_path: Path) -> None:
    """Its policy is cut over two ranks, and broadcast to one server instead of two from then on.
    Engine and trainer agree token by token in every step, every prompt is in its step once, and
    nothing is left behind."""
    run = Run(
        tmp_path,
        *(
            "parallel.tensor=2",
            "rollout.engines=2",
            "sglang.sync=distributed",
            f"sglang.agreement_limit={LIMIT}",
        ),
        "observability.sinks=[jsonl, console, support.cursors_sink.Cursors]",
        **{"run.steps": 16},
    )
    try:
        killed = []
        lines = []
        for line in run.lines():
            lines.append(line)
            if is_step(line, 2):
                assert run.traces.look() == 2
                killed += [
                    p
                    for p in run.traces._marked()
                    if SERVE in p.cmdline() and os.getpgid(p.pid) == p.pid
                ][:1]
                os.killpg(killed[0].pid, signal.SIGKILL)
        assert killed and run.process.wait() == 0, run.errors()
    finally:
        run.process.kill()
        run.process.wait()
        run.log.close()
    rows = metrics(run.dir)
    assert len(rows) == 16
    for row in rows:
        assert row["agreement/max"] <= LIMIT and row["agreement/canary_max"] <= LIMIT
        # every token is of the newest weights
        assert row["agreement/max_of_age_1"] == row["agreement/max"]
    assert sum(row["engine/dead"] for row in rows) == 1
    assert {row["engine/serving"] for row in rows} >= {1.0, 2.0}
    assert any("is dead" in line and "the server ended with -9" in line for line in lines)
    steps = json.loads((run.dir / "cursors.json").read_text())
    used = [cursor for number in range(1, 17) for cursor in steps[str(number)]]
    assert used == list(range(16 * 4))
    assert run.traces.left() == []


def test_a_server_on_the_trainers_devices_that_is_killed_comes_back(tmp_path: Path) -> None:
    """Killed in mid-run, it restarts in a rollout, in which the trainer has left the devices, and
    serves after the next sync of each tensor group's own servers."""
    run = Run(
        tmp_path,
        *(
            "parallel.tensor=2",
            "rollout.engines=2",
            "sglang.sync=tensor",
            "sglang.colocated=true",
            f"sglang.agreement_limit={LIMIT}",
        ),
        "observability.sinks=[jsonl, console, support.cursors_sink.Cursors]",
        **{"run.steps": 8},
    )
    try:
        lines = []
        for line in run.lines():
            lines.append(line)
            if is_step(line, 2):
                assert run.traces.look() == 2
                group = min(
                    p.pid
                    for p in run.traces._marked()
                    if SERVE in p.cmdline() and os.getpgid(p.pid) == p.pid
                )
                os.killpg(group, signal.SIGKILL)
        assert run.process.wait() == 0, run.errors()
    finally:
        run.process.kill()
        run.process.wait()
        run.log.close()
    rows = metrics(run.dir)
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        assert row["agreement/max"] <= LIMIT and row["agreement/canary_max"] <= LIMIT
        assert row["agreement/max_of_age_1"] == row["agreement/max"]
    assert sum(row["engine/dead"] for row in rows) == 1 == sum(r["engine/starting"] for r in rows)
    assert [row["engine/serving"] for row in rows[-3:]] == [2.0] * 3
    assert any("is dead" in line and "the server ended with -9" in line for line in lines)
    steps = json.loads((run.dir / "cursors.json").read_text())
    assert [c for n in range(1, 9) for c in steps[str(n)]] == list(range(8 * 4))
    assert run.traces.left() == []


def test_a_server_that_hangs_in_a_weight_sync_costs_what_the_black_box_waits_for(
    tmp_path: Path,
) -> None:
    """All of its processes are stopped once a rank sends, which would wait for
    faults.requests.collective_s. The server is named and killed, the sync is made by the same call,
    and the run goes on with the other."""
    run = Run(
        tmp_path,
        *(
            "parallel.tensor=2",
            "rollout.engines=2",
            "sglang.sync=distributed",
            f"sglang.agreement_limit={LIMIT}",
        ),
        *("faults.hangs.end_run=true", "faults.hangs.floor_s=5", "faults.run.attempts=0"),
        **{"run.steps": 8},
    )
    try:
        lines = []
        for line in run.lines():
            lines.append(line)
            if is_step(line, 4):
                assert run.traces.look() == 2
                marked = list(run.traces._marked())
                (beats,) = (
                    p.cmdline()[-1] for p in marked if "megatron_stare.hangs.watcher" in p.cmdline()
                )
                group = min(
                    p.pid for p in marked if SERVE in p.cmdline() and os.getpgid(p.pid) == p.pid
                )
                sender = beat_file(Path(beats), "trainer rank 0")
                while (beat := read_beat(sender)) is None or beat.phase != "send_weights":
                    pass
                os.killpg(group, signal.SIGSTOP)
        assert run.process.wait() == 0, run.errors()
        screen = run.errors()
        assert re.search(
            r"waits for the server of rollout engine \d.*which are\s+stopped", screen, re.DOTALL
        ), screen
        assert re.search(r"trainer rank 0 .* send_weights, ", screen), screen
        assert "faults.hangs.end_run: killing server of rollout engine" in screen
    finally:
        run.process.kill()
        run.process.wait()
        run.log.close()
    rows = metrics(run.dir)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert sum(row["engine/dead"] for row in rows) == 1
    assert all(row["agreement/max"] <= LIMIT for row in rows)
    assert any("is dead" in line and "the server ended with -9" in line for line in lines)
    assert run.traces.left() == []


def test_a_run_that_is_told_to_end_while_its_servers_have_left_the_device_saves_and_goes_on(
    tmp_path: Path,
) -> None:
    """SIGTERM while ranks compute, the servers' memory released: the step is finished, which takes
    the servers back, saved, and nothing stays. Resumed, both servers hold the weights that were
    saved."""
    colocated = (
        "parallel.tensor=2",
        "rollout.engines=2",
        "sglang.sync=tensor",
        "sglang.colocated=true",
    )
    limit, settings = f"sglang.agreement_limit={LIMIT}", {"run.steps": 8, "run.checkpoint_every": 0}
    run = Run(tmp_path, *colocated, limit, **settings)
    try:
        for line in run.lines():
            if is_step(line, 2):
                assert run.traces.look() == 2
                marked = run.traces._marked()
                (beats,) = (
                    p.cmdline()[-1] for p in marked if "megatron_stare.hangs.watcher" in p.cmdline()
                )
                rank = beat_file(Path(beats), "trainer rank 0")
                while (beat := read_beat(rank)) is None or beat.phase != "compute_log_probs":
                    pass
                run.process.send_signal(signal.SIGTERM)
        assert run.process.wait() == 128 + signal.SIGTERM, run.errors()
    finally:
        run.process.kill()
        run.process.wait()
        run.log.close()
    said = (tmp_path / "stderr.log").read_text()
    found = re.search(
        r"after step (\d) of 8; the last checkpoint is of step (\d); continue with", said
    )
    assert found and found[1] == found[2] == "3", said
    assert run.traces.left() == []
    again = Run(tmp_path, *colocated, limit, "--resume", **settings | {"run.steps": 5})
    try:
        assert [again.traces.look() for line in again.lines() if is_step(line, 4)] == [2]
        assert again.process.wait() == 0, again.errors()
    finally:
        again.process.kill()
        again.process.wait()
        again.log.close()
    rows = metrics(run.dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["agreement/max"] <= LIMIT and row["agreement/canary_max"] <= LIMIT
    assert again.traces.left() == []


def faulty(folder: Path, fault: str) -> str:
    """A Python of SGLang's environment in which a server, and nothing else, begins with a fault."""
    script = folder / "python"
    script.write_text(
        f"#!{servers.PYTHON}\nimport os, socket, sys\nif {SERVE!r} in sys.argv:\n    {fault}\n"
        f"os.execv({servers.PYTHON!r}, [{servers.PYTHON!r}, *sys.argv[1:]])\n"
    )
    script.chmod(0o755)
    return f"sglang.python={script}"


def stopped(folder: Path, *overrides: str, started: bool = False) -> str:
    """Starts a run that must end without having begun, and returns its words. The run must leave
    nothing, or, if a server was `started`, this server's log alone."""
    done = train(f"run.dir={folder / 'run'}", *SGLANG, *overrides, cwd=folder, **ALONE)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr.split("its last words")[0]
    left = [path for path in (folder / "run").rglob("*") if path.is_file()]
    if started:
        (log,) = left
        assert log.parent.name == "logs" and log.name.startswith("server_http_")
        assert log.stat().st_size > 0
    else:
        assert not (folder / "run").exists()
    assert [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(p.info["cmdline"] or ())
    ] == []
    return done.stderr


def test_a_port_that_somebody_else_takes_is_named(tmp_path: Path) -> None:
    """After it was found free, as the server was still starting."""
    taken = (
        "s = socket.create_server(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])));"
        " s.set_inheritable(True)"
    )
    said = stopped(tmp_path, model(), faulty(tmp_path, taken))
    assert "the server ended with" in said and "address already in use" in said.lower()


def test_memory_that_does_not_suffice_is_named(tmp_path: Path) -> None:
    """SGLang's own words, of a server that is allowed next to none."""
    none = "sys.argv[sys.argv.index('--mem-fraction-static') + 1] = '1e-9'"
    said = stopped(tmp_path, model(), faulty(tmp_path, none), started=True)
    assert "the server ended with" in said and "memory" in said.split("its last words")[1].lower()


def test_a_model_that_the_server_does_not_know_is_named(tmp_path: Path) -> None:
    """The model is of a family that the trainer knows, under another architecture's name."""
    folder = tmp_path / "model"
    shutil.copytree(servers.MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    said = stopped(tmp_path, f"model.path={folder}", started=True)
    assert "NoSuchModel" in said


def test_ports_that_are_all_taken_are_refused_before_anything_starts(tmp_path: Path) -> None:
    first, held = taken_in_a_row(4)
    try:
        said = stopped(tmp_path, model(), f"runtime.ports=[{first}, {first + 3}]")
    finally:
        for each in held:
            each.close()
    assert "runtime.ports" in said


def taken_in_a_row(count: int) -> tuple[int, list[socket.socket]]:
    """The first of some ports, and what listens on each of them."""
    for first in range(21_000, 29_000, count):
        held: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                held.append(socket.create_server(("127.0.0.1", port)))
            return first, held
        except OSError:
            for each in held:
                each.close()
    raise AssertionError("no ports are free here")
