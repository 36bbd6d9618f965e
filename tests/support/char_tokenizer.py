"""A real transformers tokenizer of single characters, for the tests of prompt sources. BOS is added
unless refused."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+=; abcdefghijklmnopqrstuvwxyz"
BOS = len(CHARACTERS)

CHAT_TEMPLATE = (
    # u/a: roles
    "{% for m in messages %}u {{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a {%"
    " endif %}"
)


def char_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    vocab = {character: index for index, character in enumerate(CHARACTERS)} | {
        "<s>": BOS,
        "<unk>": BOS + 1,
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.chat_template = chat_template
    return fast


def ids(text: str) -> tuple[int, ...]:
    """Token ids of `text`, without special tokens."""
    return tuple(CHARACTERS.index(character) for character in text)
