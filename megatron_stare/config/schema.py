"""Defines the configuration of a run as typed pydantic models. Every field states its unit and
meaning. Unknown keys raise an error.

Three further modules define the sections about training, rollouts and faults. Import all sections
from this module.
"""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_stare.config.algorithm import AlgorithmConfig
from megatron_stare.config.fault_sections import FaultsConfig
from megatron_stare.config.rollout_sections import (
    PRECISIONS,
    AgreementConfig,
    DataConfig,
    EvalConfig,
    PartialConfig,
    RewardConfig,
    RolloutConfig,
    SGLangConfig,
    coarsest_dtype,
)
from megatron_stare.config.section import Section, expand_path
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

PORTS = (1024, 65535)  # lower ports are reserved for the system


class RunConfig(Section):
    """Name and length of the run, and the folder of its results."""

    name: str = Field(
        "run", description="name of the run; part of the directory's name if `dir` is not given"
    )
    dir: str | None = Field(None, description="run directory; default runs/<name>-<time>")
    seed: int = Field(1, ge=0, lt=2**31, description="seeds data order and sampling noise")
    steps: int = Field(
        100,
        ge=1,
        description="training steps; one step trains on one rollout batch, in one or more updates",
    )
    checkpoint_every: int = Field(
        50, ge=0, description="steps between checkpoints; 0: only after the last step"
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of newest checkpoints to keep")
    rollouts_every: int = Field(10, ge=1, description="steps between dumps of sampled rollouts")
    rollouts_kept: int = Field(32, ge=0, description="samples written per dump")
    tokens_kept: int = Field(
        8, ge=0, description="samples per dump that are written with the numbers of every token"
    )

    _paths = field_validator("dir")(expand_path)


class CheckpointConfig(Section):
    """Settings for writing, keeping and verifying checkpoints; see docs/checkpoints.md. The setting
    run.checkpoint_every sets how often checkpoints are written. The run keeps the newest
    `run.keep_checkpoints` checkpoints and also the checkpoints that this section selects."""

    background: bool = Field(
        True,
        description=(
            "training continues while a checkpoint is written; it is complete once all ranks have"
            " written"
        ),
    )
    writers: int = Field(
        2, ge=1, description="files per trainer rank, each written by a process of its own"
    )
    verify: bool = Field(
        True,
        description=(
            "before a load the ranks check the checksums of all tensor files; false: only their"
            " lengths. Other files are always checked"
        ),
    )
    self_test: bool = Field(
        True,
        description=(
            "save a few responses of the newest step with their log-probs; a resume computes the"
            " log-probs again before it trains"
        ),
    )
    grace_s: float = Field(
        20.0,
        gt=0,
        description=(
            "seconds after SIGTERM or Ctrl-C to finish the current update and save its state; the"
            " rest of the 30 s that Slurm and Kubernetes allow is for closing"
        ),
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        description="keep checkpoints of all steps that are multiples of this; null: none",
    )
    keep_best: int = Field(
        0, ge=0, description="number of checkpoints to keep with the best `best_by`; 0: none"
    )
    best_by: str | None = Field(
        None,
        description=(
            "metric for `keep_best`: one of the step, such as reward/mean, or of its evaluation,"
            " such as eval/pass1, or eval/TASK/pass1 for a task"
        ),
    )
    best_is: Literal["highest", "lowest"] = Field(
        "highest", description="whether high or low values of `best_by` are best"
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
    """Forecast of the run's memory and time, which the run logs together with the measured values;
    see docs/planning.md. `megatron-stare plan` uses these settings as defaults of its options."""

    enabled: bool = Field(
        True, description="predict memory and time at the start; log them beside the measured ones"
    )
    gpu: str | None = Field(
        None,
        description="kind of GPU, as in `plan --gpu`; null: this machine's, or cpu-core if none",
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
            "file of calibrations by GPU that `plan --calibrate` writes; read if it exists"
        ),
    )

    _paths = field_validator("coefficients")(expand_path)


class ObservabilityConfig(Section):
    """Metrics, profiles and reports of a run. The settings of this section do not change training.
    See docs/diagnostics.md."""

    entropy_forecast: bool = Field(
        True,
        description=(
            "log the first-order entropy forecast of every step; takes two more sums in the"
            " log-prob pass"
        ),
    )
    measured_every: int = Field(
        10,
        ge=0,
        description=(
            "steps between measurements of the entropy change that was forecast (one forward pass"
            " each) and of token gradient norms by probability and entropy; 0: never"
        ),
    )
    profile_steps: list[int] = Field(
        [],
        description=(
            "steps whose log-prob pass and update torch.profiler records, as Chrome traces in"
            " profile/ of the run directory"
        ),
    )
    profile_ranks: list[int] = Field([0], description="ranks to record in `profile_steps`")
    reflection_words: list[str] = Field(
        [],
        description=(
            "words to count in every response for the metric `response/reflections`, such as"
            " [wait, alternatively]"
        ),
    )
    sinks: list[Extension] = Field(
        [Extension(name) for name in ("jsonl", "tensorboard", "console", "report")],
        description=(
            "outputs of the run's reports: 'jsonl', 'tensorboard', 'console', 'report', 'wandb',"
            " 'mlflow', 'prometheus', 'webhook' or a class path my_pkg.MySink; with settings:"
            " {name: ..., setting: value}, see docs/sinks.md"
        ),
    )
    metrics: list[str] = Field(
        [],
        description=(
            "paths my_pkg.my_metric of functions of a step's batch that return additional metrics"
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
    """Settings of processes and machines. The page docs/cluster.md describes how processes are
    placed on GPUs."""

    runner: Literal["ray", "inline"] = Field(
        "ray", description="'ray': actors; 'inline': everything in this process"
    )
    ray_address: str | None = Field(
        None, description="address of a running Ray cluster to join; null: start one here"
    )
    object_store_mb: int = Field(
        128, ge=80, description="size limit of a locally started Ray object store, MB"
    )
    trainer_threads: int = Field(1, ge=1, description="CPU threads of a trainer rank")
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="timeout of one remote call, seconds; `faults.requests` has the other timeouts",
    )
    placement_s: float = Field(
        60.0, ge=0, description="longest wait for GPUs that other jobs still hold, seconds"
    )
    gpu_resource: str = Field(
        "GPU",
        min_length=1,
        description="Ray resource that ranks and engines are placed by; not GPU: simulated GPUs",
    )
    ports: list[int] = Field(
        [],
        description=(
            "first and last port that a run may listen on; empty: ephemeral ports, and 20000 to"
            " 31999"
        ),
    )
    interface: str | None = Field(
        None,
        description=(
            "network interface for traffic between ranks and servers, the same on every node, such"
            " as eth0; null: any"
        ),
    )
    env: dict[str, str] = Field(
        {},
        description=(
            "environment variables of trainer ranks and servers, such as NCCL's; servers also get"
            " sglang.environment"
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
        """Divides the port range into `shares` consecutive ranges, and returns the range with index
        `number`. Returns None if no range is set. No port is in two ranges, so processes that use
        different ranges never take the same port.

        Raises:
            ValueError: the range has fewer than `shares` ports.
        """
        if not self.ports:
            return None
        first, last = self.ports
        if (count := last - first + 1) < shares:
            raise ValueError(f"{count} ports cannot be shared by {shares}")
        return range(first + number * count // shares, first + (number + 1) * count // shares)


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
                        f" rollout.engine=sglang, or sglang.{name}={json.dumps(default)},"
                        " the default"
                    )
            if self.eval.urls:
                raise ValueError(
                    f"eval.urls names servers, and the engine {self.rollout.engine.name!r} has none"
                )
        return self

    @model_validator(mode="after")
    def _a_group_needs_two(self) -> Config:
        read = isinstance(self.algorithm, AlgorithmConfig)  # false before the method is imported
        if read and not self.supervised and self.batch.samples_per_prompt < 2:
            raise ValueError(
                "batch.samples_per_prompt: a group of one response has no spread, so its advantage"
                " is always zero; use at least 2"
            )
        return self

    @model_validator(mode="after")
    def _limits_leave_each_other_time(self) -> Config:
        self.faults.requests.check(self.runtime.timeout_s)
        return self

    @property
    def expected_lengths(self) -> tuple[float, float]:
        """Expected mean number of tokens in a prompt, and expected mean number of tokens in a
        response. The settings `plan.prompt_tokens` and `plan.response_tokens` set the two numbers.
        If `plan.prompt_tokens` is null, a quarter of `rollout.max_prompt_tokens` is expected per
        prompt. If `plan.response_tokens` is null, half of `rollout.max_new_tokens` is expected per
        response."""
        rollout, plan = self.rollout, self.plan
        return (
            plan.prompt_tokens or rollout.max_prompt_tokens / 4,
            plan.response_tokens or rollout.max_new_tokens / 2,
        )

    @property
    def supervised(self) -> bool:
        """True if the run learns from given responses, without engines, verifiers and
        evaluations."""
        return self.algorithm.supervised

    @property
    def coarsest_dtype(self) -> str:
        """See the function `coarsest_dtype`."""
        return coarsest_dtype(*(attrgetter(name)(self) for name in PRECISIONS))

    @property
    def skips_log_prob_pass(self) -> bool:
        """True if steps train without a log-prob pass. If steps skip the log-prob pass although a
        setting needs it, the preflight checks raise ConfigError."""
        return self.supervised or self.statistics.gate == "lagged"
