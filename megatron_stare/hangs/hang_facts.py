"""Records of a run that does not get on. They travel as JSON, from node to node and into the
bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_stare.run_dir.heartbeat import Beat

VERIFIER, SERVER, WRITER = "verifier", "server of ", "child of "
NODE_PARTS = ("raylet", "gcs_server")  # Ray's processes that a run stands and falls with


@dataclass(frozen=True)
class Frame:
    """A Python function on a stack.

    own: it is neither Python's nor an installed package's, but this project's or a user's.
    """

    function: str
    file: str
    line: int
    own: bool = False

    @property
    def name(self) -> str:
        """The function's, without its class's."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """One of a process. frames: the innermost first."""

    name: str
    frames: tuple[Frame, ...]
    holds_interpreter: bool = False


@dataclass(frozen=True)
class ProcessFacts:
    """A process of the run, as its node saw it.

    Args:
        node: its host, and where several of Ray's nodes are on one, which.
        role: see Beat, or `verifier`, `raylet`, `gcs_server`, `server of rollout engine 0`, `child
            of driver`.
        state: see proc_files.Status; X: it has ended.
        phase, since: of its beat; since seconds before the look. None: it writes none.
        busy: share of a CPU that it used while it was looked at.
        asleep: it was in the state D at both looks.
        stuck: the system call and the file that it waited in, the same one at both looks; "" where
            it did not.
        file_system: on which that file lies, its kind and place.
        waits_in: the kernel's function.
        said: what could not be had of it, in words.
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
        """From JSON."""
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
    """A response that was asked for and has not come.

    age_s: since it was asked of the replica.
    """

    replica: int
    prompt: int
    sample: int
    age_s: float


@dataclass(frozen=True)
class ReplicaFacts:
    """An engine as the driver sees it: its state (docs/fleet.md), how many requests it has, and the
    oldest of them."""

    number: int
    state: str
    under_way: int = 0
    oldest: tuple[RequestFacts, ...] = ()


@dataclass(frozen=True)
class ServerFacts:
    """A server that the run uses and has not started. answer: what became of a question, "" where
    it was answered."""

    engine: int
    url: str
    answer: str


@dataclass(frozen=True)
class Facts:
    """All that was found.

    Args:
        beat: the driver's, as it was when the limit passed.
        without_s: for how long the run had not got on.
        missing: nodes whose part did not come, and why.
        flight: of NCCL's flight recorder, what there is, in words.
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
