"""Rehearses a recipe's launch on nodes that are namespaces of this machine.

    bash scripts/rehearse.sh short_cot_qwen2.5_32b --nodes 16

All nodes on paper: addresses, placement, and the command line of every server, by the product's own
code. Two of them with real processes: the job script, Ray, ranks on gloo and real SGLang servers on
CPUs, each node with an address, a host name, a /dev/shm and a /tmp of its own. A node has as many
GPUs as a copy of the recipe's model takes; the layout of a copy, of a server and the way of the
weights are the recipe's, the model is a thousandth of its size. Each sync makes all its steps;
under the first a server is killed, the job is requeued at its time limit, and a node is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
TOOLS = Path(__file__).parents[1]
ROOT = TOOLS.parent
sys.path[1:1] = [str(TOOLS), str(ROOT)]

import psutil  # noqa: E402
from make_route_docs import pairs, recipe, scaled  # noqa: E402
from namespaces import ADDRESSES, Node, missing, two_nodes  # noqa: E402
from small import write_data, write_model  # noqa: E402

from megatron_stare.config.process_settings import INTERFACES  # noqa: E402
from megatron_stare.config.recipes import recipes  # noqa: E402
from megatron_stare.config.schema import Config  # noqa: E402
from megatron_stare.errors import UserError  # noqa: E402
from megatron_stare.planning import placement  # noqa: E402
from megatron_stare.planning.placement import Demand, plan  # noqa: E402
from megatron_stare.rollout.engines.sglang.replica import (  # noqa: E402
    ENVIRONMENT,
    PYTHON_VARIABLE,
    server_options,
)

SERVE = "megatron_stare.rollout.engines.sglang.serve"
FAKE, LIMIT = "fake_gpu", 1e-4  # nats, float32
# of the first sync: what happens once a step is made
EVENTS = {3: "a server is killed", 5: "the time limit nears", 7: "a node is killed"}
TO_DO = {"tensor": True, "disk": True, "distributed": False}  # with servers on the trainer's GPUs


def on_paper(name: str, count: int, sync: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Prints the placement of a recipe on `count` nodes of eight GPUs, and every server's command
    line. Returns what it comes to.

    Args:
        overrides: key=value words.

    Raises:
        UserError: the recipe cannot be placed or synced there.
    """
    config = scaled(name, count, TO_DO[sync], sync, overrides)
    nodes = [placement.Node(f"node{n:02d}", f"10.0.0.{n + 1}", 8, 8) for n in range(count)]
    placed = plan(Demand.of(config), nodes)
    sent = Counter(server for server, _ in pairs(config, placed))
    for number, node in enumerate(placed.parts):
        options = server_options(config, number, address=node.address)
        line = shlex.join(["python", "-m", SERVE, *options.arguments(*options.ports[:2])])
        print(f"{node.address} server {number}, {sent[number]} senders: {line}")
    for node in placed.nodes:
        ranks = placed.ranks_on(node)
        held = f"ranks {ranks.start} to {ranks.stop - 1}" if ranks else "no rank"
        print(f"{node.address} {held}, {len(placed.parts_on(node))} servers")
    return {"sync": sync, "ranks": len(placed.ranks), "servers": len(placed.parts)}


class Job:
    """A Slurm job of a recipe on the two nodes, started again as Slurm does when it is requeued."""

    def __init__(self, nodes: list[Node], shared: Path, name: str, given: Mapping[str, str]):
        self.nodes, self.shared, self.name, self.given = nodes, shared, name, given
        self.dir, self.starts = Path(given["RUN_DIR"]), 0
        self.lines: list[str] = []
        self.left: list[str] = []

    def start(self) -> subprocess.Popen[str]:
        slurm = {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_RESTART_COUNT": str(self.starts),
        }
        self.starts += 1
        scripts = [str(ROOT / "scripts" / f"{each}.sh") for each in ("slurm_submit", "run_recipe")]
        words = ["env", *(f"{key}={value}" for key, value in {**self.given, **slurm}.items())]
        words += ["bash", scripts[0], "--job", scripts[1], self.name]
        return self.nodes[0].popen(
            words, cwd=self.shared, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def clean(self, process: subprocess.Popen[str]) -> None:
        """Waits for the end of the job's script. Notes what the run has left after a while, and
        ends everything on the nodes, as Slurm does."""
        process.wait()
        until = time.monotonic() + 30
        while (left := [each for node in self.nodes for each in ours(node)]) and (
            time.monotonic() < until
        ):
            time.sleep(0.5)
        self.left += left
        for node in self.nodes:
            node.kill()

    def made(self, process: subprocess.Popen[str]) -> Iterator[int]:
        """Yields the steps that a start of the job makes, until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)
            print(f"    {line}", end="", flush=True)
            if step := re.match(r"\s*step\s+(\d+)/", line):
                yield int(step[1])

    def run(self, events: Mapping[int, str]) -> dict[str, Any]:
        """Runs the job to its end. Raises UserError if it does not end as it should."""
        due, seen, requeued = dict(events), [], self.shared / "bin/requeued"
        listened: list[set[str]] = [set() for _ in self.nodes]
        while True:
            process = self.start()
            cleaner = threading.Thread(target=self.clean, args=(process,))
            cleaner.start()
            for step in self.made(process):
                for addresses, node in zip(listened, self.nodes, strict=True):
                    addresses |= listening(node)
                if (what := due.pop(step, None)) is None:
                    continue
                print(f"  step {step}: {what}", flush=True)
                seen.append(f"step {step}: {what}")
                if what == "a server is killed":
                    os.killpg(a_server(self.nodes[1]), signal.SIGKILL)
                elif what == "the time limit nears":
                    process.send_signal(signal.SIGUSR1)
                else:  # Slurm then ends the job on its other nodes and requeues it
                    self.nodes[1].kill()
                    self.nodes[0].kill()
                    requeued.touch()
            cleaner.join()
            ended = process.returncode
            if requeued.exists():
                requeued.unlink()
                continue
            break
        if ended:
            raise UserError(f"the job ended with {ended}", where="".join(self.lines[-30:]))
        apart = self.given["COLOCATED"] == "false"  # then a node may have no server
        for found, node in zip(listened, self.nodes, strict=True):
            if not (found == {node.address} or (apart and not found and any(listened))):
                raise UserError(f"servers of {node.address} listened on {sorted(found)}")
        return {"events": seen, "starts": self.starts, **self.held()}

    def held(self) -> dict[str, Any]:
        """Returns what the finished run recorded. Raises UserError if it is not what it should."""
        rows = [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows]
        if steps != list(range(1, int(self.given["STEPS"]) + 1)):
            raise UserError(f"the run has the steps {steps}", where=str(self.dir))
        kinds = ("agreement/max", "agreement/canary_max")
        apart = max(row[kind] for row in rows for kind in kinds)
        if not apart <= LIMIT:
            raise UserError(f"engines and trainer differ by {apart} nats, not {LIMIT}")
        if self.left:
            raise UserError(f"the run has left {len(self.left)} processes: {self.left}")
        placed = (self.dir / "placement.txt").read_text()
        if not all(address in placed for address in ADDRESSES):
            raise UserError("the run was not on both nodes", where=placed)
        return {"steps": len(steps), "agreement_max": apart}


def listening(node: Node) -> set[str]:
    """Returns the addresses that SGLang's processes of a node listen on, but for loopback, and for
    the store at which a server's own ranks meet: that is torch's, and listens on all."""
    found = node.run("ss", "-Hltnp").splitlines()
    every = {line.split()[3].rpartition(":")[0] for line in found if "sglang" in line}
    return every - {"*", "127.0.0.1"}


def ours(node: Node) -> list[str]:
    """Returns the command lines of the node's processes that are not Ray's own."""
    found = []
    for number in node.processes():
        with contextlib.suppress(psutil.Error):
            line = " ".join(psutil.Process(number).cmdline())
            if "megatron_stare" in line or "sglang" in line:
                found.append(line[:160])
    return found


def a_server(node: Node) -> int:
    """Returns the process group of a server on the node."""
    for number in sorted(node.processes()):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if SERVE in psutil.Process(number).cmdline() and os.getpgid(number) == number:
                return number
    raise UserError(f"no server runs on {node.name}")


def variables(
    config: Config, shared: Path, sync: str, steps: int, overrides: tuple[str, ...]
) -> tuple[dict[str, str], int]:
    """Variables of scripts/launch.sh that make the recipe small, and the GPUs of a node."""
    parallel, served = config.parallel, config.sglang.tensor_parallel
    gpus, colocated = parallel.tensor * parallel.pipeline * parallel.context, TO_DO[sync]
    problems, reward = write_data(shared)
    more = [
        f"sglang.sync={sync}",
        f"reward.verifier={reward}:verify",
        "reward.workers=1",
        f"sglang.agreement_limit={LIMIT}",
        "sglang.start_timeout_s=1800",
        "run.checkpoint_every=2",
        "runtime.object_store_mb=128",
        *overrides,
        *(["algorithm.overlong=null"] if getattr(config.algorithm, "overlong", None) else []),
    ]
    given = {
        "MODEL": str(shared / "model"),
        "DATA": str(problems),
        "STEPS": str(steps),
        "EVALUATE": "0",
        "DEVICE": "cpu",
        "DTYPE": "float32",
        "COLOCATED": str(colocated).lower(),
        "DATA_PARALLEL": "2" if colocated else "1",
        "ENGINES": str((2 if colocated else 1) * gpus // served),
        "PROMPTS": "4",
        "GENERATE_PROMPTS": "8" if config.batch.generate_prompts else "",
        "MINI_BATCH": "2" if config.batch.mini_batch_prompts else "",
        "SAMPLES": "4",
        "MAX_PROMPT_TOKENS": "1024",  # bytes, and a template may name tools
        "MAX_NEW_TOKENS": "32",
        "MICRO_BATCH_TOKENS": "2048",
        "GPU_RESOURCE": FAKE,
        "GPUS": "0",
        "CPUS": "2",
        "OBJECT_STORE_GB": "1",
        "RESOURCES": json.dumps({FAKE: gpus}),
        "SETTINGS": " ".join(more),
        "WORK": str(shared),
        "RUN_DIR": str(shared / f"run-{sync}"),
        "PYTHON": sys.executable,
        "SGLANG_PYTHON": os.environ.get("SGLANG_PYTHON") or sglang_python(),
    }
    return given, gpus


def sglang_python() -> str:
    """Returns the Python of SGLang's environment. Raises UserError if there is none."""
    python = os.environ.get(PYTHON_VARIABLE) or str(Path(str(ENVIRONMENT)) / "bin/python")
    if not Path(python).exists():
        raise UserError(f"no SGLang at {python}", fix="bash scripts/setup_sglang.sh")
    return python


class Memory(threading.Thread):
    """Watches what the machine's processes take beyond what they took before, in 10^9 bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = psutil.virtual_memory().available
        self.most, self.over = 0.0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(2.0):
            taken = self._before - psutil.virtual_memory().available
            self.most = max(self.most, taken / 1e9)


def rehearse(
    name: str, sync: str, steps: int, events: Mapping[int, str], overrides: tuple[str, ...]
) -> dict[str, Any]:
    """Runs a recipe with one sync on the two nodes. Raises UserError if it fails."""
    config = recipe(name, overrides)
    environment = {key: value for key, value in os.environ.items() if key not in INTERFACES}
    memory, begun = Memory(), time.monotonic()
    with two_nodes(environment) as (nodes, shared):
        given, gpus = variables(config, shared, sync, steps, overrides)
        parameters = write_model(config, shared / "model")
        copies, servers = given["DATA_PARALLEL"], given["ENGINES"]
        print(
            f"{name}, {sync}: 2 nodes of {gpus} GPUs, {copies} x {gpus} ranks, {servers} servers"
            f" of {config.sglang.tensor_parallel}, {parameters:,} parameters",
            flush=True,
        )
        memory.start()
        try:
            told = Job(nodes, shared, name, given).run(events)
        finally:
            memory.over.set()
    ranks = int(copies) * gpus
    size = {"gpus_per_node": gpus, "ranks": ranks, "servers": int(servers)}
    taken = {"seconds": round(time.monotonic() - begun), "memory_gb": round(memory.most, 1)}
    return {"sync": sync, **size, **told, **taken}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="rehearse.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", choices=recipes(), metavar="RECIPE")
    parser.add_argument("--nodes", type=int, default=2, help="nodes on paper, of eight GPUs each")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sync", nargs="+", choices=TO_DO, default=list(TO_DO))
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", help="settings, as after train"
    )
    parser.add_argument("--paper", action="store_true", help="start nothing")
    parser.add_argument("--out", type=Path, help="file for what was found, as JSON")
    args = parser.parse_args()
    if args.nodes < 1 or args.steps < 1:
        parser.error("--nodes and --steps are at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the nodes end
    args.set = tuple(args.set)  # recipes are cached by it
    told: dict[str, Any] = {"set": args.set} if args.set else {}
    told |= {"recipe": args.recipe, "nodes": args.nodes, "paper": [], "real": []}
    try:
        if not args.paper and (lacking := missing()):
            raise UserError(lacking, fix="--paper starts nothing and needs none of it")
        for sync in args.sync:
            told["paper"].append(on_paper(args.recipe, args.nodes, sync, args.set))
        for number, sync in enumerate([] if args.paper else args.sync):
            events = EVENTS if number == 0 else {}
            told["real"].append(rehearse(args.recipe, sync, args.steps, events, args.set))
            print(json.dumps(told["real"][-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(told, indent=1) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
