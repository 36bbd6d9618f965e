"""The renderer that the library `verifiers` is given: a template that hides the tools is told.

pip install verifiers==0.4.0    into an environment that has this project
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.runs import ROOT
from transformers import AutoTokenizer

pytest.importorskip("renderers")
from megatron_stare.environments import chat_renderer

CHAT = ROOT / "assets/tiny-chat"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOOLS: list[dict[str, Any]] = [{"name": name, "parameters": {}} for name in ("look_up", "dice")]
ASK = {"role": "user", "content": "What is 2+3?"}


def warnings(
    caplog: pytest.LogCaptureFixture, template: str | None, *messages: dict[str, str], **of: Any
) -> list[str]:
    """Renders a conversation twice, with a renderer each, as a run has several."""
    chat_renderer._warn_untold.cache_clear()
    caplog.clear()
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    tokenizer.chat_template = template or tokenizer.chat_template
    for renderer in [chat_renderer.ChatRenderer(tokenizer) for _ in range(2)]:
        for _ in range(2):
            renderer.render(messages, **of)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_template_that_hides_the_tools_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings(caplog, PLAIN, ASK, tools=TOOLS)
    assert "does not tell the policy about its tools (look_up, dice)" in told
    assert "use a template that renders `tools`" in told
    system = {"role": "system", "content": "You have look_up."}
    (told,) = warnings(caplog, PLAIN, system, ASK, tools=TOOLS)
    assert "its tools (dice)" in told


def test_nothing_is_told_where_the_policy_knows_its_tools(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, None, ASK, tools=TOOLS) == []  # from the template
    assert warnings(caplog, PLAIN, ASK) == []
    system = {"role": "system", "content": "Call dice() or look_up(NAME)."}
    assert warnings(caplog, PLAIN, system, ASK, tools=TOOLS) == []
