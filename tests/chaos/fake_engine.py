"""A real engine process around a fake executor.

    python fake_engine.py [OPTIONS] DESCRIPTOR

A prompt that begins with POISON crashes the process in the step that computes it. A prompt that
begins with STALL makes that step endless. With --scripted the fake model answers in words, and
these prompts are ordinary ones. The file is run by its path, so it puts the repository on the
import path itself.

An adapter whose path ends with CRASH_ADAPTER crashes the process while it is read.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bloomery.config import EngineConfig, EnginePlan, resolve_plan
from bloomery.engine.engine_process import run_engine_process
from bloomery.engine.executor import LoadProgress
from bloomery.errors import CheckpointError
from bloomery.messages import (
    AdapterInfo,
    EngineCapacity,
    SampledTokens,
    ScheduledRequest,
    ScheduledStep,
    StepOutput,
)
from tests.engine.fake_executor import VOCAB, FakeExecutor

POISON = (6, 6, 6, 6, 6)
STALL = (5, 5, 5, 5, 5)
CRASH_ADAPTER = "/crash"
BLOCKS = 512
MAX_MODEL_LEN = 2048
LOAD_REPORTS = 5  # progress reports while the engine loads


class FaultyExecutor:
    """A fake executor with a step time, a load time and prompts that kill it."""

    def __init__(self, arguments: argparse.Namespace, report: LoadProgress):
        self.arguments = arguments
        self.report = report
        self.fake: FakeExecutor = FakeExecutor(0)
        self.next_step_time = 0.0

    def start(self, plan: object) -> EngineCapacity:
        assert isinstance(plan, EnginePlan)
        if self.arguments.refuse:
            raise CheckpointError("model.safetensors: 12 bytes are missing")
        for part in range(LOAD_REPORTS):
            self.report("weights", part, LOAD_REPORTS)
            time.sleep(self.arguments.load / LOAD_REPORTS)
        vocab = self.arguments.vocab
        if self.arguments.scripted:
            from tests.server.scripted_engine import ScriptedExecutor, load_test_tokenizer

            tokenizer = load_test_tokenizer()
            self.fake = ScriptedExecutor(plan.block_size, tokenizer)
            vocab = tokenizer.vocab_size
        elif self.arguments.instant:
            self.fake = InstantExecutor(plan.block_size)
        else:
            self.fake = FakeExecutor(plan.block_size)
        return EngineCapacity(
            self.arguments.blocks,
            plan.block_size,
            plan.max_num_seqs,
            plan.max_num_batched_tokens,
            self.arguments.context,
            vocab,
        )

    def submit(self, step: ScheduledStep) -> Future[StepOutput]:
        delay = self.arguments.delay
        if delay:
            self._wait_for_next_step(delay)
        if not self.arguments.scripted:
            for scheduled in step.requests:
                self.apply_fault(scheduled)
        return self.fake.submit(step)

    def _wait_for_next_step(self, delay: float) -> None:
        """Sleep until `delay` seconds after the last step began.

        The time that the engine itself spends between two steps does not add to the delay.
        """
        time.sleep(max(self.next_step_time - time.monotonic(), 0.0))
        earliest_start = time.monotonic() - delay
        self.next_step_time = max(self.next_step_time, earliest_start) + delay

    def apply_fault(self, scheduled: ScheduledRequest) -> None:
        """Crash or hang if the request is new and its prompt says so."""
        if scheduled.new_request is None:
            return
        tokens = scheduled.new_request.tokens
        if tokens[:5] == POISON:
            os.kill(os.getpid(), signal.SIGSEGV)
        while tokens[:5] == STALL:
            time.sleep(1)

    def load_adapter(self, name: str, path: str) -> Future[AdapterInfo]:
        if path.endswith(CRASH_ADAPTER):
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.fake.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        self.fake.unload_adapter(name)

    def close(self) -> None:
        self.fake.close()


class InstantExecutor(FakeExecutor):
    """Returns tokens at no cost, so only the engine and its messages cost time."""

    def begin(self, step: ScheduledStep) -> None: ...

    def find_readers(self, step: ScheduledStep) -> set[tuple[int, int]]:
        return set()

    def sample(self, request: ScheduledRequest, mask: int = 0) -> SampledTokens:
        length = request.start + request.count
        return SampledTokens(request.sequence, (length % VOCAB,))


def load_test_vocabulary(plan: EnginePlan) -> object:
    from bloomery.structured.matcher import TokenVocabulary
    from tests.server.scripted_engine import load_test_tokenizer

    return TokenVocabulary(load_test_tokenizer())


def fake_engine_command(*options: str) -> tuple[str, ...]:
    """Return the command of this engine, without the descriptor that its client appends."""
    return (sys.executable, __file__, *options)


def fake_plan(**changes: object) -> EnginePlan:
    """Return a plan for a fake executor: small blocks, two steps in flight."""
    config = EngineConfig(
        load_format="dummy", threads=1, block_size=4, max_num_seqs=16, max_num_batched_tokens=64
    )
    plan = resolve_plan(
        config,
        name="fake",
        path="",
        kind="folder",
        dtype="float32",
        device="cpu",
        context=MAX_MODEL_LEN,
    )
    return replace(plan, **{"steps_in_flight": 2, **changes})  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per step")
    parser.add_argument("--load", type=float, default=0.0, help="seconds to load")
    parser.add_argument("--refuse", action="store_true", help="fail to load")
    parser.add_argument("--instant", action="store_true", help="steps cost nothing")
    parser.add_argument("--scripted", action="store_true", help="answer in words")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--context", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("descriptor", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    return run_engine_process(
        arguments.descriptor,
        lambda plan, report: FaultyExecutor(arguments, report),
        load_test_vocabulary if arguments.scripted else None,
    )


if __name__ == "__main__":
    sys.exit(main())
