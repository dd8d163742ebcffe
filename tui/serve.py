"""`prl-tui --serve`: the same screens in a browser on this machine, by textual-serve.

textual-serve starts one `prl-tui` for each browser window, without authentication. So this listens on the loopback
address only, is read-only by default, and answers only its own pages: another site that is open in the same browser can
reach a loopback port too, and must not control the workspace.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.web_runner import GracefulExit
from textual_serve.server import Server

from prime_rl.utils.runtime import http_refusal

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The page asks another company's server for a font. It has a fallback, and a workspace may have no way out.
_FOREIGN_LINK = r"<link\b[^>]*\bhref=\"https?://(?!{authority}/)[^>]*>"


def child_command(output_dir: Path, *, allow_actions: bool) -> str:
    """The command that textual-serve hands to a shell for each browser window."""
    argv = [sys.executable, "-m", "tui", *([] if allow_actions else ["--read-only"]), "--", str(output_dir)]
    return f"exec {shlex.join(argv)}"


class WorkspaceServer(Server):
    """Serves one workspace on a socket that is bound already."""

    def __init__(self, output_dir: Path, sock: socket.socket, *, allow_actions: bool) -> None:
        host, port = sock.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        command = child_command(output_dir, allow_actions=allow_actions)
        super().__init__(command, host=host, port=port, title="prl", public_url=f"http://{name}:{port}")
        self._sock = sock
        self._mode = "acting" if allow_actions else "read-only"

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._refuse_strangers)
        return app

    @web.middleware
    async def _refuse_strangers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Only this address by its own name, and only pages that came from it."""
        if refused := http_refusal(request.method, request.headers.items()):
            return web.Response(status=refused[0], text=refused[1])
        return await handler(request)

    async def handle_index(self, request: web.Request) -> web.Response:
        """Return textual-serve's page with the host that the browser asked for, without `<link>`s to other sites."""
        response: web.Response = await super().handle_index(request)  # type: ignore[assignment]
        authority = request.headers["Host"]
        # By the host that the browser asked for; otherwise it blocks its own files as another site's.
        page = (response.text or "").replace(self.public_url[len("http://") :], authority)
        response.text = re.sub(_FOREIGN_LINK.format(authority=re.escape(authority)), "", page, flags=re.DOTALL)
        return response

    async def on_startup(self, app: web.Application) -> None:
        """Print the address and whether it acts, in place of what textual-serve prints."""
        print(f"prl-tui: {self.public_url} ({self._mode}); press Ctrl-C to stop", flush=True)

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM; each window of a browser starts a process of `prl-tui`."""
        loop = asyncio.new_event_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _end)
        web.run_app(self._make_app(), sock=self._sock, handle_signals=False, loop=loop, print=None)


def _end() -> None:
    raise GracefulExit


def serve(output_dir: Path, *, host: str, port: int, allow_actions: bool) -> int:
    """0 after a signal, 1 when the port is not available."""
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1" if host == "localhost" else host, port))
        except OSError as error:
            print(
                f"prl-tui: cannot listen on port {port} ({error.strerror}): choose another with --port", file=sys.stderr
            )
            return 1
        sock.listen()
        WorkspaceServer(output_dir, sock, allow_actions=allow_actions).run()
    return 0
