"""The section `data`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from megatron_stare.config.performance_section import Section
from megatron_stare.config.template import check_template


class MixtureFile(Section):
    """A file that training prompts are mixed from."""

    path: str = Field(description="as data.path")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="share of the prompts, against other weights")
    name: str | None = Field(None, description="what its prompts' ids begin with; null: the file's name")

    @property
    def label(self) -> str:
        return self.name or Path(self.path).stem


class DataConfig(Section):
    """The prompts."""

    source: str = Field(
        "jsonl", description="'files', by its older name 'jsonl'; 'arithmetic', 'signs' or a class path"
    )
    path: str | None = Field(
        None, description="training prompts of source 'files': .parquet, JSON lines or hf:owner/name; see docs/data.md"
    )
    eval_path: str | None = Field(None, description="prompts of the evaluation, source 'files'")
    mixture: list[MixtureFile] = Field(
        [], description="training prompts of source 'files' from several files, in place of `path`"
    )
    prompt_key: str | None = Field(None, description="key of the prompt, dotted where it lies deeper; null: 'prompt'")
    answer_key: str | None = Field(
        None, description="key of the answer; null: the first there is of answer, label and reward_model.ground_truth"
    )
    deduplicate: bool = Field(
        False, description="train on a problem once a pass, and not on one whose repeats have other answers"
    )
    decontaminate: list[str] = Field(
        [], description="files of evaluation problems; training leaves out what shares `ngram` words in a row with one"
    )
    ngram: int = Field(13, ge=1, description="words in a row of `decontaminate`")
    template: str | None = Field(
        None, description="text around a prompt, which stands at {prompt}, before the chat template; null: none"
    )
    chat_template: bool = Field(False, description="wrap every prompt as a user turn with the tokenizer's template")

    _template = field_validator("template")(check_template)

    @model_validator(mode="after")
    def _one_or_several_files(self) -> DataConfig:
        if self.mixture and self.path is not None:
            raise ValueError("`path` and `mixture` both name training prompts: set one of them")
        labels = [file.label for file in self.mixture]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two files of the mixture are called {twice[0]!r}: give one a `name`")
        return self
