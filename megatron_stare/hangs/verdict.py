"""Decides by rules which processes block a run, and which processes wait for the blocking
processes. `verdict` is a pure function of the facts.

The rules are ordered by certainty, beginning with the most certain rule. The first rule that
applies gives the verdict. The first rules blame a process that is stopped, has ended, or waits for
a file. The next rules blame a node or a server that does not answer. A further rule blames a rank
that is missing from a collective in which other ranks wait. The last rule blames a verifier, an
engine, a rank or the driver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_stare.hangs.hang_facts import NODE_PARTS, VERIFIER, Facts, Frame, ProcessFacts, Thread
from megatron_stare.process.interruption import DRIVER as DRIVER_THREAD
from megatron_stare.run_dir.heartbeat import DRIVER, IDLE, RANK

ENGINE = "rollout engine "
# files on the stack of a wait for a collective, and for a neighbouring pipeline stage
COLLECTIVES = "torch/distributed/distributed_c10d.py"
STAGES = "pipeline_parallel/p2p_communication.py"
TO_SERVERS = ("send_weights", "send_own_weights")  # calls with collectives that include servers
JUDGING = ("judge", "rewards/worker.py")  # on the stack of a verifier that is judging an answer
CALLED = "cluster/ray.py"  # the file through which a worker enters a call
LOST = ("dead", "starting")  # engine states in which the run already continues without it
INNERMOST = 6  # frames searched for a collective


@dataclass(frozen=True)
class Verdict:
    """Names the processes that block the run.

    Args:
        rule: name of the rule that applied.
        sentence: text that says which process waits for which, and why.
        culprits: processes that block the run; empty if the cause is not a process of the run.
    """

    rule: str
    sentence: str
    culprits: tuple[ProcessFacts, ...] = ()


def verdict(facts: Facts) -> Verdict:
    """Returns the verdict of the first rule that applies to the facts."""
    rules: Sequence[Callable[[Facts], Verdict | None]] = (
        _stopped,
        _ended,
        _waits_for_files,
        _silent_nodes,
        _silent_servers,
        _collective,
        _at_work,
    )
    return next(found for rule in rules if (found := rule(facts)) is not None)


def _stopped(facts: Facts) -> Verdict | None:
    culprits = tuple(p for p in facts.processes if p.stopped)
    if not culprits:
        return None
    debugged = all(p.state == "t" for p in culprits)
    how = "stopped by a debugger" if debugged else "stopped (SIGSTOP)"
    return Verdict("stopped", _waited(facts, culprits, f"{_which(culprits)} {how}"), culprits)


def _ended(facts: Facts) -> Verdict | None:
    known = {f"{ENGINE}{replica.number}" for replica in facts.replicas if replica.state in LOST}
    culprits = tuple(
        p for p in facts.processes if p.gone and p.phase is not None and p.role not in known
    )
    if not culprits:
        return None
    return Verdict(
        "ended",
        _waited(facts, culprits, f"{_which(culprits)} gone: the process has ended"),
        culprits,
    )


def _waits_for_files(facts: Facts) -> Verdict | None:
    culprits = tuple(p for p in facts.processes if p.stuck or (p.asleep and p.busy == 0))
    if not culprits:
        return None
    first = next((p for p in culprits if p.stuck), culprits[0])
    if first.stuck:
        what = f"in {first.stuck} of {first.path}" + (
            f" ({first.file_system})" if first.file_system else ""
        )
    else:
        what = f"for a device or file system, in {first.waits_in or 'the kernel'}"
    verb = "waits" if len(culprits) == 1 else "wait"
    why = f"who {verb} {what}, which does not answer"
    return Verdict("file system", f"{_waiters(facts, culprits)}{_named(culprits)}, {why}", culprits)


def _silent_nodes(facts: Facts) -> Verdict | None:
    if not facts.missing:
        return None
    told = "; ".join(f"{node}: {why}" for node, why in sorted(facts.missing.items()))
    return Verdict("node", f"{_waiters(facts, ())}a node that says nothing ({told})")


def _silent_servers(facts: Facts) -> Verdict | None:
    silent = [server for server in facts.servers if server.answer]
    if not silent:
        return None
    told = "; ".join(f"engine {s.engine}'s server at {s.url}, which {s.answer}" for s in silent)
    return Verdict("server", f"{_waiters(facts, ())}{told}")


def _collective(facts: Facts) -> Verdict | None:
    """Blames the ranks that are missing from a collective in which other ranks wait. If the waiting
    ranks send weights to the engines' servers, the verdict blames no rank, and reports that the
    waiting ranks wait for the servers. If every rank waits in a collective, the verdict blames no
    rank either. If the ranks wait in different collectives, no collective can complete, and the
    verdict reports that the ranks wait for each other. If all ranks wait in the same collective,
    the verdict reports that the network does not deliver the data that the ranks send."""
    ranks = [p for p in facts.processes if p.role.startswith(RANK)]
    inside = {p.role: met for p in ranks if (met := collective(p)) is not None}
    if not inside:
        return None
    waiting = [p for p in ranks if p.role in inside]
    if any(p.phase in TO_SERVERS for p in waiting):
        return Verdict(
            "servers",
            f"{_named(waiting)} {_verb(waiting)} in {_met(inside)} for the engines' servers",
        )
    others = [p for p in ranks if p.role not in inside]
    missing = tuple([p for p in others if p.phase != IDLE] or others)
    if missing:
        where = "; ".join(sorted({_where(p) for p in missing}))
        said = (
            f"{_named(waiting)} {_verb(waiting)} in {_met(inside)} for {_named(missing)}, which"
            f" {_be(missing)} {where}"
        )
        return Verdict("collective", said, missing)
    if len(set(inside.values())) > 1:
        by = defaultdict(list)
        for p in waiting:
            by[inside[p.role]].append(p)
        told = ", ".join(f"{_named(some)} in {met}" for met, some in by.items())
        return Verdict("collective", f"the ranks wait for each other in different calls: {told}")
    return Verdict(
        "network",
        f"all ranks wait for each other in {_met(inside)}: what they send does not arrive",
    )


def _at_work(facts: Facts) -> Verdict | None:
    """Blames a verifier, an engine or a rank that has unfinished work. If no verifier, engine or
    rank has unfinished work, blames the driver, because all other processes then wait for the
    driver."""
    judging = tuple(p for p in facts.processes if p.role == VERIFIER and _judges(p))
    asked = [replica for replica in facts.replicas if replica.under_way]
    ages = [request.age_s for replica in asked for request in replica.oldest]
    # An engine is to blame only for requests that it has had for at least half of the time without
    # progress. Meanwhile a verifier may have work.
    old = max(ages, default=0.0) >= facts.without_s / 2
    if judging and not old:
        where = "; ".join(sorted({_where(p) for p in judging}))
        said = (
            f"{_waiters(facts, judging)}{_count(judging, 'verifier')} (pid {_pids(judging)}),"
            f" {_being(judging)} {where}"
        )
        return Verdict("verifier", said, judging)
    busy = [p for p in facts.processes if p.phase not in (None, IDLE) and p.role != DRIVER]
    if asked and ages:
        slow = max(asked, key=lambda replica: max((r.age_s for r in replica.oldest), default=0.0))
        oldest = max(slow.oldest, key=lambda request: request.age_s)
        engine = tuple(p for p in facts.processes if p.role == f"{ENGINE}{slow.number}")
        where = f", and is {_where(engine[0])}" if engine else ""
        said = (
            f"{_waiters(facts, engine)}rollout engine {slow.number} ({slow.state}), which has"
            f" {slow.under_way} requests, the oldest (prompt {oldest.prompt}, sample"
            f" {oldest.sample}) for {oldest.age_s:.0f} s{where}"
        )
        if engine or not busy:
            return Verdict("engine", said, engine)
    if busy:
        longest = max(busy, key=lambda p: p.since or 0.0)
        said = f"{_waiters(facts, [longest])}{_named([longest])}, which is {_where(longest)}"
        return Verdict("worker", said, (longest,))
    driver = tuple(p for p in facts.processes if p.role == DRIVER)
    if not driver:
        return Verdict("unknown", "the driver's state is unknown: its stack cannot be read")
    return Verdict(
        "driver",
        f"all others are idle and wait for the driver, which is {_where(driver[0])}",
        driver,
    )


def collective(process: ProcessFacts) -> str | None:
    """Returns the name of the collective in which the process waits. Returns None if the process
    does not wait in a collective."""
    frames = main_frames(process)[:INNERMOST]
    for frame in frames:
        if frame.file.endswith(COLLECTIVES) and not frame.name.startswith("_"):
            return frame.name
        if frame.file.endswith(STAGES):
            named = [
                f.name for f in frames if f.file.endswith(STAGES) and not f.name.startswith("_")
            ]
            return named[0] if named else frame.name
    return None


def main_frames(process: ProcessFacts) -> Sequence[Frame]:
    """Returns the stack frames of the thread that executes the process's current call. The
    innermost frame comes first."""
    threads = [thread for thread in process.threads if thread.frames]
    if not threads:
        return ()
    return min(threads, key=_rank_of).frames


def _rank_of(thread: Thread) -> int:
    called = any(frame.name == "method" and frame.file.endswith(CALLED) for frame in thread.frames)
    if called:
        return 0
    # the main thread only handles signals
    return 1 if thread.name == DRIVER_THREAD else 2 if thread.name == "MainThread" else 3


def _where(process: ProcessFacts) -> str:
    """Describes in a few words where in the code a process is, or which state the process is in."""
    if process.stopped:
        return "stopped (SIGSTOP)"
    frames = main_frames(process)
    if not frames:
        call = f"in the call {process.phase}" if process.phase else "asked for nothing"
        return call + (f" ({process.said})" if process.said else "")
    inner = frames[0]
    own = next((f for f in frames if f.own and not f.file.endswith(CALLED)), None)
    if process.phase == IDLE and process.role != DRIVER:
        return f"in no call any more, at {inner}"
    computes = ", and computes" if process.busy >= 0.5 else ""
    called = f", called by {own}" if own is not None and own != inner else ""
    return f"at {inner}{called}{computes}"


def _judges(process: ProcessFacts) -> bool:
    return any(f.name == JUDGING[0] and f.file.endswith(JUDGING[1]) for f in main_frames(process))


def _waited(facts: Facts, culprits: Sequence[ProcessFacts], which: str) -> str:
    return f"{_waiters(facts, culprits)}{_named(culprits)}, {which}"


def _waiters(facts: Facts, culprits: Sequence[ProcessFacts]) -> str:
    """Returns the beginning of a sentence, such as `ranks 0, 2 wait in all_reduce for `. The
    returned text ends with the word `for` and a space. If ranks wait in a collective, the text
    names these ranks. If no rank waits in a collective, the text depends on which process blocks
    the run. If the driver blocks the run, the text says that all other processes wait. If another
    process blocks the run, the text says that the driver waits."""
    blamed = {(p.node, p.pid) for p in culprits}
    inside = {
        p.role: (p, met)
        for p in facts.processes
        if p.role.startswith(RANK)
        and (p.node, p.pid) not in blamed
        and (met := collective(p)) is not None
    }
    if inside:
        waiting = [p for p, _ in inside.values()]
        return (
            f"{_named(waiting)} {_verb(waiting)} in"
            f" {_met({r: met for r, (_, met) in inside.items()})} for "
        )
    if any(p.role == DRIVER for p in culprits):
        return "all wait for "
    return "the driver waits for "


def _met(inside: dict[str, str]) -> str:
    return " and ".join(sorted(set(inside.values())))


def _named(processes: Sequence[ProcessFacts]) -> str:
    """Returns the names of processes for use in a sentence, such as `ranks 0, 2`. The name of a
    process of Ray contains the name of its node: `Ray's raylet on NODE (pid 7)`."""
    return " and ".join(_names(processes))


def _names(processes: Sequence[ProcessFacts]) -> Iterator[str]:
    for prefix, one, many in ((RANK, "rank", "ranks"), (ENGINE, "engine", "engines")):
        numbers = sorted(
            int(p.role.removeprefix(prefix)) for p in processes if p.role.startswith(prefix)
        )
        if numbers:
            yield f"{one if len(numbers) == 1 else many} {', '.join(map(str, numbers))}"
    for p in processes:
        if p.role in NODE_PARTS:
            yield f"Ray's {p.role} on {p.node} (pid {p.pid})"
        elif not p.role.startswith((RANK, ENGINE)):
            yield f"the {p.role}" + ("" if p.role == DRIVER else f" (pid {p.pid})")


def _which(processes: Sequence[ProcessFacts]) -> str:
    return f"which {_be(processes)}"


def _be(processes: Sequence[ProcessFacts]) -> str:
    return "is" if len(processes) == 1 else "are"


def _being(processes: Sequence[ProcessFacts]) -> str:
    return "which is" if len(processes) == 1 else "which are"


def _verb(processes: Sequence[ProcessFacts]) -> str:
    return "waits" if len(processes) == 1 else "wait"


def _count(processes: Sequence[ProcessFacts], what: str) -> str:
    return f"a {what}" if len(processes) == 1 else f"{len(processes)} {what}s"


def _pids(processes: Sequence[ProcessFacts]) -> str:
    return ", ".join(str(p.pid) for p in processes)
