"""The memory of the KV cache: shared blocks, its size, and blocks that others have taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bloomery.cache_groups import plan_cache_groups
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.loop import EngineLoop
from bloomery.engine.state_pool import StatePool
from bloomery.errors import ConfigError
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.quantized_kv_cache import read_kv_cache, write_key_or_value
from bloomery.kernels.state_cache import StateView, view_states
from bloomery.runtime.kv_cache import CacheMemory, StageCache, fit_kv_cache
from bloomery.runtime.worker import Worker
from bloomery.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    ModelSpec,
    RecurrentSpec,
    ShortConvSpec,
    state_parts,
)
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import (
    build_engine_loop,
    build_plan,
    greedy_request,
    output_token_ids,
    run_requests,
)
from tests.runtime.test_runner import PADDED, use_self_feeding_steps
from tests.test_cache_groups import interleave, make_hybrid, make_model

CPU = torch.device("cpu")
PAGE_SIZE = 8
NUM_BLOCKS = 5


def make_cache(model: ModelSpec, dtype: torch.dtype, layers: range) -> StageCache:
    layout = plan_cache_groups(model, 1000, PAGE_SIZE, scaled=dtype == torch.int8)
    stage = ModelSpec(
        model.vocab, model.hidden, tuple(model.layers[i] for i in layers), None, model.context
    )
    return StageCache(stage, layout, layout.place_layers(layers), PAGE_SIZE, dtype)


# ---- shared blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [range(8), range(3, 7)], ids=["all", "stage"])
@pytest.mark.parametrize(
    ("full", "window", "dtype"),
    [
        ((2, 8), (2, 8), torch.float32),
        ((1, 16), (4, 8), torch.float16),  # blocks of half as many positions
        ((2, 8), (4, 8), torch.int8),  # with scales
    ],
)
def test_a_block_is_the_same_memory_in_every_table(
    full: tuple[int, int], window: tuple[int, int], dtype: torch.dtype, layers: range
) -> None:
    model = make_model(interleave(3, 8, 20), full, window)
    cache = make_cache(model, dtype, layers)
    caches = cache.allocate(NUM_BLOCKS, CPU)
    memories = {tensor.untyped_storage().data_ptr() for tensor in caches}
    assert len(memories) == len(cache.slot_bytes(1)) < len(caches)
    assert cache.block_bytes * NUM_BLOCKS == sum(cache.slot_bytes(NUM_BLOCKS).values())
    block = 2
    for tensor, place in zip(caches, cache.places, strict=True):
        size = tensor.shape[1] // NUM_BLOCKS
        slots = torch.arange(block * size, (block + 1) * size)
        values = torch.ones(size, *tensor.shape[2:])
        for half in (0, 1):
            write_key_or_value(values, half, tensor, slots)
        for other, other_place in zip(caches, cache.places, strict=True):
            other_size = other.shape[1] // NUM_BLOCKS
            stored = torch.stack(
                read_kv_cache(other, torch.arange(other.shape[1]), torch.float32)
            ).view(2, NUM_BLOCKS, other_size, -1)
            written = stored.ne(0).any(-1).any(-1).any(0)
            expected = torch.arange(NUM_BLOCKS) == block
            assert torch.equal(written, expected & (place.slot == other_place.slot))
        for memory in caches:
            memory.view(torch.uint8).zero_()


QWEN = GatedDeltaNetSpec(2, 4, 8, 8)
SHORT_CONV = ShortConvSpec(16)
HEADS = AttentionSpec(2, 1, 16)
MORE_HEADS = AttentionSpec(6, 3, 16)


def write_states(memory: CacheMemory, mixer: RecurrentSpec, blocks: list[int]) -> None:
    """Let the state of each layer be its own number, in a sequence with these blocks."""
    for number, views in enumerate(view_all_states(memory, mixer, blocks), 1):
        for view in views:
            view.write(torch.full((1, view.part.rows, view.part.width), float(number)))


def view_all_states(
    memory: CacheMemory, mixer: RecurrentSpec, blocks: list[int]
) -> list[tuple[StateView, ...]]:
    """The states of all layers in a sequence with these blocks."""
    layout = memory.cache.layout.states
    assert layout is not None
    tables = torch.tensor(layout.divide_blocks(blocks, memory.num_blocks))
    return [
        view_states(state[0], tables[None, state[1]], state_parts(mixer))
        for state in memory.states()
        if state is not None
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("mixer", [QWEN, SHORT_CONV], ids=["delta-net", "short-conv"])
@pytest.mark.parametrize("other_heads", [HEADS, MORE_HEADS], ids=["equal", "unequal"])
def test_states_share_blocks_with_keys_and_values(
    dtype: torch.dtype, mixer: RecurrentSpec, other_heads: AttentionSpec
) -> None:
    model = make_hybrid(8, (2, 5), HEADS, mixer)
    layers = list(model.layers)
    layers[2] = replace(layers[2], attention=other_heads)
    model = replace(model, layers=tuple(layers))
    layout = plan_cache_groups(
        model, 100, PAGE_SIZE, scaled=dtype == torch.int8, value_bytes=dtype.itemsize
    )
    assert layout.states is not None and layout.states.num_tables > 1
    places = (layout.place_layers(range(8)), layout.place_states(range(8)))
    cache = StageCache(model, layout, places[0], PAGE_SIZE, dtype, places[1])
    size = layout.states.num_blocks
    num_blocks = 3 * size + 3
    memory = cache.allocate_memory(num_blocks, CPU)
    caches = memory.keys_values()
    assert [tensor is None for tensor in caches] == [
        layer.attention is None for layer in model.layers
    ]
    assert [state is None for state in memory.states()] == [
        layer.recurrent is None for layer in model.layers
    ]
    shuffled = torch.randperm(num_blocks).tolist()
    blocks, targets, others = shuffled[:size], shuffled[size : 2 * size], shuffled[2 * size :]
    key_block = others.pop()
    for keys_values in filter_none(caches):
        block_view(keys_values, num_blocks)[:, key_block] = 1
    write_states(memory, mixer, blocks)
    memory.copy_blocks(list(zip(blocks, targets, strict=True)))
    write_states(memory, mixer, others[:size])
    for keys_values in filter_none(caches):
        assert (block_view(keys_values, num_blocks)[:, key_block] == 1).all()
        assert not block_view(keys_values, num_blocks)[:, others[size:]].any()
    for sequence in (blocks, targets, others[:size]):
        for number, views in enumerate(view_all_states(memory, mixer, sequence), 1):
            assert all((view.read() == number).all() for view in views)


def filter_none(caches: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [cache for cache in caches if cache is not None]


def block_view(keys_values: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[2, slots, ...] -> [2, blocks, values of a block]."""
    return keys_values.view(2, num_blocks, -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_copies_read_all_sources_first(dtype: torch.dtype) -> None:
    model = make_model([None] * 3, (1, 8))
    cache = make_cache(model, dtype, range(3))
    memory = cache.allocate_memory(NUM_BLOCKS, CPU)
    tensor = memory.keys_values()[1]
    assert tensor is not None
    size = tensor.shape[1] // NUM_BLOCKS
    values = torch.randn(NUM_BLOCKS * size, *tensor.shape[2:])
    for half in (0, 1):
        write_key_or_value(values, half, tensor, torch.arange(len(values)))
    every_slot = torch.arange(len(values))
    before = torch.stack(read_kv_cache(tensor, every_slot, torch.float32)).view(2, NUM_BLOCKS, -1)
    memory.copy_blocks([(0, 1), (1, 0), (2, 4)])
    after = torch.stack(read_kv_cache(tensor, every_slot, torch.float32)).view(2, NUM_BLOCKS, -1)
    assert torch.equal(after, before[:, [1, 0, 2, 3, 2]])


# ---- size ----------------------------------------------------------------------------------------


def test_a_window_lets_longer_sequences_fit(tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    options = {"block_size": PAGE_SIZE, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    windowed = make_cache(make_model(interleave(3, 8, 20)), torch.float32, range(8))
    unlimited = make_cache(make_model([None] * 8), torch.float32, range(8))
    gib = 100 * windowed.block_bytes / 2**30
    plan = build_plan(tmp_path, 1000, kv_cache_gib=gib, **options)
    with pytest.raises(ConfigError, match="lower max_model_len to 200"):
        fit_kv_cache(plan, unlimited, CPU)
    with pytest.raises(ConfigError, match="lower max_model_len to 656"):
        fit_kv_cache(plan, windowed, CPU)  # six pages in each of three tables, the rest is full
    plan = build_plan(tmp_path, 656, kv_cache_gib=gib, **options)
    assert fit_kv_cache(plan, windowed, CPU).num_blocks == 100


# ---- blocks that others have taken ---------------------------------------------------------------


def free_blocks(pool: BlockPool | StatePool) -> list[int]:
    """The blocks that nothing holds."""
    return pool.cache.free_blocks if isinstance(pool, StatePool) else pool.free_blocks


def generate_poisoned(loop: EngineLoop, poison: bool) -> list[list[int]]:
    """Complete three prompts; with `poison`, blocks that no sequence holds are not numbers."""
    worker: Worker = loop.executor.worker  # type: ignore[attr-defined]
    pool = loop.scheduler.block_pool
    step = loop.step
    num_poisoned = 0

    def step_and_poison() -> list:
        nonlocal num_poisoned
        outputs = step()
        for memory in worker.memory.slots.values():
            halves = memory.view(torch.float32).view(2, pool.num_blocks + 1, -1)
            for block in (*free_blocks(pool), pool.num_blocks):
                halves[:, block] = torch.nan
                num_poisoned += 1
        return outputs

    if poison:
        loop.step = step_and_poison  # type: ignore[method-assign]
    prompts = [[5 + i, *range(10, 10 + 9 * i)] for i in range(1, 4)]
    requests = [greedy_request(str(i), prompt, 14) for i, prompt in enumerate(prompts)]
    outputs = run_requests(loop, requests)
    assert bool(num_poisoned) == poison
    return [output_token_ids(outputs[request.id]) for request in requests]


def use_triton(worker: Worker) -> None:
    use_self_feeding_steps(worker, PADDED, short_decodes=False)


def check_traced(worker: Worker) -> None:
    """No layer may keep decode steps from being replayed as a trace."""
    assert worker.cpu_traced, worker.capacity.notes


BACKENDS: dict[str, tuple[bool, Callable[[Worker], object]]] = {
    "torch": (False, lambda worker: None),
    "native": (True, check_traced),
    "triton": (False, use_triton),
}


NEEDS_INTERPRETER = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # interpreted kernels compute with NaN
@pytest.mark.parametrize(
    "backend",
    ["torch", "native", pytest.param("triton", marks=[pytest.mark.slow, NEEDS_INTERPRETER])],
)
@pytest.mark.parametrize(
    "name",
    [
        *["gemma2", "gemma3", "cohere2", "mistral"],
        *["qwen3_5_text", "lfm2", "falcon_h1", "jamba", "zamba2"],
    ],
)
def test_freed_blocks_do_not_matter(name: str, backend: str, tmp_path: Path) -> None:
    cpu_kernels, prepare = BACKENDS[backend]
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    settings = build_plan(
        tmp_path,
        64,
        block_size=4,
        max_num_batched_tokens=11,
        max_num_seqs=4,
        kv_cache_gib=0.001,
        prefix_cache=False,
        cpu_kernels=cpu_kernels,
    )
    results = []
    for poison in (False, True):
        loop = build_engine_loop(settings)
        prepare(loop.executor.worker)  # type: ignore[attr-defined]
        results.append(generate_poisoned(loop, poison))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "name", ["gemma3", "mistral", "qwen3_5_text", "lfm2", "falcon_h1", "jamba", "zamba2"]
)
@pytest.mark.parametrize("cpu_kernels", [False, True], ids=["torch", "native"])
def test_deterministic_steps_use_all_tables(name: str, cpu_kernels: bool, tmp_path: Path) -> None:
    """Every position is a sequence of its own there, with its own rows of every table."""
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    results = []
    for deterministic in (False, True):
        settings = build_plan(
            tmp_path,
            64,
            block_size=4,
            max_num_seqs=4,
            deterministic=deterministic,
            cpu_kernels=cpu_kernels,
        )
        results.append(generate_poisoned(build_engine_loop(settings), poison=False))
    assert results[0] == results[1]
