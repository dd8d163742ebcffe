"""The gateway of a workspace: `python -m prime_rl.gateway.server @ gateway.toml`. Reads top to bottom.

Agents speak HTTP with it, orchestrators dial its link, on a port of its own. All that it knows it is told again by
those: killed and started again, sessions go on. Exit codes: 0 stopped, 1 failed, 2 wrong config.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
from collections.abc import Callable, Sequence

from prime_rl.configs.base import ConfigError, parse_argv
from prime_rl.configs.gateway import GatewayConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import GatewayStatus, StatusWriter, read_status
from prime_rl.gateway.keys import workspace_secret
from prime_rl.gateway.link import LinkServer
from prime_rl.utils.process import StopFlag
from prime_rl.utils.runtime import (
    StartError,
    TokenRate,
    bind,
    bound_socket,
    complain,
    is_loopback,
    origin,
    setup_logger,
)
from prime_rl.utils.secrets import SecretError, close_handed, seal

logger = logging.getLogger("gateway")

POLL_S = 0.25
REPORT_EVERY = 4  # turns
# Calls a minute are counted over so long.
WINDOW_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 stopped, 1 failed, 2 wrong config."""
    stop = StopFlag().install()
    try:
        config = parse_argv(GatewayConfig, argv)
        setup_logger("gateway", config.log.level)
        close_handed()
        seal()
        output = OutputDir(config.output_dir)
        before = read_status(output.gateway_status, GatewayStatus)
        sock = bind_again(config.host, config.port, before.address if before else "")
        links = bind_again(config.host, 0, before.link if before else "")
        secret = workspace_secret(output)
    except (ConfigError, SecretError) as error:
        complain("gateway", error)
        return 2
    except (StartError, OSError) as error:
        complain("gateway", error)
        return 1
    address, link = (origin(config.host, each.getsockname()[1]).removeprefix("http://") for each in (sock, links))
    url = config.public_url or f"http://{address}"
    if not (is_loopback(config.host) or config.public_url):
        logger.warning("agents are told %s, and keys cross the network as they are: see gateway.public_url", url)
    logger.info("serving agents at %s, which are told %s, and orchestrators at %s", address, url, link)
    told = GatewayStatus(base_url=url.rstrip("/"), address=address, link=link)
    status = StatusWriter(output.gateway_status, told)
    try:
        with sock, links:
            asyncio.run(serve(sock, links, secret, told.base_url, status, stop))
    finally:
        status.close(state="stopped", waiting_on=None, num_runs=0, num_sessions=0, calls_per_min=0.0)
    logger.info("stopped%s", f" by {stop.signal_name}" if stop.signal_name else "")
    return 0


def bind_again(host: str, port: int, before: str) -> socket.socket:
    """A socket bound to `port`; for 0 to that of the HOST:PORT `before`, if it is free. Raises StartError."""
    old = before.rpartition(":")[2]
    if port == 0 and old.isdecimal():
        with contextlib.suppress(OSError, OverflowError):
            return bound_socket(host, int(old))
    return bind(host, port)


async def serve(
    sock: socket.socket, links: socket.socket, secret: bytes, url: str, status: StatusWriter, stop: Callable[[], bool]
) -> None:
    """Serve until a stop is asked for. `url` is what clients are told."""
    from prime_rl.gateway.app import build_app  # after every check
    from prime_rl.gateway.serve import serving

    server, rate = LinkServer(secret), TokenRate(WINDOW_S)
    async with server.listening(links), serving(build_app(server, secret, url=url), sock):
        for turn in itertools.count():
            if stop():
                break
            status.turn()
            if turn % REPORT_EVERY == 0:
                # A write waits for the disk: not in the event loop.
                await asyncio.to_thread(
                    status.update,
                    state="running",
                    waiting_on=None if server.num_runs else "the orchestrator of a run to connect",
                    num_runs=server.num_runs,
                    num_sessions=server.num_sessions,
                    calls_per_min=round(60 * rate.per_s(server.num_calls), 1),
                )
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(status.update, state="stopping", waiting_on="the answers under way")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
