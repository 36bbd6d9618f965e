"""Whole runs with rollouts from real SGLang servers: agreement over twenty steps, and what an end
leaves behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import sglang_servers as servers
from support.interrupts import interruptible
from support.leftovers import Traces
from support.models import save_model
from support.runs import command, environment, metrics, model

from megatron_stare.cluster.colocation import MEASURED_EVERY, MEASURED_FIRST

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.distributed,
    pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
]
SGLANG = (
    "rollout.engine=sglang",
    f"sglang.python={servers.PYTHON}",
    f"sglang.start_timeout_s={servers.START_S}",
    "eval.prompts=0",
)
LIMIT = 1e-4  # nats, float32


class Run:
    """A run in a process of its own, read line by line."""

    def __init__(self, folder: Path, *overrides: str, **settings: object) -> None:
        self.dir, self.traces = folder / "run", Traces()
        self.log = (folder / "stderr.log").open("w+")
        self.process = subprocess.Popen(
            command(model(), f"run.dir={self.dir}", *SGLANG, *overrides, **settings),
            cwd=folder,
            env=self.traces.environment(environment()),
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            preexec_fn=interruptible,
        )

    def lines(self) -> Iterator[str]:
        """Its output, until it ends."""
        assert self.process.stdout is not None
        yield from self.process.stdout

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()


def is_step(line: str, number: int) -> bool:
    """Tells if a line of output is that of the step."""
    return re.match(rf"\s*step\s+{number}/", line) is not None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type]:
    runs: list[Run] = []

    def begin(*overrides: str, **settings: object) -> Run:
        runs.append(Run(tmp_path, *overrides, **settings))
        return runs[-1]

    yield begin  # type: ignore[misc]
    for run in runs:
        run.process.kill()
        run.process.wait()
        run.log.close()


def agreed(run: Run, steps: int) -> list[dict[str, Any]]:
    """The metrics of a run that has two servers, agrees in every step, and leaves nothing
    behind."""
    servers_seen = 0
    for line in run.lines():
        if is_step(line, 2):
            servers_seen = run.traces.look()
    assert run.process.wait() == 0, run.errors()
    rows = metrics(run.dir)
    assert len(rows) == steps
    for row in rows:
        assert row["agreement/max"] <= LIMIT
        assert row["agreement/canary_max"] <= LIMIT
        # every token is of the newest weights
        assert row["agreement/max_of_age_1"] == row["agreement/max"]
    assert servers_seen == 2
    assert run.traces.left() == []
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["tensor", "distributed"])
def test_twenty_steps_agree_token_by_token(start, sync):
    run = start(
        "parallel.tensor=2",
        "rollout.engines=2",
        f"sglang.sync={sync}",
        f"sglang.colocated={sync == 'tensor'}",
        f"sglang.agreement_limit={LIMIT}",
        **{"run.steps": 20},
    )
    for row in agreed(run, 20):
        assert row["ratio/max_abs_log"] == 0.0
    recorded = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    steps = range(1, 21)
    read = [step <= MEASURED_FIRST or step % MEASURED_EVERY == 0 for step in steps]
    for moved in ("memory/engines_freed_mb", "memory/engines_taken_mb"):
        assert [moved in row for row in recorded] == [sync == "tensor" and now for now in read]
    for phase in ("rollout", "log_probs", "update", "sync"):
        assert all(row[f"memory/{phase}_peak_mb"] > 0 for row in recorded)
        held = [f"memory/{phase}_engines_mb" in row for row in recorded]
        assert held == [sync == "tensor" and now for now in read]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["tensor", "disk", "distributed", "colocated"])
def test_ten_steps_agree_with_servers_of_two_ranks(start, sync):
    """The trainer is cut over tensor and pipeline ranks, each of two servers over tensor ranks;
    colocated, each of these opens memory of a trainer's rank of its own."""
    run = start(
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.first_stage_layers=2",
        "rollout.engines=2",
        "sglang.tensor_parallel=2",
        f"sglang.sync={'tensor' if sync == 'colocated' else sync}",
        f"sglang.colocated={sync == 'colocated'}",
        f"sglang.agreement_limit={LIMIT}",
        **{"run.steps": 10, "batch.prompts": 8, "batch.samples_per_prompt": 4},
    )
    agreed(run, 10)


ON_TWO_NODES = (
    "parallel.tensor=2",
    "sglang.tensor_parallel=2",
    "sglang.nodes=2",
    f"sglang.agreement_limit={LIMIT}",
)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["distributed", "tensor", "disk"])
def test_steps_agree_with_a_server_on_two_nodes(start, tmp_path, sync):
    """A process a node, each with one of the server's two ranks; both prove what they hold."""
    folder = [f"sglang.sync_folder={tmp_path}"] if sync == "disk" else []
    run = start(*ON_TWO_NODES, f"sglang.sync={sync}", *folder, **{"run.steps": 5})
    agreed(run, 5)


@pytest.mark.slow
def test_servers_sample_ahead_of_training(start):
    """Weights are swapped while responses are under way: no token is older than allowed, and those
    that are said to be of the newest weights have the trainer's log-probs."""
    run = start(
        "parallel.tensor=2",
        "rollout.engines=2",
        "rollout.staleness=1",
        "rollout.max_batch=2",  # so that a step's responses take a while
        "sglang.sync=distributed",
        f"sglang.agreement_limit={LIMIT}",
        "algorithm.correction={mode: truncate}",
        **{"run.steps": 12, "batch.prompts": 8, "batch.samples_per_prompt": 4},
    )
    for _ in run.lines():
        run.traces.look()
    assert run.process.wait() == 0, run.errors()
    rows = metrics(run.dir)
    assert len(rows) == 12
    assert max(row["staleness/max_age"] for row in rows) == 1 and rows[0]["staleness/max_age"] == 0
    # how many is a matter of the machine's time
    assert any(0 < row["staleness/mean_age"] < 1 for row in rows)
    for row in rows:
        assert row["agreement/canary_max"] <= LIMIT
        if "agreement/max_of_age_2" in row:  # of a policy one step older, which is another
            assert row["agreement/max_of_age_2"] > LIMIT
        assert row["rollout/retried"] == 0.0
        if "agreement/max_of_age_1" in row:  # of the newest weights: the trainer's own
            assert row["agreement/max_of_age_1"] <= LIMIT
    assert run.traces.left() == []


@pytest.mark.slow
def test_servers_continue_responses_that_were_cut(start):
    """Tokens sampled behind a prefix of older weights have the trainer's log-probs, so the prefix
    was the right one."""
    run = start(
        "rollout.engines=2",
        *("partial.tokens=8", "rollout.temperature=2"),  # at which responses have 5 to 32 tokens
        f"sglang.agreement_limit={LIMIT}",
        "algorithm.correction={mode: truncate}",
        **{"run.steps": 6, "batch.prompts": 8, "batch.samples_per_prompt": 4},
    )
    for _ in run.lines():
        run.traces.look()
    assert run.process.wait() == 0, run.errors()
    rows = metrics(run.dir)
    assert len(rows) == 6 and sum(row["partial/continued"] for row in rows) > 0
    assert max(row["staleness/max_age"] for row in rows) > 0
    for row in rows:
        assert row["agreement/canary_max"] <= LIMIT and row["rollout/retried"] == 0.0
        if "agreement/max_of_age_1" in row:  # of the newest weights
            assert row["agreement/max_of_age_1"] <= LIMIT
    assert run.traces.left() == []


@pytest.mark.slow
def test_experts_that_servers_name_are_replayed(start, tmp_path):
    """In float32 engine and trainer choose alike but for a tie, so that what was put in the wrong
    place shows."""
    folder = tmp_path / "model"
    sizes = {
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "vocab_size": 16,
        "max_position_embeddings": 128,
    }
    save_model(folder, "qwen3_moe", **sizes)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(servers.MODEL / file, folder)
    run = start(
        *("parallel.tensor=2", "parallel.sequence=true", "parallel.data=2", "parallel.expert=2"),
        f"model.path={folder}",
        *("moe.routing_replay=true", "rollout.engines=2", f"sglang.agreement_limit={LIMIT}"),
    )
    for row in agreed(run, 2):
        assert row["ratio/max_abs_log"] == 0.0
        assert row["routing/differs"] < 1e-3


@pytest.mark.slow
def test_ten_steps_in_bfloat16_agree_by_mean_and_quantiles(start):
    """Trainer and server both; the limits are those of docs/diagnostics.md, and single tokens pass
    float32's."""
    run = start(**{"run.steps": 10, "model.dtype": "bfloat16", "batch.prompts": 8})
    for _ in run.lines():
        run.traces.look()
    assert run.process.wait() == 0, run.errors()
    rows = metrics(run.dir)
    assert len(rows) == 10
    for row in rows:
        assert (
            1e-4 < row["agreement/mean"] <= 0.01
            and row["agreement/p99"] <= 0.1
            and row["agreement/p999"] <= 0.5
        )
        assert row["agreement/max"] > 1e-3 and row["agreement/canary_likely_mean"] <= 0.1
        assert row["rollout/retried"] == 0.0
    assert run.traces.left() == []


@pytest.mark.slow
def test_keys_and_values_in_eight_bits_agree_within_their_limits(start):
    """In float32, so that the differences are the cache's alone: those that
    benchmarks/eight_bits.py simulates."""
    run = start(
        "sglang.kv_cache_dtype=fp8_e4m3",
        "algorithm.correction={mode: truncate}",
        **{"run.steps": 4, "batch.prompts": 8},
    )
    for _ in run.lines():
        run.traces.look()
    assert run.process.wait() == 0, run.errors()
    rows = metrics(run.dir)
    assert len(rows) == 4
    for row in rows:
        assert 2e-3 < row["agreement/mean"] <= 0.02
        assert row["agreement/p99"] <= 0.4 and row["agreement/p999"] <= 1.25
        assert 0.02 < row["agreement/canary_likely_mean"] <= 0.2
        assert row["correction/weight"] != 1.0
    assert run.traces.left() == []


def test_a_run_that_stops_says_why_and_leaves_nothing(start):
    """Rounding alone is past this limit, so the first canary stops the run, after a whole weight
    sync."""
    run = start("sglang.agreement_limit=1e-12")
    for _ in run.lines():
        run.traces.look()
    assert run.process.wait() == 2
    assert "log-probs of the canary differ by up to" in run.errors()
    assert "the limit is 1e-12" in run.errors()
    assert "Traceback" not in run.errors()
    assert run.traces.left() == []


def test_ctrl_c_leaves_nothing(start):
    run, interrupted = start(**{"run.steps": 50}), False
    for line in run.lines():
        if is_step(line, 1):
            interrupted = True
            assert run.traces.look() == 1
            run.process.send_signal(signal.SIGINT)
    assert interrupted and run.process.wait() == 130, run.errors()
    assert run.traces.left() == []
