"""How servers are started on GPUs and CPUs, and what is refused before one is."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from support import sglang_servers as servers
from support.runs import ROOT

from megatron_stare.config.fault_sections import FaultsConfig
from megatron_stare.config.process_settings import check_ports
from megatron_stare.config.schema import Config, MoeConfig, RuntimeConfig, SGLangConfig
from megatron_stare.errors import ConfigError
from megatron_stare.models import family_of, read_shape
from megatron_stare.models.shape import Latent
from megatron_stare.rollout.engines.sglang import server
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.cpu_platform import ATTENTION, copied_rows
from megatron_stare.rollout.engines.sglang.flag_check import refused_flag
from megatron_stare.rollout.engines.sglang.protocol import (
    SGLangError,
    check_precision,
    check_speculation,
)
from megatron_stare.rollout.engines.sglang.replica import (
    SGLangReplica,
    check_servers,
    served_dtype,
    server_flags,
    server_memory,
    server_options,
    servers_target,
)
from megatron_stare.rollout.engines.sglang.serve import remove_shared_memory
from megatron_stare.rollout.engines.sglang.server import ServerProcess
from megatron_stare.rollout.engines.sglang.server_checks import LAUNCH_SETTINGS
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.server_options import CPU_ATTENTION, share_of_ports
from megatron_stare.weights.files.check import expected

SHAPE = read_shape(servers.MODEL)
MOE = replace(SHAPE, family="qwen3_moe", experts=8, experts_per_token=2, expert_ffn=64, kv_heads=4)
ON_GPUS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "tensor_parallel": 4,
    "expert_parallel": 2,
    "memory_fraction": 0.7,
    "context_length": 120,
    "attention_backend": "fa3",
    "cuda_graph_batch_sizes": [1, 8, 64],
    "environment": {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "3"},
    "host": "10.0.0.7",
    "python": sys.executable,
}


def config(**sglang):
    return Config.model_validate(
        {
            "model": {"path": str(servers.MODEL)},
            "rollout": {
                "engine": "sglang",
                "max_prompt_tokens": 16,
                "max_new_tokens": 100,
                "max_batch": 64,
            },
            "sglang": {"python": sys.executable, **sglang},
        }
    )


def test_of_a_long_log_only_the_end_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "LOG_BYTES", 20)
    process = server.ServerProcess.__new__(server.ServerProcess)
    process._log = tmp_path / "server.log"
    assert process._said() == ""
    for text, said in (("short\n", "short\n"), ("x" * 90 + "\nlast words\n", "last words\n")):
        process._log.write_text(text)
        assert process._said() == said


def test_a_closed_server_holds_no_memory(tmp_path, monkeypatch):
    """A killed rank frees its GPU only as it ends, and what closes the server needs that memory.
    Here the kill comes late, as the end of a process with tens of GB does."""
    kill, rank = os.killpg, tmp_path / "rank"
    monkeypatch.setattr(os, "killpg", lambda *what: threading.Timer(0.5, kill, what).start())
    process = server.ServerProcess.__new__(server.ServerProcess)
    script = f"sleep 600 & echo $! >{rank}.new; mv {rank}.new {rank}; cat"  # ends with its input
    process._process = subprocess.Popen(["sh", "-c", script], stdin=-1, start_new_session=True)
    process._log, process._scratch = tmp_path / "server.log", tmp_path / "scratch"
    process.url, process.api_key = "http://127.0.0.1:1", "key"
    while not rank.exists():
        assert process._process.poll() is None
    process.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(rank.read_text())).status() == psutil.STATUS_ZOMBIE


def test_the_command_line_of_a_server_on_gpus():
    asked = config(
        **ON_GPUS,
        seeds=True,
        colocated=True,
        cache_tokens=9000,
        flags=["--chunked-prefill-size=4096"],
    )
    assert server_options(asked).arguments(30_001) == [
        *("--model-path", str(servers.MODEL)),
        *("--host", "10.0.0.7"),
        *("--port", "30001"),
        *("--dtype", "bfloat16"),
        *("--device", "cuda"),
        *("--tp-size", "4"),
        *("--ep-size", "2"),
        *("--attention-backend", "fa3"),
        *("--moe-runner-backend", "triton"),
        *("--mem-fraction-static", "0.7"),
        *("--context-length", "120"),
        *("--max-total-tokens", "9000"),
        *("--max-running-requests", "64"),
        *("--weight-version", "none"),
        *("--log-level-http", "warning"),
        *("--load-format", "dummy"),
        *("--cuda-graph-bs-decode", "1", "8", "64"),
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--disable-shared-experts-fusion",
        "--sleep-on-idle",
        "--enable-deterministic-inference",
        "--enable-memory-saver",
        "--chunked-prefill-size=4096",
    ]
    assert server_flags(asked).keys() == {"enable_deterministic_inference", "enable_memory_saver"}
    assert served_dtype(asked) == "bfloat16"


def test_experts_are_stored_as_they_are_sent():
    """On compute capability 10 SGLang 0.5.23 would choose a runner that repacks them."""
    words = server_options(config(device="cuda")).arguments(1)
    assert words[words.index("--moe-runner-backend") + 1] == "triton"
    assert "--moe-runner-backend" not in server_options(config(device="cpu")).arguments(1)


def test_a_server_whose_experts_are_replayed_names_them():
    asked = config(device="cuda")
    assert "--enable-return-routed-experts" not in server_options(asked).arguments(1)
    assert "enable_return_routed_experts" not in server_flags(asked)
    asked = asked.model_copy(update={"moe": MoeConfig(routing_replay=True)})
    assert "--enable-return-routed-experts" in server_options(asked).arguments(1)
    assert server_flags(asked)["enable_return_routed_experts"] == "moe.routing_replay"


def test_a_server_whose_groups_of_ranks_have_requests_of_their_own():
    """--dp-size and --enable-dp-attention are the spelling that all supported releases take."""
    asked = config(device="cuda", tensor_parallel=4, attention_data_parallel=2)
    words = server_options(asked).arguments(1)
    assert words[words.index("--dp-size") + 1] == "2" and "--enable-dp-attention" in words
    plain = server_options(config(device="cuda", tensor_parallel=4)).arguments(1)
    assert "--dp-size" not in plain and "--enable-dp-attention" not in plain
    qwen3 = replace(SHAPE, family="qwen3", heads=8, kv_heads=2)
    check_servers(asked, qwen3)
    check_servers(
        config(device="cpu", tensor_parallel=4, attention_data_parallel=2), replace(qwen3, ffn=512)
    )
    for groups, shape, message in (
        (3, qwen3, "4 ranks of a server cannot be cut into 3 groups"),
        (2, SHAPE, "cuts the attention of qwen2 over all ranks of a server"),
        (2, replace(qwen3, heads=7), "7 attention heads cannot be cut over 2 ranks"),
        (1, replace(qwen3, heads=6), "6 attention heads cannot be cut over 4 ranks"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_servers(
                config(device="cuda", tensor_parallel=4, attention_data_parallel=groups), shape
            )
    check_servers(
        config(device="cuda", tensor_parallel=4, attention_data_parallel=2), replace(qwen3, heads=6)
    )
    replayed = asked.model_copy(update={"moe": MoeConfig(routing_replay=True)})
    with pytest.raises(ConfigError, match="never compared with the trainer's"):
        check_servers(replayed, MOE)


def test_what_groups_with_requests_of_their_own_keep_on_a_gpu():
    """A GPU keeps a group's share of attention and embedding, a server's share of the rest, and
    whole norms. Embedding and head have 64 rows, of which 16 are words. Each group caches its own
    requests, of which a rank has more heads."""
    shape = replace(
        SHAPE, family="qwen3", qk_norm=True, qkv_bias=False, heads=8, kv_heads=4, head_dim=12
    )
    # of three layers
    attention = 3 * (2 * 8 + 2 * 4) * 12 * 96 + 64 * 96
    rest = 3 * 3 * 256 * 96 + 64 * 96
    norms = 3 * (2 * 12 + 2 * 96) + 96
    for groups, sharing in ((1, 4), (2, 2), (4, 1)):
        asked = config(
            device="cuda", tensor_parallel=4, attention_data_parallel=groups, cache_tokens=1000
        )
        kept = server_memory(asked, shape, 10**9)
        token = 2 * 3 * max(4 // sharing, 1) * 12 * 4
        assert kept.cache == 1000 * token
        assert kept.weights == (attention // sharing + rest // 4 + norms) * 4


def test_what_every_rank_of_a_server_keeps_whole():
    """DeepSeek's projections into the latents, routers and norms; of two key heads, a rank of four
    keeps one. Experts are counted as one by one."""
    shape = read_shape(ROOT / "assets/architectures/deepseek-v3")
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        name = f"model.layers.0.self_attn.{name}.weight"
        sizes = family_of(shape).size(name, shape)
        assert ServerLayout("cuda", 16).elements(name, sizes, shape) == math.prod(sizes)
    few = replace(MOE, kv_heads=2, layers=1)
    for layout in (ServerLayout("cuda", 4), ServerLayout("cuda", 4, 2), ServerLayout("cuda", 4, 4)):
        for name, sizes in expected(few).items():
            parts = layout.parts(name, torch.zeros(sizes), few, 0)
            assert layout.elements(name, sizes, few) == sum(map(torch.numel, parts)), name
    name = "model.layers.0.self_attn.k_proj.weight"
    assert layout.elements(name, expected(few)[name], few) * 2 == math.prod(expected(few)[name])


def test_what_is_not_set_on_gpus_is_sglangs_choice():
    words = server_options(config(device="cuda", cache_tokens=None)).arguments(1)
    for name in (
        "attention-backend",
        "mem-fraction-static",
        "context-length",
        "max-total-tokens",
        "sampling-backend",
    ):
        assert f"--{name}" not in words
    for name in ("--sleep-on-idle", "--enable-memory-saver", "--cuda-graph-bs-decode", "--ep-size"):
        assert name not in words
    assert words[words.index("--dtype") + 1] == "float32"  # the model's


def test_an_idle_server_beside_a_trainer_leaves_it_the_cores():
    for device in ("cpu", "cuda"):
        words = server_options(config(device=device, colocated=True)).arguments(1)
        assert "--sleep-on-idle" in words


def test_no_two_servers_of_a_run_draw_from_the_same_ports():
    """Nor from the ports that SGLang draws for ranks, by its utils/network.py."""
    asked = servers.config(engines=3, nodes=2, tensor_parallel=2, device="cuda")
    drawn = [
        set(server_options(asked, number, node).ports) for number in range(3) for node in (0, 1)
    ]
    assert len(drawn) == 6 and sum(map(len, drawn)) == len(set().union(*drawn)) == 4000
    assert not set().union(*drawn) & set(range(22_000, 30_000))
    assert max(set().union(*drawn)) < 32_768
    for number in (0, 4999):  # one for HTTP and one for the ranks
        assert len(share_of_ports(number, 5000, 2)) == 2


@pytest.mark.parametrize("ports", [[], [29_000, 30_039]])  # of the range, 65 shares of 16
@pytest.mark.parametrize("engines", [3, 64])
def test_ports_that_sglang_derives_are_no_other_servers(ports, engines):
    """With groups of ranks that have requests of their own, at fixed distances of the meeting port;
    by PortArgs.init_new and data_parallel_controller.py of SGLang 0.5.23."""
    asked = servers.config(engines=engines, tensor_parallel=2, attention_data_parallel=2)
    asked = asked.model_copy(update={"runtime": RuntimeConfig(ports=ports)})
    check_ports(asked, engines)
    taken: set[int] = set()
    for number in range(engines):
        options = server_options(asked, number)
        http, met = set(options.http_ports), set(options.meeting_ports)
        ranks = {port + further for port in met for further in (0, 1, 2, 3, 4, 5, 6, 13)}
        assert http and met and not http & ranks
        assert not taken & (http | ranks)
        taken |= http | ranks


def test_a_server_with_groups_of_ranks_is_told_where_they_meet(monkeypatch):
    """Else SGLang derives their ports from the one for HTTP, beyond the server's share."""
    told: list[list[str]] = []
    monkeypatch.setattr(server.subprocess, "Popen", lambda words, **_: told.append(words))
    options = server_options(config(device="cpu", tensor_parallel=2, attention_data_parallel=2))
    process = ServerProcess(options)
    shutil.rmtree(process._scratch)
    (words,) = told
    host, _, port = words[words.index("--dist-init-addr") + 1].partition(":")
    assert host == "127.0.0.1" and int(port) in options.meeting_ports
    assert int(words[words.index("--port") + 1]) in options.http_ports
    assert "--nccl-port" not in words


def test_a_syncs_broadcast_has_the_limit_of_collectives_and_its_calls_that_of_calls():
    asked = config(sync="distributed")
    asked = asked.model_copy(
        update={"faults": FaultsConfig(requests={"collective_s": 77.0})}  # beside runtime.timeout_s
    )
    target = servers_target(asked)
    assert (target.collective_s, target.timeout_s) == (77.0, asked.runtime.timeout_s)


def test_seeds_and_a_group_of_trainer_and_servers_of_several_ranks_are_refused():
    """SGLang 0.5.23 sets NCCL's channels with seeds alone (attention_hook.py:696)."""
    refused = {"device": "cuda", "seeds": True, "tensor_parallel": 2, "sync": "distributed"}
    with pytest.raises(ConfigError, match="NCCL's number of channels"):
        check_servers(config(**refused), SHAPE)
    for other in ({"seeds": False}, {"tensor_parallel": 1}, {"sync": "disk"}, {"device": "cpu"}):
        check_servers(config(**{**refused, **other}), SHAPE)


def test_a_server_on_the_cpu_is_told_what_it_needs():
    words = server_options(
        config(device="cpu", tensor_parallel=2, colocated=True, cache_tokens=None)
    ).arguments(1)
    for name, value in (
        ("attention-backend", ATTENTION),
        ("sampling-backend", "pytorch"),
        ("mem-fraction-static", "0.1"),
        ("max-total-tokens", "20000"),
        ("tp-size", "2"),
    ):
        assert words[words.index(f"--{name}") + 1] == value
    assert "--sleep-on-idle" in words and "--enable-memory-saver" not in words
    assert CPU_ATTENTION == ATTENTION


def test_the_environment_is_passed_through_and_a_run_has_the_last_word(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/trainer")
    monkeypatch.setenv("FROM_THE_USER", "kept")
    found = server_options(config(**ON_GPUS)).process_environment()
    assert found["NCCL_DEBUG"] == "WARN" and found["FROM_THE_USER"] == "kept"
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("3", "1")
    assert "PYTHONPATH" not in found and "SGLANG_CPU_OMP_THREADS_BIND" not in found


def test_a_server_finds_the_tools_of_its_own_environment(tmp_path, monkeypatch):
    """SGLang starts `ninja` by its name, and its Python is a link to another folder's."""
    own, others = (tmp_path / name / "bin" for name in ("servers", "trainer"))
    for folder in (own, others):
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
        (folder / "ninja").write_text("#!/bin/sh\n")
        (folder / "ninja").chmod(0o755)
    monkeypatch.setenv("PATH", str(others), prepend=os.pathsep)
    for python in (own / "python", others / "python"):
        options = server_options(config(python=str(python)))
        path = options.process_environment()["PATH"]
        assert shutil.which("ninja", path=path) == str(python.parent / "ninja")
        assert path.endswith(os.environ["PATH"])
    named = server_options(config(python="python")).process_environment()
    assert shutil.which("ninja", path=named["PATH"]) == str(others / "ninja")
    set_so = server_options(config(environment={"PATH": "/a"})).process_environment()
    assert set_so["PATH"] == "/a"


def test_ranks_on_a_cpu_are_bound_to_cores_that_there_are():
    found = server_options(config(device="cpu", tensor_parallel=2)).process_environment()
    cores = found["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(cores) == 2 and {int(core) for core in cores} <= os.sched_getaffinity(0)
    assert (
        "SGLANG_CPU_OMP_THREADS_BIND"
        not in server_options(config(device="cpu")).process_environment()
    )


@pytest.mark.parametrize(
    ("asked", "where", "message"),
    [
        ({"attention_backend": "fa3"}, "sglang.attention_backend", "torch_native alone, not fa3"),
        ({"memory_fraction": 0.5}, "sglang.memory_fraction", "share of a GPU's memory"),
        ({"cuda_graph_batch_sizes": [1]}, "sglang.cuda_graph_batch_sizes", "no CUDA graphs"),
        ({"tensor_parallel": 4}, "sglang.tensor_parallel", "pads 2 key-value heads for 4 ranks"),
        (
            {"tensor_parallel": 3},
            "sglang.tensor_parallel",
            "4 attention heads cannot be cut over 3 ranks",
        ),
        (
            {"tensor_parallel": 2, "expert_parallel": 2},
            "sglang.expert_parallel",
            "0 experts cannot be held whole",
        ),
        ({"context_length": 110}, "rollout.max_new_tokens", "a server fills 108 tokens"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_by_name(asked, where, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_servers(config(device="cpu", **asked), SHAPE)
    assert error.value.where == where
    check_servers(config(device="cpu", tensor_parallel=2, kv_cache_dtype="fp8_e4m3"), SHAPE)


def test_rows_are_copied_between_the_tokens_of_a_group_and_those_of_all():
    """Copies are those of SGLang's memcpy_triton_kernel: the offset is of the source or of where it
    goes."""
    own, offset, rows = torch.arange(8.0).view(4, 2) + 1, torch.tensor(2), torch.tensor(3)
    copied_rows(everyone := torch.zeros(6, 2), own, 0, offset, rows, False)
    assert torch.equal(everyone, torch.cat([torch.zeros(2, 2), own[:3], torch.zeros(1, 2)]))
    copied_rows(back := torch.zeros(4, 2), everyone, 0, offset, rows, True)
    assert torch.equal(back, torch.cat([own[:3], torch.zeros(1, 2)]))
    copied_rows(short := torch.zeros(2, 2), own, 0, torch.tensor(0), rows, True)
    assert torch.equal(short, own[:2])


def test_latent_attention_is_for_gpus_and_for_sixteen_bits() -> None:
    latent = replace(SHAPE, family="deepseek_v3", kv_heads=4, latent=Latent(16, 16, 16, 8, 16))
    with pytest.raises(
        ConfigError, match=r"attention for CPUs \(torch_native\) cannot compute latent"
    ) as error:
        check_servers(config(device="cpu"), latent)
    assert error.value.where == "model.path"
    check_servers(config(device="cuda"), latent)
    with pytest.raises(ConfigError, match="in 8 bits, the cache of latent attention") as error:
        check_servers(config(device="cuda", kv_cache_dtype="fp8_e4m3"), latent)
    assert error.value.where == "sglang.kv_cache_dtype"
    attached = config(python=None, urls=["http://localhost:1"], kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="in 8 bits, the cache of latent attention"):
        check_servers(attached, latent)
    check_servers(attached, SHAPE)


def test_experts_of_a_rank_alone_are_for_gpus():
    """By fused_moe_native.py of 0.5.23, which counts tokens by their expert's number and is told -1
    of others'; seen on a server, which died of the first request."""
    moe = {"tensor_parallel": 2, "expert_parallel": 2}
    check_servers(config(device="cuda", **moe), MOE)
    with pytest.raises(ConfigError, match="whose expert another rank holds") as error:
        check_servers(config(device="cpu", **moe), MOE)
    assert error.value.where == "sglang.expert_parallel"
    check_servers(config(device="cpu", tensor_parallel=2), MOE)


def test_feed_forward_layers_that_a_cpu_would_pad_are_refused():
    """256 columns are 8 times 32, 96 are 3 times."""
    check_servers(config(device="cpu"), replace(SHAPE, ffn=96))
    with pytest.raises(ConfigError, match="a multiple of 64 wide"):
        check_servers(config(device="cpu", tensor_parallel=2), replace(SHAPE, ffn=96))


def test_gpus_can_do_what_a_cpu_cannot():
    check_servers(config(**ON_GPUS), MOE)
    # two ranks share a key-value head
    check_servers(config(device="cuda", tensor_parallel=4), SHAPE)
    with pytest.raises(ConfigError, match="8 experts cannot be held whole by 4 groups of 6 ranks"):
        check_servers(
            config(device="cuda", tensor_parallel=6, expert_parallel=4),
            replace(MOE, heads=6, kv_heads=6, expert_ffn=60),
        )
    with pytest.raises(
        ConfigError, match="3 key-value heads can be neither cut over nor shared by 2 ranks"
    ):
        check_servers(config(device="cuda", tensor_parallel=2), replace(SHAPE, kv_heads=3))


def test_a_server_that_other_machines_reach_must_have_a_key(monkeypatch):
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    with pytest.raises(
        ConfigError, match=r"http://node7:30000 is not on loopback, so it must ask for a key"
    ):
        check_servers(config(python=None, urls=["http://localhost:1", "http://node7:30000"]), SHAPE)
    check_servers(config(python=None, urls=["http://localhost:1"]), SHAPE)
    monkeypatch.setenv("SGLANG_API_KEY", "key")
    check_servers(config(python=None, urls=["http://node7:30000"]), SHAPE)


def test_what_the_ranks_of_one_server_share_is_removed_and_no_others():
    """Processes that are killed leave it in /dev/shm; another server's ranks are at work with
    theirs."""
    with ExitStack() as stack:
        ours, others = (
            subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
            )
            for _ in range(2)
        )
        for process in (ours, others):
            stack.callback(process.communicate, b"\n")
        files = [
            Path(f"/dev/shm/sgl_shm_mq_{pid}_test") for pid in (ours.pid, others.pid, 2**22 + 1)
        ]
        for file in files:
            file.touch()
            stack.callback(file.unlink, missing_ok=True)
        remove_shared_memory(os.getpgid(ours.pid))
        assert [file.exists() for file in files] == [False, True, True]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
def test_two_servers_of_two_ranks_listen_in_their_shares_of_the_range():
    """Started together: HTTP at one port of a share, the ranks' meeting place at another."""
    asked = servers.config(engines=2, tensor_parallel=2, python=servers.PYTHON, device="cpu")
    asked = asked.model_copy(update={"runtime": RuntimeConfig(ports=[29_000, 29_011])})
    with ExitStack() as stack:
        replicas = [SGLangReplica(asked, number) for number in range(2)]
        for replica in replicas:
            stack.callback(replica.close)
        for replica in replicas:
            stack.callback(replica.engine().close)
        for number, replica in enumerate(replicas):
            share = asked.runtime.port_share(number + 1, 3)
            assert share == range(29_004 + 4 * number, 29_008 + 4 * number)
            root = psutil.Process(replica._process.process_group)
            listening = {
                connection.laddr.port
                for process in (root, *root.children(recursive=True))
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            http, meeting = listening & set(share[:2]), listening & set(share[2:])
            assert [f"http://127.0.0.1:{port}" for port in http] == [replica._process.url]
            assert len(meeting) == 1
            assert not listening & (set(range(29_000, 29_012)) - set(share))


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
def test_further_flags_are_those_of_the_release():
    """By SGLang's own parser; a second name of a flag that the run sets is found, too."""
    own = server_options(config(device="cpu")).own_arguments(0)

    def refused(*flags):
        return refused_flag(servers.PYTHON, own, flags)

    assert refused("--chunked-prefill-size=4096", "--schedule-policy", "fcfs") is None
    assert "--no-such-flag" in refused("--no-such-flag")
    assert "invalid choice: 'best'" in refused("--grammar-backend", "best")
    assert (
        refused("--tensor-parallel-size", "4")
        == "they change tp_size, which this project sets itself"
    )
    assert refused("--api-key=mine") == "they change api_key, which this project sets itself"
    assert (
        refused("--pp-size", "2", "--dtype=half")
        == "they change dtype, pp_size, which this project sets itself"
    )
    own = server_options(config(device="cuda")).own_arguments(0)
    assert (
        refused("--moe-runner-backend=flashinfer_cutlass")
        == "they change moe_runner_backend, which this project sets itself"
    )


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"tensor_parallel": 2}, "sglang.tensor_parallel"),
        ({"device": "cpu"}, "sglang.device"),
        ({"flags": ["--x"]}, "sglang.flags"),
        ({"environment": {"A": "b"}}, "sglang.environment"),
        ({"cache_tokens": 500}, "sglang.cache_tokens"),
        ({"start_timeout_s": 5.0}, "sglang.start_timeout_s"),
    ],
)
def test_how_servers_start_is_no_setting_of_those_that_run(asked, where):
    """They were passed over without a word."""
    with pytest.raises(ConfigError, match="attaches to running ones") as error:
        check_servers(config(python=None, urls=["http://localhost:1"], **asked), SHAPE)
    assert error.value.where == where
    check_servers(
        config(python=None, urls=["http://localhost:1"], dtype="bfloat16", seeds=True), SHAPE
    )


def test_every_setting_of_a_servers_start_is_among_those():
    """All that the command line and its environment are made of."""
    others = {
        "urls",
        "router",
        "dtype",
        "kv_cache_dtype",
        "quantization",
        "sync",
        "sync_folder",
        "colocated",
        "seeds",
        "agreement_limit",
        "canary_prompts",
    }
    assert (
        set(LAUNCH_SETTINGS) | others == set(SGLangConfig.model_fields)
        and not set(LAUNCH_SETTINGS) & others
    )


def test_engines_beside_named_servers_are_those_servers():
    asked = config(python=None, urls=["http://localhost:1", "http://localhost:2"])
    for engines in (1, 2):
        check_servers(
            asked.model_copy(
                update={"rollout": asked.rollout.model_copy(update={"engines": engines})}
            ),
            SHAPE,
        )
    wrong = asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"engines": 3})})
    with pytest.raises(ConfigError, match=r"3 engines are asked for, and 2 servers are named"):
        check_servers(wrong, SHAPE)


def test_a_router_needs_servers_that_are_named():
    with pytest.raises(ConfigError, match="have keys of their own, which no router knows"):
        check_servers(config(device="cpu", router="http://localhost:2"), SHAPE)
    check_servers(
        config(python=None, urls=["http://localhost:1"], router="http://localhost:2"), SHAPE
    )


def test_a_cache_is_as_large_as_the_device_wants():
    def tokens(**asked):
        return server_options(config(**asked)).cache_tokens

    assert (tokens(device="cpu"), tokens(device="cuda")) == (20_000, None)
    assert tokens(device="cpu", cache_tokens=70) == tokens(device="cuda", cache_tokens=70) == 70


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("fp8", "set sglang.quantization=fp8, without the flag"),
        ("w8a8_int8", "the only quantization that is supported is fp8"),
    ],
)
def test_weights_in_eight_bits_are_a_setting_and_no_flag(value, fix):
    for given in ([f"--quantization={value}"], ["--quantization", value]):
        with pytest.raises(ConfigError, match=rf"quantized by {value}, and sglang\.quant") as error:
            check_servers(config(device="cuda", flags=["--page-size=16", *given]), SHAPE)
        assert error.value.where == "sglang.flags" and fix in str(error.value)
    check_precision(
        {"quantization": None, "kv_cache_dtype": "auto", "page_size": 16}, "http://localhost:1"
    )


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--kv-cache-dtype=fp8_e4m3", "set sglang.kv_cache_dtype=fp8_e4m3, without the flag"),
        ("--kv_cache_dtype=fp8_e5m2", "the only 8-bit cache that is supported is fp8_e4m3"),
    ],
)
def test_a_cache_of_eight_bits_is_a_setting_and_no_flag(flag, fix):
    """The setting determines the limits of agreement."""
    for given in ([flag], flag.split("=")):
        with pytest.raises(ConfigError, match=re.escape("sglang.kv_cache_dtype is null")) as error:
            check_servers(config(device="cuda", flags=["--page-size=16", *given]), SHAPE)
        assert error.value.where == "sglang.flags"
        assert fix in str(error.value)
    check_precision({"kv-cache-dtype": "bfloat16"}, "sglang.flags")


def test_a_running_server_has_the_cache_that_the_run_expects():
    url = "http://localhost:1"
    for held, asked, fix in (
        ("fp8_e4m3", None, "set sglang.kv_cache_dtype=fp8_e4m3"),
        ("auto", "fp8_e4m3", "start it with --kv-cache-dtype=fp8_e4m3"),
        ("mxfp8", "fp8_e4m3", "the only 8-bit cache"),
    ):
        with pytest.raises(ConfigError, match=f"limits of agreement.*\n.*{fix}") as error:
            check_precision({"kv_cache_dtype": held}, url, asked)
        assert error.value.where == url
    check_precision({"kv_cache_dtype": "fp8_e4m3"}, url, "fp8_e4m3")


def test_eight_bits_of_cache_hold_twice_as_many_tokens():
    options = server_options(config(**ON_GPUS, kv_cache_dtype="fp8_e4m3"))
    words = options.arguments(30_001)
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8_e4m3"
    assert "--kv-cache-dtype" not in server_options(config(**ON_GPUS)).arguments(30_001)
    whole = server_memory(config(**ON_GPUS), SHAPE, 10**9)
    half = server_memory(config(**ON_GPUS, kv_cache_dtype="fp8_e4m3"), SHAPE, 10**9)
    assert (half.token, half.cache, half.weights) == (whole.token / 2, whole.cache, whole.weights)
    wide = {**ON_GPUS, "dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}
    assert server_memory(config(**wide), SHAPE, 10**9).token == half.token


def test_flash_attention_over_eight_bits_answers_in_bfloat16():
    """Its hopper/flash_api.cpp does so for FP8 queries, to which SGLang 0.5.23 rounds."""
    half = {"device": "cuda", "dtype": "float16", "kv_cache_dtype": "fp8_e4m3"}
    with pytest.raises(ConfigError, match="servers in float16 with a cache of fp8_e4m3") as error:
        check_servers(config(**half, python=sys.executable), SHAPE)
    assert error.value.where == "sglang.kv_cache_dtype"
    for allowed in ({"attention_backend": "triton"}, {"dtype": "bfloat16"}, {"device": "cpu"}):
        check_servers(config(**{**half, **allowed}, python=sys.executable), SHAPE)


NGRAM = "--speculative-algorithm=NGRAM"


@pytest.mark.parametrize(
    ("device", "flags", "words"),
    [
        ("cuda", ["--speculative-algorithm", "EAGLE3"], "by EAGLE3 is refused: its draft model"),
        ("cpu", [NGRAM], "on cpu is refused: SGLang takes the likeliest token there"),
        (
            "cuda",
            [NGRAM, "--speculative-accept-threshold-single", "0.9"],
            "speculative-accept-threshold-single 0.9 is refused",
        ),
        (
            "cuda",
            [NGRAM, "--speculative-accept-threshold-acc=0.5"],
            "speculative-accept-threshold-acc 0.5 is refused",
        ),
        (
            "cuda",
            [NGRAM, "--speculative-accept-threshold-acc=half"],
            "speculative-accept-threshold-acc half is refused",
        ),
    ],
)
def test_drafts_must_not_change_what_is_sampled(device, flags, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_servers(config(device=device, flags=flags), SHAPE)


def test_a_running_server_that_accepts_every_draft_is_refused():
    found = {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_single": 0.0}
    with pytest.raises(ConfigError, match=r"threshold-single 0\.0 is refused"):
        check_speculation(found, "cuda", "http://localhost:1")


def test_drafts_that_are_verified_exactly_pass():
    for thresholds in ({}, {"speculative_accept_threshold_single": 1.0}):
        check_speculation({"speculative_algorithm": "NGRAM", **thresholds}, "cuda", "here")
    # what a server without speculation reports
    check_speculation(
        {"speculative_algorithm": None, "speculative_accept_threshold_acc": 0.5}, "cpu", "here"
    )


@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [("SGLANG_SIMULATE_ACC_LEN", "2.5"), ("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")],
)
def test_variables_that_change_samples_are_refused(monkeypatch, name, value, inherited):
    def given(value):
        if inherited:
            monkeypatch.setenv(name, value)
            return config(device="cpu")
        return config(device="cpu", environment={name: value})

    with pytest.raises(ConfigError, match=f"{name}={value} is set for the servers"):
        check_servers(given(value), SHAPE)
    check_servers(given("0"), SHAPE)


def test_a_cpu_computes_in_bfloat16_too():
    check_servers(config(device="cpu", dtype="bfloat16"), SHAPE)


def test_a_port_whose_new_owner_never_answers_does_not_hide_the_servers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody listens on the server's port by the time it binds: it ends, and who asks there is
    kept waiting."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'Address already in use' >&2\nread go\nseq 3000\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr("megatron_stare.rollout.engines.sglang.server.PROBE_S", 0.2)
    process = ServerProcess(server_options(servers.config(python=str(script), device="cpu"), 0))
    loop = asyncio.new_event_loop()
    try:
        assert process._process.stdin is not None
        with socket.create_server(("127.0.0.1", urlsplit(process.url).port or 0)):
            client = SGLangClient(process.url, process.api_key, 60)
            asked: list[bool] = []

            def run(ask: Any) -> Any:
                if asked:  # it has been asked once in vain: the server ends
                    process._process.stdin.write(b"go\n")
                    process._process.stdin.flush()
                    process._process.wait()
                asked.append(True)
                return loop.run_until_complete(ask())

            with pytest.raises(
                SGLangError,
                match=r"ended with 1 \(address already in use: another process took its port\)",
            ):
                process.wait_ready(client, run)
            loop.run_until_complete(client.close())
        assert len(asked) == 2
    finally:
        process.close()
        loop.close()
