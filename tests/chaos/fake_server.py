"""A complete server, API process and engine process, around a fake model.

    python fake_server.py PORT [OPTIONS]

Only the model differs from `bloomery serve`, so loads and faults can be tested on two cores in
seconds. The file is run by its path, so it puts the repository on the import path itself.
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
from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.logs import configure_logging
from bloomery.serve import run_server
from bloomery.serve_main import open_listeners
from bloomery.server.app import create_app
from bloomery.server.limits import ServerLimits
from bloomery.server.service import ServerSettings
from tests.chaos.fake_engine import fake_engine_command, fake_plan
from tests.server.scripted_engine import load_test_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument(
        "--engine", default="--scripted", help="options of fake_engine.py, as one argument"
    )
    parser.add_argument("--limits")
    parser.add_argument("--api-key")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--policy", default="fair")
    parser.add_argument("--drain-seconds", type=float, default=30.0)
    parser.add_argument("--step-timeout", type=float, default=300.0, help="seconds until a hang")
    arguments = parser.parse_args()
    configure_logging("json")
    server_config = ServerConfig(
        port=arguments.port,
        api_key=arguments.api_key,
        limits=arguments.limits,
        drain_seconds=arguments.drain_seconds,
    )
    limits = ServerLimits.parse(server_config.limits)
    settings = ServerSettings(
        model="speaker",
        aliases=("org/speaker-1",),
        keys=server_config.api_keys,
        limits=limits,
        warm=True,
    )
    plan = fake_plan(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        block_size=8,
        policy=arguments.policy,
    )
    timeouts = EngineTimeouts(
        step_seconds=arguments.step_timeout,
        first_step_seconds=arguments.step_timeout,
        queue_seconds=limits.queue_seconds,
        max_restarts=limits.restarts,
    )
    listeners = open_listeners(server_config.host, server_config.port)
    tokenizer = load_test_tokenizer()
    options = (*arguments.engine.split(), "--vocab", str(tokenizer.vocab_size))
    client = EngineClient(plan, fake_engine_command(*options), timeouts)
    make_app = partial(create_app, client, tokenizer, settings)
    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(
        run_server(lambda: client, lambda _: make_app, server_config, listeners, limits)
    )


if __name__ == "__main__":
    sys.exit(main())
