"""Defines the configuration sections about rollouts. The sections cover prompts, engines and
servers, rewards, agreement with the trainer, and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_stare.config.section import Section, check_template, expand_path
from megatron_stare.registry import Extension


class MixtureFile(Section):
    """One of several files from which training prompts are drawn."""

    path: str = Field(description="as data.path")
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="share of the prompts, relative to the others"
    )
    name: str | None = Field(None, description="prefix of its prompts' ids; null: the file's name")

    _paths = field_validator("path")(expand_path)

    @property
    def label(self) -> str:
        return self.name or Path(self.path).stem


# prompt sources with a short form, NAME:VALUE, each with the setting that VALUE is
_SHORT_FORMS = {"reasoning_gym": "dataset"}


def _spelled_out(source: Any) -> Any:
    """Replaces a short form, such as 'reasoning_gym:chain_sum', by the prompt source's name and
    setting."""
    try:
        given = Extension.read(source)
    except ValueError:  # raised again for the field itself
        return source
    name, short, value = given.name.partition(":")
    if not short or (key := _SHORT_FORMS.get(name)) is None:
        return source
    if key in given.settings:
        raise ValueError(f"gives {key} twice, as {value!r} and as {given.settings[key]!r}")
    return Extension(name, {key: value, **given.settings})


class DataConfig(Section):
    """The prompts."""

    source: Extension = Field(
        Extension("jsonl"),
        description=(
            "'files' (old name: 'jsonl'), 'arithmetic', 'signs' or a class path; 'messages' for"
            " supervised fine-tuning, see docs/sft.md"
        ),
    )
    path: str | None = Field(
        None,
        description=(
            "training prompts of source 'files', or conversations of source 'messages': .parquet,"
            " JSON lines or hf:owner/name; see docs/data.md"
        ),
    )
    eval_path: str | None = Field(
        None,
        description=(
            "prompts of the evaluation, source 'files'; conversations for the held-out loss, source"
            " 'messages'"
        ),
    )
    mixture: list[MixtureFile] = Field(
        [], description="training prompts of source 'files' from several files, in place of `path`"
    )
    prompt_key: str | None = Field(
        None, description="key of the prompt, dotted if nested; null: 'prompt'"
    )
    answer_key: str | None = Field(
        None,
        description=(
            "key of the answer; null: the first that exists among answer, label and"
            " reward_model.ground_truth"
        ),
    )
    columns: list[str] | Literal["all"] = Field(
        [],
        description=(
            "columns of a row that the verifier receives as `columns`, dotted if nested; all: the"
            " whole row"
        ),
    )
    deduplicate: bool = Field(
        False,
        description=(
            "train on a repeated problem once per pass over the data, and not at all if its answers"
            " differ"
        ),
    )
    decontaminate: list[str] = Field(
        [],
        description=(
            "files of evaluation problems; training prompts that share `ngram` consecutive words"
            " with one of them are left out"
        ),
    )
    ngram: int = Field(13, ge=1, description="consecutive words for `decontaminate`")
    template: str | None = Field(
        None,
        description=(
            "text around {prompt}, inside the chat template; without one, begin it with any BOS"
            " token"
        ),
    )
    chat_template: bool = Field(
        False, description="wrap every prompt as a user turn with the tokenizer's template"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description=(
            "further values for the chat template, such as {enable_thinking: false}; in rows of"
            " `messages`, too"
        ),
    )

    _source = field_validator("source", mode="before")(_spelled_out)

    _paths = field_validator("path", "eval_path", "decontaminate")(expand_path)

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
    """Engines and sampling."""

    engine: Extension = Field(
        Extension("local"),
        description="'local' (transformers, in process), 'sglang' or a class path my_pkg.MyEngine",
    )
    engines: int = Field(1, ge=1, description="number of engines, each a replica of the policy")
    environment: Extension = Field(
        Extension("single_turn"),
        description=(
            "environment that turns a prompt into a response: 'single_turn' or a class path"
            " my_pkg.MyEnvironment"
        ),
    )
    temperature: float = Field(
        1.0, gt=0, description="divides the logits, in rollout and training alike"
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt, tokens")
    truncate_prompt: Literal["error", "drop", "left"] = Field(
        "error",
        description=(
            "a longer prompt stops the run (error), is left out of the data (drop), or loses its"
            " first tokens (left)"
        ),
    )
    max_new_tokens: int = Field(1024, ge=1, description="longest response, tokens")
    max_batch: int = Field(256, ge=1, description="responses an engine decodes together")
    threads: int = Field(1, ge=1, description="CPU threads of an engine")
    staleness: int | None = Field(
        None,
        ge=0,
        description=(
            "engines sample ahead of training, with weights at most this many steps old; null:"
            " synchronous"
        ),
    )
    stale_tokens: Literal["correct", "mask"] = Field(
        "correct",
        description=(
            "treatment of tokens that older weights sampled: correct weights their loss by"
            " algorithm.correction; mask excludes them from the loss but keeps them as context"
        ),
    )
    stale_from: int = Field(
        1,
        ge=1,
        description=("least age in steps of the weights whose tokens `stale_tokens: mask` masks"),
    )
    prove_every: int = Field(
        1,
        ge=1,
        description=(
            "every n-th weight sync verifies values by checksums; the others verify only names and"
            " counts"
        ),
    )
    sync_bucket_mb: int = Field(
        64,
        ge=1,
        description=(
            "size limit of a bucket of weights sent to the engines, MB; a larger tensor is sent"
            " alone"
        ),
    )


class PartialConfig(Section):
    """Partial rollouts. Long responses are interrupted at the end of a step and continued in a
    later step; see docs/asynchrony.md."""

    tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "tokens that in-flight responses grow by in a round; rounds repeat until enough groups"
            " for a step are complete. Fewer than rollout.max_new_tokens. null: no partial rollouts"
        ),
    )
    prompts: int | None = Field(
        None,
        ge=1,
        description=(
            "prompt groups in flight at a time, at least batch.prompts; null: twice batch.prompts,"
            " or batch.generate_prompts with dynamic sampling"
        ),
    )

    def groups_under_way(self, prompts: int, generate_prompts: int | None) -> int:
        """Returns the number of prompt groups to keep in flight. `prompts` and `generate_prompts`
        are settings of the section `batch`."""
        return self.prompts or generate_prompts or 2 * prompts


class SGLangConfig(Section):
    """Configures the SGLang servers. If `rollout.engine` is not `sglang`, all settings of this
    section must keep their default values. See docs/sglang.md."""

    urls: list[str] = Field(
        [],
        description=(
            "URLs of running servers to use, with SGLANG_API_KEY as key; empty: the run starts"
            " rollout.engines servers"
        ),
    )
    router: str | None = Field(
        None,
        description=(
            "URL of an sglang-router in front of `urls`, used only for requests for responses"
        ),
    )
    host: str | None = Field(
        None,
        description=(
            "IPv4 address that all servers of a run listen on; 0.0.0.0: all addresses of a node."
            " null: each node's own address (on runtime.interface, else Ray's), or loopback if the"
            " run starts Ray itself"
        ),
    )
    python: str | None = Field(
        None,
        description=(
            "Python of SGLang's environment; null: the environment made by scripts/setup_sglang.sh"
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description=("device of servers that a run starts; auto: GPUs if this machine has any"),
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="dtype of the servers' weights and activations; null: model.dtype"
    )
    kv_cache_dtype: Literal["fp8_e4m3"] | None = Field(
        None,
        description=(
            "dtype of the servers' KV cache; null: that of their activations. 8 bits hold twice as"
            " many tokens, and need algorithm.correction"
        ),
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description=(
            "storage of the servers' matrices: 8 bits in blocks of 128 x 128, as DeepSeek-V3; null:"
            " `dtype`. 8 bits are read twice as fast, and need algorithm.correction"
        ),
    )
    tensor_parallel: int = Field(1, ge=1, description="tensor-parallel ranks of a server")
    expert_parallel: int = Field(
        1,
        ge=1,
        description=("expert-parallel groups of a server's ranks; a divisor of tensor_parallel"),
    )
    attention_data_parallel: int = Field(
        1,
        ge=1,
        description=(
            "data-parallel attention groups of a server's ranks; a divisor of tensor_parallel"
        ),
    )
    nodes: int = Field(
        1, ge=1, description="nodes per server, with equal ranks each; a divisor of tensor_parallel"
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=("share of a GPU's memory for weights and KV cache; null: SGLang's choice"),
    )
    context_length: int | None = Field(
        None, ge=1, description="context length of a server, tokens; null: the model's"
    )
    attention_backend: str | None = Field(
        None, description="SGLang's name of the attention backend; null: SGLang's choice"
    )
    cuda_graph_batch_sizes: list[int] = Field(
        [],
        description=(
            "batch sizes for which decoding captures a CUDA graph; empty: SGLang's choice"
        ),
    )
    flags: list[str] = Field(
        [],
        description=(
            "additional arguments of sglang.launch_server, such as --chunked-prefill-size=4096"
        ),
    )
    environment: dict[str, str] = Field(
        {}, description="environment variables of the servers, in addition to the run's"
    )
    sync: Literal["tensor", "disk", "distributed"] = Field(
        "tensor",
        description=(
            "weights are sent as bytes in requests (tensor), through a folder (disk), or over a"
            " process group (distributed)"
        ),
    )
    sync_folder: str | None = Field(
        None,
        description="folder of `sync: disk`, visible to all nodes; null: weight_sync in run.dir",
    )
    colocated: bool = Field(
        False,
        description=(
            "servers share the trainer's device, and release their memory while it computes"
        ),
    )
    seeds: bool = Field(False, description="servers seed sampling by request, at a cost in speed")
    cache_tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "size of a server's KV cache, tokens; null: 20,000 on a CPU, as many as fit"
            " memory_fraction on GPUs"
        ),
    )
    start_timeout_s: float = Field(300.0, gt=0, description="timeout of a server's start, seconds")
    agreement_limit: float | None = Field(
        None,
        gt=0,
        description=(
            "largest difference of a token's log-prob from the trainer's, nats; above it the run"
            " stops. null: 1e-3 in float32, none in 16 bits, where `agreement` applies"
        ),
    )
    canary_prompts: int = Field(
        4,
        ge=0,
        description=(
            "sequences whose log-probs are compared between servers and trainer after every weight"
            " sync"
        ),
    )

    _paths = field_validator("python", "sync_folder")(expand_path)


# the settings that determine how closely engine and trainer agree
PRECISIONS = ("model.dtype", "sglang.dtype", "sglang.kv_cache_dtype", "sglang.quantization")
_COARSEST_FIRST = ("fp8", "fp8_e4m3", "bfloat16", "float16", "float32")


def coarsest_dtype(*dtypes: str | None) -> str:
    """Returns the coarsest of several dtypes: the dtypes in which trainer and engines compute, and
    the dtypes in which servers store weights and the KV cache. The coarsest dtype determines how
    closely engine and trainer agree.

    Args:
        dtypes: values of the settings in PRECISIONS; None is ignored.
    """
    return min(filter(None, dtypes), key=_COARSEST_FIRST.index, default="float32")


class AgreementConfig(Section):
    """Limits, in nats, on the absolute difference between the engines' and the trainer's log-probs
    of sampled tokens. The limits apply if the engines or the trainer compute in 16 bits, or if
    servers have 8-bit weights or an 8-bit cache. A difference above a limit stops the run. If a
    limit is null, its default value applies, which docs/diagnostics.md explains. If trainer,
    engines, weights and cache all use 32 bits, the only limit is sglang.agreement_limit, which
    applies to the log-prob difference of each token."""

    mean: float | None = Field(
        None,
        gt=0,
        description=(
            "largest mean; null: 0.025 in bfloat16, 0.003 in float16, 0.1 with an 8-bit cache, 0.2"
            " with 8-bit weights"
        ),
    )
    p99: float | None = Field(
        None,
        gt=0,
        description=(
            "largest 99 % quantile; null: 0.2 in bfloat16, 0.025 in float16, 0.8 with an 8-bit"
            " cache, 1.6 with 8-bit weights"
        ),
    )
    p999: float | None = Field(
        None,
        gt=0,
        description=(
            "largest 99.9 % quantile; null: 1 in bfloat16, 0.125 in float16, 4 with an 8-bit cache,"
            " 8 with 8-bit weights"
        ),
    )
    trend: float = Field(
        3.0,
        gt=1,
        description=(
            "largest growth of the mean: ratio of its medians over the newest and the run's first"
            " `window` steps"
        ),
    )
    window: int = Field(10, ge=3, description="steps per window of `trend`")


class RewardConfig(Section):
    """Settings of the worker processes that verify answers."""

    verifier: Extension = Field(
        Extension("math"),
        description=(
            "'math', 'stare', 'dapo', 'dapo_boxed', 'exact', 'numeric', 'choice', 'format',"
            " 'arithmetic', 'signs', 'environment', a function my_pkg.my_module.verify or"
            " my_file.py:verify, a server's URL, or a sum 'math + 0.1 * format';"
            " see docs/verifiers.md"
        ),
    )
    known_answers: str | None = Field(
        None,
        description=(
            'file with one {"response": ..., "answer": ..., "reward": ...} per line; before the'
            " first step `verifier` must return these rewards. null: only the verifier's own cases"
        ),
    )
    workers: int = Field(1, ge=1, description="verifier processes")
    timeout_s: float = Field(10.0, gt=0, description="wall-clock limit of one answer, seconds")
    max_failure_rate: float = Field(
        0.05,
        ge=0,
        le=1,
        description="largest share of a batch whose verification may time out or crash",
    )

    _paths = field_validator("known_answers")(expand_path)


class EvalTask(Section):
    """A task on which the policy is evaluated. If a setting is missing or null, the task uses the
    corresponding setting of the run."""

    name: str = Field(
        pattern=r"^[\w.@+-]+$",
        description="unique name in eval.jsonl, the report and TensorBoard",
    )
    source: Extension | None = Field(None, description="as data.source")
    path: str | None = Field(None, description="as data.eval_path")
    template: str | None = Field(
        None, description="as data.template; the template '{prompt}' adds nothing"
    )
    chat_template: bool | None = Field(None, description="as data.chat_template")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="as data.chat_template_kwargs"
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="as rollout.max_prompt_tokens")
    truncate_prompt: Literal["error", "drop", "left"] | None = Field(
        None, description="as rollout.truncate_prompt"
    )
    verifier: Extension | None = Field(None, description="as reward.verifier")
    environment: Extension | None = Field(None, description="as rollout.environment")
    prompts: int | None = Field(
        None, ge=1, description="number of problems; null: eval.prompts, or all if that is 0"
    )
    samples: int | None = Field(None, ge=1, description="as eval.samples")
    k: list[int] | None = Field(None, description="as eval.k")
    offline: bool = Field(
        False, description="skip the task in training; only `megatron-stare eval` evaluates it"
    )
    temperature: float | None = Field(None, gt=0, description="as rollout.temperature")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="nucleus sampling: sample from the fewest tokens with this total probability",
    )
    max_new_tokens: int | None = Field(None, ge=1, description="as rollout.max_new_tokens")
    greedy: bool | None = Field(None, description="as eval.greedy")

    _source = field_validator("source", mode="before")(_spelled_out)

    _paths = field_validator("path")(expand_path)

    _template = field_validator("template")(check_template)


class EvalConfig(Section):
    """Evaluation on held-out problems before, during and after training; see
    docs/evaluation.md."""

    prompts: int = Field(
        0, ge=0, description="number of problems; 0: no evaluation, unless there are tasks"
    )
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before and after")
    greedy: bool = Field(True, description="also decode greedily")
    samples: int = Field(
        1, ge=1, description="responses per problem, whose mean is its result (avg@k)"
    )
    k: list[int] = Field(
        [],
        description=(
            "values of k for pass@k and maj@k, none above `samples`; empty: `samples` and all"
            " smaller powers of two"
        ),
    )
    seed: int = Field(
        20_240_917,
        ge=0,
        lt=2**31,
        description="seed of sampling in every evaluation, independent of run.seed",
    )
    engines: int = Field(
        0,
        ge=0,
        description=("engines reserved for evaluation, in addition to rollout.engines; 0: none"),
    )
    urls: list[str] = Field(
        [], description="running servers reserved for evaluation, as in sglang.urls"
    )
    tasks: list[EvalTask] = Field(
        [],
        description="tasks to evaluate, see below; empty: the run's own task on held-out problems",
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
