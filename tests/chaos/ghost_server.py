"""The whole server as two processes, API and engine, around a ghost: `python ghost_server.py PORT [OPTIONS]`.

All is as `bloomery serve` has it but the model, so that loads and faults can be tried on two cores in seconds.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import uvloop

from bloomery.config import ServerConfig
from bloomery.engine.client import EngineClient, Patience
from bloomery.logs import write
from bloomery.serve import run
from bloomery.server.app import create_app
from bloomery.server.limits import Limits
from bloomery.server.service import Settings
from tests.chaos.ghost_engine import command, plan
from tests.server.speaker import words


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument(
        "--engine", default="--speaker", help="options of ghost_engine.py, in one word"
    )
    parser.add_argument("--limits")
    parser.add_argument("--api-key")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--policy", default="fair")
    parser.add_argument("--drain", type=float, default=30.0)
    parser.add_argument("--silence", type=float, default=300.0)
    arguments = parser.parse_args()
    write("json")
    wishes = ServerConfig(
        port=arguments.port,
        api_key=arguments.api_key,
        limits=arguments.limits,
        drain_seconds=arguments.drain,
    )
    limits = Limits.of(wishes.limits)
    settings = Settings(
        model="speaker", aliases=("org/speaker-1",), keys=wishes.keys, limits=limits, warm=True
    )
    made = plan(
        max_num_seqs=arguments.sequences,
        max_num_batched_tokens=arguments.tokens,
        block_size=8,
        policy=arguments.policy,
    )
    patience = Patience(
        silence=arguments.silence,
        first=arguments.silence,
        queue=limits.queue_seconds,
        restarts=limits.restarts,
    )
    tokenizer = words()
    options = (*arguments.engine.split(), "--vocab", str(tokenizer.vocab_size))
    client = EngineClient(made, command(*options), patience)
    make_app = partial(create_app, client, tokenizer, settings)
    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(
        run(client, make_app, wishes, limits)
    )


if __name__ == "__main__":
    sys.exit(main())
