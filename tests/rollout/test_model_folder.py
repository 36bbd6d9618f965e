"""Tokenizers and configs of model folders: those that are taken, and faults that are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_stare.errors import DataError
from megatron_stare.rollout.engines.model_folder import (
    load_tokenizer,
    model_stop_token_ids,
    read_model_config,
)

CHAT = ROOT / "assets/tiny-chat"
LINE = "What is 31*1234?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny chat model, without weights."""
    shutil.copytree(CHAT, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "model"


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def digits(tokenizer: Tokenizer) -> None:
    """Merges numbers in the vocabulary, and lets them be read digit by digit."""
    tokenizer.model = models.BPE()
    tokenizer.train_from_iterator(
        [LINE] * 9,
        trainers.BpeTrainer(
            vocab_size=320,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "LlamaTokenizer", "GPT2Tokenizer"])
def test_a_tokenizer_without_a_vocabulary_is_refused(folder: Path, kind: str) -> None:
    change(folder / "tokenizer_config.json", tokenizer_class=kind)
    load_tokenizer(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"no vocabulary(.|\n)*download this model's") as refused:
        load_tokenizer(str(folder))
    assert refused.value.where == str(folder)


def test_a_class_that_overrides_tokenizer_json_is_refused(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    digits(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    change(folder / "config.json", model_type="llama")
    change(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    with pytest.raises(DataError, match="GPT2Tokenizer, which transformers loads") as refused:
        load_tokenizer(str(folder))
    assert refused.value.where == str(folder)
    assert "set tokenizer_class to PreTrainedTokenizerFast" in str(refused.value)
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    encoded = load_tokenizer(str(folder)).encode(LINE, add_special_tokens=False)
    assert encoded == tokenizer.encode(LINE).ids


@pytest.mark.parametrize("name", ["tiny-adder", "tiny-chat", "tiny-searcher"])
def test_tokenizers_that_ship_are_taken(name: str) -> None:
    load_tokenizer(str(ROOT / "assets" / name))


@pytest.mark.parametrize("normalised", [False, True])  # the two forms of spaces in Llama 2's files
def test_a_tokenizer_of_sentences_is_taken(folder: Path, normalised: bool) -> None:
    pieces = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    pieces.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces.train_from_iterator(
        [LINE] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False),
    )
    if normalised:
        pieces.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        pieces.pre_tokenizer = None
    # as in a file that was saved while it padded and cut
    pieces.enable_padding(length=99)
    pieces.enable_truncation(3)
    pieces.save(str(folder / "tokenizer.json"))
    change(folder / "config.json", model_type="llama")
    change(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", eos_token="</s>")
    tokenizer = load_tokenizer(str(folder))
    assert type(tokenizer).__name__ == "LlamaTokenizer"
    assert tokenizer.decode(tokenizer.encode(LINE, add_special_tokens=False)) == LINE


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'factor'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}},
            "'low_freq_factor'",
        ),
        ({"max_position_embeddings": 16384.0}, "'max_position_embeddings' expected int, got float"),
        ({"eos_token_id": "258"}, "'eos_token_id' with value '258'"),
        ({"rms_norm_eps": "1e-6"}, "'rms_norm_eps' expected float, got str"),
    ],
)
def test_a_config_with_a_wrong_field_is_refused_with_the_field(
    folder: Path, fields: dict[str, Any], said: str
) -> None:
    change(folder / "config.json", **fields)
    for read in (read_model_config, model_stop_token_ids, load_tokenizer):
        with pytest.raises(DataError) as refused:
            read(str(folder))
        assert said in str(refused.value)
        assert refused.value.where == str(folder)
        assert "fix: correct the file" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"eos_token_id": 258,}', r"generation_config\.json does not load: .*not a valid JSON"),
        ("[]", r"generation_config\.json does not load: "),
        (
            '{"eos_token_id": "258"}',
            r"eos_token_id '258' in generation_config\.json is not a token",
        ),
    ],
)
def test_an_invalid_generation_config_is_refused(folder: Path, text: str, said: str) -> None:
    assert model_stop_token_ids(str(folder)) == (258,)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(DataError, match=said) as refused:
        model_stop_token_ids(str(folder))
    assert refused.value.where == str(folder) and "fix: " in str(refused.value)


@pytest.mark.parametrize("text", ["{}", '{"added_tokens": [],}'])
def test_a_damaged_tokenizer_json_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match="the tokenizer, or") as refused:
        load_tokenizer(str(folder))
    assert refused.value.where == str(folder)
