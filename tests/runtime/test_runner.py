"""The model runner: padded steps, CUDA graphs and their background capture change no token.

The engine runs on the CPU. Attention of self-feeding steps is computed by interpreted kernels.
Requests of many lengths arrive while others run, so that steps have several prefill chunks, some
that end their prompt and some that do not, and batch slots that are padding. A CPU has no CUDA
graphs: here a captured graph is the work itself, to be run again.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers as tf

from bloomery.attention.triton_paged import TritonPagedAttention
from bloomery.engine.loop import EngineLoop
from bloomery.executors.local import LocalExecutor
from bloomery.kernels import paged_decode, paged_prefill
from bloomery.kernels.launch import MissingKernels, triton_interpreted
from bloomery.messages import EngineRequest, ResolvedSampling
from bloomery.runtime.rows import BatchOrder, PlacedRequest
from bloomery.runtime.runner import (
    CudaGraphRunner,
    GraphPool,
    ModelForward,
    ModelRunner,
    garbage_collection_paused,
)
from bloomery.runtime.step_batch import (
    SHORT_DECODE_POSITIONS,
    CaptureSizes,
    decode_batch_sizes,
    decode_shape,
    mixed_shape,
)
from bloomery.runtime.worker import Worker
from tests.parity.cases import CASES, ParityCase, make_checkpoint
from tests.parity.serve import build_engine_loop, build_plan
from tests.structured.byte_vocabulary import BYTES, END, use_grammars

VOCAB = 211
MAX_LEN = 64
MODEL_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**MODEL_SIZES),
    "gemma2": lambda: tf.Gemma2Config(  # two cache groups
        **MODEL_SIZES | {"num_hidden_layers": 2},
        head_dim=8,
        sliding_window=9,
        attn_logit_softcapping=20.0,
    ),
    "mixtral": lambda: tf.MixtralConfig(**MODEL_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4),
}
LETTERS = 'start: "[" /[a-z]+/ "]"'
DIGITS = "start: /[0-9]{2,}/"
GRAMMARS = ("", LETTERS, "", DIGITS, "start: /(?s:.*)/")
EXACT = CaptureSizes()
PADDED = CaptureSizes(decodes=(2, 4), mixed_decodes=(2, 4), mixed_tokens=(8, 16))


class SpyModelRunner(ModelRunner):
    """Records the steps it runs; `short_decodes` lets decodes go through the prefill kernel."""

    def __init__(self, *arguments: Any, short_decodes: bool):
        super().__init__(*arguments)
        self.short_decodes = short_decodes
        self.mixed_runs = list[tuple[int, tuple[bool, ...]]]()
        self.num_decode_runs = 0
        self.num_apart_runs = 0

    def sample_apart(self) -> None:
        self.num_apart_runs += 1
        super().sample_apart()

    def run_decodes(self, order: BatchOrder, is_masked: bool) -> None:
        self.num_decode_runs += 1
        super().run_decodes(order, is_masked)

    def run_mixed(
        self,
        order: BatchOrder,
        chunks: Sequence[PlacedRequest],
        max_position: int,
    ) -> Any:
        samples = tuple(scheduled.samples for scheduled, _ in chunks)
        self.mixed_runs.append((len(order.rows), samples))
        position = max_position if self.short_decodes else SHORT_DECODE_POSITIONS
        return super().run_mixed(order, chunks, position)


def use_self_feeding_steps(
    worker: Worker, sizes: CaptureSizes, short_decodes: bool
) -> SpyModelRunner:
    """Let the worker run its decode and mixed steps as a GPU does."""
    backend = TritonPagedAttention(
        decode_tiling=paged_decode.PagedDecodeTiling(16, 4, 2, splits=2, max_unsplit_tiles=1),
        prefill_tiling=paged_prefill.PagedPrefillTiling(32, 16, 4, 2, 2, 1),
    )
    runner = SpyModelRunner(
        ModelForward(
            worker.decoder,
            backend,
            worker.caches,
            layer_tables=worker.cache.layer_tables,
            states=worker.state_memories,
        ),
        worker.rows,
        worker.cache.kernel_block_size,
        worker.sampler,
        worker.decoder.spec.vocab,
        short_decodes=short_decodes,
    )
    runner.sizes = sizes
    worker.runner = runner
    worker.cpu_traced = True  # so that decode steps feed themselves too
    return runner


def serve(loop: EngineLoop, requests: list[tuple[int, EngineRequest]]) -> dict[str, list[int]]:
    """Return the tokens of each request, given (arrival step, request) pairs."""
    tokens: dict[str, list[int]] = {request.id: [] for _, request in requests}
    last_arrival = max(arrival for arrival, _ in requests)
    step = 0
    while loop.busy or step <= last_arrival:
        for arrival, request in requests:
            if arrival == step:
                loop.add(request)
        for output in loop.step():
            tokens[output.request] += output.ids
        step += 1
    return tokens


def check_grammars(arrivals: list[tuple[int, EngineRequest]], tokens: dict[str, list[int]]) -> None:
    """Every output is the beginning of a text that its grammar allows."""
    for _, request in arrivals:
        text = BYTES.decode(tokens[request.id]) if request.grammar else ""
        if request.grammar == LETTERS:
            assert re.fullmatch(r"\[([a-z]+\]?)?", text), text
        elif request.grammar == DIGITS:
            assert text.isdigit()


def make_arrivals(random: Random) -> list[tuple[int, EngineRequest]]:
    """Make greedy and sampled requests, some with log-probabilities, at different steps.

    Some must match a grammar.
    """
    arrivals = []
    for number in range(7):
        prompt_len = random.choice((1, 5, 17))
        prompt = tuple(random.randrange(3, VOCAB) for _ in range(prompt_len))
        sampling = ResolvedSampling(
            temperature=random.choice((0.0, 1.0)),
            top_k=random.choice((0, 5)),
            seed=number,
            logprobs=2 if number == 4 else None,
            prompt_logprobs=1 if number == 6 else None,
        )
        arrival = random.randrange(6)
        grammar = GRAMMARS[number % len(GRAMMARS)]
        stop_ids = (END,) if grammar else ()
        request = EngineRequest(
            str(number), prompt, sampling, random.randint(2, 5), stop_ids, grammar=grammar
        )
        arrivals.append((arrival, request))
    return arrivals


@pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)
# Interpreted kernels divide by zero for padding rows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "sizes", "steps_in_flight", "short_decodes"),
    [
        ("llama", EXACT, 1, False),
        ("llama", PADDED, 2, True),
        ("llama", PADDED, 2, False),
        ("gemma2", PADDED, 1, True),
        ("mixtral", PADDED, 2, False),
        ("bloom", PADDED, 2, True),
    ],
)
def test_self_feeding_steps_give_the_tokens_of_host_built_steps(
    name: str, sizes: CaptureSizes, steps_in_flight: int, short_decodes: bool, tmp_path: Path
) -> None:
    make_checkpoint(ParityCase(name, MODELS[name]), tmp_path)
    options = {
        "max_num_batched_tokens": 12,
        "max_num_seqs": 4,
        "block_size": 4,
        "kv_cache_gib": 0.01,
        "prefix_cache": False,
    }
    settings = build_plan(
        tmp_path, MAX_LEN, steps_in_flight=steps_in_flight, cpu_kernels=False, **options
    )
    host_built = build_engine_loop(settings)
    self_feeding = build_engine_loop(settings)
    worker = self_feeding.executor.worker  # type: ignore[attr-defined]
    runner = use_self_feeding_steps(worker, sizes, short_decodes)
    use_grammars(host_built, VOCAB)
    use_grammars(self_feeding, VOCAB)
    arrivals = make_arrivals(Random(6))
    tokens = serve(self_feeding, arrivals)
    assert tokens == serve(host_built, arrivals)
    assert runner.num_apart_runs > len(runner.mixed_runs)  # masked decode steps, too
    check_grammars(arrivals, tokens)
    num_decodes, chunks = zip(*runner.mixed_runs, strict=True)
    assert runner.num_decode_runs > 1
    assert max(num_decodes) > 1 and max(map(len, chunks)) > 1
    assert any(all(samples) for samples in chunks)
    assert any(not all(samples) for samples in chunks)


@dataclass
class RepeatedWork:
    """Stands in for a CUDA graph."""

    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


class CountingGraphPool(GraphPool):
    """Counts captures instead of capturing CUDA graphs."""

    def __init__(self) -> None:
        self.pending = []
        self.incomplete = []
        self.num_captured = 0

    def capture(self, work: Callable[[], None], missing: MissingKernels) -> Any:
        self.num_captured += 1
        return RepeatedWork(work)


def test_a_shape_is_captured_after_its_second_run() -> None:
    pool = CountingGraphPool()
    runs = []
    graph_runner = CudaGraphRunner(pool)
    for num_runs in range(4):
        graph_runner.run(mixed_shape(8, 64, False), lambda: runs.append(8))
        assert len(runs) == num_runs + 1
        assert pool.num_captured == (1 if num_runs > 1 else 0)  # not within the run itself
        pool.capture_pending()
        assert pool.num_captured == (1 if num_runs > 0 else 0)
    graph_runner.run(mixed_shape(16, 64, False), lambda: runs.append(16))
    pool.capture_pending()
    assert pool.num_captured == 1 and not pool.pending


class ColdGraphPool(CountingGraphPool):
    """Misses a kernel at the first capture."""

    def capture(self, work: Callable[[], None], missing: MissingKernels) -> Any:
        if not self.num_captured:
            missing["specialization"] = "cold_kernel"
        return super().capture(work, missing)


def test_a_graph_that_lacks_a_kernel_is_not_kept() -> None:
    runs = []
    missing: MissingKernels = {}
    graph_runner = CudaGraphRunner(ColdGraphPool())
    assert not graph_runner.capture(decode_shape(8), lambda: runs.append(0), missing)
    assert missing == {"specialization": "cold_kernel"} and not graph_runner.graphs
    assert graph_runner.capture(decode_shape(8), lambda: runs.append(1), missing)
    assert graph_runner.capture(decode_shape(8), lambda: runs.append(2), missing)  # it exists
    graph_runner.run(decode_shape(8), lambda: runs.append(3))
    assert runs == [1]  # the captured work ran, and only now


def generate(loop: EngineLoop) -> dict[str, list[int]]:
    """Return the tokens of four requests."""
    tokens: dict[str, list[int]] = {}
    for i, prompt_len in enumerate((3, 9, 5, 7)):
        sampling = ResolvedSampling(0.9, top_p=0.9, seed=i)
        if i % 2:
            sampling = ResolvedSampling(0.0)
        prompt = tuple(range(4, 4 + prompt_len))
        loop.add(EngineRequest(str(i), prompt, sampling, 12 + 4 * i))
        tokens[str(i)] = []
    while loop.busy:
        for output in loop.step():
            tokens[output.request] += output.ids
    return tokens


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_captured_graphs_change_no_tokens(name: str, tmp_path: Path) -> None:
    """Running a step over padding leaves rows, batch slots and KV cache of requests unchanged."""
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    settings = build_plan(tmp_path, 64, max_num_seqs=6)
    expected = generate(build_engine_loop(settings))
    loop = build_engine_loop(settings)
    assert isinstance(loop.executor, LocalExecutor) and loop.executor.worker is not None
    worker = loop.executor.worker
    if not worker.cpu_traced:
        pytest.skip("without the CPU kernels a CPU has no self-feeding steps")
    pool = CountingGraphPool()
    graph_runner = CudaGraphRunner(pool)
    worker.runner.use_cuda_graphs(graph_runner)
    reported = []
    worker.capture_graphs(report=lambda what, done, total: reported.append((done, total)))
    num_sizes = len(decode_batch_sizes(6))
    assert pool.num_captured == 3 * num_sizes  # decode steps, masked ones, and their sampling
    assert reported[-1] == (pool.num_captured, pool.num_captured)
    assert generate(loop) == expected
    assert pool.num_captured == len(graph_runner.graphs)  # nothing was left to capture
    captured = list(graph_runner.graphs)
    assert sum(shape.samples_apart for shape in captured) == num_sizes
    assert sum(shape.num_tokens == 0 for shape in captured) == num_sizes
    assert not captured[0].samples_apart


def test_no_garbage_is_collected_inside_the_block() -> None:
    assert gc.isenabled()
    with garbage_collection_paused():
        assert not gc.isenabled()
        with garbage_collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError), garbage_collection_paused():
        raise ValueError
    assert gc.isenabled()
