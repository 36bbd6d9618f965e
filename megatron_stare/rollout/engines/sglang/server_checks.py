"""Checks the configuration of a run's servers before any server is started."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron_stare.config.schema import Config, SGLangConfig
from megatron_stare.errors import ConfigError
from megatron_stare.models.shape import ModelShape
from megatron_stare.process.network import EVERYWHERE
from megatron_stare.rollout.engines.sglang.flag_check import refused_flag
from megatron_stare.rollout.engines.sglang.protocol import check_precision, check_speculation
from megatron_stare.rollout.engines.sglang.server_engine import NEVER_FILLED
from megatron_stare.rollout.engines.sglang.server_layout import CPU_WIDTHS, ServerLayout
from megatron_stare.rollout.engines.sglang.server_options import CPU_ATTENTION, ServerOptions
from megatron_stare.rollout.engines.sglang.transport import on_loopback

API_KEY_VARIABLE = "SGLANG_API_KEY"  # key of servers that the run attaches to
# settings for starting servers; not dtype and kv_cache_dtype, which also apply to attached servers
LAUNCH_SETTINGS = (
    *(
        "host",
        "python",
        "device",
        "tensor_parallel",
        "expert_parallel",
        "attention_data_parallel",
        "nodes",
    ),
    *("memory_fraction", "context_length"),
    *(
        "attention_backend",
        "cuda_graph_batch_sizes",
        "flags",
        "environment",
        "cache_tokens",
        "start_timeout_s",
    ),
)

# variables of SGLang's that a run refuses
ALTERING = {
    "SGLANG_SIMULATE_ACC_LEN": "it accepts drafts by a given length, and not by the model",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probs would leave out the temperature",
}
OFF = ("", "0", "-1", "false", "no", "off")


def server_device(config: Config) -> str:
    """Returns the device type, cpu or cuda, of the servers that the run starts on this machine."""
    if config.sglang.device != "auto":
        return config.sglang.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_lengths(config: Config, shape: ModelShape, *bounds: int | None) -> None:
    """Raises ConfigError if the longest prompt and the longest response together do not fit into a
    server's context.

    Args:
        bounds: limits on the context length, in addition to the model's own limit. A bound of None
            is ignored.
    """
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    held = min(bound for bound in (shape.max_positions, *bounds) if bound is not None)
    filled = held - NEVER_FILLED
    if config.rollout.max_prompt_tokens >= filled:
        raise ConfigError(
            f"prompts of {config.rollout.max_prompt_tokens} tokens leave no room for a response: a"
            f" server fills {filled} tokens of its context of {held}",
            where="rollout.max_prompt_tokens",
            fix=(
                f"at most {max(1, filled - 1)}, less the tokens of a response, or raise"
                " sglang.cache_tokens"
            ),
        )
    if longest > filled:
        raise ConfigError(
            f"prompt and response of up to {longest} tokens are too long: a server fills {filled}"
            f" tokens of its context of {held}",
            where="rollout.max_new_tokens",
            fix=(
                f"at most {filled - config.rollout.max_prompt_tokens}, or raise sglang.cache_tokens"
            ),
        )


def check_attached(config: Config) -> None:
    """Raises ConfigError if settings contradict the running servers in `sglang.urls`, or if the API
    key is missing although one of these servers is not on loopback."""
    elsewhere = [url for url in config.sglang.urls if not on_loopback(url)]
    if elsewhere and not os.environ.get(API_KEY_VARIABLE):
        raise ConfigError(
            f"{elsewhere[0]} is not on loopback, so it must ask for a key: who can reach it could"
            " replace its weights",
            where="sglang.urls",
            fix=f"start it with --api-key, and set {API_KEY_VARIABLE} to the same",
        )
    for name in LAUNCH_SETTINGS:
        if getattr(config.sglang, name) != SGLangConfig.model_fields[name].default:
            raise ConfigError(
                "this setting applies to servers that the run starts, but the run attaches to"
                " running ones (sglang.urls)",
                where=f"sglang.{name}",
                fix="leave it out, and start your servers with it",
            )
    if config.rollout.engines not in (1, len(config.sglang.urls)):
        raise ConfigError(
            f"{config.rollout.engines} engines are asked for, and {len(config.sglang.urls)} servers"
            " are named in sglang.urls",
            where="rollout.engines",
            fix="leave it out: the servers are the engines",
        )


def check_started(config: Config, shape: ModelShape, options: ServerOptions) -> None:
    """Raises ConfigError if servers with these settings could not start, could not receive weights,
    or would return altered samples or log-probs. Also raises ConfigError if the servers would store
    the weights in a form that cannot be compared with the trainer's weights."""
    _check_cuts(config, shape, options)
    _check_host(config.sglang)
    _check_nodes(config, options)
    if options.device == "cpu":
        for where, message, fix in _beyond_a_cpu(config, shape, options):
            raise ConfigError(message, where=where, fix=fix)
    if not Path(options.python).exists():
        raise ConfigError(
            f"there is no Python at {options.python}",
            where="sglang.python",
            fix="bash scripts/setup_sglang.sh builds SGLang's environment",
        )
    if (
        options.device == "cuda"
        and options.kv_cache_dtype
        and options.dtype != "bfloat16"
        and options.attention_backend is None
    ):
        raise ConfigError(
            f"servers in {options.dtype} with a cache of {options.kv_cache_dtype} do not start:"
            " FlashAttention, SGLang's choice on H100, answers in bfloat16",
            where="sglang.kv_cache_dtype",
            fix="set sglang.dtype=bfloat16, or name an attention backend",
        )
    flags = _by_name(options.flags)
    check_precision(flags, "sglang.flags")
    check_speculation(flags, options.device, "sglang.flags")
    _check_variables(options)
    _check_channels(config, options)
    if options.flags and (
        refused := refused_flag(options.python, options.own_arguments(0), options.flags)
    ):
        raise ConfigError(
            refused,
            where="sglang.flags",
            fix="python -m sglang.launch_server --help lists what it takes",
        )


def _check_channels(config: Config, options: ServerOptions) -> None:
    """Raises ConfigError if servers and trainer would use different numbers of channels in one NCCL
    group."""
    several = options.device == "cuda" and options.tensor > 1
    if several and options.seeds and config.sglang.sync == "distributed":
        raise ConfigError(
            "servers that honour seeds on several ranks set NCCL's number of channels"
            " (NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS), and the trainer does not: a group of both"
            " would fail or hang",
            where="sglang.seeds",
            fix="set it to false, or use sglang.tensor_parallel=1 or another sglang.sync",
        )


def _check_variables(options: ServerOptions) -> None:
    """Raises ConfigError if an environment variable would make the servers return altered samples
    or log-probs."""
    found = options.process_environment()
    for name, does in ALTERING.items():
        if found.get(name, "").lower() not in OFF:
            raise ConfigError(
                f"{name}={found[name]} is set for the servers: {does}",
                where="sglang.environment" if name in options.environment else name,
                fix="leave it out, or unset it",
            )


def _by_name(flags: Sequence[str]) -> dict[str, str]:
    """Parses command-line flags, and returns a dict from the name of each flag to the flag's value.
    A flag has the form --name=value, or --name followed by the value. A flag without a value gets
    the value ""."""
    found: dict[str, str] = {}
    name = ""
    for flag in flags:
        if flag.startswith("--"):
            name, _, value = flag[2:].partition("=")
            found[name] = value
        elif name:
            found[name] = flag
    return found


def _check_cuts(config: Config, shape: ModelShape, options: ServerOptions) -> None:
    tensor, expert, data = options.tensor, options.expert, options.data
    if tensor % data:
        raise ConfigError(
            f"{tensor} ranks of a server cannot be cut into {data} groups with requests of"
            " their own",
            where="sglang.attention_data_parallel",
            fix="use a divisor of sglang.tensor_parallel",
        )
    ServerLayout(options.device, tensor, expert, data).require_family(
        shape, "sglang.attention_data_parallel"
    )
    if data > 1 and config.moe.routing_replay:
        raise ConfigError(
            "the experts that a server names were never compared with the trainer's for servers"
            " whose groups of ranks have requests of their own (sglang.attention_data_parallel)",
            where="moe.routing_replay",
            fix="set it to false, or use tensor and expert parallelism alone",
        )
    attending = tensor // data  # ranks per group that attends to the same requests
    if shape.heads % attending:
        raise ConfigError(
            f"{shape.heads} attention heads cannot be cut over {attending} ranks of a server",
            where="sglang.tensor_parallel",
            fix="use a divisor",
        )
    # the ranks of an expert-parallel group together hold whole experts
    for width in (shape.feed_forward * expert, *shape.whole_widths):
        if width % tensor:
            raise ConfigError(
                f"{width} columns of its feed-forward layers cannot be cut over {tensor} ranks of a"
                " server",
                where="sglang.tensor_parallel",
                fix="use a divisor",
            )
    if shape.kv_heads % attending and attending % shape.kv_heads:
        raise ConfigError(
            f"{shape.kv_heads} key-value heads can be neither cut over nor shared by {attending}"
            " ranks of a server",
            where="sglang.tensor_parallel",
            fix="use a divisor or a multiple",
        )
    if tensor % expert or (expert > 1 and (not shape.experts or shape.experts % expert)):
        raise ConfigError(
            f"{shape.experts} experts cannot be held whole by {expert} groups of {tensor} ranks",
            where="sglang.expert_parallel",
            fix=(
                "use a divisor of sglang.tensor_parallel and of the model's experts, 1 for a dense"
                " model"
            ),
        )


def _check_host(asked: SGLangConfig) -> None:
    """Raises ConfigError if `sglang.host` is not an IPv4 address, or if a node of a multi-node
    server cannot listen on `sglang.host`."""
    if asked.host is None:
        return
    own = (
        "leave it out: each server then listens on its own node's address (runtime.interface, else"
        " Ray's)"
    )
    try:
        address = ipaddress.IPv4Address(asked.host)
    except ValueError:
        raise ConfigError(
            f"{asked.host!r} is no IPv4 address", where="sglang.host", fix=own
        ) from None
    if asked.nodes > 1 and asked.host != EVERYWHERE:
        what = "other nodes do not reach" if address.is_loopback else "one node alone can have"
        raise ConfigError(
            f"a server's ranks are on {asked.nodes} nodes, and {asked.host} is an address that"
            f" {what}",
            where="sglang.host",
            fix=own,
        )


def _check_nodes(config: Config, options: ServerOptions) -> None:
    """Raises ConfigError if a server's ranks cannot be divided evenly over the server's nodes. Also
    raises ConfigError if a GPU server has ranks on several nodes and `sglang.sync` is "tensor"."""
    asked = config.sglang
    if options.tensor % options.nodes:
        raise ConfigError(
            f"{options.tensor} ranks of a server cannot be dealt to {options.nodes} nodes in equal"
            " parts",
            where="sglang.nodes",
            fix="use a divisor of sglang.tensor_parallel",
        )

    if options.nodes > 1 and asked.sync == "tensor" and options.device == "cuda":
        raise ConfigError(
            "with the value tensor, the trainer sends handles of its GPU memory, which ranks on"
            f" another node cannot open, and every server is on {options.nodes} nodes",
            where="sglang.sync",
            fix="use disk" if asked.colocated else "use distributed or disk",
        )


def check_sync(config: Config) -> None:
    """Raises ConfigError if the method in `sglang.sync` cannot move weights from the trainer's
    ranks to GPU servers that the run starts."""
    asked = config.sglang
    if asked.urls or server_device(config) == "cpu":
        return
    if asked.sync == "tensor" and not asked.colocated:
        raise ConfigError(
            "with the value tensor, the trainer sends handles of its GPU memory. A server with its"
            " own GPUs does not see the trainer's GPUs, and cannot open the handles",
            where="sglang.sync",
            fix="use distributed or disk, or sglang.colocated=true",
        )
    if asked.sync == "distributed" and asked.colocated:
        raise ConfigError(
            "NCCL refuses groups in which two ranks have the same GPU. With sglang.colocated, each"
            " rank of a server shares its GPU with a rank of the trainer",
            where="sglang.sync",
            fix="use tensor or disk, or give the servers GPUs of their own: sglang.colocated=false",
        )


def _beyond_a_cpu(
    config: Config, shape: ModelShape, options: ServerOptions
) -> Iterator[tuple[str, str, str]]:
    """Yields the setting, the problem and the fix for every setting that a CPU server does not
    support."""
    set_here, leave = config.sglang, "leave it out, or sglang.device=cuda"
    if options.attention_backend not in (None, CPU_ATTENTION):
        message = (
            f"on a CPU SGLang has the attention backend {CPU_ATTENTION} alone, not"
            f" {options.attention_backend}"
        )
        yield "sglang.attention_backend", message, leave
    if set_here.memory_fraction is not None:
        yield (
            "sglang.memory_fraction",
            "it is a share of a GPU's memory, and servers run on the CPU",
            leave,
        )
    if set_here.cuda_graph_batch_sizes:
        yield "sglang.cuda_graph_batch_sizes", "a CPU has no CUDA graphs", leave
    if shape.latent:
        message = f"SGLang's attention for CPUs ({CPU_ATTENTION}) cannot compute latent attention"
        yield "model.path", message, "servers on GPUs, or rollout.engine=local"
    if options.expert > 1:
        message = (
            "on a CPU SGLang's layer of experts cannot take a token whose expert another rank holds"
        )
        yield "sglang.expert_parallel", message, "leave it out: experts are cut over the ranks then"
    if shape.kv_heads % (attending := options.tensor // options.data):
        message = (
            f"on a CPU SGLang pads {shape.kv_heads} key-value heads for {attending} ranks, so that"
            " weights "
        )
        yield (
            "sglang.tensor_parallel",
            message + "could not be compared",
            f"use a divisor of {shape.kv_heads}",
        )
    widths = CPU_WIDTHS * options.tensor
    if padded := [width for width in (shape.feed_forward, *shape.whole_widths) if width % widths]:
        message = (
            f"SGLang pads feed-forward layers {padded[0]} wide on a CPU, so their weights could"
            " not be "
        )
        fix = (
            f"a model whose feed-forward layers are a multiple of {widths} wide, or"
            " rollout.engine=local"
        )
        yield "model.path", message + "compared", fix
