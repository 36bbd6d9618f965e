"""Weights that servers store in 8 bits: rounding, what is sent and hashed, what is refused; and
real servers, whose kernel alone is stood in for."""

from __future__ import annotations

import asyncio
import json
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import sglang_servers as servers
from support.sglang_fake import FakeServer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_stare.errors import ConfigError
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.phase_times import _read_bytes
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang import fp8_weights, target
from megatron_stare.rollout.engines.sglang import sync as sync_module
from megatron_stare.rollout.engines.sglang.disk_sync import DiskSync
from megatron_stare.rollout.engines.sglang.fingerprint import Fingerprint
from megatron_stare.rollout.engines.sglang.fp8_weights import (
    as_sent,
    check_quantization,
    quantized,
    rounded,
    rounds,
)
from megatron_stare.rollout.engines.sglang.place import Place
from megatron_stare.rollout.engines.sglang.protocol import (
    SGLangError,
    check_hashes,
    check_precision,
)
from megatron_stare.rollout.engines.sglang.replica import (
    check_servers,
    server_memory,
    server_options,
)
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import WeightSync
from megatron_stare.rollout.engines.sglang.target import ServersTarget, TargetServer
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync
from megatron_stare.weights.files.check import expected
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot

URL = "http://localhost:1"
TINY = read_shape(servers.MODEL)
WIDE = replace(TINY, family="qwen2", hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=512)
QWEN_32B = replace(
    WIDE, layers=1, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=27648, vocab_size=152064
)
UP = "model.layers.0.mlp.up_proj.weight"


def matrix(rows: int = 256, columns: int = 384) -> Tensor:
    """A matrix with a block of zeros, one of tiny numbers, and one with an outlier."""
    found = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    found[:128, :128] = 0
    found[:128, 128:256] *= 1e-20
    found[200, 200] = -1000
    return found


def test_each_block_is_scaled_to_the_largest_number() -> None:
    """By hand, in float64: the nearest of all numbers of the format, times the scale."""
    weight = matrix()
    elements, scales = quantized(weight)
    assert (elements.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scales.shape == (2, 3)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = every[~every.isnan()].unique()
    for row in range(2):
        for column in range(3):
            cut = (
                slice(128 * row, 128 * row + 128),
                slice(128 * column, 128 * column + 128),
            )
            block, largest = weight[cut].double(), weight[cut].abs().max().double()
            scale = float(largest / 448) or 1.0
            torch.testing.assert_close(float(scales[row, column]), scale, rtol=1e-6, atol=0)
            apart = (block / scales[row, column].double()).unsqueeze(-1) - numbers
            nearest = apart.abs().min(-1).values
            held = elements[cut].double()
            assert torch.all((block / scales[row, column].double() - held).abs() <= nearest + 1e-6)
            assert held.abs().max() == (448 if largest else 0)


def test_a_server_computes_with_what_it_received() -> None:
    """Relative errors are at most half a step of three bits, and one of bfloat16."""
    weight = matrix()
    elements, scales = quantized(weight)
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(rounded(weight), (elements.float() * spread).bfloat16())
    room = weight.abs() * (2**-4 + 2**-8) + spread * 2**-10
    assert torch.all((rounded(weight).float() - weight).abs() <= room)


def test_large_matrices_are_rounded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(1024, 256).bfloat16()
    (elements, scales), whole = quantized(weight), rounded(weight)
    monkeypatch.setattr(fp8_weights, "_ELEMENTS", 3 * 128 * 256)
    again, scales_again = quantized(weight)
    assert torch.equal(again.view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(scales_again, scales) and torch.equal(rounded(weight), whole)
    assert torch.equal(scales, quantized(weight.float())[1])


def test_matrices_of_layers_alone_are_rounded() -> None:
    kept = {name.split(".")[-2] for name in expected(WIDE) if not rounds(name, WIDE)} - {
        "q_proj",
        "k_proj",
        "v_proj",
    }  # their biases
    assert kept == {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"} | (
        set() if WIDE.tied else {"lm_head"}
    )
    assert not rounds("model.layers.0.self_attn.q_proj.bias", WIDE)
    moe = replace(WIDE, family="qwen3_moe", experts=4, experts_per_token=2, expert_ffn=128)
    assert not rounds("model.layers.0.mlp.gate.weight", moe)
    assert rounds("model.layers.0.mlp.experts.3.gate_proj.weight", moe)


def test_tensors_are_sent_with_their_scales_and_in_an_order_that_aligns_them() -> None:
    bucket = [("model.norm.weight", torch.ones(256)), (UP, matrix())]
    (scale_name, scales), other, (name, elements) = as_sent(bucket, WIDE)
    assert other[1] is bucket[0][1] and (scale_name, name) == (UP + "_scale_inv", UP)
    want = quantized(bucket[1][1])
    assert torch.equal(elements.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(scales, want[1])


@pytest.mark.parametrize("layout", [ServerLayout("cpu"), ServerLayout("cuda", 2)])
def test_hashes_are_of_what_a_server_computes_with(layout: ServerLayout) -> None:
    down, norm = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
    weight, ones = matrix(256, 512), torch.rand(256)

    def checksums(eight_bits: bool, value: Tensor) -> Sequence[Mapping[str, str]]:
        one = Fingerprint(WIDE, torch.bfloat16, replace(layout, eight_bits=eight_bits))
        one.add(down, value)
        one.add(norm, ones)
        return one.checksums()

    found = checksums(True, weight)
    assert found == checksums(False, rounded(weight))
    assert [each.keys() for each in found] == [{down, norm}] * layout.tensor
    for mine, plain in zip(found, checksums(False, weight), strict=True):
        assert mine[norm] == plain[norm] and mine[down] != plain[down]


class Recorder(WeightSync):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__([])
        self.sent: list[tuple[list[str], Sequence[str]]] = []

    async def meet(self, layouts: Sequence[ServerLayout]) -> None: ...

    async def send(self, bucket: Sequence[tuple[str, Tensor]], handles: Sequence[str] = ()) -> None:
        self.sent.append(([name for name, _ in bucket], handles))

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("eight_bits", "handles", "names"),
    [
        (True, (), [UP + "_scale_inv", UP]),
        (True, ("of rounded copies",), [UP]),
        (False, (), [UP]),
    ],
)
def test_a_bucket_is_rounded_where_no_handles_were_made(
    eight_bits: bool, handles: Sequence[str], names: list[str]
) -> None:
    recorder = Recorder()
    layouts = [ServerLayout("cuda", eight_bits=eight_bits)]
    sending = sync_module.Sending(recorder, WIDE, torch.bfloat16, layouts, prove=True)
    asyncio.run(sending.send([(UP, matrix(512, 256))], handles=handles))
    assert recorder.sent == [(names, handles)]
    assert sending.sent().sizes == {UP: (512, 256)}


def test_handles_keep_the_copies_of_two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may still open the bucket before; the copies end with the update."""
    monkeypatch.setattr(target, "packed", lambda bucket: bucket[-1][1])
    layout = ServerLayout(eight_bits=True)
    server = TargetServer(URL, None, layout, Place(), WIDE, torch.bfloat16)
    sender = ServersTarget("tensor", 1.0, "model", colocated=True, servers=(server,)).sender(0)
    try:
        made = []
        for _ in range(3):
            flat = BucketLayout(torch.float32, (Slot(UP, (512, 256), 0),))
            made.append(weakref.ref(sender.handle(Bucket(flat, matrix(512, 256).flatten()))))
        assert made[0]() is None
        assert [one().dtype for one in made[1:]] == [torch.float8_e4m3fn] * 2  # type: ignore[union-attr]
        sender.free()
        assert [one() for one in made] == [None] * 3
    finally:
        sender.close()


@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "message"),
    [
        (WIDE, ServerLayout("cpu"), "bfloat16", "only with AMX"),
        (WIDE, ServerLayout("cuda"), "float16", "in bfloat16, not float16"),
        (replace(WIDE, family="glm4_moe"), ServerLayout("cuda"), "bfloat16", "of glm4_moe were"),
        # SGLang 0.5.23 renames the scales of Llama as it loads them, and then leaves them out
        (replace(WIDE, family="llama"), ServerLayout("cuda"), "bfloat16", "of llama were"),
        (TINY, ServerLayout("cuda"), "bfloat16", "on each rank of a server"),
        (WIDE, ServerLayout("cuda", 4), "bfloat16", r"\[64, 256\] on each rank"),
        (QWEN_32B, ServerLayout("cuda", 16), "bfloat16", r"\[5120, 320\]|\[320, 5120\]"),
    ],
)
def test_what_cannot_be_stored_in_blocks_is_refused(
    shape: ModelShape, layout: ServerLayout, dtype: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_quantization(shape, layout, dtype)
    assert error.value.where == "sglang.quantization"


def test_a_32b_model_is_stored_in_blocks_on_up_to_eight_ranks() -> None:
    for tensor in (1, 2, 4, 8):
        check_quantization(QWEN_32B, ServerLayout("cuda", tensor), "bfloat16")


def config(**sglang: Any) -> Any:
    asked = {"device": "cuda", "dtype": "bfloat16", "python": sys.executable, **sglang}
    return servers.config(**asked)


def test_servers_are_started_with_blocks() -> None:
    words = server_options(config(quantization="fp8")).arguments(30_001)
    assert words[words.index("--quantization") + 1] == "fp8"
    given = json.loads(words[words.index("--json-model-override-args") + 1])
    assert given["quantization_config"]["weight_block_size"] == [128, 128]
    assert "--quantization" not in server_options(config()).arguments(30_001)


def test_a_server_has_the_weights_that_the_run_expects() -> None:
    for held, asked, fix in (
        ("fp8", None, "set sglang.quantization=fp8"),
        (None, "fp8", "docs/sglang.md"),
        ("w8a8_int8", "fp8", "the only quantization that is supported is fp8"),
    ):
        with pytest.raises(ConfigError, match=f"limits of agreement.*\n.*{fix}") as error:
            check_precision({"quantization": held}, URL, None, asked)
        assert error.value.where == URL
    check_precision({"quantization": "fp8"}, URL, None, "fp8")
    check_hashes("0.5.23", URL)
    with pytest.raises(SGLangError, match=r"0\.5\.22, whose hashes of 8-bit weights"):
        check_hashes("0.5.22", URL)
    assert ServerLayout.of({"device": "cuda", "quantization": "fp8"}, URL).eight_bits
    assert not ServerLayout.of({"device": "cuda", "quantization": None}, URL).eight_bits


class Informing(FakeServer):
    """Server with `more` in its /server_info."""

    more: Mapping[str, str] = MappingProxyType({})

    def _info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**super()._info(body), **self.more}


def test_an_engine_asks_its_server() -> None:
    fake, loop = Informing("fake"), asyncio.new_event_loop()
    client = fake.client()

    def engine(**more: str) -> SGLangEngine:
        fake.more = more
        sync = TensorSync([client])
        return SGLangEngine(
            client, sync, str(servers.MODEL), "bfloat16", 2, loop, quantization="fp8"
        )

    with pytest.raises(ConfigError, match="are not quantized"):
        engine()
    with pytest.raises(SGLangError, match="hashes of 8-bit weights were never compared"):
        engine(quantization="fp8", version="0.5.22")
    engine(quantization="fp8").close()


def test_files_for_servers_have_each_tensor_in_its_dtype(tmp_path: Path) -> None:
    sync = DiskSync([], str(servers.MODEL), tmp_path)
    sent = as_sent([("model.norm.weight", torch.ones(256).bfloat16()), (UP, matrix())], WIDE)
    asyncio.run(sync.meet([]))
    asyncio.run(sync.send(sent))
    (file,) = tmp_path.glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == {name for name, _ in sent}
    for name, tensor in sent:
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_scales_of_a_cache_would_be_lost_beside_released_weights() -> None:
    both = config(
        quantization="fp8", kv_cache_dtype="fp8_e4m3", colocated=True, memory_fraction=0.5
    )
    with pytest.raises(ConfigError, match="scales of its 8-bit cache") as error:
        check_servers(both, WIDE)
    assert error.value.where == "sglang.kv_cache_dtype"
    for apart in (
        config(quantization="fp8", colocated=True),
        config(quantization="fp8", kv_cache_dtype="fp8_e4m3"),
    ):
        check_servers(apart, WIDE)


def test_plans_count_8_bits_of_matrices_and_16_of_the_ends() -> None:
    plain, eight = config(), config(quantization="fp8")
    ends = QWEN_32B.hidden * QWEN_32B.vocab_size * (1 if QWEN_32B.tied else 2)
    read, less = (_read_bytes(asked, QWEN_32B, 8) for asked in (plain, eight))
    assert less == pytest.approx(ends * 2 + (read - ends * 2) / 2)
    whole, half = (server_memory(asked, QWEN_32B, 80 * 10**9) for asked in (plain, eight))
    assert half.weights == pytest.approx(less, rel=1e-3) and half.cache > whole.cache


SIZES = {
    "vocab_size": 15,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=128, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}
SEQUENCES = [(3, 4, 5, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11), (13, 12, 2, 2, 9)]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
@pytest.mark.parametrize(
    ("name", "tensor", "sync"),
    [
        ("qwen2", 1, "distributed"),
        ("qwen3", 2, "disk"),
        ("qwen2", 2, "distributed"),
        ("qwen3_moe", 1, "disk"),
        ("qwen3_moe", 2, "distributed"),
    ],
)
def test_a_server_holds_what_was_sent(
    name: str, tensor: int, sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own parameters, loading and hashes. Its log-probs are those of a model whose weights
    are rounded; one wrong scale is noticed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2)
    model.save_pretrained(tmp_path / "model")
    weights, shape = servers.weights(tmp_path / "model"), read_shape(tmp_path / "model")
    python = tmp_path / "python"
    python.write_text(
        f"#!{servers.PYTHON}\nimport os, sys\n"
        f"os.environ['PYTHONPATH'] = {str(servers.ROOT / 'tests/support/fp8_kernel')!r}\n"
        f"os.execv({servers.PYTHON!r}, [{servers.PYTHON!r}, *sys.argv[1:]])\n"
    )
    python.chmod(0o755)
    with servers.running(
        tmp_path / "model",
        python=str(python),
        quantization="fp8",
        dtype="bfloat16",
        sync=sync,
        tensor_parallel=tensor,
    ) as engine:
        servers.sync(engine, 1, weights)
        found = engine.prompt_log_probs(SEQUENCES)
        monkeypatch.setattr(sync_module, "as_sent", with_a_wrong_scale)
        with pytest.raises(WeightUpdateError, match="has other values"):
            servers.sync(engine, 2, weights)
    held = {n: rounded(w).float() if rounds(n, shape) else w for n, w in weights.items()}
    folder = tmp_path / "rounded"
    model.save_pretrained(folder, state_dict=held)
    moved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for tokens, log_probs in zip(SEQUENCES, found, strict=True):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            want = moved(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        assert (torch.tensor(log_probs) - want).abs().mean() < 0.1


def with_a_wrong_scale(
    bucket: Iterable[tuple[str, Tensor]], shape: ModelShape
) -> Sequence[tuple[str, Tensor]]:
    sent = as_sent(bucket, shape)
    for name, tensor in sent:
        if name.endswith("weight_scale_inv") and (
            "1.mlp.down" in name or "1.mlp.experts.3.up" in name
        ):
            tensor[-1, -1] *= 1 + 2**-6
    return sent
