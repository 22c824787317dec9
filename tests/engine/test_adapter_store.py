"""Adapters in host memory: read when they are needed, dropped when others need the place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.engine.adapter_store import AdapterStore, read_adapter_version
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler
from bloomery.errors import InvalidRequest
from bloomery.messages import (
    AdapterRefusal,
    EngineRequest,
    ResolvedSampling,
    TokenOutput,
)
from tests.engine.fake_executor import (
    BAD_ADAPTER,
    FakeExecutor,
    read_version_at_once,
    reference_tokens,
)

PAGE_SIZE = 2


def build_loop(max_loras: int = 2, max_cpu_loras: int = 3, max_num_seqs: int = 8) -> EngineLoop:
    pool = BlockPool(200, PAGE_SIZE)
    scheduler = Scheduler(pool, 32, max_num_seqs, max_loras=max_loras)
    executor = FakeExecutor(PAGE_SIZE)
    ticks = iter(range(10**9))
    loop = EngineLoop(
        scheduler, executor, 2, lambda: 0.01 * next(ticks), max_cpu_loras=max_cpu_loras
    )
    if loop.adapter_store is not None:
        loop.adapter_store.read_version = read_version_at_once
    return loop


def adapter_request(id: str, adapter: str, max_tokens: int = 4, path: str = "") -> EngineRequest:
    return EngineRequest(
        id, (1, 2, 3, 4, 5), ResolvedSampling(), max_tokens, lora=adapter, lora_path=path or adapter
    )


def run(loop: EngineLoop, num_steps: int = 400) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    for _ in range(num_steps):
        if not loop.busy:
            break
        for output in loop.step():
            outputs.setdefault(output.request, []).append(output)
    return outputs


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.ids]


def store_of(loop: EngineLoop) -> AdapterStore:
    assert loop.adapter_store is not None
    return loop.adapter_store


def fake_executor_of(loop: EngineLoop) -> FakeExecutor:
    assert isinstance(loop.executor, FakeExecutor)
    return loop.executor


def test_more_adapters_than_places_take_turns() -> None:
    loop = build_loop()
    requests = [adapter_request(f"{turn}{name}", name) for turn in range(2) for name in "abcdefg"]
    for request in requests:
        loop.add(request)
    outputs = run(loop)
    for request in requests:
        expected = reference_tokens(request)[len(request.prompt) :]
        assert tokens_of(outputs[request.id]) == expected
    loop.step()
    executor = fake_executor_of(loop)
    assert executor.num_reads >= 7
    assert len(executor.host_adapters) == 3
    assert store_of(loop).num_evictions == executor.num_reads - 3


def test_requests_run_while_an_adapter_is_read() -> None:
    loop = build_loop()
    executor = fake_executor_of(loop)
    executor.reads_at_once = False
    loop.add(adapter_request("slow", "a"))
    loop.add(EngineRequest("base", (1, 2, 3), ResolvedSampling(), 5))
    outputs: dict[str, list[TokenOutput]] = {}
    for _ in range(20):
        for output in loop.step():
            outputs.setdefault(output.request, []).append(output)
    assert len(tokens_of(outputs["base"])) == 5
    assert "slow" not in outputs
    executor.finish_reading()
    assert len(tokens_of(run(loop)["slow"])) == 4


def test_a_bad_adapter_fails_only_its_own_requests() -> None:
    loop = build_loop()
    loop.add(adapter_request("good", "a"))
    for number in range(2):
        loop.add(adapter_request(f"bad{number}", "x", path=f"x{BAD_ADAPTER}"))
    outputs = run(loop)
    assert len(tokens_of(outputs["good"])) == 4
    for number in range(2):
        (output,) = outputs[f"bad{number}"]
        assert output.finish == "error"
        assert output.error == ("cannot use the LoRA adapter 'x': x/bad: rank 99 is too large")
    answers = {answer.name: answer for answer in loop.take_adapter_answers()}
    assert isinstance(answers["x"], AdapterRefusal)
    assert "a" in answers
    # The next request tries again.
    loop.add(adapter_request("mended", "x", path="x"))
    assert len(tokens_of(run(loop)["mended"])) == 4


def test_an_unloaded_adapter_serves_its_requests_to_the_end() -> None:
    loop = build_loop()
    request = adapter_request("1", "a", max_tokens=10)
    loop.add(request)
    first = [output for _ in range(4) for output in loop.step()]
    loop.unload_adapter("a")
    assert fake_executor_of(loop).host_adapters == {"a"}
    rest = run(loop)["1"]
    assert tokens_of([*first, *rest]) == reference_tokens(request)[5:]
    loop.step()
    assert fake_executor_of(loop).host_adapters == set()
    assert [slot.adapter for slot in loop.scheduler.adapter_slots.slots] == ["", ""]


def test_adapters_can_be_read_before_a_request_needs_them() -> None:
    loop = build_loop()
    for name in "abcd":
        loop.load_adapter(name, name)
    loop.load_adapter("x", BAD_ADAPTER)
    run(loop)
    answers = [(answer.name, type(answer).__name__) for answer in loop.take_adapter_answers()]
    assert answers == [*((name, "AdapterInfo") for name in "abcd"), ("x", "AdapterRefusal")]
    assert fake_executor_of(loop).host_adapters <= set("abcd")
    assert len(fake_executor_of(loop).host_adapters) <= 3
    loop.load_adapter("d", "d")
    assert [answer.name for answer in loop.take_adapter_answers()] == ["d"]


def test_an_error_that_quotes_a_long_value_is_shortened() -> None:
    loop = build_loop()
    loop.load_adapter("x", f"adapter{'y' * 100_000}{BAD_ADAPTER}")
    run(loop)
    (answer,) = loop.take_adapter_answers()
    assert isinstance(answer, AdapterRefusal)
    assert answer.error.startswith("cannot use the LoRA adapter 'x': adapteryyy")
    assert answer.error.endswith("rank 99 is too large")
    assert len(answer.error) < 10_000


def test_files_that_have_changed_get_no_prefix_hit_of_the_old_ones() -> None:
    loop = build_loop(max_loras=1, max_cpu_loras=1)
    prompt = adapter_request("1", "a")
    loop.add(prompt)
    run(loop)
    loop.add(replace(prompt, id="2"))
    assert run(loop)["2"][0].cached > 0
    loop.add(adapter_request("3", "b"))
    run(loop)  # a leaves host memory
    loop.add(replace(prompt, id="4"))
    assert run(loop)["4"][0].cached > 0  # its files are the same
    loop.add(adapter_request("5", "b"))
    run(loop)
    changed = read_version_at_once("other")
    store_of(loop).read_version = lambda path: changed
    loop.add(replace(prompt, id="6"))
    assert run(loop)["6"][0].cached == 0


def test_a_request_that_waits_for_its_adapter_can_be_aborted() -> None:
    loop = build_loop(max_loras=1, max_cpu_loras=1)
    fake_executor_of(loop).reads_at_once = False
    for request_id, name in (("1", "a"), ("2", "b")):
        loop.add(adapter_request(request_id, name))
        assert loop.holds(request_id)
    loop.step()
    assert loop.num_waiting_for_files == 2
    assert loop.abort("2") and loop.abort("1")
    assert not loop.abort("1")
    assert loop.num_waiting_for_files == 0
    fake_executor_of(loop).finish_reading()
    run(loop)
    assert all(place.is_free for place in store_of(loop).places.slots)


def test_an_engine_without_adapters_says_so() -> None:
    loop = build_loop(max_loras=0, max_cpu_loras=0)
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        loop.add(adapter_request("1", "a"))
    loop.load_adapter("a", "a")
    (answer,) = loop.take_adapter_answers()
    assert isinstance(answer, AdapterRefusal)


def test_a_request_that_cannot_run_gives_its_adapter_back() -> None:
    loop = build_loop()
    loop.add(adapter_request("1", "a"))
    run(loop)
    with pytest.raises(InvalidRequest, match="cache positions"):
        loop.add(adapter_request("2", "a", max_tokens=10**6))
    assert store_of(loop).places.by_adapter["a"].is_free


def test_the_version_of_an_adapter_follows_its_files(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"1")
    before = read_adapter_version(str(tmp_path))
    assert read_adapter_version(str(tmp_path)) == before
    os.utime(weights, ns=(1, 1))
    changed = read_adapter_version(str(tmp_path))
    assert changed != before
    replacement = tmp_path.with_suffix(".new")
    replacement.write_bytes(b"2")
    os.utime(replacement, ns=(1, 1))  # by a tool that keeps times
    replacement.replace(weights)
    assert read_adapter_version(str(tmp_path)) not in (before, changed)
    assert read_adapter_version(str(weights))
    with pytest.raises(OSError):
        read_adapter_version(str(tmp_path / "missing"))
