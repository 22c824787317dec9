"""The first adapter with a head of its own leaves the steps of other requests as they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.engine.loop import EngineLoop
from bloomery.errors import InvalidRequest
from bloomery.kernels.launch import MissingKernels
from bloomery.messages import AdapterInfo
from bloomery.parallel.groups import SingleRank
from bloomery.quant.lora import TableAdapters
from bloomery.runtime.runner import CpuTraceRunner, CudaGraphRunner
from bloomery.runtime.worker import TRIED_SHAPE_STRIDE, Worker
from tests.parity.adapters import (
    RANK,
    adapted_request,
    build_adapter_loop,
    greedy_tokens,
    save_adapter,
)
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import build_plan, output_token_ids, run_requests
from tests.runtime.test_runner import CountingGraphPool

PROMPT = [5, 9, 3, 17, 8]
COUNT = 6
ADAPTERS: dict[str, dict[str, Any]] = {
    "inner": {"targets": ["q_proj", "down_proj"]},
    "head": {"targets": ["q_proj", "lm_head"]},
    "table": {"targets": ["v_proj"], "modules_to_save": ["lm_head"]},
}


class AdaptedEngine:
    """An engine with native kernels, its adapters, and what PEFT says of each."""

    def __init__(self, folder: Path):
        case = next(case for case in CASES if case.name == "llama")
        model = make_checkpoint(case, folder / "model")
        self.folder = folder
        self.expected = {}
        for seed, (name, config) in enumerate(ADAPTERS.items()):
            adapted = save_adapter(model, folder / name, seed=seed, **config)
            self.expected[name] = greedy_tokens(adapted, PROMPT, COUNT)
            model = adapted.unload()
        plan = build_plan(
            folder / "model",
            64,
            enable_lora=True,
            max_loras=3,
            max_lora_rank=RANK,
            max_num_seqs=6,
            kv_cache_gib=0.01,
        )
        self.loop: EngineLoop = build_adapter_loop(plan)
        self.worker: Worker = self.loop.executor.worker  # type: ignore[attr-defined]
        if not self.worker.cpu_traced:
            pytest.skip("without the CPU kernels a CPU has no self-feeding steps")
        self.num_requests = 0

    def check(self, *names: str) -> None:
        """Run a request of each adapter together; their tokens must be those of PEFT."""
        requests = []
        for name in names:
            self.num_requests += 1
            id = f"{name} {self.num_requests}"
            requests.append(adapted_request(id, PROMPT, COUNT, self.folder / name))
        outputs = run_requests(self.loop, requests)
        for name, request in zip(names, requests, strict=True):
            assert output_token_ids(outputs[request.id]) == self.expected[name]

    def load(self, name: str) -> Future[AdapterInfo]:
        """Start to read an adapter into host memory."""
        path = str(self.folder / name)
        return self.worker.load_adapter(path, path)


@pytest.fixture
def engine(tmp_path: Path) -> AdaptedEngine:
    return AdaptedEngine(tmp_path)


def test_traces_of_other_adapters_stay(engine: AdaptedEngine) -> None:
    runner = engine.worker.runner.work_runner
    assert isinstance(runner, CpuTraceRunner)
    engine.check("inner", "inner")
    inner_traces = dict(runner.traces)
    assert any(shape.has_adapters for shape in inner_traces)
    engine.check("head", "inner")
    first = {shape: trace for shape, trace in runner.traces.items() if shape.changes_outer}
    assert first
    engine.check("inner")
    # Memory for tables changes what these steps do, and no others.
    engine.check("table", "head", "inner")
    engine.check("head", "inner")
    second = {shape: trace for shape, trace in runner.traces.items() if shape.changes_outer}
    assert all(second[shape] is not trace for shape, trace in first.items() if shape in second)
    assert all(runner.traces[shape] is trace for shape, trace in inner_traces.items())


def test_graphs_of_other_adapters_stay(engine: AdaptedEngine) -> None:
    """Counted with stand-ins for CUDA graphs, which run the work again."""
    worker = engine.worker
    pool = CountingGraphPool()
    graph_runner = CudaGraphRunner(pool)
    worker.runner.use_cuda_graphs(graph_runner)
    worker.capture_graphs()
    at_start = dict(graph_runner.graphs)
    engine.check("inner", "inner")
    assert graph_runner.graphs == at_start, "a step with an adapter was not captured at the start"
    memory = worker.decoder.adapter_memory
    assert memory is not None and memory.outer.values is None
    loading = engine.load("head")
    while not loading.done():
        engine.check("inner", "inner")
    # Its memory is there and its kernels were tried, after other steps, before a step needs it.
    assert memory.outer.values is not None
    shapes = worker.runner.list_outer_shapes()
    tried = set(shapes[::TRIED_SHAPE_STRIDE])
    assert tried and set(graph_runner.graphs) == set(at_start) | tried
    assert worker.kernel_trial is None
    engine.check("head", "inner")
    engine.check("inner")
    # The others are captured when they recur, and only those with that adapter.
    added = set(graph_runner.graphs) - set(at_start) - tried
    assert added <= set(shapes)
    assert all(graph_runner.graphs[shape] is graph for shape, graph in at_start.items())
    engine.check("table", "head", "inner")
    assert all(graph_runner.graphs[shape] is graph for shape, graph in at_start.items())


def test_a_long_step_does_not_end_the_search_for_kernels(
    engine: AdaptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = engine.worker
    graph_runner = CudaGraphRunner(CountingGraphPool())
    worker.runner.use_cuda_graphs(graph_runner)
    engine.check("inner", "inner")
    monkeypatch.setattr(f"{Worker.__module__}.IDLE_SECONDS", 0.01)
    monkeypatch.setattr(worker, "_is_device_busy", lambda: True)
    loading = engine.load("head")
    while worker.kernel_trial is None and not loading.done():
        time.sleep(0.01)
    time.sleep(0.2)  # in which the step in flight does not end
    assert not loading.done() and worker.kernel_trial is not None
    while not loading.done():
        engine.check("inner", "inner")
    tried = worker.runner.list_outer_shapes()[::TRIED_SHAPE_STRIDE]
    assert tried and set(tried) <= set(graph_runner.graphs)


class UncompiledGraphPool(CountingGraphPool):
    """Every step lacks a kernel that only it launches."""

    def capture(self, work: Callable[[], None], missing: MissingKernels) -> Any:
        missing[str(self.num_captured)] = None
        return super().capture(work, missing)


def test_missing_kernels_are_compiled_before_an_adapter_is_there(
    engine: AdaptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has no index, as the one GPU of most servers."""
    worker = engine.worker
    worker.runner.use_cuda_graphs(CudaGraphRunner(UncompiledGraphPool()))
    engine.check("inner", "inner")
    compiled: list[MissingKernels] = []
    monkeypatch.setattr(f"{Worker.__module__}.compile_kernels", compiled.append)
    monkeypatch.setattr(worker, "_is_device_busy", lambda: True)
    loading = engine.load("head")
    while not loading.done():
        engine.check("inner", "inner")
    assert loading.result().num_targets > 0
    (missing,) = compiled
    assert len(missing) == len(worker.runner.list_outer_shapes()[::TRIED_SHAPE_STRIDE])


class FirstOfTwo(SingleRank):
    """A rank of two, of which the other one has nothing to say."""

    size = 2


def test_memory_that_is_missing_fails_only_the_adapter_that_needs_it(
    engine: AdaptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallel ranks, too, allocate before a step needs the memory."""
    worker = engine.worker
    memory = worker.decoder.adapter_memory
    assert memory is not None
    worker.mesh = replace(worker.mesh, group=FirstOfTwo())
    runner = worker.runner.work_runner
    assert isinstance(runner, CpuTraceRunner)
    engine.check("head", "inner")
    traces = dict(runner.traces)

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(TableAdapters, "allocate", run_out)
        with pytest.raises(InvalidRequest, match="there is no memory"):
            engine.load("table").result()
    engine.check("head", "inner")
    engine.load("table").result()
    assert any(target.tables.is_allocated for target in memory.tables)
    # Ranks drop these traces in the step that needs the memory, all at the same time.
    assert all(runner.traces[shape] is trace for shape, trace in traces.items())
    engine.check("table", "head", "inner")
    assert all(
        runner.traces.get(shape) is not trace
        for shape, trace in traces.items()
        if shape.changes_outer
    )
