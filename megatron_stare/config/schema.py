"""The configuration of a run, as typed models. Every field carries its unit and meaning; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from megatron_stare.config.agreement_section import AgreementConfig
from megatron_stare.config.algorithm import AlgorithmConfig
from megatron_stare.config.black_box_section import BlackBoxConfig
from megatron_stare.config.checkpoint_section import CheckpointConfig
from megatron_stare.config.data_section import DataConfig
from megatron_stare.config.eval_section import EvalConfig
from megatron_stare.config.guards_section import GuardsConfig
from megatron_stare.config.limits_section import LimitsConfig
from megatron_stare.config.memory_section import MemoryConfig
from megatron_stare.config.moe_section import MoeConfig
from megatron_stare.config.partial_section import PartialConfig
from megatron_stare.config.performance_section import PerformanceConfig, Section
from megatron_stare.config.plan_section import PlanConfig
from megatron_stare.config.recovery_section import RecoveryConfig
from megatron_stare.config.restarts_section import RestartsConfig
from megatron_stare.config.reward_section import RewardConfig
from megatron_stare.config.runtime_section import RuntimeConfig
from megatron_stare.config.services_section import ServicesConfig


class RunConfig(Section):
    """What is run, for how long, and where its results go."""

    name: str = Field("run", description="name of the run; part of the directory when `dir` is not given")
    dir: str | None = Field(None, description="run directory; default runs/<name>-<time>")
    seed: int = Field(1, ge=0, lt=2**31, description="seeds data order and sampling noise")
    steps: int = Field(100, ge=1, description="training steps; one step is one rollout batch, of any number of updates")
    checkpoint_every: int = Field(50, ge=0, description="steps between checkpoints; 0: only after the last step")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    rollouts_every: int = Field(10, ge=1, description="steps between dumps of sampled rollouts")
    rollouts_kept: int = Field(32, ge=0, description="samples written per dump")
    tokens_kept: int = Field(8, ge=0, description="of these, samples written with the numbers of every token")


class ModelConfig(Section):
    """The policy."""

    path: str = Field(description="Hugging Face folder the policy starts from")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="parameters and activations in training, and of the local engine; beside the two short ones the "
        "optimizer keeps float32 parameters and moments. float16 scales the loss, see optimizer.initial_loss_scale",
    )
    reference_path: str | None = Field(
        None, description="Hugging Face folder of the reference policy of a KL term; null: the same as `path`"
    )
    reference_offload: bool = Field(False, description="keep the reference in host memory between its passes")
    reference_refresh_every: int | None = Field(
        None, ge=1, description="steps after which the current policy becomes the reference; null: never"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="activations computed again in backward instead of kept: of the parts in `recompute_modules`, or "
        "of whole layers",
    )
    recompute_method: Literal["uniform", "block"] = Field(
        "uniform",
        description="`recompute: full` keeps the input of every `recompute_layers` layers alone, or recomputes only "
        "the first `recompute_layers` layers of a stage's chunk",
    )
    recompute_layers: int = Field(1, ge=1, description="layers of `recompute_method`")
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] = Field(
        ["core_attn"], min_length=1, description="parts of a layer that `recompute: selective` computes again"
    )
    head: Literal["auto", "materialised", "gradient_in_forward", "recompute"] = Field(
        "auto",
        description="logits of a micro-batch at once, by chunks whose gradient is taken in the forward (where the loss "
        "of a token depends on its own log-prob), or by chunks that are computed again in backward; auto: by the free "
        "memory at the start",
    )
    head_chunk_tokens: int = Field(1024, ge=1, description="tokens whose logits a chunked head holds at a time")


class ParallelConfig(Section):
    """How the trainer is laid out over ranks. World size = tensor * pipeline * context * data."""

    tensor: int = Field(1, ge=1, description="tensor-parallel ranks")
    pipeline: int = Field(1, ge=1, description="pipeline stages")
    virtual_pipeline: int = Field(1, ge=1, description="model chunks a pipeline stage holds")
    first_stage_layers: int | None = Field(
        None, ge=1, description="layers of the first pipeline stage; the others share the rest. null: all alike"
    )
    context: int = Field(1, ge=1, description="context-parallel ranks, which hold parts of every sequence")
    context_comm: Literal["p2p", "all_gather", "a2a"] = Field("p2p", description="how GPUs exchange keys and values")
    expert: int = Field(1, ge=1, description="expert-parallel ranks")
    data: int = Field(1, ge=1, description="data-parallel replicas")
    sequence: bool = Field(False, description="sequence parallelism over the tensor-parallel ranks")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: those of other data and of other chunks of sequences."""
        return self.data * self.context

    @property
    def sequence_multiple(self) -> int:
        """What the length of a sequence is padded to a multiple of: each context-parallel rank holds two chunks."""
        return 2 * self.context if self.context > 1 else 1


class BatchConfig(Section):
    """The rollout batch and how training walks through it."""

    prompts: int = Field(32, ge=1, description="prompt groups a rollout batch, that is a step")
    mini_batch_prompts: int | None = Field(
        None, ge=1, description="prompt groups an optimizer step, a divisor of `prompts`; null: all of them"
    )
    epochs: int = Field(1, ge=1, description="times the optimizer steps walk through the rollout batch")
    generate_prompts: int | None = Field(
        None,
        ge=1,
        description="dynamic sampling: prompt groups a round; those whose rewards are all equal are dropped, and "
        "rounds follow until `prompts` are left. null: every group is trained on",
    )
    max_rounds: int = Field(
        10, ge=1, description="rounds of dynamic sampling a step; one that is still short then takes dropped groups"
    )
    samples_per_prompt: int = Field(8, description="responses a prompt (the group size of GRPO)")
    micro_batch_tokens: int = Field(8192, ge=1, description="tokens a micro-batch, padding included")
    packed: bool = Field(True, description="lay the sequences of a micro-batch end to end instead of padding them")

    @property
    def updates(self) -> int:
        """Optimizer steps a rollout batch."""
        return self.epochs * (self.prompts // (self.mini_batch_prompts or self.prompts))

    @field_validator("samples_per_prompt")
    @classmethod
    def _a_group_needs_two(cls, value: int) -> int:
        if value < 2:
            raise ValueError("a group of one response has no spread, so its advantage is always zero; use at least 2")
        return value


class StatisticsConfig(Section):
    """What the selection of tokens, and a method's gate, are read from."""

    surprisal: Literal["old", "current", "rollout"] = Field(
        "old",
        description="surprisals, and the entropies that STAPO and 20-Entropy select by, are those of the log-prob "
        "pass; of the policy before each optimizer step, whose mini-batch passes through it again; or (surprisals "
        "alone) of the engine",
    )
    gate: Literal["exact", "lagged"] = Field(
        "exact",
        description="the gate reads this step's log-prob pass, or the training pass of the step before, which saves "
        "the log-prob pass: with surprisal `rollout`, one optimizer step a rollout batch, and a method that needs no "
        "other old log-probs or entropies",
    )
    scope: Literal["global", "micro_batch"] = Field(
        "global",
        description="tokens are selected over the optimizer step's batch, or by micro-batch and rank, only to compare "
        "with published code",
    )


class RolloutConfig(Section):
    """Where responses come from and how they are sampled."""

    engine: str = Field(
        "local", description="'local' (transformers, in process), 'sglang' or a class path my_pkg.MyEngine"
    )
    engines: int = Field(1, ge=1, description="number of engines, each a replica of the policy")
    environment: str = Field(
        "single_turn",
        description="what makes a response of a prompt: 'single_turn' or a class path my_pkg.MyEnvironment",
    )
    temperature: float = Field(1.0, gt=0, description="divides the logits, in rollout and training alike")
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt, tokens")
    truncate_prompt: Literal["error", "drop", "left"] = Field(
        "error", description="a longer prompt stops the run, is left out of the data, or loses its first tokens"
    )
    max_new_tokens: int = Field(1024, ge=1, description="longest response, tokens")
    max_batch: int = Field(256, ge=1, description="responses an engine decodes together")
    threads: int = Field(1, ge=1, description="CPU threads of an engine")
    staleness: int | None = Field(
        None, ge=0, description="engines sample ahead of training, from weights at most this many steps old; null: not"
    )
    stale_tokens: Literal["correct", "mask"] = Field(
        "correct",
        description="tokens of older weights than those a step trains are weighed by algorithm.correction, or carry no "
        "loss and stay in the context",
    )
    stale_from: int = Field(
        1, ge=1, description="`stale_tokens: mask` masks tokens of weights that are at least this many steps older"
    )
    prove_every: int = Field(
        1, ge=1, description="weight syncs until values are proven by checksums again; else names and counts alone"
    )
    sync_bucket_mb: int = Field(
        64, ge=1, description="largest bucket of weights on its way to the engines, MB; a larger tensor goes alone"
    )


class SGLangConfig(Section):
    """The servers of `rollout.engine: sglang`; see docs/sglang.md."""

    urls: list[str] = Field(
        [], description="running servers to use, keyed by SGLANG_API_KEY; empty: start rollout.engines of them here"
    )
    router: str | None = Field(
        None, description="URL of an sglang-router in front of `urls` that is asked for responses, and for nothing else"
    )
    host: str = Field("127.0.0.1", description="address that servers of a run listen on; 0.0.0.0: all there are")
    python: str | None = Field(
        None, description="Python of the environment SGLang is installed in; null: that of scripts/setup_sglang.sh"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where servers that a run starts compute; auto: on GPUs where this machine has any"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="of the servers' weights and activations; null: model.dtype"
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks that a server cuts the model over")
    expert_parallel: int = Field(
        1, ge=1, description="groups of a server's ranks that hold whole experts, a divisor of tensor_parallel"
    )
    attention_data_parallel: int = Field(
        1, ge=1, description="groups of a server's ranks that attend to requests of their own, likewise a divisor"
    )
    nodes: int = Field(1, ge=1, description="nodes that a server's ranks lie on in equal parts, likewise a divisor")
    memory_fraction: float | None = Field(
        None, gt=0, lt=1, description="share of a GPU's memory for weights and key/value cache; null: SGLang's choice"
    )
    context_length: int | None = Field(None, ge=1, description="tokens of a server's context; null: the model's")
    attention_backend: str | None = Field(None, description="SGLang's name of it; null: SGLang's choice")
    cuda_graph_batch_sizes: list[int] = Field(
        [], description="numbers of responses that decoding captures a CUDA graph for; empty: SGLang's choice"
    )
    flags: list[str] = Field(
        [], description="further arguments of sglang.launch_server, such as --chunked-prefill-size=4096"
    )
    environment: dict[str, str] = Field({}, description="environment variables of the servers, beside the run's own")
    sync: Literal["tensor", "disk", "distributed"] = Field(
        "tensor", description="weights travel as bytes in requests, through a folder, or in a process group"
    )
    sync_folder: str | None = Field(None, description="of sync: disk, seen by all machines; null: a temporary one")
    colocated: bool = Field(
        False, description="servers share the trainer's device: they release their memory while it computes"
    )
    seeds: bool = Field(False, description="servers key sampling noise on the request, at a cost in speed")
    cache_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens a server's key/value cache holds; null: 20,000 on a CPU, what fits memory_fraction on GPUs",
    )
    start_timeout_s: float = Field(300.0, gt=0, description="limit of a server's start, seconds")
    agreement_limit: float | None = Field(
        None,
        gt=0,
        description="largest difference of a token's log-prob from the trainer's, nats; past it a run stops. "
        "null: 1e-3 in float32, none in 16 bits, where `agreement` decides",
    )
    canary_prompts: int = Field(
        4, ge=0, description="sequences whose log-probs servers and trainer both compute after every weight sync"
    )


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    name: Literal["adam", "sgd"] = Field(
        "adam",
        description="adam is AdamW; sgd is for the single steps of tools/check_invariance.py and refused in a run, "
        "whose checkpoints could not hold it",
    )
    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    warmup_steps: int = Field(
        0,
        ge=0,
        description="optimizer steps of linear warm-up from 0; a rollout batch takes epochs * prompts / "
        "mini_batch_prompts of them",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="shape after the warm-up, up to the last optimizer step of run.steps rollout batches"
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled; norms and biases are spared")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    clip_grad: float = Field(1.0, gt=0, description="largest global gradient norm")
    distributed: bool = Field(False, description="Megatron's DistributedOptimizer: states sharded over data ranks")
    initial_loss_scale: float = Field(
        2.0**16,
        gt=0,
        description="float16: the loss is multiplied by it before backward, the gradient divided by it before clipping",
    )
    min_loss_scale: float = Field(
        1.0, gt=0, description="float16: the scale falls no lower; a gradient that overflows at it counts as not finite"
    )
    loss_scale_window: int = Field(
        400, ge=1, description="float16: optimizer steps in a row without overflow after which the scale grows"
    )
    hysteresis: int = Field(
        1, ge=1, description="float16: of the overflows since the scale last grew, the first one that lowers it"
    )
    growth_factor: float = Field(2.0, gt=1, description="float16: what the scale grows by")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="float16: what the scale falls by")

    @model_validator(mode="after")
    def _the_scale_starts_above_its_floor(self) -> OptimizerConfig:
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale {self.min_loss_scale:g} is above initial_loss_scale {self.initial_loss_scale:g}"
            )
        return self


class ObservabilityConfig(Section):
    """What is watched beside training; none of it changes what is learnt. See docs/diagnostics.md."""

    entropy_forecast: bool = Field(
        True, description="log the first-order entropy forecast of every step, from two more sums of the log-prob pass"
    )
    measured_every: int = Field(
        10,
        ge=0,
        description="steps between measurements of what a forecast came to, a forward pass each, and of the norm of a "
        "token's gradient by its probability and entropy; 0: never",
    )
    reflection_words: list[str] = Field(
        [], description="words counted in every response, such as [wait, alternatively]: metric `response/reflections`"
    )
    sinks: list[str] = Field(
        ["jsonl", "tensorboard", "console", "report"],
        description="what the run's reports go to: 'jsonl', 'tensorboard', 'console', 'report', 'wandb', 'mlflow', "
        "'prometheus', 'webhook' (see services) or a class path my_pkg.MySink",
    )
    metrics: list[str] = Field(
        [], description="functions of a step's batch whose numbers are logged too: paths my_pkg.my_metric"
    )

    @field_validator("reflection_words")
    @classmethod
    def _words_can_be_counted(cls, value: list[str]) -> list[str]:
        if not all(word.strip() for word in value):
            raise ValueError("an empty word stands everywhere")
        return value

    @field_validator("sinks", "metrics")
    @classmethod
    def _each_is_told_once(cls, value: list[str]) -> list[str]:
        if twice := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is named more than once")
        return value


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig()
    statistics: StatisticsConfig = StatisticsConfig()
    rollout: RolloutConfig = RolloutConfig()
    partial: PartialConfig = PartialConfig()
    sglang: SGLangConfig = SGLangConfig()
    agreement: AgreementConfig = AgreementConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = Field(
        default_factory=lambda: AlgorithmConfig.read("stare"),
        description="method and its settings; see docs/algorithms/README.md",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    moe: MoeConfig = MoeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    performance: PerformanceConfig = PerformanceConfig()
    memory: MemoryConfig = MemoryConfig()
    plan: PlanConfig = PlanConfig()
    eval: EvalConfig = EvalConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    limits: LimitsConfig = LimitsConfig()
    restarts: RestartsConfig = RestartsConfig()
    guards: GuardsConfig = GuardsConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    services: ServicesConfig = ServicesConfig()
    black_box: BlackBoxConfig = BlackBoxConfig()

    @model_validator(mode="after")
    def _servers_are_used(self) -> Config:
        if self.rollout.engine != "sglang":
            for name, default in SGLangConfig():
                if getattr(self.sglang, name) != default:
                    raise ValueError(
                        f"sglang.{name} is set, but rollouts come from the engine {self.rollout.engine!r}, which has "
                        "no servers: set rollout.engine=sglang, or leave it out"
                    )
            if self.eval.urls:
                raise ValueError(f"eval.urls names servers, and the engine {self.rollout.engine!r} has none")
        return self

    @model_validator(mode="after")
    def _limits_leave_each_other_time(self) -> Config:
        self.limits.check(self.runtime.timeout_s)
        return self

    @property
    def skips_log_prob_pass(self) -> bool:
        """Whether the training pass does without a log-prob pass before it; preflight refuses where it cannot."""
        return self.statistics.gate == "lagged"
