"""Real SGLang servers for tests, and models whose responses are known beforehand."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.config.schema import Config
from megatron_stare.rollout.engines.replicas import Site
from megatron_stare.rollout.engines.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.replica import ENVIRONMENT, SGLangReplica
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "assets" / "tiny-adder"
PYTHON = os.environ.get("MEGATRON_STARE_SGLANG_PYTHON", str(ENVIRONMENT / "bin" / "python"))
START_S = 900  # a machine that runs other tests as well
MISSING = (
    None
    if Path(PYTHON).exists()
    else f"no SGLang at {PYTHON}; bash scripts/setup_sglang.sh installs it"
)


def config(
    model: Path = MODEL,
    engines: int = 1,
    request_s: float | None = None,
    *,
    routing_replay: bool = False,
    **sglang: object,
) -> Config:
    """Configuration of a run whose rollouts come from servers started here."""
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "rollout": {
                "engine": "sglang",
                "engines": engines,
                "max_prompt_tokens": 16,
                "max_new_tokens": 100,
            },
            "moe": {"routing_replay": routing_replay},
            "sglang": {"start_timeout_s": START_S, **sglang},
            "faults": {"requests": {"request_s": request_s}},
        }
    )


@contextmanager
def running(model: Path = MODEL, **settings: Any) -> Iterator[SGLangEngine]:
    """An engine over a server of its own, which ends with the block."""
    with several(1, model, **settings) as (engine,):
        yield engine


@contextmanager
def several(count: int, model: Path = MODEL, **settings: Any) -> Iterator[list[SGLangEngine]]:
    """Engines over servers of their own, which start together and end with the block."""
    asked = config(model, count, **settings)
    with ExitStack() as stack:
        replicas = []
        for number in range(count):
            parts = [
                SGLangReplica.part(asked, number, node) for node in range(1, asked.sglang.nodes)
            ]
            for part in parts:
                stack.callback(part.close)
            here = ("127.0.0.1",) * len(parts)
            site = Site(InlineWorkers(parts), here[0], here) if parts else Site()
            replicas.append(SGLangReplica(asked, number, site))
            stack.callback(replicas[-1].close)
        engines = []
        for replica in replicas:
            engines.append(replica.engine())
            stack.callback(engines[-1].close)
        yield engines


@contextmanager
def attached(
    *engines: SGLangEngine,
) -> Iterator[tuple[asyncio.AbstractEventLoop, list[SGLangClient]]]:
    """Clients of engines' servers beside their own, on a loop of their own. At the end the servers
    say again that they hold the versions that their engines gave them: whoever gave them others
    behind an engine's back made it think that its server was started anew."""
    loop = asyncio.new_event_loop()
    processes = [engine.process for engine in engines if engine.process is not None]
    clients = [SGLangClient(process.url, process.api_key, 120) for process in processes]
    try:
        yield loop, clients
        for engine, client in zip(engines, clients, strict=True):
            if (held := engine.model_info().weight_version) is not None:
                loop.run_until_complete(client.publish_version(str(held)))
    finally:
        loop.run_until_complete(everywhere(*(client.close() for client in clients)))
        loop.close()


def weights(model: Path = MODEL) -> dict[str, Tensor]:
    """A folder's tensors by Hugging Face name."""
    return {
        name: t
        for file in sorted(model.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


def buckets(tensors: dict[str, Tensor], count: int = 3) -> list[list[tuple[str, Tensor]]]:
    """The tensors as the trainer's stream gives them: views of flat tensors, in `count` buckets."""
    found, names = [], list(tensors)
    for chunk in (names[i::count] for i in range(count)):
        flat = torch.cat([tensors[name].reshape(-1) for name in chunk])
        pieces = flat.split([tensors[name].numel() for name in chunk])
        found.append(
            [
                (name, piece.view(tensors[name].shape))
                for name, piece in zip(chunk, pieces, strict=True)
            ]
        )
    return found


def sync(
    engine: SGLangEngine, version: int, tensors: dict[str, Tensor], count: int = 3
) -> dict[str, str]:
    """A whole weight update, in `count` buckets."""
    engine.begin_weight_update(version)
    for bucket in buckets(tensors, count):
        engine.update_weights(bucket)
    return engine.end_weight_update()


def says_only(token: int) -> dict[str, Tensor]:
    """Weights of tiny-adder's shape that give `token` probability 1 everywhere, and answer nothing
    else."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    tensors["model.embed_tokens.weight"].fill_(1.0)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
    tensors["lm_head.weight"][token] = 10.0
    return tensors


def copy_model(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """tiny-adder's folder with other weights."""
    shutil.copytree(MODEL, folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder
