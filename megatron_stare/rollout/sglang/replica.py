"""From a run's configuration to an SGLang engine: a server started or attached to, its client, and the weight sync."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, unknown_name
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.replicas import Replica
from megatron_stare.rollout.sglang.broadcast import BroadcastSync
from megatron_stare.rollout.sglang.client import SGLangClient
from megatron_stare.rollout.sglang.disk_sync import DiskSync
from megatron_stare.rollout.sglang.server import ServerOptions, ServerProcess
from megatron_stare.rollout.sglang.server_engine import NEVER_FILLED, SGLangEngine
from megatron_stare.rollout.sglang.server_layout import CPU_WIDTHS
from megatron_stare.rollout.sglang.sync import WeightSync
from megatron_stare.rollout.sglang.tensor_sync import TensorSync
from megatron_stare.shipped import CHECKOUT

ENVIRONMENT = CHECKOUT / ".venv-sglang" if CHECKOUT else None  # of scripts/setup_sglang.sh
PYTHON_VARIABLE = "MEGATRON_STARE_SGLANG_PYTHON"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
API_KEY_VARIABLE = "SGLANG_API_KEY"  # of servers that are attached to


class SGLangReplica(Replica):
    """One of a run's servers on its way up, or attached to; see Replica."""

    def __init__(self, config: Config, number: int) -> None:
        self._config = config
        self._process: ServerProcess | None = None
        if config.sglang.urls:
            url, key = config.sglang.urls[number], os.environ.get(API_KEY_VARIABLE)
        else:
            self._process = ServerProcess(server_options(config))
            url, key = self._process.url, self._process.api_key
        self._client = SGLangClient(url, key, config.runtime.timeout_s)

    def engine(self) -> SGLangEngine:
        """See Replica. Waits until the server answers; nothing is left behind where it does not, or cannot be used."""
        config, loop = self._config, asyncio.new_event_loop()
        with contextlib.ExitStack() as stack:
            stack.callback(loop.close)
            stack.callback(self.close)
            stack.callback(lambda: loop.run_until_complete(self._client.close()))
            if self._process is not None:
                self._process.wait_ready(self._client, loop.run_until_complete)
            engine = SGLangEngine(
                self._client,
                make_sync(config.sglang.sync, [self._client], config.model.path, config.runtime.timeout_s),
                config.model.path,
                config.model.dtype,
                config.rollout.max_batch,
                loop,
                self._process,
                server_flags(config),
            )
            stack.pop_all()  # the engine's from here on
            return engine

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    @classmethod
    def check(cls, config: Config, shape: ModelShape) -> None:
        check_servers(config, shape)

    @classmethod
    def count(cls, config: Config) -> int:
        return len(config.sglang.urls) or config.rollout.engines


def make_sync(method: str, clients: Sequence[SGLangClient], model_path: str, timeout_s: float) -> WeightSync:
    """The method that `sglang.sync` names."""
    made: dict[str, Callable[[], WeightSync]] = {
        "tensor": lambda: TensorSync(clients),
        "disk": lambda: DiskSync(clients, model_path),
        "distributed": lambda: BroadcastSync(clients, timeout_s),
    }
    if method not in made:
        raise unknown_name(method, made, "sglang.sync")
    return made[method]()


def check_servers(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError for what can be known to be wrong before a server is started."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    held = min([shape.max_positions] if config.sglang.urls else [shape.max_positions, config.sglang.cache_tokens])
    filled = held - NEVER_FILLED
    if config.rollout.max_prompt_tokens >= filled:
        raise ConfigError(
            f"prompts of {config.rollout.max_prompt_tokens} tokens leave no room for a response in the {filled} that a "
            f"server fills of its context of {held}",
            where="rollout.max_prompt_tokens",
            fix=f"at most {max(1, filled - 1)}, less the tokens of a response, or raise sglang.cache_tokens",
        )
    if longest > filled:
        raise ConfigError(
            f"prompt and response of up to {longest} tokens exceed the {filled} that a server fills of "
            f"its context of {held}",
            where="rollout.max_new_tokens",
            fix=f"at most {filled - config.rollout.max_prompt_tokens}, or raise sglang.cache_tokens",
        )
    elsewhere = [url for url in config.sglang.urls if urlsplit(url).hostname not in LOOPBACK_NAMES]
    if elsewhere and config.sglang.sync == "distributed":
        raise ConfigError(
            f"the broadcast reaches servers of this machine only, and {elsewhere[0]} is not named as one",
            where="sglang.sync",
            fix="use tensor, or disk with a file system that all servers see",
        )
    if config.sglang.urls:
        return
    if shape.feed_forward % CPU_WIDTHS:
        raise ConfigError(
            f"SGLang pads feed-forward layers {shape.feed_forward} wide on a CPU, so their weights could not be "
            "compared",
            where="model.path",
            fix=f"a model whose feed-forward layers are a multiple of {CPU_WIDTHS} wide, or rollout.engine=local",
        )
    if config.model.dtype != "float32":
        raise ConfigError(
            "servers started here run on the CPU, in float32", where="sglang.urls", fix="name running servers instead"
        )
    python = sglang_python(config)
    if not Path(python).exists():
        raise ConfigError(
            f"there is no Python at {python}",
            where="sglang.python",
            fix="bash scripts/setup_sglang.sh builds SGLang's environment",
        )


def server_flags(config: Config) -> dict[str, str]:
    """Flags without which a server cannot do what is asked of it, and the settings that ask."""
    wanted = {
        "enable_deterministic_inference": ("sglang.seeds", config.sglang.seeds),
        "enable_memory_saver": ("sglang.colocated", config.sglang.colocated),
    }
    return {flag: setting for flag, (setting, asked) in wanted.items() if asked}


def sglang_python(config: Config) -> str:
    """The Python of SGLang's environment: as set, of the environment variable, or of the checkout.

    Raises:
        ConfigError: none of them says it; a wheel knows of no checkout.
    """
    if python := config.sglang.python or os.environ.get(PYTHON_VARIABLE):
        return python
    if ENVIRONMENT is None:
        raise ConfigError(
            "where SGLang is installed is not known to a project that was installed from a wheel",
            where="sglang.python",
            fix=f"name the Python of SGLang's environment here or in {PYTHON_VARIABLE}; in a checkout, "
            "bash scripts/setup_sglang.sh builds one in .venv-sglang",
        )
    return str(ENVIRONMENT / "bin" / "python")


def server_options(config: Config) -> ServerOptions:
    """How the servers of this run are started."""
    return ServerOptions(
        python=sglang_python(config),
        model_path=config.model.path,
        dtype=config.model.dtype,
        threads=config.rollout.threads,
        max_running=config.rollout.max_batch,
        cache_tokens=config.sglang.cache_tokens,
        seeds=config.sglang.seeds,
        start_timeout_s=config.sglang.start_timeout_s,
    )
