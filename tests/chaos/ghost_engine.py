"""A real engine process around a ghost: `python ghost_engine.py [OPTIONS] DESCRIPTOR`.

A prompt that begins with POISON kills it in the step that computes it; one that begins with STALL makes that step
endless; not so where the ghost speaks in words. Run by path, so it finds the tests by itself.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bloomery.config import Config, Plan, resolve
from bloomery.engine.process import Report, serve
from bloomery.errors import CheckpointError
from bloomery.messages import (
    EngineCapacity,
    ScheduledRequest,
    SampledTokens,
    ScheduledStep,
    StepOutput,
)
from tests.ghost.ghost import VOCAB, Ghost

POISON = (6, 6, 6, 6, 6)
STALL = (5, 5, 5, 5, 5)
BLOCKS = 512
MAX_LENGTH = 2048


class Haunted:
    """A ghost with a pace, a load time and weaknesses."""

    def __init__(self, arguments: argparse.Namespace, report: Report):
        self.arguments = arguments
        self.report = report
        self.ghost: Ghost = Ghost(0)
        self.due = 0.0  # the next step

    def start(self, plan: object) -> EngineCapacity:
        assert isinstance(plan, Plan)
        if self.arguments.refuse:
            raise CheckpointError("model.safetensors: 12 bytes are missing")
        for part in range(5):
            self.report("ectoplasm", part, 5)
            time.sleep(self.arguments.load / 5)
        vocab = self.arguments.vocab
        if self.arguments.speaker:
            from tests.server.speaker import Speaker, words

            tokenizer = words()
            self.ghost = Speaker(plan.block_size, tokenizer)
            vocab = tokenizer.vocab_size
        else:
            self.ghost = (Quick if self.arguments.quick else Ghost)(plan.block_size)
        blocks = self.arguments.blocks
        length = self.arguments.context
        return EngineCapacity(
            blocks, plan.block_size, plan.max_num_seqs, plan.max_num_batched_tokens, length, vocab
        )

    def submit(self, step: ScheduledStep) -> Future[StepOutput]:
        if (
            self.arguments.delay
        ):  # from step to step, so that what the engine itself does in between is no part of it
            time.sleep(max(self.due - time.monotonic(), 0.0))
            self.due = max(self.due, time.monotonic() - self.arguments.delay) + self.arguments.delay
        for item in step.requests:
            tokens = (
                item.new_request.tokens
                if item.new_request is not None and not self.arguments.speaker
                else ()
            )
            if tokens[:5] == POISON:
                os.kill(os.getpid(), signal.SIGSEGV)
            while tokens[:5] == STALL:
                time.sleep(1)
        return self.ghost.submit(step)

    def spare(self) -> int:
        return self.ghost.spare()

    def close(self) -> None:
        self.ghost.close()


class Quick(Ghost):
    """Tokens for nothing: what remains is the cost of the engine and of the way to it."""

    def write(self, item: ScheduledRequest) -> None: ...

    def sample(self, item: ScheduledRequest) -> SampledTokens:
        return SampledTokens(item.sequence, ((item.start + item.count) % VOCAB,))

    def run(self, step: ScheduledStep) -> StepOutput:
        return StepOutput(tuple(self.sample(item) for item in step.requests if item.samples))


def command(*options: str) -> tuple[str, ...]:
    return (sys.executable, __file__, *options)


def plan(**changes: object) -> Plan:
    """A plan as a ghost needs it: small blocks, two steps in flight."""
    config = Config(
        load_format="dummy", threads=1, block_size=4, max_num_seqs=16, max_num_batched_tokens=64
    )
    made = resolve(
        config,
        name="ghost",
        path="",
        kind="folder",
        dtype="float32",
        device="cpu",
        context=MAX_LENGTH,
    )
    return replace(made, **{"depth": 2, **changes})  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--speaker", action="store_true")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--context", type=int, default=MAX_LENGTH)
    parser.add_argument("descriptor", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    return serve(
        socket.socket(fileno=arguments.descriptor), lambda plan, report: Haunted(arguments, report)
    )


if __name__ == "__main__":
    sys.exit(main())
