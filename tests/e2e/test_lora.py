"""LoRA adapters offline, with real engines: tokens equal PEFT's, through crashes and evictions."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bloomery import LLM, AsyncLLM, LoRARequest, SamplingParams
from bloomery.errors import InvalidRequest, RequestFailed
from tests.parity.adapters import RANK, greedy_tokens, save_adapter
from tests.parity.cases import CASES, make_checkpoint
from tests.waiting import wait_until_async

NUM_ADAPTERS = 5
COUNT = 12
PROMPT = [5, 9, 3, 17, 8, 11, 30, 4, 21]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": RANK,
    "threads": 1,
    "kv_cache_gib": 0.01,
    "block_size": 4,
    "max_num_seqs": 8,
    "cpu_kernels": False,
}


class AdaptedModel(NamedTuple):
    """A tiny checkpoint, its adapters, and the greedy tokens of each; first those of the base."""

    folder: Path
    adapters: list[LoRARequest]
    expected: dict[LoRARequest | None, list[int]]


@pytest.fixture(scope="module")
def adapted_model(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder = tmp_path_factory.mktemp("lora")
    model = make_checkpoint(next(case for case in CASES if case.name == "llama"), folder / "model")
    expected: dict[LoRARequest | None, list[int]] = {None: greedy_tokens(model, PROMPT, COUNT)}
    adapters = []
    for number in range(NUM_ADAPTERS):
        path = folder / f"adapter{number}"
        adapted = save_adapter(model, path, seed=number)
        adapter = LoRARequest(f"adapter{number}", number + 1, str(path))
        adapters.append(adapter)
        expected[adapter] = greedy_tokens(adapted, PROMPT, COUNT)
        model = adapted.unload()
    return AdaptedModel(folder / "model", adapters, expected)


def greedy(count: int = COUNT) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def llm(adapted_model: AdaptedModel) -> Iterator[LLM]:
    llm = LLM(str(adapted_model.folder), **OPTIONS)
    yield llm
    llm.close()


def test_every_prompt_of_a_batch_can_have_its_own_adapter(
    llm: LLM, adapted_model: AdaptedModel
) -> None:
    """Five adapters share two device slots and three places in host memory."""
    choices = [*adapted_model.adapters, None, *reversed(adapted_model.adapters), None]
    outputs = llm.generate([PROMPT] * len(choices), greedy(), False, choices)
    for output, adapter in zip(outputs, choices, strict=True):
        assert output.outputs[0].token_ids == adapted_model.expected[adapter]
    one = adapted_model.adapters[2]
    outputs = llm.generate([PROMPT, PROMPT], greedy(), use_tqdm=False, lora_request=one)
    assert [output.outputs[0].token_ids for output in outputs] == [adapted_model.expected[one]] * 2


def test_embeddings_depend_on_the_adapter(llm: LLM, adapted_model: AdaptedModel) -> None:
    first, base = llm.embed([PROMPT, PROMPT], lora_request=[adapted_model.adapters[0], None])
    assert first != base


def test_a_bad_adapter_fails_only_its_own_prompts(
    llm: LLM, adapted_model: AdaptedModel, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    bad = LoRARequest("bad", 99, str(tmp_path))
    good = adapted_model.adapters[0]
    outputs = llm.generate([PROMPT, PROMPT], greedy(), False, [bad, good])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == adapted_model.expected[good]
    with pytest.raises(RequestFailed, match="cannot use the LoRA adapter 'bad'"):
        llm.embed([PROMPT], lora_request=bad)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(("", 1, "x"), "lora_name"), (("a", 0, "x"), "lora_int_id"), (("a", 1, ""), "lora_path")],
)
def test_wrong_lora_requests_are_refused(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        LoRARequest(*arguments)
    assert refusal.value.field == field


def test_an_engine_without_adapters_names_the_option(adapted_model: AdaptedModel) -> None:
    llm = LLM(str(adapted_model.folder), **{**OPTIONS, "enable_lora": False})
    try:
        with pytest.raises(InvalidRequest, match="enable_lora=True"):
            llm.generate([PROMPT], greedy(), False, adapted_model.adapters[0])
        with pytest.raises(InvalidRequest, match="2 prompts but 1 lora_request"):
            llm.generate([PROMPT, PROMPT], greedy(), False, [None])
    finally:
        llm.close()


# ---- an engine in a process of its own -----------------------------------------------------------


async def stream_tokens(engine: AsyncLLM, adapter: LoRARequest | None, count: int) -> list[int]:
    tokens: list[int] = []
    async for delta in engine.stream(PROMPT, greedy(count), adapter):
        tokens += delta.token_ids
    return tokens


@pytest.fixture(scope="module")
def engine(adapted_model: AdaptedModel) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(str(adapted_model.folder), **OPTIONS)
    yield engine
    engine.close()


def test_streams_with_adapters_survive_their_engine(
    engine: AsyncLLM, adapted_model: AdaptedModel
) -> None:
    count = 70  # long enough that the engine dies amid all streams
    choices = [*adapted_model.adapters[:3], None]

    async def run() -> list[list[int]]:
        undisturbed = await asyncio.gather(*(stream_tokens(engine, a, count) for a in choices))
        restarts = engine.client.num_restarts
        streams = [asyncio.create_task(stream_tokens(engine, a, count)) for a in choices]
        before = engine.stats.tokens_out
        while engine.stats.tokens_out < before + 30:
            await asyncio.sleep(0.001)
        pid = engine.client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        disturbed = await asyncio.gather(*streams)
        assert engine.client.num_restarts == restarts + 1
        assert disturbed == undisturbed
        return disturbed

    for tokens, adapter in zip(asyncio.run(run()), choices, strict=True):
        assert tokens[:COUNT] == adapted_model.expected[adapter]


def test_a_hundred_adapters_are_loaded_while_streams_run(
    engine: AsyncLLM, adapted_model: AdaptedModel, tmp_path: Path
) -> None:
    paths = [adapter.lora_path for adapter in adapted_model.adapters]

    async def run() -> None:
        count = 90
        choices = [*adapted_model.adapters[:2], None]
        expected = await asyncio.gather(*(stream_tokens(engine, a, count) for a in choices))
        streams = [asyncio.create_task(stream_tokens(engine, a, count)) for a in choices]
        file_loads = engine.stats.adapter_file_loads
        loads = [
            asyncio.run_coroutine_threadsafe(
                engine.client.load_adapter(f"more{number}", paths[number % len(paths)]),
                engine.client_loop,
            )
            for number in range(100)
        ]
        (tmp_path / "adapter_config.json").write_text("{}")
        bad = asyncio.run_coroutine_threadsafe(
            engine.client.load_adapter("bad", str(tmp_path)), engine.client_loop
        )
        infos = await asyncio.gather(*map(asyncio.wrap_future, loads))
        assert {info.rank for info in infos} == {RANK}
        with pytest.raises(InvalidRequest, match="bad"):
            await asyncio.wrap_future(bad)
        assert await asyncio.gather(*streams) == expected
        # An idle engine reports its statistics twice a second.
        assert await wait_until_async(lambda: engine.stats.adapter_file_loads >= file_loads + 100)
        assert engine.stats.adapters_in_memory <= 3

    asyncio.run(run())
