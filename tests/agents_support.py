"""Programs as environments in tests: one whose program is Python code, and an endpoint for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prime_rl.contract.calls import Reward
from prime_rl.orchestrator.envs.agent_env import (
    AgentEnvironment,
)
from prime_rl.orchestrator.envs.base import Outcome
from prime_rl.orchestrator.envs.child import Posted, RemotePolicy

CHAT = {
    "choices": [{"message": {"content": 'It is {"score": 7}.'}}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2},
}
# Asks once with urllib, as any client does.
ASKS = """
import json, os, sys, urllib.request
def post(url, body):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
example = json.load(sys.stdin)
call = {"model": os.environ["PRL_MODEL"], "messages": example["messages"]}
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", call)
"""


class Server:
    """An endpoint on the loopback that answers one text and keeps what it was sent; rewards go to `posted`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        self.status = 200
        self.answers: list[Any] = []
        self.posted: Posted | None = None
        loop, outer = asyncio.get_running_loop(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((self.path, self.headers.get("Authorization", ""), body))
                if self.path.endswith("/reward") and (posted := outer.posted):
                    reward = Reward(body.get("reward"), body.get("rewards", {}), error=body.get("error", ""))
                    loop.call_soon_threadsafe(posted.take, reward)
                data = json.dumps(outer.answers.pop(0) if outer.answers else CHAT).encode()
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Policy(RemotePolicy):
    """The policy of one rollout as its process has it, with an endpoint that a test serves."""

    def __init__(self, url: str = "http://127.0.0.1:9") -> None:
        super().__init__(1, lambda report: None, (f"{url}/s/run_a.Ab1/v1", "secret"))


def write_rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"q{at}", "answer": str(at), "hint": "h"}) + "\n" for at in range(12))
    )
    return path


@contextlib.asynccontextmanager
async def agent(rows: Path, program: str = "", **args: Any) -> AsyncIterator[AgentEnvironment]:
    """An environment whose program is Python code."""
    defaults = {} if "tasks" in args else {"path": str(rows)}
    env = AgentEnvironment({"command": [sys.executable, "-c", program], **defaults, **args}, seed=1)
    try:
        yield env
    finally:
        await env.close()
        assert not env._root.exists()


async def once(rows: Path, program: str, policy: Policy | None = None, example: int = 0, **args: Any) -> Outcome:
    async with agent(rows, program, **args) as env:
        return await env.rollout(env.examples("train")[example], policy or Policy())


def writes(text: str) -> str:
    return f"open('reward.json', 'w').write({text!r})"
