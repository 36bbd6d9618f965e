"""The configuration of a run, as typed models. Every field carries its unit and meaning; unknown
keys are refused.

The sections about training, responses and faults have a module each; all are imported from here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_stare.config.algorithm import AlgorithmConfig
from megatron_stare.config.fault_sections import FaultsConfig
from megatron_stare.config.rollout_sections import (
    AgreementConfig,
    DataConfig,
    EvalConfig,
    PartialConfig,
    RewardConfig,
    RolloutConfig,
    SGLangConfig,
)
from megatron_stare.config.section import Section
from megatron_stare.config.training_sections import (
    BatchConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    PerformanceConfig,
    StatisticsConfig,
)
from megatron_stare.registry import Extension

PORTS = (1024, 65535)  # below are the system's


class RunConfig(Section):
    """The run: its name, its length, and where its results go."""

    name: str = Field(
        "run", description="name of the run; part of the directory when `dir` is not given"
    )
    dir: str | None = Field(None, description="run directory; default runs/<name>-<time>")
    seed: int = Field(1, ge=0, lt=2**31, description="seeds data order and sampling noise")
    steps: int = Field(
        100,
        ge=1,
        description="training steps; one step is one rollout batch, of any number of updates",
    )
    checkpoint_every: int = Field(
        50, ge=0, description="steps between checkpoints; 0: only after the last step"
    )
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    rollouts_every: int = Field(10, ge=1, description="steps between dumps of sampled rollouts")
    rollouts_kept: int = Field(32, ge=0, description="samples written per dump")
    tokens_kept: int = Field(
        8, ge=0, description="of these, samples written with the numbers of every token"
    )


class CheckpointConfig(Section):
    """How checkpoints are written, kept and checked; run.checkpoint_every says when, and
    run.keep_checkpoints how many of the newest are kept beside what is asked for here. See
    docs/checkpoints.md."""

    background: bool = Field(
        True,
        description=(
            "training goes on while a checkpoint is written; it counts once all ranks have written"
        ),
    )
    writers: int = Field(
        2, ge=1, description="files, and processes that write them, a trainer rank"
    )
    verify: bool = Field(
        True,
        description=(
            "the ranks read all tensor files before they are loaded, and compare checksums; false:"
            " lengths alone are looked at. Other files are always read"
        ),
    )
    self_test: bool = Field(
        True,
        description=(
            "a few responses of the newest step, and their log-probs, are saved with the weights; a"
            " resume computes them again before it trains"
        ),
    )
    grace_s: float = Field(
        20.0,
        gt=0,
        description=(
            "seconds after SIGTERM or Ctrl-C in which an update under way may end and its state be"
            " saved; the rest of the 30 s that Slurm and Kubernetes leave is for closing"
        ),
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        description="checkpoints of steps that this divides are kept for good; null: none are",
    )
    keep_best: int = Field(
        0, ge=0, description="checkpoints kept because `best_by` is best there; 0: none"
    )
    best_by: str | None = Field(
        None,
        description=(
            "metric that `keep_best` goes by: of the step, such as reward/mean, or of its"
            " evaluation, such as eval/pass1, of a task eval/TASK/pass1"
        ),
    )
    best_is: Literal["highest", "lowest"] = Field(
        "highest", description="which values of `best_by` are the best"
    )

    @model_validator(mode="after")
    def _best_by_something(self) -> CheckpointConfig:
        if bool(self.keep_best) != (self.best_by is not None):
            given, missing = (
                ("keep_best", "best_by") if self.keep_best else ("best_by", "keep_best")
            )
            raise ValueError(f"{given} needs {missing}: without both, no best checkpoint is kept")
        return self


class PlanConfig(Section):
    """The forecast of `megatron-stare plan` for this run, logged beside what the run measures; see
    docs/planning.md. The command reads these settings, too, where it is not told otherwise."""

    enabled: bool = Field(
        True, description="predict memory and time as a run starts, and log both with what it took"
    )
    gpu: str | None = Field(
        None,
        description="kind of GPU, as in `plan --gpu`; null: this machine's, without one cpu-core",
    )
    prompt_tokens: float | None = Field(
        None,
        ge=1,
        description="mean tokens of a prompt; null: a quarter of rollout.max_prompt_tokens",
    )
    response_tokens: float | None = Field(
        None, ge=1, description="mean tokens of a response; null: half of rollout.max_new_tokens"
    )
    coefficients: str = Field(
        "plan_coefficients.json",
        description=(
            "file of calibrations by GPU, that `plan --calibrate` writes; read where it exists"
        ),
    )


class ObservabilityConfig(Section):
    """Observations beside training; none of them changes what is learnt. See
    docs/diagnostics.md."""

    entropy_forecast: bool = Field(
        True,
        description=(
            "log the first-order entropy forecast of every step, from two more sums of the log-prob"
            " pass"
        ),
    )
    measured_every: int = Field(
        10,
        ge=0,
        description=(
            "steps between measurements of what a forecast came to, a forward pass each, and of the"
            " norm of a token's gradient by its probability and entropy; 0: never"
        ),
    )
    profile_steps: list[int] = Field(
        [],
        description=(
            "steps whose log-prob pass and update torch.profiler records: Chrome traces in profile/"
            " of the run directory"
        ),
    )
    profile_ranks: list[int] = Field([0], description="ranks that are recorded in these steps")
    reflection_words: list[str] = Field(
        [],
        description=(
            "words counted in every response, such as [wait, alternatively]: metric"
            " `response/reflections`"
        ),
    )
    sinks: list[Extension] = Field(
        [Extension(name) for name in ("jsonl", "tensorboard", "console", "report")],
        description=(
            "what the run's reports go to: 'jsonl', 'tensorboard', 'console', 'report', 'wandb',"
            " 'mlflow', 'prometheus', 'webhook' or a class path my_pkg.MySink; with settings of its"
            " own {name: ..., setting: value}, see docs/sinks.md"
        ),
    )
    metrics: list[str] = Field(
        [],
        description=(
            "functions of a step's batch whose numbers are logged too: paths my_pkg.my_metric"
        ),
    )

    @field_validator("reflection_words")
    @classmethod
    def _words_can_be_counted(cls, value: list[str]) -> list[str]:
        if not all(word.strip() for word in value):
            raise ValueError("an empty word would match everywhere")
        return value

    @field_validator("sinks", "metrics")
    @classmethod
    def _each_is_told_once(cls, value: list[Any]) -> list[Any]:
        names = [Extension.read(each).name for each in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is named more than once")
        return value


class RuntimeConfig(Section):
    """Processes and machines. Placement on GPUs is described in docs/cluster.md."""

    runner: Literal["ray", "inline"] = Field(
        "ray", description="'ray': actors; 'inline': everything in this process"
    )
    ray_address: str | None = Field(
        None, description="running Ray cluster to join; default: start one here"
    )
    object_store_mb: int = Field(
        128, ge=80, description="cap of a locally started Ray object store, MB"
    )
    trainer_threads: int = Field(1, ge=1, description="CPU threads of a trainer rank")
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="limit of one remote call, seconds; the others are in `faults.requests`",
    )
    placement_s: float = Field(
        60.0, ge=0, description="limit of the wait for GPUs that others still hold, seconds"
    )
    gpu_resource: str = Field(
        "GPU",
        min_length=1,
        description="Ray's name of what ranks and engines are placed by; another: simulated GPUs",
    )
    ports: list[int] = Field(
        [],
        description=(
            "first and last port that a run listens on; empty: the kernel's choice, and 20000 to"
            " 31999"
        ),
    )
    interface: str | None = Field(
        None,
        description=(
            "network interface of every node that ranks and servers meet over, such as eth0;"
            " null: any"
        ),
    )
    env: dict[str, str] = Field(
        {},
        description=(
            "environment variables of trainer ranks and servers, such as NCCL's; sglang.environment"
            " adds"
        ),
    )

    @field_validator("ports")
    @classmethod
    def _first_and_last(cls, value: list[int]) -> list[int]:
        if value and not (len(value) == 2 and PORTS[0] <= value[0] < value[1] <= PORTS[1]):
            raise ValueError(
                f"a range is [first, last], between {PORTS[0]} and {PORTS[1]}, not {value}"
            )
        return value

    def port_share(self, number: int, shares: int) -> range | None:
        """The ports that one of several holders may listen on: no two of them have one in common,
        so that holders on one node cannot take each other's. None: no range is set.

        Raises:
            ValueError: the range has fewer ports than there are shares.
        """
        if not self.ports:
            return None
        first, last = self.ports
        if last - first + 1 < shares:
            raise ValueError(f"{last - first + 1} ports cannot be shared by {shares}")
        return range(first + number, last + 1, shares)


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
    faults: FaultsConfig = FaultsConfig()

    @model_validator(mode="after")
    def _servers_are_used(self) -> Config:
        if self.rollout.engine.name != "sglang":
            for name, default in SGLangConfig():
                if getattr(self.sglang, name) != default:
                    raise ValueError(
                        f"sglang.{name} is set, but rollouts come from the engine"
                        f" {self.rollout.engine.name!r}, which has no servers: set"
                        " rollout.engine=sglang, or leave it out"
                    )
            if self.eval.urls:
                raise ValueError(
                    f"eval.urls names servers, and the engine {self.rollout.engine.name!r} has none"
                )
        return self

    @model_validator(mode="after")
    def _limits_leave_each_other_time(self) -> Config:
        self.faults.requests.check(self.runtime.timeout_s)
        return self

    @property
    def expected_lengths(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of a response: those of `plan`, else what is assumed of every
        run."""
        rollout, plan = self.rollout, self.plan
        return (
            plan.prompt_tokens or rollout.max_prompt_tokens / 4,
            plan.response_tokens or rollout.max_new_tokens / 2,
        )

    @property
    def skips_log_prob_pass(self) -> bool:
        """Tells whether the training pass does without a log-prob pass before it; preflight refuses
        where it cannot."""
        return self.statistics.gate == "lagged"
