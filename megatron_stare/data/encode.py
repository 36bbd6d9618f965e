"""Encodes the text of a prompt into the token ids that the policy continues (`Prompt.token_ids`).
All prompt sources of this package use this encoder, except the source `messages`. The prompts of
all sources with this encoder therefore have the same templates and the same length limit."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from megatron_stare.config.schema import Config
from megatron_stare.data.messages import ASSISTANT, keeps
from megatron_stare.data.records import Messages
from megatron_stare.environments.environment import find_environment
from megatron_stare.errors import ConfigError, DataError


class PromptTooLongError(DataError):
    """Raised if a prompt exceeds rollout.max_prompt_tokens, unless rollout.truncate_prompt allows
    cutting the prompt."""


class PromptEncoder:
    """Tokenizes prompts according to `data.template`, `data.chat_template`,
    `data.chat_template_kwargs` and `rollout.max_prompt_tokens`. If the environment has tools, their
    schemas are passed to the chat template.

    `cut`: number of prompts that were too long and lost tokens at the beginning.

    Args:
        config: the run's configuration.
        tokenizer: a transformers tokenizer.

    Raises:
        ConfigError: the configuration requests a chat template, but the tokenizer has no chat
            template.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = config.data.template
        self._chat_template = config.data.chat_template
        self._limit = config.rollout.max_prompt_tokens
        self.cut = 0
        self._cuts = config.rollout.truncate_prompt == "left"
        self._template_kwargs = dict(config.data.chat_template_kwargs)
        environment, settings = find_environment(config.rollout.environment)
        if (tools := environment.tool_schemas(settings)) is not None:
            self._template_kwargs["tools"] = tools
        if self._chat_template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template",
                where="data.chat_template",
                fix="data.chat_template=false",
            )

    def __call__(self, prompt: str | Messages, where: str) -> tuple[int, ...]:
        """Returns the token ids of `prompt`: at least one id, and at most
        `rollout.max_prompt_tokens` ids.

        Args:
            prompt: the problem as a text or as the messages of a conversation. `data.template`
                wraps the text, or the last message.
            where: line or id that an error message names.

        Raises:
            DataError: the prompt has no tokens, has several messages but `data.chat_template` is
                false, or has messages that the chat template refuses or leaves out.
            PromptTooLongError: the prompt has too many tokens, and the configuration does not allow
                cutting the prompt.
        """
        *before, (_, text) = (("user", prompt),) if isinstance(prompt, str) else prompt
        if self._template is not None:
            text = self._template.format(prompt=text)
        if before and not self._chat_template:
            raise DataError(
                "the prompt has several messages, which only a chat template joins",
                where=where,
                fix="data.chat_template=true",
            )
        if self._chat_template:
            text = self._rendered((*before, ("user", text)), where)
        # Raw text is encoded as it is; a BOS token, if the model needs one, belongs in the
        # template. A run warns if it is missing there (driver/opening.py).
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        if not ids:
            raise DataError(
                "the prompt has no tokens, so there is nothing to continue", where=where
            )
        if len(ids) > self._limit and not self._cuts:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, the limit rollout.max_prompt_tokens is"
                f" {self._limit}",
                where=where,
                fix=(
                    f"set rollout.max_prompt_tokens to at least {len(ids)}, or"
                    " rollout.truncate_prompt to drop or left"
                ),
            )
        self.cut += len(ids) > self._limit
        return tuple(ids[-self._limit :])

    def _rendered(self, prompt: Messages, where: str) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in prompt],
                add_generation_prompt=True,
                tokenize=False,
                **self._template_kwargs,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"the chat template refuses the prompt: {error}",
                where=where,
                fix="correct its messages, or use another template",
            ) from error
        for role, content in prompt:
            # templates may leave out thinking, and may write answers of tools as JSON
            if role not in (ASSISTANT, "tool") and not keeps(text, content):
                raise DataError(
                    f"the chat template leaves out the prompt's message of the role {role!r}",
                    where=where,
                    fix="use a role that the template renders, or remove it",
                )
        return text
