"""AsyncLLM with the embedded model: streams, aborts, and an engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomery import AsyncLLM, SamplingParams
from bloomery.errors import BloomeryError, InvalidRequest, PromptTooLong, RequestFailed
from tests.waiting import WAIT_SECONDS, wait_until, wait_until_async

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
OPTIONS: dict[str, Any] = {
    "cpu_kernels": False,
    "threads": 1,
    "kv_cache_gib": 0.2,
    "max_model_len": 1024,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(None, **OPTIONS)
    yield engine
    engine.close()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


async def stream_ids(engine: AsyncLLM, prompt: Any, params: SamplingParams) -> list[int]:
    token_ids: list[int] = []
    async for delta in engine.stream(prompt, params):
        token_ids += delta.token_ids
    return token_ids


async def wait_idle(engine: AsyncLLM) -> bool:
    """Wait until the engine process reports that it has no request and no used KV block."""
    return await wait_until_async(lambda: not engine.stats.running and not engine.stats.kv_used)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_concurrent_streams_get_the_tokens_of_transformers(engine: AsyncLLM) -> None:
    async def leave_early() -> None:
        async for _ in engine.stream("Count:", SamplingParams(max_tokens=400, ignore_eos=True)):
            break

    async def main() -> list[list[int]]:
        streams = [stream_ids(engine, entry["prompt"], greedy(16)) for entry in GOLDEN[:4]]
        outputs = await asyncio.gather(*streams, leave_early())
        with pytest.raises(PromptTooLong):
            await stream_ids(engine, "word " * 2000, greedy(16))
        return outputs[:4]

    assert asyncio.run(main()) == [entry["ids"][:16] for entry in GOLDEN[:4]]


def test_leaving_a_stream_aborts_the_request_and_frees_its_kv_blocks(engine: AsyncLLM) -> None:
    async def main() -> None:
        stream = engine.stream("Count to one thousand:", greedy(900))
        async for _ in stream:
            break
        assert await wait_until_async(lambda: engine.stats.running == 1)
        await stream.aclose()
        assert await wait_idle(engine)
        assert engine.stats.tokens_out < 900

    asyncio.run(main())


def test_a_stop_string_ends_the_text_and_the_request(engine: AsyncLLM) -> None:
    prompt = "Paris is the capital of France. The capital of France"
    params = SamplingParams(temperature=0.0, max_tokens=64, stop=["Rome", "is Par"])

    async def main() -> None:
        deltas = [delta async for delta in engine.stream(prompt, params)]
        assert "".join(delta.text for delta in deltas) == " "
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].stop_reason == "is Par"
        assert await wait_idle(engine)

    asyncio.run(main())


def test_token_ids_are_a_prompt_and_several_completions_are_numbered(engine: AsyncLLM) -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)

    async def main() -> dict[int, list[int]]:
        by_index: dict[int, list[int]] = {0: [], 1: []}
        prompt = {"prompt_token_ids": GOLDEN[0]["prompt_ids"]}
        async for delta in engine.stream(prompt, params):
            by_index[delta.index] += delta.token_ids
        return by_index

    first = asyncio.run(main())
    assert [len(token_ids) for token_ids in first.values()] == [6, 6]
    assert first[0] != first[1]
    assert asyncio.run(main()) == first, "the seed decides, in every event loop"


def test_invalid_requests_are_refused_by_field(engine: AsyncLLM) -> None:
    for prompt in ({"nothing": 1}, "", [10**6]):
        with pytest.raises(InvalidRequest) as caught:
            asyncio.run(stream_ids(engine, prompt, greedy(4)))
        assert caught.value.field == "prompt"


def test_the_engine_continues_while_the_caller_blocks_its_event_loop(engine: AsyncLLM) -> None:
    """The caller spins in Python after the first token, and lets nothing else run in its loop.

    The engine process still generates everything meanwhile, as its own statistics show.
    """
    num_tokens = 48
    before = engine.stats.tokens_out

    async def main() -> None:
        token_ids: list[int] = []
        async for delta in engine.stream(GOLDEN[0]["prompt"], greedy(num_tokens)):
            if not token_ids:
                deadline = time.monotonic() + WAIT_SECONDS
                while engine.stats.tokens_out < before + num_tokens:
                    assert time.monotonic() < deadline, "the engine waits for its caller"
            token_ids += delta.token_ids
        assert token_ids == GOLDEN[0]["ids"][:num_tokens]

    asyncio.run(main())


def test_a_stream_survives_a_killed_engine_process(engine: AsyncLLM) -> None:
    entry = GOLDEN[2]
    first_pid = engine.client.pid
    assert first_pid is not None and first_pid != os.getpid()

    async def main() -> None:
        token_ids: list[int] = []
        async for delta in engine.stream(entry["prompt"], greedy(60)):
            token_ids += delta.token_ids
            if len(token_ids) >= 10 and engine.client.epoch == 1:
                os.kill(first_pid, signal.SIGKILL)
                assert await wait_until_async(lambda: engine.client.epoch == 2)
        assert token_ids == entry["ids"][:60], "a gap, a repetition or another text"

    asyncio.run(main())
    assert engine.client.epoch == 2
    assert engine.client.pid not in (None, first_pid)


def test_it_can_be_created_inside_an_event_loop_and_close_ends_the_engine() -> None:
    async def main() -> None:
        engine = AsyncLLM(None, skip_tokenizer_init=True, **OPTIONS)
        assert engine.tokenizer is None
        assert engine.default_params == SamplingParams(max_tokens=None)
        pid = engine.client.pid
        assert pid is not None
        with pytest.raises(InvalidRequest, match="give token ids"):
            await stream_ids(engine, "text", greedy(4))
        prompt = {"prompt_token_ids": GOLDEN[1]["prompt_ids"]}
        assert await stream_ids(engine, prompt, greedy(8)) == GOLDEN[1]["ids"][:8]
        open_stream = engine.stream(prompt, greedy(900))
        await anext(open_stream)
        engine.close()
        engine.close()  # a second call does nothing
        assert not engine.thread.is_alive()
        assert wait_until(lambda: not is_running(pid))
        with pytest.raises(RequestFailed):
            async for _ in open_stream:
                pass
        with pytest.raises(RequestFailed, match="the engine is closed"):
            await stream_ids(engine, prompt, greedy(4))

    asyncio.run(main())


def test_an_engine_that_cannot_load_says_why() -> None:
    options = OPTIONS | {"kv_cache_gib": 1e-6}
    with pytest.raises(BloomeryError, match="max_model_len"):
        AsyncLLM(None, skip_tokenizer_init=True, **options)
