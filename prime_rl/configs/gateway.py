"""Config of the gateway, the endpoint of agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from prime_rl.configs.base import BaseConfig, LogConfig


class GatewayConfig(BaseConfig):
    """`[gateway]` of the system file. Every request needs the key of its session or of its run."""

    enabled: bool = False
    """Start it with the workspace. Else it runs while a run has an environment of agents."""

    output_dir: Path = Path("outputs")
    """The workspace. In a system file its own `output_dir` applies."""

    host: str = "127.0.0.1"
    """Address to listen on, for agents and for orchestrators. From other machines keys can be read on their way: have a
    proxy with TLS before it, and set `public_url`."""

    port: int = Field(0, ge=0, le=65535)
    """Port to listen on. 0: any free one, and the same one after a restart if it still is."""

    public_url: Annotated[str, Field(pattern=r"^https?://[^/\s?#]+(/[^\s?#]*)?$")] | None = None
    """The address that agents are told in place of http://HOST:PORT, for example the name of a proxy."""

    log: LogConfig = LogConfig()
    """Logging."""
