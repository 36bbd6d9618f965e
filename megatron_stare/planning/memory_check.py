"""Whether a run fits the GPUs it is to be on, said before anything starts: the numbers of memory_budget.py, found."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config, ParallelConfig
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.dry.planned_rank import plan_rank
from megatron_stare.megatron.model.head_choice import largest_logits
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.activation_memory import ActivationMemory, activation_memory, layer_parts
from megatron_stare.planning.memory_budget import Budget, Needs, budget
from megatron_stare.rollout.engines.replicas import ServedMemory, served_memory

BUCKETS = 3  # of the sync that a sender holds at most
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_memory(run: ResolvedRun) -> None:
    """Holds the run against a GPU's memory, where that is known.

    Raises:
        ConfigError: a setting of `memory` has nothing to say, or a phase of a step does not fit; with all phases'
            numbers and what would do.
    """
    config = run.config
    if config.memory.offload is not None and not config.sglang.colocated:
        raise ConfigError(
            "nothing has to leave a device that the trainer has for itself",
            where="memory.offload",
            fix="set sglang.colocated=true as well, or leave it out",
        )
    capacity = round(config.memory.device_gb * 1e9) if config.memory.device_gb else device_bytes()
    if capacity is not None:
        Fit(capacity).require(run)


def device_bytes() -> int | None:
    """Memory of the smallest GPU of this machine, as its driver's tool says, which leaves CUDA alone; None: no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    sizes = [int(line) for line in said.stdout.split() if line.isdigit()] if said.returncode == 0 else []
    return min(sizes) * 2**20 if sizes else None


class Fit:
    """Holds runs against GPUs of so many bytes. Ranks that two of them have in common are built once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._built: dict[str, list[dict[str, int]]] = {}

    def require(self, run: ResolvedRun) -> None:
        """Raises ConfigError where a phase of the run does not fit, or a cache has no room for a response."""
        if not (wrong := self.faults(run)):
            return
        found = self.budget(run)
        fixes = [name for name, changed in self._changes(run, found) if not self.faults(changed)]
        experts = "\nactivations of experts are not known before, and not counted" if run.shape.experts else ""
        raise ConfigError(
            f"{'; '.join(wrong)}\n{found.table()}{experts}",
            where="memory",
            fix="; or ".join([*fixes, "more ranks in parallel.tensor, parallel.pipeline or of a server"]),
        )

    def faults(self, run: ResolvedRun) -> list[str]:
        """What of a run does not fit, a sentence each."""
        found, wrong = self.budget(run), []
        if found.over:
            wrong.append(f"a GPU of {self.capacity / 1e9:.1f} GB is too small for the phases {', '.join(found.over)}")
        if served := self.served(run):
            tokens, longest = served.cache // served.token, longest_sequence(run.config)
            if tokens < longest:
                wrong.append(f"a server's cache holds {tokens} tokens, a prompt with its response has up to {longest}")
        return wrong

    def budget(self, run: ResolvedRun) -> Budget:
        """Of the pipeline stage whose fullest phase is fullest."""
        return max(self.budgets(run), key=lambda each: max(map(each.total, each.phases)))

    def budgets(self, run: ResolvedRun) -> list[Budget]:
        """Of the first rank of every pipeline stage."""
        offload, colocated = run.config.memory.offload or "all", run.config.sglang.colocated
        return [budget(each, self.capacity, colocated=colocated, offload=offload) for each in self.needs(run)]

    def needs(self, run: ResolvedRun) -> Iterator[Needs]:
        """What the first rank of each stage of the pipeline needs, and a server's rank beside it."""
        config, shape, stages = run.config, run.shape, run.config.parallel.pipeline
        tokens, longest = -(-config.batch.micro_batch_tokens // config.parallel.context), longest_sequence(config)
        rows = 1 if config.batch.packed else max(config.batch.micro_batch_tokens // longest, 1)
        kept, layer = self.activations(run, tokens, longest, rows)
        served = self.served(run)
        for stage, nbytes in enumerate(self.stages(run)):
            yield Needs(
                parameters=nbytes["parameters"],
                gradients=nbytes["gradients"],
                optimizer=nbytes["main parameters"] + nbytes["moments"],
                reference=nbytes["parameters"] if run.method.needs_reference else 0,
                reference_moves=config.model.reference_offload,
                forward=round(layer * tokens * _BYTES[config.model.dtype]),
                activations=round(kept.kept * micro_batches_held(config.parallel, stage)) + kept.again if kept else 0,
                logits=logits_bytes(config, shape) if stage == stages - 1 else 0,
                buckets=BUCKETS * config.rollout.sync_bucket_mb * 2**20,
                served=served.weights if served else 0,
                cache=served.cache if served else 0,
            )

    def activations(
        self, run: ResolvedRun, tokens: int, longest: int, rows: int
    ) -> tuple[ActivationMemory | None, float]:
        """Of a micro-batch, and numbers a token that one layer makes. Experts' are not known before: none of either."""
        config, shape = run.config, run.shape
        kept = activation_memory(config, shape, tokens, longest, rows)
        return kept, 0.0 if shape.experts else sum(layer_parts(config, shape, rows, longest).values())

    def served(self, run: ResolvedRun) -> ServedMemory | None:
        """What a server's rank keeps."""
        return served_memory(run.config, run.shape, self.capacity)

    def stages(self, run: ResolvedRun) -> list[dict[str, int]]:
        """Bytes by item of the first rank of each stage, built without data; no other of its stage holds more."""
        config, parallel = run.config, run.config.parallel
        key = "".join(each.model_dump_json() for each in (config.model, parallel, config.optimizer))
        if key not in self._built:
            ranks = range(0, parallel.world_size, parallel.world_size // parallel.pipeline)
            plans = [plan_rank(run.shape, config.model, parallel, config.optimizer, rank) for rank in ranks]
            self._built[key] = [plan.nbytes for plan in plans]
        return self._built[key]

    def _changes(self, run: ResolvedRun, found: Budget) -> Iterator[tuple[str, ResolvedRun]]:
        """Single settings that make less of what does not fit, and the run with each; the nearest first."""
        config = run.config
        items = {item for phase in found.over for item in found.phases[phase]}
        served = self.served(run)
        if served and "cache" in items and found.cache_room > 0:
            yield _with(run, served.setting, served.value_for(found.cache_room))
        if config.sglang.colocated and config.memory.offload not in (None, "all"):
            yield _with(run, "memory.offload", "all")
        if "reference" in items and not config.model.reference_offload:
            yield _with(run, "model.reference_offload", True)
        if not config.optimizer.distributed and config.parallel.replicas > 1:
            yield _with(run, "optimizer.distributed", True)
        if "activations" in items and config.model.recompute != "full":
            yield _with(run, "model.recompute", "full")
        half = config.batch.micro_batch_tokens // 2
        while "activations" in items and half >= longest_sequence(config):
            yield _with(run, "batch.micro_batch_tokens", half)
            half //= 2


def micro_batches_held(parallel: ParallelConfig, stage: int) -> float:
    """Micro-batches whose activations a stage of the pipeline holds at once, from their forwards to their backwards.

    One forward, one backward (D. Narayanan et al., arXiv 2104.04473, section 2.2); where a stage has its layers in
    chunks, as megatron-core's interleaved schedule warms up: two chunks for each stage that follows, all chunks but
    the last for as many micro-batches as there are stages, and the one that is begun.
    """
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks == 1:
        return stages - stage
    return (2 * (stages - stage - 1) + (chunks - 1) * stages + 1) / chunks


def logits_bytes(config: Config, shape: ModelShape) -> int:
    """Those that the head holds at a time; left to itself it takes chunks where whole ones are large."""
    whole = largest_logits(config, shape)
    if config.model.head == "materialised":
        return whole
    return min(whole, whole * config.model.head_chunk_tokens // config.batch.micro_batch_tokens)


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with its response."""
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens


def _with(run: ResolvedRun, setting: str, value: Any) -> tuple[str, ResolvedRun]:
    section, _, name = setting.partition(".")
    part = getattr(run.config, section).model_copy(update={name: value})
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"{setting}={shown}", ResolvedRun(run.config.model_copy(update={section: part}), run.shape)
