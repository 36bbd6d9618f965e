"""The sections about responses: prompts, engines and servers, rewards, agreement with the trainer,
evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megatron_stare.config.section import Section, check_template
from megatron_stare.registry import Extension


class MixtureFile(Section):
    """A file that training prompts are mixed from."""

    path: str = Field(description="as data.path")
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="share of the prompts, against other weights"
    )
    name: str | None = Field(
        None, description="what its prompts' ids begin with; null: the file's name"
    )

    @property
    def label(self) -> str:
        return self.name or Path(self.path).stem


class DataConfig(Section):
    """The prompts."""

    source: Extension = Field(
        Extension("jsonl"),
        description="'files', by its older name 'jsonl'; 'arithmetic', 'signs' or a class path",
    )
    path: str | None = Field(
        None,
        description=(
            "training prompts of source 'files': .parquet, JSON lines or hf:owner/name; see"
            " docs/data.md"
        ),
    )
    eval_path: str | None = Field(None, description="prompts of the evaluation, source 'files'")
    mixture: list[MixtureFile] = Field(
        [], description="training prompts of source 'files' from several files, in place of `path`"
    )
    prompt_key: str | None = Field(
        None, description="key of the prompt, dotted where it lies deeper; null: 'prompt'"
    )
    answer_key: str | None = Field(
        None,
        description=(
            "key of the answer; null: the first there is of answer, label and"
            " reward_model.ground_truth"
        ),
    )
    columns: list[str] | Literal["all"] = Field(
        [],
        description=(
            "columns of a row that a verifier is given as `columns`, dotted where they lie deeper;"
            " all: the whole row"
        ),
    )
    deduplicate: bool = Field(
        False,
        description=(
            "train on a problem once a pass, and not on one whose repeats have other answers"
        ),
    )
    decontaminate: list[str] = Field(
        [],
        description=(
            "files of evaluation problems; training leaves out what shares `ngram` words in a row"
            " with one"
        ),
    )
    ngram: int = Field(13, ge=1, description="words in a row of `decontaminate`")
    template: str | None = Field(
        None,
        description=(
            "text around a prompt, which stands at {prompt}, before the chat template; null: none"
        ),
    )
    chat_template: bool = Field(
        False, description="wrap every prompt as a user turn with the tokenizer's template"
    )

    _template = field_validator("template")(check_template)

    @model_validator(mode="after")
    def _one_or_several_files(self) -> DataConfig:
        if self.mixture and self.path is not None:
            raise ValueError("`path` and `mixture` both name training prompts: set one of them")
        labels = [file.label for file in self.mixture]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two files of the mixture are called {twice[0]!r}: give one a `name`")
        return self


class RolloutConfig(Section):
    """The engines that sample responses, and how they sample."""

    engine: Extension = Field(
        Extension("local"),
        description="'local' (transformers, in process), 'sglang' or a class path my_pkg.MyEngine",
    )
    engines: int = Field(1, ge=1, description="number of engines, each a replica of the policy")
    environment: Extension = Field(
        Extension("single_turn"),
        description=(
            "what makes a response of a prompt: 'single_turn' or a class path my_pkg.MyEnvironment"
        ),
    )
    temperature: float = Field(
        1.0, gt=0, description="divides the logits, in rollout and training alike"
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt, tokens")
    truncate_prompt: Literal["error", "drop", "left"] = Field(
        "error",
        description=(
            "a longer prompt stops the run, is left out of the data, or loses its first tokens"
        ),
    )
    max_new_tokens: int = Field(1024, ge=1, description="longest response, tokens")
    max_batch: int = Field(256, ge=1, description="responses an engine decodes together")
    threads: int = Field(1, ge=1, description="CPU threads of an engine")
    staleness: int | None = Field(
        None,
        ge=0,
        description=(
            "engines sample ahead of training, from weights at most this many steps old; null: not"
        ),
    )
    stale_tokens: Literal["correct", "mask"] = Field(
        "correct",
        description=(
            "tokens of older weights than those a step trains are weighed by algorithm.correction,"
            " or carry no loss and stay in the context"
        ),
    )
    stale_from: int = Field(
        1,
        ge=1,
        description=(
            "`stale_tokens: mask` masks tokens of weights that are at least this many steps older"
        ),
    )
    prove_every: int = Field(
        1,
        ge=1,
        description=(
            "weight syncs until values are proven by checksums again; else names and counts alone"
        ),
    )
    sync_bucket_mb: int = Field(
        64,
        ge=1,
        description=(
            "largest bucket of weights on its way to the engines, MB; a larger tensor goes alone"
        ),
    )


class PartialConfig(Section):
    """Long responses are cut at the end of a step, kept, and continued in a later one; see
    docs/asynchrony.md."""

    tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "tokens by which the responses under way grow at a time, until enough groups of them"
            " are whole for a step; fewer than rollout.max_new_tokens. null: every response is"
            " waited for"
        ),
    )
    prompts: int | None = Field(
        None,
        ge=1,
        description=(
            "prompt groups under way at a time, at least batch.prompts; null: twice batch.prompts,"
            " with dynamic sampling batch.generate_prompts"
        ),
    )

    def groups_under_way(self, prompts: int, generate_prompts: int | None) -> int:
        """How many at a time; the arguments are those of the section `batch`."""
        return self.prompts or generate_prompts or 2 * prompts


class SGLangConfig(Section):
    """The servers of `rollout.engine: sglang`; see docs/sglang.md."""

    urls: list[str] = Field(
        [],
        description=(
            "running servers to use, keyed by SGLANG_API_KEY; empty: start rollout.engines of them"
            " here"
        ),
    )
    router: str | None = Field(
        None,
        description=(
            "URL of an sglang-router in front of `urls` that is asked for responses, and for"
            " nothing else"
        ),
    )
    host: str | None = Field(
        None,
        description=(
            "IPv4 address that servers of a run listen on, which then all must have; 0.0.0.0: all"
            " of a node. null: their own node's (runtime.interface, else Ray's), and loopback where"
            " a run starts Ray itself"
        ),
    )
    python: str | None = Field(
        None,
        description=(
            "Python of the environment SGLang is installed in; null: that of"
            " scripts/setup_sglang.sh"
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description=(
            "where servers that a run starts compute; auto: on GPUs where this machine has any"
        ),
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="of the servers' weights and activations; null: model.dtype"
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks that a server cuts the model over")
    expert_parallel: int = Field(
        1,
        ge=1,
        description=(
            "groups of a server's ranks that hold whole experts, a divisor of tensor_parallel"
        ),
    )
    attention_data_parallel: int = Field(
        1,
        ge=1,
        description=(
            "groups of a server's ranks that attend to requests of their own, likewise a divisor"
        ),
    )
    nodes: int = Field(
        1, ge=1, description="nodes that a server's ranks lie on in equal parts, likewise a divisor"
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "share of a GPU's memory for weights and key/value cache; null: SGLang's choice"
        ),
    )
    context_length: int | None = Field(
        None, ge=1, description="tokens of a server's context; null: the model's"
    )
    attention_backend: str | None = Field(
        None, description="SGLang's name of it; null: SGLang's choice"
    )
    cuda_graph_batch_sizes: list[int] = Field(
        [],
        description=(
            "numbers of responses that decoding captures a CUDA graph for; empty: SGLang's choice"
        ),
    )
    flags: list[str] = Field(
        [],
        description=(
            "further arguments of sglang.launch_server, such as --chunked-prefill-size=4096"
        ),
    )
    environment: dict[str, str] = Field(
        {}, description="environment variables of the servers, beside the run's own"
    )
    sync: Literal["tensor", "disk", "distributed"] = Field(
        "tensor",
        description="weights travel as bytes in requests, through a folder, or in a process group",
    )
    sync_folder: str | None = Field(
        None, description="of sync: disk, seen by all nodes; null: weight_sync in run.dir"
    )
    colocated: bool = Field(
        False,
        description=(
            "servers share the trainer's device: they release their memory while it computes"
        ),
    )
    seeds: bool = Field(
        False, description="servers key sampling noise on the request, at a cost in speed"
    )
    cache_tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "tokens a server's key/value cache holds; null: 20,000 on a CPU, what fits"
            " memory_fraction on GPUs"
        ),
    )
    start_timeout_s: float = Field(300.0, gt=0, description="limit of a server's start, seconds")
    agreement_limit: float | None = Field(
        None,
        gt=0,
        description=(
            "largest difference of a token's log-prob from the trainer's, nats; past it a run"
            " stops. null: 1e-3 in float32, none in 16 bits, where `agreement` decides"
        ),
    )
    canary_prompts: int = Field(
        4,
        ge=0,
        description=(
            "sequences whose log-probs servers and trainer both compute after every weight sync"
        ),
    )


class AgreementConfig(Section):
    """How far the engines' log-probs of sampled tokens may lie from the trainer's where one of them
    computes in 16 bits: the sizes of the differences, nats. Past one of these limits a run stops;
    docs/diagnostics.md argues what null stands for. In float32 sglang.agreement_limit, of the
    largest difference, decides alone."""

    mean: float | None = Field(
        None, gt=0, description="largest mean; null: 0.025 in bfloat16, 0.003 in float16"
    )
    p99: float | None = Field(
        None, gt=0, description="largest 99 % quantile; null: 0.2 in bfloat16, 0.025 in float16"
    )
    p999: float | None = Field(
        None, gt=0, description="largest 99.9 % quantile; null: 1 in bfloat16, 0.125 in float16"
    )
    trend: float = Field(
        3.0,
        gt=1,
        description=(
            "largest growth of the mean, from the first `window` steps of a run to the newest"
        ),
    )
    window: int = Field(10, ge=3, description="steps whose median of means `trend` compares")


class RewardConfig(Section):
    """How answers are verified, in worker processes."""

    verifier: Extension = Field(
        Extension("math"),
        description=(
            "'math', 'stare', 'dapo', 'dapo_boxed', 'exact', 'numeric', 'choice', 'format',"
            " 'arithmetic', 'signs', a function my_pkg.my_module.verify or my_file.py:verify, a"
            " server's URL, or a sum 'math + 0.1 * format'; see docs/verifiers.md"
        ),
    )
    known_answers: str | None = Field(
        None,
        description=(
            'file of {"response": ..., "answer": ..., "reward": ...} a line that `verifier` must'
            " judge so before the first step; null: none beside the verifier's own"
        ),
    )
    workers: int = Field(1, ge=1, description="verifier processes")
    timeout_s: float = Field(10.0, gt=0, description="wall-clock limit of one answer, seconds")
    max_failure_rate: float = Field(
        0.05,
        ge=0,
        le=1,
        description="share of a batch that may time out or crash before the run stops",
    )


class EvalTask(Section):
    """A task that the policy is evaluated on. What it leaves out, or sets to null, is the run's
    own."""

    name: str = Field(
        pattern=r"^[\w.@+-]+$",
        description="in eval.jsonl, the report and TensorBoard; each has its own",
    )
    source: Extension | None = Field(None, description="as data.source")
    path: str | None = Field(None, description="as data.eval_path")
    template: str | None = Field(
        None, description="as data.template; the template '{prompt}' adds nothing"
    )
    chat_template: bool | None = Field(None, description="as data.chat_template")
    max_prompt_tokens: int | None = Field(None, ge=1, description="as rollout.max_prompt_tokens")
    truncate_prompt: Literal["error", "drop", "left"] | None = Field(
        None, description="as rollout.truncate_prompt"
    )
    verifier: Extension | None = Field(None, description="as reward.verifier")
    environment: Extension | None = Field(None, description="as rollout.environment")
    prompts: int | None = Field(
        None, ge=1, description="problems; null: eval.prompts, and where that is 0, all"
    )
    samples: int | None = Field(None, ge=1, description="as eval.samples")
    k: list[int] | None = Field(None, description="as eval.k")
    offline: bool = Field(
        False, description="leave it out of training: `megatron-stare eval` alone asks it"
    )
    temperature: float | None = Field(None, gt=0, description="as rollout.temperature")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="only the likeliest tokens are drawn, as few as together have this probability",
    )
    max_new_tokens: int | None = Field(None, ge=1, description="as rollout.max_new_tokens")
    greedy: bool | None = Field(None, description="as eval.greedy")

    _template = field_validator("template")(check_template)


class EvalConfig(Section):
    """Results on held-out problems, before and after training and in between; see
    docs/evaluation.md."""

    prompts: int = Field(0, ge=0, description="problems; 0: no evaluation, unless there are tasks")
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before and after")
    greedy: bool = Field(True, description="also decode greedily")
    samples: int = Field(
        1, ge=1, description="responses a problem; its result is their mean (avg@k)"
    )
    k: list[int] = Field(
        [],
        description=(
            "of pass@k and maj@k, none above `samples`; empty: the powers of two up to it, and it"
        ),
    )
    seed: int = Field(
        20_240_917,
        ge=0,
        lt=2**31,
        description="keys the sampling noise of every evaluation, which is not the run's",
    )
    engines: int = Field(
        0,
        ge=0,
        description=(
            "engines that evaluations have to themselves, started beside rollout.engines; 0: none"
        ),
    )
    urls: list[str] = Field([], description="likewise, running servers, as sglang.urls")
    tasks: list[EvalTask] = Field(
        [],
        description="what is evaluated, see below; empty: the run's own task, on held-out problems",
    )

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: list[EvalTask]) -> list[EvalTask]:
        names = [task.name for task in tasks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two tasks are called {name!r}: their results could not be told apart"
                )
        return tasks
