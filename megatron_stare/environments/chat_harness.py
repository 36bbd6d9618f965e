"""Lets an agent of the library `verifiers` converse and call tools inside the driver's process. The
function `register` registers this module under the name in the constant `ID`, and the library then
imports the module by this name.

The library's own harness for conversations starts a new Python process after every message of the
user. The start of a Python process takes about one second of CPU time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.compaction import truncate_tool_output
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

ID = "megatron_stare_chat"  # the library takes only top-level modules
__all__ = ["ChatHarness"]


def register() -> None:
    """Adds this module to `sys.modules` under the name in the constant `ID`. The library
    `verifiers` imports the module by the name in `ID`."""
    sys.modules[ID] = sys.modules[__name__]


class ChatHarnessConfig(HarnessConfig):
    """Settings of ChatHarness. ChatHarness has the settings that the library `verifiers` defines
    for every harness, and no further settings."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Lets the policy write a turn, makes the tool calls in this turn, and repeats both until the
    policy writes a turn without a call."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> ProgramResult:
        """See `verifiers.v1.harness.Harness`. If the server refuses to sample a turn, the
        conversation ends with exit code 1. The server refuses to sample a turn for one of two
        reasons: an error has occurred, or a limit has been reached. The library records the reason
        in its trace of the conversation."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    headers={"Authorization": f"Bearer {secret}"},
                    timeout=httpx.Timeout(None, connect=5.0),
                )
            )
            tools, of, connected = await connect_mcp({"mcpServers": servers}, stack)
            asked = {"model": ctx.model, "messages": messages}
            if tools:
                asked["tools"] = tools
            while True:
                said = await client.post(f"{endpoint}/chat/completions", json=asked)
                if said.is_error:
                    return ProgramResult(1, "", said.text)
                message = said.json()["choices"][0]["message"]
                messages.append({key: each for key, each in message.items() if each is not None})
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": call["id"],
                            "name": call["function"]["name"],
                            "content": await _answered(call["function"], of, connected),
                        }
                    )


async def _answered(
    function: Mapping[str, str], of: dict[str, tuple[str, str]], connected: dict[str, Any]
) -> Any:
    """Returns the tool's answer. If the called tool does not exist or the arguments are malformed,
    the answer is a text that describes the error."""
    if function["name"] not in of:
        return f"error: there is no tool {function['name']!r}; there are {', '.join(of)}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are not an object"
    answer = await call_mcp(connected, of, function["name"], arguments)
    return truncate_tool_output(answer) if isinstance(answer, str) else answer
