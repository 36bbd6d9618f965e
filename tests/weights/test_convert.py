"""Conversion is exact both ways, says clearly what is wrong with its input, and leaves all of its
output or none."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing as mp
import os
import re
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import FAMILIES, save_model
from transformers import AutoModelForCausalLM

from megatron_stare.cli import main
from megatron_stare.errors import DataError, UserError
from megatron_stare.models import read_shape
from megatron_stare.weights.files import convert as conversion
from megatron_stare.weights.files import torch_dist_writer
from megatron_stare.weights.files.blocks import cut
from megatron_stare.weights.files.check import check_folder
from megatron_stare.weights.files.convert import Options, compare, convert, stops_of
from megatron_stare.weights.files.hf_folder import (
    HfFolder,
    add_stops,
    copy_companions,
    exported_step,
    write_folder,
)
from megatron_stare.weights.files.processes import Advance, run_parts
from megatron_stare.weights.files.safetensors_file import lay_out
from megatron_stare.weights.files.torch_dist import TorchDist

ROOT = Path(__file__).parent.parent.parent
SHARD_BYTES = 20_000


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    opened = HfFolder(folder)
    return {name: opened.slice(name)[:] for name in opened.names()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert b[name].dtype == tensor.dtype
        assert torch.equal(b[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    save_model(tmp_path / "hf", family)
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    # tensors of several blocks
    monkeypatch.setattr(conversion, "cut", functools.partial(cut, block_bytes=3000))
    options = Options(shard_bytes=SHARD_BYTES, check=True)
    convert(tmp_path / "hf", tmp_path / "megatron", None, options)
    convert(tmp_path / "megatron", tmp_path / "back", None, options)
    assert_same(tensors(tmp_path / "hf"), tensors(tmp_path / "back"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in tensors(tmp_path / "hf").values()
    )
    for file in set(index["weight_map"].values()):
        assert load_file(tmp_path / "back" / file)  # the library reads what we lay out
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "megatron"]


def test_across_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> int:
        raise OSError(errno.EXDEV, "another file system")

    save_model(tmp_path / "hf", "qwen2_tied")
    convert(tmp_path / "hf", tmp_path / "megatron", None, Options())
    monkeypatch.setattr(os, "copy_file_range", refused)
    convert(tmp_path / "megatron", tmp_path / "back", None, Options())
    assert_same(tensors(tmp_path / "hf"), tensors(tmp_path / "back"))


def test_dtypes(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "qwen3")
    original = tensors(tmp_path / "hf")
    half = Options(dtype=torch.bfloat16, check=True)
    convert(tmp_path / "hf", tmp_path / "half", None, half)
    convert(tmp_path / "half", tmp_path / "half-hf", None, Options(check=True))
    rounded = {name: tensor.bfloat16() for name, tensor in original.items()}
    assert_same(rounded, tensors(tmp_path / "half-hf"))
    assert json.loads((tmp_path / "half-hf" / "config.json").read_text())["dtype"] == "bfloat16"
    convert(tmp_path / "half-hf", tmp_path / "wide", None, Options(dtype=torch.float32, check=True))
    convert(tmp_path / "wide", tmp_path / "wide-hf", None, Options(check=True))
    assert_same(
        {name: tensor.float() for name, tensor in rounded.items()}, tensors(tmp_path / "wide-hf")
    )
    convert(tmp_path / "wide", tmp_path / "narrow-hf", None, half)
    assert_same(rounded, tensors(tmp_path / "narrow-hf"))


def test_biases_of_experts_stay_in_float32(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "glm4_moe")
    original = tensors(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "half", None, Options(dtype=torch.bfloat16, check=True))
    options = Options(shard_bytes=SHARD_BYTES, check=True)
    convert(tmp_path / "half", tmp_path / "half-hf", None, options)
    rounded = {
        name: tensor if name.endswith(".e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in original.items()
    }
    assert_same(rounded, tensors(tmp_path / "half-hf"))
    # of two dtypes, which is no error
    convert(tmp_path / "half-hf", tmp_path / "again", None, options)
    convert(tmp_path / "again", tmp_path / "again-hf", None, options)
    assert_same(rounded, tensors(tmp_path / "again-hf"))


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "glm4_moe")
    original = tensors(tmp_path / "hf")
    predicts = {
        f"model.layers.4.{name}.weight": torch.ones(32)
        for name in ("enorm", "self_attn.q_proj", "embed_tokens")
    }
    save_file(original | predicts, tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "megatron", None, Options(check=True))
    convert(tmp_path / "megatron", tmp_path / "back", None, Options(check=True))
    assert_same(original, tensors(tmp_path / "back"))
    save_file(
        original | {"model.layers.5.enorm.weight": torch.ones(32)},
        tmp_path / "hf" / "model.safetensors",
    )
    with pytest.raises(
        DataError, match=r"'model\.layers\.5\.enorm\.weight' is not one of a glm4_moe model"
    ):
        convert(tmp_path / "hf", tmp_path / "other", None, Options())


def test_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "hf", "qwen2")
    assert (
        main(
            [
                "convert",
                str(tmp_path / "hf"),
                str(tmp_path / "megatron"),
                "--processes",
                "2",
                "--check",
            ]
        )
        == 0
    )
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == 2
    assert (
        main(
            [
                "convert",
                str(tmp_path / "megatron"),
                str(tmp_path / "back"),
                "--processes",
                "2",
                "--check",
            ]
        )
        == 0
    )
    assert_same(tensors(tmp_path / "hf"), tensors(tmp_path / "back"))
    captured = capsys.readouterr()
    assert "both sides are equal bit for bit" in captured.out
    assert (
        re.findall(r"(convert|check): .* 100 %, \d+ MB/s", captured.err) == ["convert", "check"] * 2
    )


def test_parts_of_processes_are_of_like_size(tmp_path: Path) -> None:
    """Six elements in blocks of 2, 1 and 3 are two parts of three."""
    save_model(tmp_path, "qwen2")
    (norm,) = (
        block
        for block in cut(read_shape(tmp_path))
        if block.rule.megatron == "decoder.final_layernorm.weight"
    )
    blocks = [replace(norm, start=start, stop=stop) for start, stop in ((0, 2), (2, 3), (3, 6))]
    assert conversion._split(blocks, 2) == [blocks[:2], blocks[2:]]
    assert conversion._split(blocks, 1) == [blocks]
    assert conversion._split(blocks[:2], 3) == [blocks[:1], blocks[1:2]]


def test_blocks_are_read_from_front_to_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor's blocks lie in its file one behind the other."""
    save_model(tmp_path / "hf", "qwen2")
    convert(tmp_path / "hf", tmp_path / "megatron", None, Options())
    with TorchDist(tmp_path / "megatron") as checkpoint:
        blocks = [
            each
            for each in cut(read_shape(tmp_path / "hf"), 3000)
            if "word_embeddings" in each.rule.megatron
        ]
        (file, first), *others = [checkpoint.position(block) for block in blocks]
    assert len(blocks) > 1 and (tmp_path / "megatron" / file).is_file()
    assert others == [(file, first + block.start) for block in blocks[1:]]


def test_the_dtype_is_said_under_the_name_that_config_json_has_for_it(tmp_path: Path) -> None:
    # of transformers 5, from before it, and from a tool that writes both
    for names in (["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"]):
        source, target = tmp_path / "-".join(names), tmp_path / f"{'-'.join(names)} copied"
        source.mkdir()
        target.mkdir()
        config = {"model_type": "qwen2"} | dict.fromkeys(names, "float32")
        (source / "config.json").write_text(json.dumps(config))
        copy_companions(source, target, "bfloat16")
        assert json.loads((target / "config.json").read_text()) == {
            "model_type": "qwen2"
        } | dict.fromkeys(names, "bfloat16")


@pytest.mark.parametrize("step", [None, 7])
def test_a_folder_says_of_which_step_its_weights_are(tmp_path: Path, step: int | None) -> None:
    save_model(tmp_path / "hf", "qwen2")
    held = tensors(tmp_path / "hf")
    write_folder(tmp_path / "out", held, tmp_path / "hf", step)
    assert exported_step(tmp_path / "out") == step and exported_step(tmp_path / "nowhere") is None
    assert_same(tensors(tmp_path / "out"), held)
    assert (tmp_path / "out/config.json").read_text() == (tmp_path / "hf/config.json").read_text()


def test_tensors_start_at_multiples_of_8_bytes(tmp_path: Path) -> None:
    """Whatever the length of the header, which tells it and the first tensor's place."""
    for length in range(1, 9):
        header, placed = lay_out(tmp_path / "f", {"x" * length: (3,), "y": (1,)}, torch.float32, {})
        assert len(header) % 8 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8
        assert [(entry.start, entry.nbytes) for entry in placed.values()] == [
            (len(header), 12),
            (len(header) + 12, 4),
        ]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def cut_in_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 30)


def index_without_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weights = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def index_with_absent_tensor(folder: Path) -> None:
    names = HfFolder(folder).names()
    rewrite(folder, lambda held: held.pop("model.norm.weight"))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def config_without_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))


def change(name: str, to: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: rewrite(
        folder, lambda held: held.update({name: to(held[name]).contiguous()})
    )


BAD = {
    "truncated": (truncate, "cut short"),
    "header": (cut_in_header, "cut short within its header"),
    "no-file": (index_without_file, "names model-00002-of-00002.safetensors, which is not there"),
    "absent-tensor": (index_with_absent_tensor, "holds 'model.norm.weight', but it does not"),
    "index": (broken_index, "the index cannot be read"),
    "missing": (
        lambda f: rewrite(f, lambda held: held.pop("lm_head.weight")),
        "missing: the tensor 'lm_head.weight'",
    ),
    "extra": (
        lambda f: rewrite(f, lambda held: held.update(x=torch.ones(1))),
        "'x' is not one of a qwen2 model",
    ),
    "shape": (
        change("model.norm.weight", lambda t: t[1:]),
        "has the shape (31,), config.json makes it (32,)",
    ),
    "dtype": (change("model.norm.weight", lambda t: t.to(torch.int8)), "is of dtype I8"),
    "mixed": (
        change("model.norm.weight", lambda t: t.bfloat16()),
        "of several dtypes: bfloat16, float32",
    ),
    "config": (config_without_field, "the field 'num_hidden_layers' is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    spoil, message = BAD[name]
    save_model(tmp_path / "hf", "qwen2")
    spoil(tmp_path / "hf")
    refused(capsys, tmp_path / "hf", tmp_path / "megatron", message)


def test_a_tied_head_of_its_own_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers computes with it, engines and Megatron with the embedding."""
    save_model(tmp_path / "hf", "qwen2_tied")
    held = load_file(tmp_path / "hf/model.safetensors")
    embedding = held["model.embed_tokens.weight"]
    same = tmp_path / "same"
    save_model(same, "qwen2_tied")
    rewrite(same, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    check_folder(same, read_shape(same))
    last = embedding.clone()
    last[-1, -1] += 1e-3
    for number, other in enumerate(
        (last, embedding[:-1].clone(), embedding.bfloat16(), embedding.T.contiguous())
    ):
        spoilt = tmp_path / f"hf{number}"
        save_model(spoilt, "qwen2_tied")
        rewrite(spoilt, lambda t, other=other: t.update({"lm_head.weight": other}))  # type: ignore[misc]
        refused(
            capsys, spoilt, tmp_path / "megatron", "the folder holds a head of its own", "--check"
        )


def refused(
    capsys: pytest.CaptureFixture[str], source: Path, target: Path, message: str, *options: str
) -> None:
    """One error, and nothing written."""
    capsys.readouterr()  # what transformers said when it saved the model
    assert main(["convert", str(source), str(target), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    assert message in error
    assert not target.exists() and not target.with_name(target.name + ".tmp").exists()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint that tests copy and spoil."""
    folder = tmp_path_factory.mktemp("converted")
    save_model(folder / "hf", "qwen2")
    convert(folder / "hf", folder / "megatron", None, Options())
    return folder


def copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_bad_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], converted: Path
) -> None:
    target = tmp_path / "back"
    cut_short = copy(converted / "megatron", tmp_path / "cut")
    os.truncate(cut_short / "__0_0.distcp", 1000)
    refused(capsys, cut_short, target, "cut short: 1,000 of")
    (cut_short / "__0_0.distcp").unlink()
    refused(capsys, cut_short, target, "a file of the checkpoint is missing")
    (cut_short / ".metadata").write_bytes(b"what?")
    refused(capsys, cut_short, target, "the metadata cannot be read")
    (cut_short / ".metadata").unlink()
    # what is left looks like a Hugging Face folder
    refused(capsys, cut_short, target, "no model.safetensors")
    refused(capsys, tmp_path / "nowhere", target, "there is no such folder")
    without_config = copy(converted / "megatron", tmp_path / "bare")
    (without_config / "config.json").unlink()
    refused(capsys, without_config, target, "does not say what model it is")
    save_model(tmp_path / "other", "qwen3")
    refused(
        capsys, without_config, target, "do not belong together", "--model", str(tmp_path / "other")
    )
    save_model(tmp_path / "tied", "qwen2_tied")
    refused(
        capsys,
        without_config,
        target,
        "'output_layer.weight' is not one of",
        "--model",
        str(tmp_path / "tied"),
    )


def test_check_finds_one_flipped_bit(tmp_path: Path, converted: Path) -> None:
    spoiled = copy(converted / "megatron", tmp_path / "spoiled")
    shape = read_shape(spoiled)
    entries = check_folder(converted / "hf", shape)
    compare(entries, spoiled, shape, [cut(shape)], torch.float32)
    needle = struct.pack("<32f", *HfFolder(converted / "hf").slice("model.norm.weight")[:].tolist())
    data = bytearray((spoiled / "__0_0.distcp").read_bytes())
    data[data.index(needle)] ^= 1
    (spoiled / "__0_0.distcp").write_bytes(data)
    with pytest.raises(DataError, match=r"differ in 'decoder.final_layernorm.weight'"):
        compare(entries, spoiled, shape, [cut(shape)], torch.float32)


@pytest.mark.parametrize("copy_", [0, 1])
def test_every_place_that_holds_a_parameter_is_compared(tmp_path: Path, copy_: int) -> None:
    """The norm before experts lies under two names, of local and of Transformer Engine's layers."""
    save_model(tmp_path / "hf", "qwen3_moe")
    convert(tmp_path / "hf", tmp_path / "megatron", None, Options())
    shape = read_shape(tmp_path / "hf")
    entries = check_folder(tmp_path / "hf", shape)
    norm = HfFolder(tmp_path / "hf").slice("model.layers.1.post_attention_layernorm.weight")[:]
    needle = struct.pack(f"<{norm.numel()}f", *norm.tolist())
    data = bytearray((tmp_path / "megatron/__0_0.distcp").read_bytes())
    assert data.count(needle) == 2
    at = data.index(needle) if copy_ == 0 else data.rindex(needle)
    data[at] ^= 1
    (tmp_path / "megatron/__0_0.distcp").write_bytes(data)
    with pytest.raises(
        DataError, match=r"differ in 'decoder\.layers\.1\.pre_mlp_layernorm\.weight'"
    ):
        compare(entries, tmp_path / "megatron", shape, [cut(shape)], torch.float32)


def test_does_not_overwrite(capsys: pytest.CaptureFixture[str], converted: Path) -> None:
    before = (converted / "megatron" / ".metadata").read_bytes()
    assert main(["convert", str(converted / "hf"), str(converted / "megatron")]) == 2
    assert "there is something here already" in capsys.readouterr().err
    assert (converted / "megatron" / ".metadata").read_bytes() == before


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_size_of_files_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, size: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(tmp_path), str(tmp_path / "out"), f"--shard-gb={size}"])
    assert "--shard-gb: must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["hf", "megatron"])
def test_disk_full(tmp_path: Path, converted: Path, source: str) -> None:
    """A limit on file sizes stands in for a full disk: the write fails half way, as there."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron_stare.cli",
            "convert",
            str(converted / source),
            str(tmp_path / "out"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert done.returncode == 2
    assert "cannot be written (File too large)" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def convert_and_die(source: Path, target: Path) -> None:
    """Is killed while the fifth block is being written."""
    blocks = 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal blocks
        blocks += 1
        if blocks == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(*args)

    made, torch_dist_writer.to_megatron = torch_dist_writer.to_megatron, counted
    convert(source, target, None, Options())


def test_killed_half_way(
    tmp_path: Path, converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    process = mp.get_context("spawn").Process(
        target=convert_and_die, args=(converted / "hf", target)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    left = target.with_name("out.tmp")
    # no one takes it for a checkpoint
    assert list(left.glob("*.distcp")) and not (left / ".metadata").exists()
    convert(converted / "hf", target, None, Options(check=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def part_that_dies(part: int, advance: Advance) -> int:
    advance(part)
    if part == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if part == 3:
        raise DataError("it cannot be read")
    return part


def test_processes() -> None:
    done: list[int] = []
    assert run_parts(part_that_dies, [1, 4], done.append) == [1, 4]
    assert sum(done) == 5
    looks: list[int] = []

    def looked(nbytes: int) -> None:
        looks.append(nbytes)
        assert len(looks) < 100, "a process that died is not noticed"  # there are five a second

    with pytest.raises(UserError, match="a process was killed"):
        run_parts(part_that_dies, [1, 2], looked)
    with pytest.raises(DataError, match="it cannot be read"):
        run_parts(part_that_dies, [1, 3], done.append)


@pytest.mark.parametrize(
    ("file", "modules"),
    [
        ("config.json", {"AutoConfig": "configuration_mine.MineConfig"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_mine.Mine", None]}),
        ("tokenizer_config.json", ["tokenization_mine.Mine", None]),
    ],
)
def test_modules_that_a_folder_names_are_copied(tmp_path: Path, file: str, modules: Any) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "folder").mkdir(parents=True)
    target.mkdir()
    names = ("configuration_mine.py", "tokenization_mine.py", "imported_by_both.py")
    for name in (*names, "folder/deeper.py"):
        (source / name).write_text(f"# {name}")
    (source / "config.json").write_text("{}")
    copy_companions(source, target)
    assert [each.name for each in target.iterdir()] == ["config.json"]
    (source / file).write_text(json.dumps({"auto_map": modules}))
    copy_companions(source, target)
    assert {each.name for each in target.iterdir()} == {"config.json", file, *names}
    assert all((target / name).read_text() == f"# {name}" for name in names)


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ('{"format": 8, "stops": [2, 7]}', [2, 7]),
        ('{"format": 7}', []),
        ("[]", []),
        ("{", []),
        (None, []),
    ],
)
def test_stops_are_those_of_a_checkpoints_state(
    tmp_path: Path, state: str | None, wanted: list[int]
) -> None:
    if state is not None:
        (tmp_path / "run_state.json").write_text(state)
    assert stops_of(tmp_path) == wanted


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": 1, "top_p": 0.5}, {"eos_token_id": 4}, [1, 2, 7]),
        ({"eos_token_id": [7, 1]}, {}, [7, 1, 2]),
        (None, {"eos_token_id": 4}, [4, 2, 7]),
        ({}, {}, [2, 7]),
        ({"eos_token_id": [2, 7]}, {}, [2, 7]),
    ],
)
def test_stops_are_added_to_those_that_are_there(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], wanted: list[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "generation_config.json"
    if generation is not None:
        path.write_text(json.dumps(generation))
    add_stops(tmp_path, {7, 2})
    assert json.loads(path.read_text()) == {**(generation or {}), "eos_token_id": wanted}
    path.unlink()
    add_stops(tmp_path, ())
    assert not path.exists()
