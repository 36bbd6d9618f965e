"""Defines data classes for the facts about a run that hangs. The facts are sent between nodes as
JSON, and written as JSON into the bundle, which is the folder with all facts about a hang
(bundle.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_stare.run_dir.heartbeat import Beat

VERIFIER, SERVER, WRITER = "verifier", "server of ", "child of "
NODE_PARTS = ("raylet", "gcs_server")  # Ray's processes that a run cannot do without


@dataclass(frozen=True)
class Frame:
    """A Python function on a stack.

    `own`: true if the function belongs to this project or to a user's code, and false if it belongs
        to Python or to an installed package.
    """

    function: str
    file: str
    line: int
    own: bool = False

    @property
    def name(self) -> str:
        """The function's name without the name of the class."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """A thread of a process.

    `frames`: the stack frames, with the innermost frame first.
    """

    name: str
    frames: tuple[Frame, ...]
    holds_interpreter: bool = False


@dataclass(frozen=True)
class ProcessFacts:
    """Facts about a process of the run, collected on the node of the process. The process is
    examined twice, one or two seconds apart.

    Args:
        node: the host of the process. If an agent reported the process, `node` is the host followed
            by the id of the Ray node.
        role: role of the process as in Beat, or `verifier`, `raylet`, `gcs_server`, `server of
            rollout engine 0`, `child of driver`.
        state: state of the process as in proc_files.Status, or X if the process has ended.
        phase, since: the phase in the process's beat, and the seconds since the start of this
            phase. Both are None if the process writes no beats.
        busy: share of a CPU that the process used between the two examinations.
        asleep: true if the process was in state D (uninterruptible sleep) at both examinations.
        stuck: the system call in which the process waited for a file at both examinations, or "" if
            the process did not wait for a file.
        path: the file that the system call in `stuck` waits for.
        file_system: kind and mount point of the file system of `path`.
        waits_in: the kernel function in which the process sleeps.
        said: remarks in words, for example about information that could not be obtained.
    """

    node: str
    pid: int
    role: str
    state: str
    name: str = ""
    parent: int = 0
    phase: str | None = None
    since: float | None = None
    busy: float = 0.0
    asleep: bool = False
    stuck: str = ""
    path: str = ""
    file_system: str = ""
    waits_in: str = ""
    threads: tuple[Thread, ...] = ()
    said: str = ""
    rss_bytes: int = 0
    pss_bytes: int | None = None
    command: str = ""

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def gone(self) -> bool:
        return self.state in ("X", "Z")

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ProcessFacts:
        """Reads a process from JSON."""
        threads = tuple(
            Thread(
                each["name"],
                tuple(Frame(**frame) for frame in each["frames"]),
                each["holds_interpreter"],
            )
            for each in told["threads"]
        )
        return cls(**{**told, "threads": threads})


@dataclass(frozen=True)
class RequestFacts:
    """A response that was requested but has not arrived yet.

    `age_s`: seconds since the response was requested from the replica.
    """

    replica: int
    prompt: int
    sample: int
    age_s: float


@dataclass(frozen=True)
class ReplicaFacts:
    """Facts that the driver knows about an engine: its state (docs/fleet.md), the number of
    requests in flight, and the oldest of these requests."""

    number: int
    state: str
    under_way: int = 0
    oldest: tuple[RequestFacts, ...] = ()


@dataclass(frozen=True)
class ServerFacts:
    """A server that the run uses but did not start.

    `answer`: error message if a test request to the server failed. The text is empty if the server
        answered the request.
    """

    engine: int
    url: str
    answer: str


@dataclass(frozen=True)
class Facts:
    """All facts about a hang.

    Args:
        beat: the driver's beat when the phase had exceeded its limit.
        without_s: seconds without progress.
        missing: nodes that did not report, with the reason for each node.
        flight: description of the records from NCCL's flight recorder.
    """

    beat: Beat
    without_s: float
    processes: tuple[ProcessFacts, ...]
    replicas: tuple[ReplicaFacts, ...] = ()
    servers: tuple[ServerFacts, ...] = ()
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flight: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
