"""Predicts how much memory a GPU needs in each phase of a step. Raises an error before a run starts
if the GPU has too little memory.

`activation_memory` counts the bytes that a rank keeps in memory between a micro-batch's forward
pass and its backward pass, with or without recomputation. The counts are for the layers that a run
uses on CPUs: Megatron's local layers with this package's RMSNorm, SwiGLU and packed attention. The
packed attention pads the sequences of a group to one length. The counts assume that all sequences
in a group have the same length. Fused kernels keep fewer bytes than `activation_memory` counts. If
the sequences in a group differ in length, their padding adds bytes that are not counted.
tests/megatron/test_recompute.py checks that the counts agree with the saved tensors within 1 %.

The function `budget` lists, for each phase of a step, the items in a GPU's memory and the size of
each item in bytes. Examples of items are the gradients and the KV cache. docs/colocation.md lists
what is in a GPU's memory in each phase. For the first rank of each pipeline stage, `Fit` builds the
model and the optimizer on torch's meta device, where tensors have no data, and counts the bytes of
the tensors. `PlannedFit` checks many layouts of a run. `PlannedFit` builds only the embedding, the
head and one layer of each kind, and computes the bytes of the ranks from the sizes of these parts.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatron_stare.config.performance import WHOLE_UP_TO
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config, ParallelConfig
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.dry.planned_rank import Parts, build_parts, plan_rank, stage_bytes
from megatron_stare.megatron.model.head import SHARE, largest_logits
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.phase_times import balanced
from megatron_stare.rollout.engines.replicas import ServedMemory, served_memory

# Assumed bytes of a process for the CUDA context, the buffers of libraries and NCCL, and allocator
# fragmentation. Not measured on a GPU.
PROCESS_BYTES = 1_500_000_000
# Assumed bytes that a server keeps beside a trainer: the same, and about 2 GB of CUDA graphs, which
# SGLang releases only with SGLANG_MEMORY_SAVER_CUDA_GRAPH (sgl-project/sglang, issue 10217).
SERVER_BYTES = 4_000_000_000

ITEMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "main parameters, moments",
    "reference": "reference policy",
    "forward": "activations, log-probs",
    "activations": "activations, update",
    "logits": "logits",
    "buckets": "buckets of the sync",
    "served": "servers' weights",
    "cache": "servers' cache",
    "processes": "CUDA, NCCL (assumed)",
}
# items that each phase needs, colocated or not. Unless colocated, a rollout is on the servers' GPUs
_PHASES: dict[str, tuple[str, ...]] = {
    "rollout": ("served", "cache"),
    "log_probs": ("parameters", "reference", "forward", "logits"),
    "update": ("parameters", "gradients", "optimizer", "reference", "activations", "logits"),
    "sync": ("parameters", "buckets", "served"),
    "canary": ("parameters", "served", "cache"),
    "checkpoint": ("parameters", "optimizer", "served"),
}
_TRAINER = ("parameters", "gradients", "optimizer", "reference")
_STAYS = {"all": (), "optimizer": ("parameters", "reference"), "none": _TRAINER}
BUCKETS = 3  # most buckets that a sender holds during a weight sync
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Needs:
    """Bytes on one GPU. Each field except `reference_moves` is a number of bytes.

    `optimizer`: bytes of main parameters and moments.
    `reference`: bytes of the reference policy, or 0 if the method needs no reference policy.
    `forward`: bytes of the activations in a forward-only pass.
    `activations`: bytes of the activations that are kept for the backward pass, plus the peak bytes
        of the activations that the backward pass recomputes.
    `buckets`: bytes of the buckets in which the weight sync sends parameters.
    `served`: bytes of the weights on a server's rank.
    `cache`: bytes of the KV cache on a server's rank.
    `reference_moves`: True if the reference policy is on the GPU only during its own log-prob pass.
    """

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    forward: int
    activations: int
    logits: int
    buckets: int
    served: int
    cache: int
    reference_moves: bool = False


@dataclass(frozen=True)
class Budget:
    """Bytes of a GPU's memory by phase and item, and the GPU's `capacity` in bytes."""

    phases: dict[str, dict[str, int]]
    capacity: int

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def over(self) -> list[str]:
        """Phases that need more memory than the GPU has."""
        return [phase for phase in self.phases if self.total(phase) > self.capacity]

    @property
    def cache_room(self) -> int:
        """Largest size, in bytes, that the KV cache can have without exceeding the GPU's memory in
        any phase with a KV cache. The size is negative if the other items of such a phase already
        need more than the GPU's memory."""
        with_cache = [phase for phase, items in self.phases.items() if "cache" in items]
        return min(
            self.capacity - self.total(phase) + self.phases[phase]["cache"] for phase in with_cache
        )

    def table(self) -> str:
        """Returns a table in GB (10^9 bytes) with one row per item and one column per phase."""
        rows = [["GB", *self.phases]]
        for item, name in ITEMS.items():
            found = [items.get(item) for items in self.phases.values()]
            if any(found):
                rows.append(
                    [name] + ["" if nbytes is None else f"{nbytes / 1e9:.1f}" for nbytes in found]
                )
        rows.append(
            [f"together, of {self.capacity / 1e9:.1f}"]
            + [f"{self.total(p) / 1e9:.1f}" for p in self.phases]
        )
        lines = (f"{first:26}" + "".join(f"{cell:>11}" for cell in cells) for first, *cells in rows)
        return "\n".join(line.rstrip() for line in lines)


def budget(needs: Needs, capacity: int, *, colocated: bool, offload: str) -> Budget:
    """Returns the bytes of every item in a GPU's memory, separately for each phase of a step.

    Args:
        capacity: memory of the GPU, bytes.
        colocated: the servers share the GPU. Otherwise the phase `rollout` describes a GPU of the
            servers.
        offload: the setting `memory.offload`. Only used if colocated.
    """
    processes = PROCESS_BYTES + (SERVER_BYTES if colocated else 0)
    sizes = {**asdict(needs), "processes": processes}
    stays = _STAYS[offload] if colocated else _TRAINER
    phases: dict[str, dict[str, int]] = {}
    for phase, wanted in _PHASES.items():
        items = {*wanted, *stays, "processes"}
        if not colocated and phase in ("canary", "checkpoint"):
            continue  # need no more than `sync` and `update`
        if not colocated:
            items -= set(_TRAINER) if phase == "rollout" else {"served", "cache"}
        if (needs.reference_moves and phase != "log_probs") or not needs.reference:
            items -= {"reference"}
        phases[phase] = {item: sizes[item] for item in ITEMS if item in items}
    return Budget(phases, capacity)


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the activations of one micro-batch on one rank.

    `kept`: bytes that are kept from forward to backward for one micro-batch. A pipeline stage keeps
        the activations of several micro-batches at a time (`micro_batches_held`).
    `again`: peak bytes of the activations that the backward pass recomputes. The activations of one
        micro-batch need `kept` plus `again` bytes in total.
    """

    kept: int
    again: int


def activation_memory(
    config: Config, shape: ModelShape, tokens: int, longest: int, rows: int = 1
) -> ActivationMemory:
    """Computes the memory of a micro-batch's activations on the last pipeline stage, without the
    logits. In a mixture of experts, every expert is assumed to get an equal share of tokens. The
    token copies that are made for dispatch to experts are not counted.

    Args:
        tokens: positions of the micro-batch, with padding.
        longest: positions of the longest sequence.
        rows: sequences per micro-batch; 1 if packed.
    """
    model, parallel = config.model, config.parallel
    size = 2 if model.dtype == "bfloat16" else 4
    chunks = parallel.virtual_pipeline
    layers = shape.layers // (parallel.pipeline * chunks)
    if parallel.first_stage_layers is not None:
        layers = (shape.layers - parallel.first_stage_layers) // (parallel.pipeline - 1)
    hidden = shape.hidden / (parallel.tensor if parallel.sequence else 1)
    whole = sum(layer_parts(config, shape, rows, longest).values())
    kept, again = layers * whole, 0.0
    if model.recompute == "full":
        uniform, number = model.recompute_method == "uniform", min(model.recompute_layers, layers)
        kept = layers // number * hidden if uniform else number * hidden + (layers - number) * whole
        again = (number if uniform else 1) * whole
    elif model.recompute == "selective":
        parts = layer_parts(
            config, shape, rows, longest, recomputed=frozenset(model.recompute_modules)
        )
        kept, again = layers * sum(parts.values()), whole - sum(parts.values())
    last_norm = hidden + 1
    # float32 rotary angles, saved as an input of the recomputed layers
    angles = 4 * longest * shape.head_dim if model.recompute == "full" else 0
    return ActivationMemory(
        round((chunks * kept + last_norm) * tokens * size) + angles,
        max(round(again * tokens * size), 0),
    )


def layer_parts(
    config: Config,
    shape: ModelShape,
    rows: int,
    longest: int,
    recomputed: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """Returns a dict that maps each part of a layer to the number of tensor elements per token that
    a rank keeps for backward. If a mixture-of-experts model begins with dense layers, the dense
    layers are counted like the model's expert layers."""
    parallel, packed = config.parallel, config.batch.packed
    tp, cut = parallel.tensor, parallel.tensor if parallel.sequence else 1
    heads, groups = shape.heads / tp, max(shape.kv_heads / tp, 1)
    q, k = heads * shape.head_dim, groups * shape.head_dim
    # output of the fused QKV projection; a view of it keeps all of it alive
    product = q + 2 * k
    if "core_attn" in recomputed:
        attention = product + q + k + q  # queries, keys, values (a view of product), and the output
    elif longest <= WHOLE_UP_TO and config.model.dtype == "float32" and parallel.context == 1:
        # copied queries, keys and values; probabilities, which overwrite the scores; the output
        attention = q + 2 * k + heads * longest + q
    elif packed:  # gathered queries, keys, values; output, also scattered; log-sum of each row
        attention = q + 2 * k + 2 * q + heads
    else:
        attention = product + q + k + q + heads
    return {
        # of both norms: the normalised input, its RMS, and the output, which the linear layer keeps
        "norms": (4 * shape.hidden + 2) / cut,
        # normalised queries and keys, and their RMS
        "norms of heads": (q + heads + k + groups) if shape.qk_norm else 0,
        "rotation": 4 * shape.head_dim / (1 if packed else rows),  # sines and cosines
        "attention": attention,
        # gate and up projections, the activation, and the product
        "feed forward": (
            0 if ("moe" if shape.experts else "mlp") in recomputed else 4 * balanced(shape).ffn / tp
        ),
    }


def check_memory(run: ResolvedRun) -> None:
    """Checks that the run fits a GPU's memory, if the size of this memory is known.

    Raises:
        ConfigError: a setting of `memory` has no effect, or a phase does not fit. The message
            contains the memory of all phases, and settings that would make the run fit.
    """
    config = run.config
    if config.memory.offload is not None and not config.sglang.colocated:
        raise ConfigError(
            "the trainer has its devices for itself, so nothing needs to be offloaded",
            where="memory.offload",
            fix="set sglang.colocated=true as well, or leave it out",
        )
    capacity = round(config.memory.device_gb * 1e9) if config.memory.device_gb else device_bytes()
    if capacity is not None:
        Fit(capacity).require(run)


def device_bytes() -> int | None:
    """Returns the memory of this machine's smallest GPU, or None without a GPU. Reads the memory
    size with nvidia-smi and not with torch, because torch would initialise CUDA in this process."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    sizes = (
        [int(line) for line in said.stdout.split() if line.isdigit()]
        if said.returncode == 0
        else []
    )
    return min(sizes) * 2**20 if sizes else None


class Fit:
    """Checks whether a GPU has enough memory for a run. `capacity` is the memory of the GPU in
    bytes. If several runs have equal settings of model, layout and optimizer, `Fit` measures their
    ranks only once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._built: dict[str, list[dict[str, int]]] = {}
        self._server_memory: dict[str, ServedMemory | None] = {}

    def require(self, run: ResolvedRun) -> None:
        """Raises ConfigError if a phase does not fit into the GPU's memory, or if a server's KV
        cache cannot hold one prompt with its response."""
        if not (wrong := self.faults(run)):
            return
        found = self.budget(run)
        fixes = [name for name, changed in self._changes(run, found) if not self.faults(changed)]
        experts = (
            "\ncopies of tokens on their way to experts are not counted"
            if run.shape.experts
            else ""
        )
        raise ConfigError(
            f"{'; '.join(wrong)}\n{found.table()}{experts}",
            where="memory",
            fix="; or ".join(
                [*fixes, "more ranks in parallel.tensor, parallel.pipeline or of a server"]
            ),
        )

    def faults(self, run: ResolvedRun) -> list[str]:
        """Returns the reasons why the run does not fit into the GPU's memory, as a list of texts.
        The returned list is empty if the run fits into the GPU's memory."""
        found, wrong = self.budget(run), []
        if found.over:
            wrong.append(
                f"a GPU of {self.capacity / 1e9:.1f} GB is too small for the phases"
                f" {', '.join(found.over)}"
            )
        if served := self.served(run):
            tokens, longest = served.cache // served.token, longest_sequence(run.config)
            if tokens < longest:
                wrong.append(
                    f"a server's cache holds {tokens} tokens, a prompt with its response has up to"
                    f" {longest}"
                )
        return wrong

    def budget(self, run: ResolvedRun) -> Budget:
        """Returns the budget of the pipeline stage with the highest peak memory. The peak memory of
        a stage is the number of bytes in the phase that needs most memory."""
        return max(self.budgets(run), key=lambda each: max(map(each.total, each.phases)))

    def budgets(self, run: ResolvedRun) -> list[Budget]:
        """Returns one budget per pipeline stage, for the first rank of the stage."""
        offload, colocated = run.config.memory.offload or "all", run.config.sglang.colocated
        return [
            budget(each, self.capacity, colocated=colocated, offload=offload)
            for each in self.needs(run)
        ]

    def needs(self, run: ResolvedRun) -> Iterator[Needs]:
        """Yields one `Needs` per pipeline stage. Each `Needs` contains the bytes that the first
        rank of one pipeline stage needs, and the bytes that a server's rank needs."""
        config, shape, stages = run.config, run.shape, run.config.parallel.pipeline
        tokens = -(-config.batch.micro_batch_tokens // config.parallel.context)
        longest = longest_sequence(config)
        rows = 1 if config.batch.packed else max(config.batch.micro_batch_tokens // longest, 1)
        kept = activation_memory(config, shape, tokens, longest, rows)
        layer = sum(layer_parts(config, shape, rows, longest).values())
        served = self.served(run)
        held = self.stages(run)
        free = min(self._free(run, nbytes) for nbytes in held)  # all ranks choose the same head
        for stage, nbytes in enumerate(held):
            yield Needs(
                parameters=nbytes["parameters"],
                gradients=nbytes["gradients"],
                # the offloaded optimizer keeps both in host memory
                optimizer=(
                    0
                    if config.performance.optimizer_offload
                    else nbytes["main parameters"] + nbytes["moments"]
                ),
                reference=nbytes["parameters"] if run.method.needs_reference else 0,
                reference_moves=config.model.reference_offload,
                forward=round(layer * tokens * _BYTES[config.model.dtype]),
                activations=(
                    round(kept.kept * micro_batches_held(config.parallel, stage)) + kept.again
                ),
                logits=logits_bytes(config, shape, free) if stage == stages - 1 else 0,
                # A bucket holds at least one whole tensor, of which the embedding is the largest.
                # With 8-bit weights, a sender also keeps rounded copies of two buckets, each of
                # half a bucket's size.
                buckets=(BUCKETS + (config.sglang.quantization is not None))
                * max(
                    config.rollout.sync_bucket_mb * 2**20,
                    shape.vocab_size * shape.hidden * _BYTES[config.model.dtype],
                ),
                served=served.weights if served else 0,
                cache=served.cache if served else 0,
            )

    def _free(self, run: ResolvedRun, nbytes: dict[str, int]) -> int:
        """Returns how many bytes of GPU memory are free on a rank when the rank chooses the mode of
        its output layer. When a rank chooses the mode of its output layer, the optimizer's moments
        are not allocated yet, and no server holds weights or a cache on the GPU."""
        config = run.config
        there = nbytes["parameters"] + nbytes["gradients"] + PROCESS_BYTES
        if not config.performance.optimizer_offload:
            there += nbytes["main parameters"]
        if run.method.needs_reference and not config.model.reference_offload:
            there += nbytes["parameters"]
        return self.capacity - there - (SERVER_BYTES if config.sglang.colocated else 0)

    def served(self, run: ResolvedRun) -> ServedMemory | None:
        """Returns the memory of a server's rank, or None if no servers run on GPUs."""
        config = run.config
        read = (config.model, config.rollout, config.sglang)
        key = f"{config.supervised}{''.join(each.model_dump_json() for each in read)}"
        if key not in self._server_memory:
            self._server_memory[key] = served_memory(config, run.shape, self.capacity)
        return self._server_memory[key]

    def stages(self, run: ResolvedRun) -> list[dict[str, int]]:
        """Builds a model and an optimizer on the meta device for the first rank of each pipeline
        stage. Returns one dict per stage, with the bytes of parameters, gradients, main parameters
        and moments on the first rank of the stage. No other rank of a stage needs more bytes than
        the stage's first rank."""
        config, parallel = run.config, run.config.parallel
        key = "".join(each.model_dump_json() for each in (config.model, parallel, config.optimizer))
        if key not in self._built:
            ranks = range(0, parallel.world_size, parallel.world_size // parallel.pipeline)
            plans = [
                plan_rank(run.shape, config.model, parallel, config.optimizer, rank)
                for rank in ranks
            ]
            self._built[key] = [plan.nbytes for plan in plans]
        return self._built[key]

    def _changes(self, run: ResolvedRun, found: Budget) -> Iterator[tuple[str, ResolvedRun]]:
        """Yields possible changes of the configuration, each as a pair: the change as a text
        (setting=value), and the changed run. Each change sets one setting, and reduces the memory
        of a phase that does not fit into the GPU's memory. The mildest changes come first."""
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
        if "logits" in items and config.model.head in ("auto", "materialised"):
            yield _with(run, "model.head", "recompute")
        if "activations" in items and config.model.recompute != "full":
            yield _with(run, "model.recompute", "full")
        if (
            "optimizer" in items
            and config.optimizer.distributed
            and config.optimizer.name == "adam"
            and config.model.dtype != "float32"
        ):
            yield _with(run, "performance.optimizer_offload", True)
        half = config.batch.micro_batch_tokens // 2
        while "activations" in items and half >= longest_sequence(config):
            yield _with(run, "batch.micro_batch_tokens", half)
            half //= 2


def micro_batches_held(parallel: ParallelConfig, stage: int) -> float:
    """Returns the number of micro-batches whose activations a pipeline stage holds at once.

    Without virtual stages, the schedule is 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2).
    With virtual stages, the schedule is megatron-core's interleaved schedule, in which each forward
    pass runs through only one chunk of a stage. After the warm-up of the interleaved schedule, a
    stage holds the activations of (2 l + (c - 1) p + 1) / c micro-batches, where l is the number of
    later stages, p is the number of stages, and c is the number of chunks per stage.
    """
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks == 1:
        return stages - stage
    return (2 * (stages - stage - 1) + (chunks - 1) * stages + 1) / chunks


def logits_bytes(config: Config, shape: ModelShape, free: int) -> int:
    """Returns the bytes of the logits that the head holds at one time, plus the bytes of the
    gradient that autograd receives for the head's weight.

    Args:
        free: bytes that are free when the run chooses its head. If `model.head` is 'auto', the head
            computes logits in chunks if they are larger than SHARE of these bytes.
    """
    whole, tensor = largest_logits(config, shape), config.parallel.tensor
    rows = shape.padded_vocab(tensor) // tensor
    gradient = rows * shape.hidden * _BYTES[config.model.dtype]
    if config.model.head == "materialised" or (
        config.model.head == "auto" and whole <= SHARE * free
    ):
        return whole + gradient
    chunk = whole * config.model.head_chunk_tokens // config.batch.micro_batch_tokens
    # In chunks the gradient is a stand-in (`LinearHead.loss`), which a weight does not need if it
    # is the embedding of the same stage.
    stands_in = not (shape.tied and config.parallel.pipeline == 1)
    return min(whole + gradient, chunk + (gradient if stands_in else 0))


def longest_sequence(config: Config) -> int:
    """Returns the maximum length of a prompt with its response, in tokens."""
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens


def _with(run: ResolvedRun, setting: str, value: Any) -> tuple[str, ResolvedRun]:
    section, _, name = setting.partition(".")
    part = getattr(run.config, section).model_copy(update={name: value})
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"{setting}={shown}", ResolvedRun(
        run.config.model_copy(update={section: part}), run.shape
    )


class PlannedFit(Fit):
    """Checks for several layouts of one run whether a GPU has enough memory. If two layouts have
    equal values of all settings in `_key`, the sizes of their stages are computed only once."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._parts: dict[tuple[int, int], Parts] = {}
        self._stages: dict[tuple[int | bool | None, ...], list[dict[str, int]]] = {}

    def stages(self, run: ResolvedRun) -> list[dict[str, int]]:
        config, parallel = run.config, run.config.parallel
        cut, key = (parallel.tensor, parallel.expert), self._key(run)
        if key not in self._stages:
            if cut not in self._parts:
                self._parts[cut] = build_parts(run.shape, config.model, *cut)
            self._stages[key] = [
                stage_bytes(
                    self._parts[cut], run.shape, config.model, parallel, config.optimizer, stage
                )
                for stage in range(parallel.pipeline)
            ]
        return self._stages[key]

    def _key(self, run: ResolvedRun) -> tuple[int | bool | None, ...]:
        """Returns all settings that determine the size of parameters, gradients and optimizer
        state."""
        parallel = run.config.parallel
        stages = (parallel.pipeline, parallel.virtual_pipeline, parallel.first_stage_layers)
        return (
            parallel.tensor,
            parallel.expert,
            *stages,
            parallel.replicas,
            run.config.optimizer.distributed,
        )

    def build(self, run: ResolvedRun) -> None:
        """Builds the model and the optimizer for the first rank of each pipeline stage, and
        measures their bytes. Later checks of this run's layout use the measured bytes. For a layout
        that `build` has not measured, the bytes are computed from the sizes of the embedding, the
        head and one layer of each kind."""
        self._stages[self._key(run)] = super().stages(run)
