"""Puts the embedded engine together and serves it. Called by `prime_rl.inference.server`."""

from __future__ import annotations

import asyncio
import logging

import torch

from prime_rl.inference.checks import StartError
from prime_rl.inference.context import ServerContext
from prime_rl.inference.embedded.api import Api
from prime_rl.inference.embedded.engine import Engine
from prime_rl.inference.embedded.model import ModelError, Served, load_model
from prime_rl.inference.embedded.text import Text
from prime_rl.inference.front import build_app
from prime_rl.inference.lengths import Room
from prime_rl.inference.limits import max_model_len
from prime_rl.inference.reporting import EngineReporter
from prime_rl.inference.serve import EngineFailed, serve

logger = logging.getLogger(__name__)


def run(context: ServerContext) -> None:
    """Load the model, serve, clean up. Raises StartError."""
    config = context.config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    served, text = _load(context)
    try:
        asyncio.run(_serve(context, served, text))
    except EngineFailed as error:
        raise StartError(str(error)) from error


async def _serve(context: ServerContext, served: Served, text: Text) -> None:
    config = context.config
    room = Room.of(max_model_len(config), text.vocabulary())
    engine = Engine(
        served,
        text.decode,
        max_num_seqs=config.num_seqs_on(served.device.type),
        max_model_len=room.max_model_len,
        raw_logprobs=config.logprobs_mode == "raw_logprobs",
    )
    app = build_app(Api(engine, text, config), config, room=room, api_key=context.api_key)
    running = asyncio.create_task(engine.run())
    try:
        await serve(
            app,
            context.sock,
            stop=context.stop,
            engine_alive=lambda: engine.alive,
            status=context.status,
            reporter=EngineReporter(context.status, engine.stats),
            abort=engine.stop,
            tick=app.state.tick,
        )
    finally:
        engine.stop()
        await running


def _load(context: ServerContext) -> tuple[Served, Text]:
    config = context.config
    try:
        text = Text(config.model.name)
        served = load_model(config)
    except (OSError, ValueError) as error:
        hint = "" if isinstance(error, ModelError) else f"model.name: {config.model.name} cannot be loaded: "
        raise StartError(f"{hint}{error}") from error
    logger.info("loaded %s: capacity for %d adapters", config.model.name, config.max_loras if served.layers else 0)
    return served, text
