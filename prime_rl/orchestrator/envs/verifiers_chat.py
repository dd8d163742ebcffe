"""The harness that plays a role of verifiers: a chat with tools, inside the process instead of a separate program.

verifiers asks of a harness only that every call of the model goes through its endpoint. Tools are the MCP servers that
verifiers has started; a call that cannot be made is answered with the reason, as the model can learn from that.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No fields."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """Turns until the model calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """One segment of the conversation. A turn that is refused (a limit, a stop) ends it with exit code 1."""
        messages = self._opening(data)
        config = {"mcpServers": {n: {"url": u, "timeout": self.config.tool_timeout} for n, u in mcp_urls.items()}}
        async with contextlib.AsyncExitStack() as stack:
            # Plain HTTP on the loopback: no certificates need to be read.
            headers = {"Authorization": f"Bearer {secret}"}
            http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=None, verify=False))
            tools, dispatch, servers = await connect_mcp(config, stack)
            body: dict[str, Any] = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while True:
                response = await http.post(f"{endpoint}/chat/completions", json=body)
                if response.status_code != 200:
                    return vf.ProgramResult(1, "", response.text[-2000:])
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(0, message.get("content") or "", "")
                for call in calls:
                    result = await _result(call["function"], dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]


async def _result(function: dict[str, str], dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    """A tool's output, or why it was not called."""
    name = function["name"]
    if name not in dispatch:
        return f"error: unknown tool {name!r}; tools: {', '.join(sorted(dispatch))}"
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        return f"error: the arguments of {name!r} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments of {name!r} are not an object"
    return await call_mcp(servers, dispatch, name, arguments)
