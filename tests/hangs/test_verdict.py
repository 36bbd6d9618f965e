"""Verdicts from facts: the rules by which processes wait for each other, and the one screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.hangs.bundle import WIDTH, screen, write
from megatron_stare.hangs.hang_facts import (
    Facts,
    Frame,
    ProcessFacts,
    ReplicaFacts,
    RequestFacts,
    ServerFacts,
    Thread,
)
from megatron_stare.hangs.node_facts import parsed_stacks
from megatron_stare.hangs.verdict import collective, main_frames, verdict
from megatron_stare.hangs.vigil import MOST
from megatron_stare.run_dir.heartbeat import DRIVER, IDLE, Beat

C10D = "torch/distributed/distributed_c10d.py"
CALLED = Frame("Actor.method", "megatron_stare/cluster/ray.py", 81)
BEAT = Beat(DRIVER, 1, "update", since=0.0, moved=0.0, limit_s=31.0, step=12)


def stack(
    *frames: tuple[str, str], name: str = "MainThread", called: bool = True
) -> tuple[Thread, ...]:
    inner = tuple(
        Frame(function, file, 7, own="/" not in file or "megatron_stare" in file)
        for function, file in frames
    )
    return (Thread(name, (*inner, CALLED) if called else inner),)


REDUCING = stack(
    ("all_reduce", C10D),
    ("wrapper", "torch/distributed/c10d_logger.py"),
    ("sums", "megatron_stare/ops/x.py"),
)
GATHERING = stack(("all_gather", C10D))
COMPUTING = stack(
    ("linear", "torch/nn/functional.py"), ("forward", "megatron_stare/megatron/model/head.py")
)
WAITING = stack(
    ("wait", "ray/_private/worker.py"), ("get", "megatron_stare/cluster/ray.py"), called=False
)
IDLING = stack(("main_loop", "ray/_private/worker.py"), called=False)


def process(role: str, pid: int, **known: Any) -> ProcessFacts:
    return ProcessFacts("a", pid, role, known.pop("state", "S"), since=94.0, **known)


def rank(number: int, threads: tuple[Thread, ...] = REDUCING, **known: Any) -> ProcessFacts:
    return process(
        f"trainer rank {number}", 100 + number, threads=threads, **{"phase": "update", **known}
    )


def idle(role: str, pid: int) -> ProcessFacts:
    return process(role, pid, phase=IDLE, threads=IDLING)


DRIVING = process(DRIVER, 1, phase="update", threads=WAITING)
ENGINE = idle("rollout engine 0", 200)
JUDGING = process(
    "verifier",
    300,
    threads=stack(
        ("Condition.wait", "/lib/threading.py"),
        ("verify", "mine.py"),
        ("judge", "megatron_stare/rewards/worker.py"),
    ),
)


def facts(*processes: ProcessFacts, without_s: float = 94.0, **known: Any) -> Facts:
    return Facts(BEAT, without_s, (DRIVING, *processes), **known)


def said(*processes: ProcessFacts, **known: Any) -> str:
    return verdict(facts(*processes, **known)).sentence


def asked(age_s: float, under_way: int = 3) -> tuple[ReplicaFacts, ...]:
    oldest = RequestFacts(0, prompt=17, sample=2, age_s=age_s)
    return (ReplicaFacts(0, "healthy", under_way, (oldest, replace(oldest, age_s=age_s / 2))),)


def test_ranks_in_a_collective_wait_for_the_one_that_is_stopped() -> None:
    stopped = rank(1, COMPUTING, state="T")
    found = verdict(facts(rank(0), stopped, rank(2), rank(3), ENGINE))
    assert (
        found.sentence == "ranks 0, 2, 3 wait in all_reduce for rank 1, which is stopped (SIGSTOP)"
    )
    assert (found.rule, found.culprits) == ("stopped", (stopped,))
    shown = screen(
        facts(rank(0), stopped, rank(2), rank(3), ENGINE), found, "/run/blackbox/x"
    ).splitlines()
    assert shown[0] == "step 12, update: 94 s of at most 31 s"
    assert shown[1].strip() == found.sentence
    # who is to blame comes first
    assert shown[4].split()[:5] == ["trainer", "rank", "1", "101", "stopped"]
    assert shown[-1] == "  the black box: /run/blackbox/x"


def test_a_rank_that_is_stopped_inside_the_collective_is_to_blame_all_the_same() -> None:
    assert (
        said(rank(0), rank(1, state="T"))
        == "rank 0 waits in all_reduce for rank 1, which is stopped (SIGSTOP)"
    )


def test_a_debugger_stops_too() -> None:
    assert said(rank(0), rank(1, state="t")).endswith("rank 1, which is stopped by a debugger")


@pytest.mark.parametrize(
    ("late", "end"),
    [
        (rank(1, stack(("asks", "mine.py"))), "rank 1, which is at asks (mine.py:7)"),
        (
            rank(1, COMPUTING, busy=0.98),
            (
                "rank 1, which is at linear (torch/nn/functional.py:7), called by forward "
                "(megatron_stare/megatron/model/head.py:7), and computes"
            ),
        ),
        (
            rank(1, IDLING, phase=IDLE),
            "rank 1, which is in no call any more, at main_loop (ray/_private/worker.py:7)",
        ),
        (
            rank(1, (), said="no stack: not permitted"),
            "rank 1, which is in the call update (no stack: not permitted)",
        ),
    ],
)
def test_ranks_in_a_collective_wait_for_the_one_that_does_not_join(
    late: ProcessFacts, end: str
) -> None:
    found = verdict(facts(rank(0), late, rank(2), ENGINE))
    assert (found.rule, found.culprits) == ("collective", (late,))
    assert found.sentence == f"ranks 0, 2 wait in all_reduce for {end}"


def test_of_ranks_outside_a_collective_those_at_work_are_to_blame() -> None:
    """One that has done its part is not waited for while another is still at its own."""
    late = rank(2, COMPUTING)
    assert verdict(facts(rank(0), rank(1, IDLING, phase=IDLE), late)).culprits == (late,)


def test_all_ranks_in_the_same_collective_blame_what_is_between_them() -> None:
    found = verdict(facts(rank(0), rank(1), ENGINE))
    assert (found.rule, found.culprits) == ("network", ())
    assert (
        found.sentence
        == "all ranks wait for each other in all_reduce: what they send does not arrive"
    )


def test_ranks_in_different_collectives_are_told_apart() -> None:
    found = said(rank(0), rank(1, GATHERING), rank(2))
    assert (
        found
        == "the ranks wait for each other in different calls: ranks 0, 2 in all_reduce, rank 1 in"
        " all_gather"
    )


def test_a_rank_that_sends_weights_waits_for_servers_and_not_for_idle_ranks() -> None:
    sending = rank(0, stack(("broadcast", C10D)), phase="send_weights")
    found = said(sending, rank(1, IDLING, phase=IDLE), ENGINE)
    assert found == "rank 0 waits in broadcast for the engines' servers"


def test_a_pipeline_stage_that_waits_for_another_is_in_a_collective_too() -> None:
    waits = stack(
        ("_communicate", "megatron/core/pipeline_parallel/p2p_communication.py"),
        ("recv_forward", "megatron/core/pipeline_parallel/p2p_communication.py"),
        ("forward_backward", "megatron/core/pipeline_parallel/schedules.py"),
    )
    assert collective(rank(1, waits)) == "recv_forward"
    late = rank(0, COMPUTING)
    assert verdict(facts(late, rank(1, waits))).culprits == (late,)


def test_a_collective_further_out_on_the_stack_is_no_wait() -> None:
    """A hook that a collective calls, say: what is innermost counts."""
    deep = stack(*[(f"f{n}", "mine.py") for n in range(8)], ("all_reduce", C10D))
    assert collective(rank(0, deep)) is None


def test_the_thread_of_the_call_counts_not_another() -> None:
    other = Thread("heartbeat", (Frame("all_reduce", C10D, 1),))
    assert collective(rank(0, (other, *COMPUTING))) is None
    assert collective(rank(0, (Thread("pool", COMPUTING[0].frames[:1]), *REDUCING))) == "all_reduce"


def test_a_rank_whose_process_is_gone_is_named() -> None:
    gone = rank(1, (), state="X")
    found = verdict(facts(rank(0), gone))
    assert (
        found.sentence
        == "rank 0 waits in all_reduce for rank 1, which is gone: the process has ended"
    )
    assert found.culprits == (gone,)


@pytest.mark.parametrize(
    ("state", "rule"), [("dead", "network"), ("starting", "network"), ("healthy", "ended")]
)
def test_an_engine_that_the_run_knows_to_be_lost_does_not_hold_it_up(state: str, rule: str) -> None:
    gone = process("rollout engine 0", 200, state="X", phase="advance")
    assert verdict(facts(gone, rank(0), rank(1), replicas=(ReplicaFacts(0, state),))).rule == rule


def test_a_child_that_has_ended_and_was_not_asked_for_is_nobody_s_fault() -> None:
    zombie = process("child of driver", 500, state="Z")
    assert verdict(facts(zombie, rank(0), rank(1))).rule == "network"


def test_who_waits_for_a_file_is_named_with_the_file() -> None:
    waits = replace(
        DRIVING, state="D", stuck="mkdir", path="/r/checkpoints/x", file_system="nfs4 at /r"
    )
    found = verdict(Facts(BEAT, 94.0, (waits, ENGINE)))
    assert (
        found.sentence
        == "all wait for the driver, who waits in mkdir of /r/checkpoints/x (nfs4 at /r), which"
        " does not answer"
    )
    writer = process(
        "child of trainer rank 0", 900, stuck="write", path="/r/s", file_system="nfs4 at /r"
    )
    assert (
        verdict(facts(writer, rank(0, IDLING, phase=IDLE))).sentence
        == "the driver waits for the child of trainer rank 0 (pid 900), who waits in write of /r/s"
        " (nfs4 at /r), which does not answer"
    )


def test_a_disk_that_works_is_not_one_that_stalls() -> None:
    asleep = rank(0, COMPUTING, state="D", asleep=True, waits_in="rpc_wait_bit_killable")
    assert said(asleep).endswith(
        "for a device or file system, in rpc_wait_bit_killable, which does not answer"
    )
    assert verdict(facts(replace(asleep, busy=0.3))).rule == "worker"
    # asleep at the second look alone
    assert verdict(facts(replace(asleep, asleep=False))).rule == "worker"


def test_servers_and_nodes_that_say_nothing() -> None:
    silent = ServerFacts(1, "http://b:3", "accepts what it is asked and does not answer")
    answers = ServerFacts(0, "http://a:3", "")
    found = said(ENGINE, servers=(answers, silent), replicas=asked(90))
    assert (
        found
        == "the driver waits for engine 1's server at http://b:3, which accepts what it is asked"
        " and does not answer"
    )
    assert (
        said(ENGINE, missing={"b": "its agent has ended"})
        == "the driver waits for a node that says nothing (b: its agent has ended)"
    )


def test_a_verifier_at_an_answer_or_an_engine_with_an_old_request() -> None:
    """A verifier is blamed where the engines are done, or were asked but now; not where they have
    the oldest work."""
    alone = verdict(facts(JUDGING, ENGINE))
    assert (
        alone.sentence == "the driver waits for a verifier (pid 300), which is at Condition.wait"
        " (/lib/threading.py:7), called by verify (mine.py:7)"
    )
    assert alone.culprits == (JUDGING,)
    assert verdict(facts(JUDGING, ENGINE, replicas=asked(5))).rule == "verifier"
    both = verdict(facts(JUDGING, ENGINE, replicas=asked(90)))
    assert (both.rule, both.culprits) == ("engine", (ENGINE,))
    assert both.sentence.startswith(
        "the driver waits for rollout engine 0 (healthy), which has 3 requests, the oldest "
        "(prompt 17, sample 2) for 90 s"
    )


def test_a_verifier_that_nothing_is_asked_of_is_not_to_blame() -> None:
    waiting = process(
        "verifier",
        300,
        threads=stack(("get", "queue.py"), ("main", "megatron_stare/rewards/worker.py")),
    )
    assert verdict(facts(waiting, ENGINE)).rule == "driver"


def test_the_worker_that_is_longest_in_a_call_is_waited_for() -> None:
    long, short = rank(0, COMPUTING), replace(rank(1, COMPUTING), since=1.0)
    found = verdict(facts(short, long, ENGINE))
    assert (found.rule, found.culprits) == ("worker", (long,))


def test_where_all_others_are_idle_the_driver_is_to_blame() -> None:
    locked = replace(DRIVING, threads=stack(("step", "my_sink.py"), called=False))
    found = verdict(Facts(BEAT, 94.0, (locked, idle("trainer rank 0", 100), ENGINE)))
    assert (found.rule, found.culprits) == ("driver", (locked,))
    assert (
        found.sentence
        == "all others are idle and wait for the driver, which is at step (my_sink.py:7)"
    )


def test_without_facts_nothing_is_made_up() -> None:
    assert verdict(Facts(BEAT, 94.0, ())).rule == "unknown"


def test_what_is_certain_comes_before_what_is_likely() -> None:
    """All at once: each rule holds until the cause before it is taken away."""
    silent = (ServerFacts(0, "u", "does not answer"),)
    stopped, gone = process("raylet", 5, state="T"), rank(3, (), state="X")
    stuck = process("child of driver", 6, stuck="read", path="/x")
    likely = [rank(0), rank(1, COMPUTING), JUDGING, ENGINE]
    known: dict[str, Any] = {"servers": silent, "missing": {"b": "?"}, "replicas": asked(90)}
    rules = []
    for certain in ([stopped, gone, stuck], [gone, stuck], [stuck], []):
        rules.append(verdict(facts(*certain, *likely, **known)).rule)
    rules += [
        verdict(facts(*likely, **{**known, "missing": {}})).rule,
        verdict(facts(*likely)).rule,
    ]
    assert rules == ["stopped", "ended", "file system", "node", "server", "collective"]


def test_a_thousand_processes_fit_on_a_screen() -> None:
    many = [rank(n) for n in range(1000)]
    late = rank(1000, COMPUTING)
    everything = facts(*many, late, replicas=asked(1), flight="f" * 300)
    found = verdict(everything)
    shown = screen(
        replace(everything, missing={"b": "x" * 300}), found, "/run/blackbox/x"
    ).splitlines()
    assert len(shown) <= 25
    assert any("trainer rank 1000" in line for line in shown[7:9])  # though it is the last of all
    assert all(len(line) <= WIDTH for line in shown)
    # the driver and 1001 ranks, of whom 13 are shown
    assert any("989 more" in line for line in shown)


def test_the_driver_is_where_its_own_thread_is() -> None:
    taking = stack(("select", "selectors.py"), name="MainThread", called=False)
    other = stack(("get", "queue.py"), name="rollouts", called=False)
    at_work = stack(
        ("read_state", "megatron_stare/run_dir/run_state.py"), name="driver", called=False
    )
    found = ProcessFacts("a", 1, DRIVER, "S", since=94.0, threads=(*taking, *other, *at_work))
    assert main_frames(found)[0].name == "read_state"
    worker = ProcessFacts("a", 2, "trainer rank 0", "S", since=94.0, threads=(*other, *taking))
    assert main_frames(worker)[0].name == "select"


def test_facts_travel_as_json() -> None:
    whole = facts(rank(0), JUDGING).to_json()["processes"][1]
    assert ProcessFacts.of(whole) == rank(0)


def test_what_py_spy_writes_is_read() -> None:
    told = b"""[{"pid": 7, "thread_id": 140, "thread_name": null, "os_thread_id": 7, "active": true,
        "owns_gil": true,
        "frames": [{"name": "wait", "filename": "/usr/lib/python3/threading.py", "module": null,
                    "short_filename": "threading.py", "line": 355, "locals": null,
                    "is_entry": true},
                   {"name": "<module>", "filename": "x.py", "short_filename": null, "line": 1}],
        "process_info": null}]"""
    frames = (Frame("wait", "threading.py", 355), Frame("<module>", "x.py", 1, own=True))
    assert parsed_stacks(told) == [Thread("140", frames, holds_interpreter=True)]


def test_a_run_with_many_bundles_gets_no_more_dumps(tmp_path: Path) -> None:
    """NCCL's dumps are left out; the facts are written all the same."""
    flights = tmp_path / "flights"
    flights.mkdir()
    (flights / "rank0").write_bytes(b"dump")
    found = []
    for number in range(MOST + 1):
        wanted = tmp_path / "run/blackbox" / f"step_{number:06d}_update"
        wanted.parent.mkdir(parents=True, exist_ok=True)
        written = write(facts(rank(0)), "the screen", flights, wanted)
        assert written == wanted and (written / "facts.json").exists()
        found.append((written / "nccl" / "rank0").exists())
    assert found == [True] * MOST + [False]
