"""Predicts how many seconds each phase of a step takes: the phase's work divided by a rate.
ASSUMPTIONS lists every assumption."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.gpus import HOST_LINK, NETWORK, Coefficients, Gpu
from megatron_stare.planning.partial_flow import PartialFlow, partial_flow
from megatron_stare.rollout.engines.replicas import ServedMemory, replica_count, replica_gpus

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ASSUMPTIONS = (
    (
        "operations: 2 per matrix entry and token; causal attention at the mean length; the output"
        " layer only at response positions; an update costs three forward passes, and with full"
        " recomputation one more of the layers"
    ),
    (
        "a pipeline of p stages, v chunks and m micro-batches per replica is idle for (p - 1) /"
        " (v m) of its busy time"
    ),
    (
        "tensor-parallel ranks exchange 4 hidden states per layer in a forward pass and 8 in a"
        " backward pass, over the node's links"
    ),
    (
        "data-parallel ranks reduce gradients in float32 and gather parameters at each update,"
        " without overlap"
    ),
    (
        "no time for: context-parallel and expert-parallel exchange, sends between pipeline stages,"
        " imbalance, the optimizer's arithmetic, rewards that are still being verified when the"
        " last response ends"
    ),
    (
        "a decoding step reads the server's weights and the cache of every response once, or is"
        " bound by arithmetic, whichever takes longer; the longest response has max_new_tokens"
        " tokens; the prompt of a group is prefilled once"
    ),
    (
        "until a calibration with runs of several sizes, the shares of peak FLOP/s include"
        " operations other than matrix products, and the share of memory bandwidth includes the"
        " fixed time of a decoding step"
    ),
    "dynamic sampling takes one round; evaluations are not counted",
    (
        "partial rollouts: response lengths are exponentially distributed up to the maximum; a"
        " round takes as long as a response that gets all of the round's tokens; unfinished"
        " responses are prefilled again once, after the weight sync"
    ),
)


def balanced(shape: ModelShape) -> ModelShape:
    """Returns the shape of a dense model that needs the same work per token as the given mixture of
    experts. The shape of a dense model is returned unchanged.

    Every expert is assumed to get an equal share of the tokens. Dense layers at the start of the
    model are treated like MoE layers.
    """
    if not shape.experts:
        return shape
    width = shape.experts_per_token * shape.expert_ffn + shape.shared_ffn
    return replace(shape, experts=0, ffn=width, dense_layers=0, shared_ffn=0)


def attention_matrices(shape: ModelShape) -> int:
    """Returns the number of matrix entries in the attention projections of one layer."""
    if (latent := shape.latent) is None:
        return 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    queries = latent.query_rank * (shape.hidden + shape.heads * shape.head_dim)
    into = shape.hidden * (latent.rank + latent.rotated)
    out = latent.rank * shape.heads * (latent.plain + latent.value)
    return queries + into + out + shape.hidden * shape.heads * latent.value


def body_matrices(shape: ModelShape) -> int:
    """Returns the number of weight-matrix entries that one token uses, summed over all layers. The
    matrices of a layer are the attention projections, the router and the feed-forward matrices."""
    attention = attention_matrices(shape)
    layer = attention + 3 * shape.hidden * balanced(shape).ffn + shape.hidden * shape.experts
    dense = attention + 3 * shape.hidden * shape.ffn
    return shape.dense_layers * dense + (shape.layers - shape.dense_layers) * layer


def forward_flops(shape: ModelShape, prompt: float, response: float) -> float:
    """Returns the forward FLOPs of all layers and the output layer for one sequence. Causal
    attention covers half of the sequence on average. The FLOPs of the output layer are counted only
    for response positions."""
    length = prompt + response
    matrices = 2 * body_matrices(shape) * length
    # scores and values, half masked
    attention = shape.layers * shape.heads * (shape.head_dim + shape.value_dim) * length * length
    return matrices + attention + 2 * shape.hidden * shape.vocab_size * response


def body_flops(shape: ModelShape, prompt: float, response: float) -> float:
    """Returns the forward FLOPs of the Transformer layers for one sequence. The FLOPs of the output
    layer are not included. Full recomputation repeats the forward FLOPs of the layers."""
    return forward_flops(shape, prompt, response) - 2 * shape.hidden * shape.vocab_size * response


@dataclass(frozen=True)
class Lengths:
    """The mean number of tokens of a prompt, and the mean number of tokens of a response."""

    prompt: float
    response: float

    @classmethod
    def of(
        cls, config: Config, prompt: float | None = None, response: float | None = None
    ) -> Lengths:
        """Returns the mean lengths `prompt` and `response`, in tokens. If the argument `prompt` is
        None, the mean length of a prompt is taken from the property `Config.expected_lengths`. If
        the argument `response` is None, the mean length of a response is taken from
        `Config.expected_lengths`."""
        expected = config.expected_lengths
        return cls(prompt or expected[0], response or expected[1])


@dataclass(frozen=True)
class Work:
    """The work of a phase, from which the phase's time is predicted.

    `ideal`: seconds that the phase would take at the peak rate, including the pipeline's idle time.
        The prediction divides `ideal` by the share of the peak rate that the run reaches. For the
        weight sync, `ideal` is not a time, but the size of the weights in bytes. The prediction
        divides the size of the weights by the speed of the weight sync in bytes per second.
    `fixed`: seconds that the prediction adds unchanged, whatever share of the peak rate the run
        reaches.
    `moved`: seconds that the ranks need to read or write every hidden state once, at full memory
        bandwidth. These seconds include the pipeline's idle time. A token has one hidden state per
        layer. The method `seconds` multiplies `moved` by the argument `moves`. The argument `moves`
        is the number of times that the phase reads or writes each hidden state.
    """

    ideal: float
    fixed: float = 0.0
    moved: float = 0.0

    def seconds(self, share: float, moves: float = 0.0) -> float:
        return self.ideal / share + moves * self.moved + self.fixed


@dataclass(frozen=True)
class Step:
    """Predicted times of a training step.

    `phases`: seconds by phase, without checkpoints.
    `seconds`: predicted duration of the whole step in seconds. The duration includes neither
        checkpoints nor evaluations.
    `checkpoint`: seconds of one checkpoint.
    `flops`: model FLOPs of the trainer's passes, not counting recomputation.
    `tokens`: prompt and response tokens of the step.
    `partial`: averages for partial rollouts, or None if partial rollouts are off.
    """

    phases: dict[str, float]
    seconds: float
    checkpoint: float
    flops: float
    tokens: float
    gpus: int
    partial: PartialFlow | None = None

    @property
    def tokens_s_gpu(self) -> float:
        """Training speed: the number of prompt and response tokens of a step, divided by the step's
        seconds and by the number of GPUs."""
        return self.tokens / self.seconds / self.gpus

    def mfu(self, gpu: Gpu) -> float:
        """Returns the model FLOPs utilization: the FLOPs of the trainer's passes, divided by the
        FLOPs that all GPUs could do in the whole step."""
        return self.flops / (self.seconds * self.gpus * gpu.flops)


def all_gpus(config: Config) -> int:
    """Returns the number of GPUs of the trainer and the servers together. A trainer rank that runs
    on a CPU counts as one GPU."""
    apart = 0 if config.sglang.colocated else replica_count(config) * replica_gpus(config)
    return config.parallel.world_size + apart


def step_time(
    run: ResolvedRun,
    gpu: Gpu,
    of: Coefficients,
    lengths: Lengths,
    nbytes: Mapping[str, int],
    served: ServedMemory | None,
) -> Step:
    """Predicts the times of a step.

    Args:
        nbytes: bytes by item, on the trainer rank that needs most memory.
        served: memory of a server's rank; None: no servers on GPUs.
    """
    config, shape = run.config, run.shape
    phases = {"rollout": rollout_seconds(config, shape, gpu, of, lengths, served)}
    phases["log_probs"] = log_prob_work(run, gpu, of, lengths, nbytes).seconds(
        of.log_prob_mfu, of.log_prob_moves
    )
    phases["update"] = update_work(run, gpu, of, lengths, nbytes).seconds(
        of.update_mfu, of.update_moves
    )
    phases["sync"] = sync_work(run, nbytes).seconds(of.sync_bytes_s)
    training = phases["log_probs"] + phases["update"]
    ahead = bool(config.rollout.staleness)
    together = max(phases["rollout"], training) if ahead else phases["rollout"] + training
    sequences = config.batch.prompts * config.batch.samples_per_prompt
    flops = (
        (forwards(run) + 3 * config.batch.epochs) * sequences * forward_flops(shape, *_of(lengths))
    )
    masters = 0 if config.model.dtype == "float32" else 4
    state = BYTES[config.model.dtype] + masters + (8 if config.optimizer.name == "adam" else 0)
    return Step(
        phases=phases,
        seconds=together + phases["sync"] + of.fixed_s,
        checkpoint=parameters(shape) * state / of.checkpoint_bytes_s,
        flops=flops,
        tokens=sequences * (lengths.prompt + lengths.response),
        gpus=all_gpus(config),
        partial=flow_of(config, lengths),
    )


def parameters(shape: ModelShape) -> int:
    """Returns the number of matrix entries in the whole model, including all experts."""
    experts = 3 * shape.hidden * shape.expert_ffn * (shape.experts - shape.experts_per_token)
    ends = shape.hidden * shape.vocab_size * (1 if shape.tied else 2)
    return body_matrices(shape) + (shape.layers - shape.dense_layers) * experts + ends


def forwards(run: ResolvedRun) -> int:
    """Returns how many forward-only passes a run makes over the batch of each step. A run can need
    a pass for log-probs, a pass for the reference's log-probs, and a pass for surprisals that are
    computed anew before each update."""
    passes = 0 if run.config.skips_log_prob_pass else 1
    return (
        passes + int(run.method.needs_reference) + int(run.config.statistics.surprisal == "current")
    )


def log_prob_work(
    run: ResolvedRun, gpu: Gpu, of: Coefficients, lengths: Lengths, nbytes: Mapping[str, int]
) -> Work:
    """Returns the total work of all forward-only passes over the batch. Each pass fills and drains
    the pipeline once. If the parameters were offloaded for the rollout, the work includes loading
    the parameters back to the device, even if the run makes no forward-only pass."""
    config, shape = run.config, run.shape
    batch, passes = config.batch, forwards(run)
    sequences = passes * batch.prompts * batch.samples_per_prompt
    ideal = (
        sequences * forward_flops(shape, *_of(lengths)) / (config.parallel.world_size * gpu.flops)
    )
    idle = 1 + _bubble(config, lengths, batch.prompts)
    exchanged = _tensor_seconds(config, shape, gpu, of, sequences, lengths, times=1)
    returned = _offloaded(run, nbytes)[0] / HOST_LINK
    return Work(
        ideal * idle, exchanged + returned, _moved(config, shape, gpu, sequences, lengths) * idle
    )


def update_work(
    run: ResolvedRun, gpu: Gpu, of: Coefficients, lengths: Lengths, nbytes: Mapping[str, int]
) -> Work:
    """Returns the work of all optimizer steps on a rollout batch. If the optimizer was offloaded
    for the rollout, the work includes loading the optimizer's state back to the device."""
    config, shape = run.config, run.shape
    batch, parallel = config.batch, config.parallel
    sequences = batch.epochs * batch.prompts * batch.samples_per_prompt
    full = config.model.recompute == "full"
    flops = 3 * forward_flops(shape, *_of(lengths)) + (
        body_flops(shape, *_of(lengths)) if full else 0
    )
    idle = 1 + _bubble(config, lengths, batch.mini_batch_prompts or batch.prompts)
    reduced = 0.0
    if parallel.replicas > 1:
        traffic = nbytes["gradients"] + nbytes["parameters"] * (
            1 if config.optimizer.distributed else 0
        )
        reduced = batch.updates * traffic / (NETWORK * of.link_efficiency)
    exchanged = _tensor_seconds(config, shape, gpu, of, sequences, lengths, times=4 if full else 3)
    ideal = sequences * flops / (parallel.world_size * gpu.flops)
    returned = _offloaded(run, nbytes)[1] / HOST_LINK
    return Work(
        ideal * idle,
        exchanged + reduced + returned,
        _moved(config, shape, gpu, sequences, lengths) * idle,
    )


def rollout_seconds(
    config: Config,
    shape: ModelShape,
    gpu: Gpu,
    of: Coefficients,
    lengths: Lengths,
    served: ServedMemory | None,
) -> float:
    """Returns the seconds that one engine needs to prefill and decode its share of the responses.
    Decoding takes the longer of two times: the time to read memory, and the time to compute."""
    batch, rollout, flow = config.batch, config.rollout, flow_of(config, lengths)
    engines, gpus = replica_count(config), max(replica_gpus(config), 1)
    if not engines:
        return 0.0
    groups = ((not flow and batch.generate_prompts) or batch.prompts) / engines
    responses = groups * batch.samples_per_prompt
    growing, context = responses, lengths.prompt + lengths.response
    if flow:
        growing, context = flow.growing / engines, lengths.prompt + flow.held / flow.growing
    token = _cached_token(config, shape, served)
    at_once = _at_once(config, growing, context, served)
    again = 0.0
    if flow:  # every round decodes all growing responses in batches, and ends with the last
        growth = responses * lengths.response / (flow.rounds * growing)
        steps = flow.rounds * (
            (growing - at_once) * growth / at_once + float(config.partial.tokens or 0)
        )
        if flow.continued:
            again = (
                flow.continued
                / engines
                * body_flops(shape, lengths.prompt + flow.carried / flow.continued, 0)
            )
    else:
        longest = max(rollout.max_new_tokens, lengths.response)
        steps = (responses - at_once) * lengths.response / at_once + longest
    weights = steps * _read_bytes(config, shape, at_once)
    cache = responses * lengths.response * (lengths.prompt + lengths.response / 2) * token
    read = (weights / gpus + cache) / (gpu.bandwidth * of.decode_efficiency)
    prompt = body_flops(shape, lengths.prompt, 0)
    arithmetic = responses * (forward_flops(shape, lengths.prompt, lengths.response) - prompt)
    computed, prefill = (
        flops / (gpus * gpu.flops * of.prefill_mfu)
        for flops in (arithmetic, groups * prompt + again)
    )
    return max(read, computed) + prefill + steps * shape.layers * of.decode_layer_s


@dataclass(frozen=True)
class RequestTime:
    """Durations of requests at a fully loaded server, in seconds. A request's duration begins when
    the server admits the request to the batch.

    `beside`: number of other requests in the server's batch.
    `tokens`: maximum number of tokens that the server generates in one request.
    `longest_s`: duration of a request in which the server generates the maximum number of tokens.
    `first_s`: expected duration of the first request that is completed in a rollout. The prediction
        assumes that the server generates a response of mean length in the first completed request.
        If the mean length is above `tokens`, the prediction uses `tokens` instead of the mean
        length.
    """

    beside: float
    tokens: float
    longest_s: float
    first_s: float


def request_time(
    config: Config,
    shape: ModelShape,
    gpu: Gpu,
    of: Coefficients,
    lengths: Lengths,
    served: ServedMemory | None,
) -> RequestTime:
    """Predicts how long a request takes, with the same coefficients as `rollout_seconds`. A
    decoding step takes equally long for every request in the batch.

    With partial rollouts, the server generates at most `partial.tokens` tokens in a request. The
    prediction for partial rollouts assumes that every request in the batch continues an unfinished
    response. Before the server decodes new tokens, the server therefore has to prefill the prompt
    and the existing tokens of each response.
    """
    engines, gpus = replica_count(config), max(replica_gpus(config), 1)
    flow, context = flow_of(config, lengths), lengths.prompt + lengths.response
    groups = (not flow and config.batch.generate_prompts) or config.batch.prompts
    growing = groups * config.batch.samples_per_prompt / engines
    tokens, mean = max(config.rollout.max_new_tokens, lengths.response), lengths.response
    before = lengths.prompt  # tokens of a request's context that the server reads at first
    if flow:
        growing, context = flow.growing / engines, lengths.prompt + flow.held / flow.growing
        tokens, mean = (min(each, config.partial.tokens or each) for each in (tokens, mean))
        before += flow.carried / flow.continued if flow.continued else 0.0
    at_once = _at_once(config, growing, context, served)
    token = _cached_token(config, shape, served)
    read = _read_bytes(config, shape, at_once) / gpus + at_once * (context - mean / 2) * token
    prompt = body_flops(shape, lengths.prompt, 0)
    computed = (
        at_once
        * (forward_flops(shape, lengths.prompt, lengths.response) - prompt)
        / lengths.response
    )
    step = max(
        read / (gpu.bandwidth * of.decode_efficiency),
        computed / (gpus * gpu.flops * of.prefill_mfu),
    )
    step += shape.layers * of.decode_layer_s
    # of the whole batch
    prefill = at_once * body_flops(shape, before, 0) / (gpus * gpu.flops * of.prefill_mfu)
    return RequestTime(max(at_once - 1, 0), tokens, prefill + tokens * step, prefill + mean * step)


def _at_once(config: Config, growing: float, context: float, served: ServedMemory | None) -> float:
    """Returns the number of responses that a server decodes at the same time.

    Args:
        growing: number of responses that are assigned to the server.
        context: mean number of tokens that a response holds in the cache.
    """
    at_once = min(growing, config.rollout.max_batch)
    if not served:
        return at_once
    # each attention group of a server has a cache of its own
    tokens = config.sglang.attention_data_parallel * served.cache / served.token
    return min(at_once, max(tokens / context, 1))


def _cached_token(config: Config, shape: ModelShape, served: ServedMemory | None) -> float:
    """Returns the number of bytes that each rank of a server reads, on average, for the keys and
    values of one token. If a server has more ranks than key/value heads, several ranks hold the
    same head. Each attention group (sglang.attention_data_parallel) reads only the cache of its own
    requests."""
    if served:
        return served.token / config.sglang.attention_data_parallel
    size = 1 if config.sglang.kv_cache_dtype else BYTES[config.sglang.dtype or config.model.dtype]
    return shape.layers * shape.cached * size / max(replica_gpus(config), 1)


def flow_of(config: Config, lengths: Lengths) -> PartialFlow | None:
    """Returns the averages of `partial_flow` for this run, or None if partial rollouts are off."""
    batch, partial = config.batch, config.partial
    if partial.tokens is None:
        return None
    under_way = partial.groups_under_way(batch.prompts, batch.generate_prompts)
    return partial_flow(
        batch.prompts,
        batch.samples_per_prompt,
        under_way,
        partial.tokens,
        lengths.response,
        config.rollout.max_new_tokens,
    )


def sync_work(run: ResolvedRun, nbytes: Mapping[str, int]) -> Work:
    """Returns the Work from which a weight sync's time is predicted. If trainer and servers are
    colocated, the work includes the trainer's offload to host memory."""
    config = run.config
    if not replica_count(config):
        return Work(0.0)
    return Work(
        parameters(run.shape) * BYTES[config.sglang.dtype or config.model.dtype],
        sum(_offloaded(run, nbytes)) / HOST_LINK,
    )


def _offloaded(run: ResolvedRun, nbytes: Mapping[str, int]) -> tuple[int, int]:
    """Returns two numbers of bytes that a rank offloads in each step: the bytes of the weights
    (policy and reference), and the bytes of the optimizer's state. Gradients are discarded, not
    copied."""
    config = run.config
    offload = config.memory.offload or "all"
    if not replica_count(config) or not config.sglang.colocated or offload == "none":
        return 0, 0
    # a reference with `model.reference_offload` is in host memory already
    models = 2 if run.method.needs_reference and not config.model.reference_offload else 1
    weights = models * nbytes["parameters"] if offload == "all" else 0
    state = nbytes["main parameters"] + nbytes["moments"]
    return weights, 0 if config.performance.optimizer_offload else state


def _of(lengths: Lengths) -> tuple[float, float]:
    return lengths.prompt, lengths.response


def _read_weights(shape: ModelShape, at_once: float) -> float:
    """Returns the expected number of parameters that a decoding step reads. In each layer, a
    decoding step reads only the experts that at least one response of the batch chooses."""
    if not shape.experts:
        return parameters(shape)
    missed = (1 - shape.experts_per_token / shape.experts) ** at_once
    expert = 3 * shape.hidden * shape.expert_ffn
    return parameters(shape) - (shape.layers - shape.dense_layers) * shape.experts * expert * missed


def _read_bytes(config: Config, shape: ModelShape, at_once: float) -> float:
    """Returns the expected number of bytes of weights that a decoding step reads. With 8-bit
    weights, the embedding and the output layer keep the servers' dtype."""
    size, read = BYTES[config.sglang.dtype or config.model.dtype], _read_weights(shape, at_once)
    if config.sglang.quantization is None:
        return read * size
    ends = shape.hidden * shape.vocab_size * (1 if shape.tied else 2)
    return read - ends + ends * size


def _bubble(config: Config, lengths: Lengths, prompts: int) -> float:
    """Returns a pipeline's idle time divided by its busy time (Narayanan et al. 2021, section
    2.2)."""
    parallel, batch = config.parallel, config.batch
    tokens = prompts * batch.samples_per_prompt * (lengths.prompt + lengths.response)
    micro_batches = max(math.ceil(tokens / (parallel.data * batch.micro_batch_tokens)), 1)
    return (parallel.pipeline - 1) / (parallel.virtual_pipeline * micro_batches)


def _moved(
    config: Config, shape: ModelShape, gpu: Gpu, sequences: float, lengths: Lengths
) -> float:
    """Returns the seconds that the ranks need to read or write every hidden state once, at full
    memory bandwidth. A token has one hidden state per layer. Each rank reads or writes an equal
    share of the hidden states, in parallel with the other ranks."""
    states = sequences * (lengths.prompt + lengths.response) * shape.layers * shape.hidden
    return states * BYTES[config.model.dtype] / (config.parallel.world_size * gpu.bandwidth)


def _tensor_seconds(
    config: Config,
    shape: ModelShape,
    gpu: Gpu,
    of: Coefficients,
    sequences: float,
    lengths: Lengths,
    *,
    times: int,
) -> float:
    """Returns the seconds that a rank spends on exchanging hidden states with the other
    tensor-parallel ranks.

    Args:
        times: number of forward passes. A backward pass counts as two forward passes.
    """
    parallel = config.parallel
    tokens = sequences * (lengths.prompt + lengths.response) / parallel.replicas
    sent = 4 * tokens * shape.hidden * BYTES[config.model.dtype] * (1 - 1 / parallel.tensor)
    return times * sent * shape.layers / parallel.pipeline / (gpu.link * of.link_efficiency)
