"""Cache groups: which layers share block tables, and how many blocks a sequence takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bloomery.cache_groups import (
    MAX_STATE_TABLES,
    MAX_TABLES,
    CacheLayout,
    StateLayout,
    count_held_blocks,
    count_state_blocks,
    count_useful_blocks,
    longest_sequence,
    plan_cache_groups,
    token_capacity,
)
from bloomery.errors import ConfigError
from bloomery.messages import CacheGroup
from bloomery.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    RecurrentSpec,
    ShortConvSpec,
    state_parts,
)

CONTEXT = 131072
PAGE_SIZE = 64


def make_model(
    windows: Sequence[int | None],
    full: tuple[int, int] = (8, 64),
    window: tuple[int, int] = (8, 64),
) -> ModelSpec:
    """A model with these windows; `full` and `window` are KV heads and head dim of the layers."""
    layers = []
    for size in windows:
        kv_heads, head_dim = full if size is None else window
        attention = AttentionSpec(16, kv_heads, head_dim, window=size)
        layers.append(LayerSpec(attention, MlpSpec(64)))
    return ModelSpec(100, 64, tuple(layers), None, CONTEXT)


def plan(model: ModelSpec, tp: int = 1, scaled: bool = False) -> CacheLayout:
    return plan_cache_groups(model, CONTEXT, PAGE_SIZE, tp, scaled)


def interleave(num_windows: int, num_layers: int, window: int) -> list[int | None]:
    """After `num_windows` layers with a window comes one without."""
    return [None if i % (num_windows + 1) == num_windows else window for i in range(num_layers)]


# Model -> windows of its layers, and the tables of its groups.
MODELS: dict[str, tuple[list[int | None], list[int]]] = {
    "llama": ([None] * 32, [1]),
    "mistral": ([4096] * 32, [1]),
    "gemma-2-27b": (interleave(1, 46, 4096), [1, 1]),
    "gemma-3-1b": (interleave(5, 26, 512), [1, 6]),
    "gemma-3-4b": (interleave(5, 34, 1024), [1, 6]),
    "gemma-3-27b": (interleave(5, 62, 1024), [1, 6]),
    "gpt-oss-120b": (interleave(1, 36, 128), [1, 1]),
    "command-r7b": (interleave(3, 32, 4096), [1, 3]),
    "olmo-3-32b": (interleave(3, 64, 4096), [1, 3]),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_divided_with_little_waste(name: str) -> None:
    windows, tables = MODELS[name]
    layout = plan(make_model(windows))
    assert [group.num_tables for group in layout.groups] == tables
    assert sum(tables) <= MAX_TABLES
    assert [group.num_layers for group in layout.groups] == [
        windows.count(group.window) for group in layout.groups
    ]
    # Bytes of a long sequence, in layers times positions: what it needs, and what it takes.
    needed = sum(min(window or CONTEXT, CONTEXT) for window in windows)
    places = layout.place_layers(range(len(windows)))
    layers_per_block = max(place.slot for place in places if place is not None) + 1
    num_blocks = count_held_blocks(layout.groups, CONTEXT, PAGE_SIZE, 1)
    assert num_blocks * layers_per_block * PAGE_SIZE <= 1.04 * needed + 2 * len(windows) * PAGE_SIZE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_no_two_layers_of_a_table_share_a_slot(name: str, num_stages: int) -> None:
    windows, _ = MODELS[name]
    layout = plan(make_model(windows))
    bounds = [stage * len(windows) // num_stages for stage in range(num_stages + 1)]
    for first, end in zip(bounds, bounds[1:]):
        places = layout.place_layers(range(first, end))
        assert max(Counter(places).values()) == 1
        for layer, place in zip(range(first, end), places, strict=True):
            assert place is not None
            assert layout.tables[place.table].window == windows[layer]


def test_larger_heads_mean_fewer_positions_in_a_block() -> None:
    """Layers with a window have twice the values per position."""
    windows = interleave(5, 30, 1024)
    layout = plan(make_model(windows, full=(4, 512), window=(16, 256)))
    assert [group.blocks_per_page for group in layout.groups] == [1, 2]
    assert [table.kernel_blocks for table in layout.tables] == [2, *[1] * 5]
    # On eight ranks each holds a copy of a KV head, so the sizes are equal.
    layout = plan(make_model(windows, full=(4, 512), window=(16, 256)), tp=8)
    assert [group.blocks_per_page for group in layout.groups] == [1, 1]


@pytest.mark.parametrize(
    ("full", "window", "tp", "scaled"),
    [
        ((4, 96), (4, 64), 1, False),  # no power of two
        ((4, 512), (16, 256), 1, True),  # scales of other sizes
        ((6, 64), (3, 64), 4, False),  # heads that four ranks cannot divide alike
    ],
)
def test_groups_that_cannot_share_blocks_are_merged(
    full: tuple[int, int], window: tuple[int, int], tp: int, scaled: bool
) -> None:
    layout = plan(make_model(interleave(1, 6, 100), full, window), tp, scaled)
    assert layout.groups == (CacheGroup(None, num_layers=6),)
    assert [place.slot for place in layout.place_layers(range(6))] == list(range(6))


def test_merged_windows_keep_the_largest() -> None:
    model = make_model([100, 200, 100, 200])
    layers = list(model.layers)
    layers[1] = LayerSpec(AttentionSpec(16, 3, 64, window=200), MlpSpec(64))
    model = ModelSpec(100, 64, tuple(layers), None, CONTEXT)
    assert plan(model).groups == (CacheGroup(200, num_layers=4),)


def test_a_window_that_holds_the_longest_sequence_is_none() -> None:
    model = make_model(interleave(1, 4, 4096))
    assert plan_cache_groups(model, 4096, PAGE_SIZE).groups == (CacheGroup(num_layers=4),)
    assert len(plan_cache_groups(model, 4097, PAGE_SIZE).groups) == 2


def test_a_chunk_counts_as_a_window() -> None:
    """A query sees at most the positions of one chunk."""
    windowed = make_model([None, 512, 512, None])
    layers = [
        replace(
            layer, attention=replace(layer.attention, window=None, chunk=layer.attention.window)
        )
        for layer in windowed.layers
    ]
    assert plan(replace(windowed, layers=tuple(layers))) == plan(windowed)


def test_blocks_of_a_sequence() -> None:
    groups = (CacheGroup(), CacheGroup(8, num_tables=3))
    # Two pages of the window are partly visible, and one more is being filled.
    assert count_held_blocks(groups, 100, 4, 1) == 25 + 3 * ((7 + 4) // 4 + 2)
    assert count_held_blocks(groups, 100, 4, 16) == 25 + 3 * ((7 + 16) // 4 + 2)
    assert count_held_blocks(groups, 5, 4, 16) == 2 + 3 * 2
    for num_blocks in range(4, 60):
        longest = longest_sequence(groups, num_blocks, 4, 8, 100)
        assert count_held_blocks(groups, longest, 4, 8) <= num_blocks
        assert longest == 100 or count_held_blocks(groups, longest + 1, 4, 8) > num_blocks


def test_the_tokens_of_a_pool() -> None:
    assert token_capacity((CacheGroup(),), 10, 16, 1000) == 160
    window_only = (CacheGroup(17),)
    assert token_capacity(window_only, 40, 16, 1000) == 40 * 1000 // 4


# ---- recurrent states ----------------------------------------------------------------------------

GATED_DELTA_NET = GatedDeltaNetSpec(16, 32, 128, 128)
QWEN_ATTENTION = AttentionSpec(16, 2, 256)


def make_hybrid(
    num_layers: int, attention_layers: Sequence[int], attention: AttentionSpec, mixer: RecurrentSpec
) -> ModelSpec:
    """A model with attention in some layers and a recurrent mixer in all others."""
    layers = [
        LayerSpec(attention, MlpSpec(64))
        if index in attention_layers
        else LayerSpec(None, MlpSpec(64), recurrent=mixer)
        for index in range(num_layers)
    ]
    return ModelSpec(100, 64, tuple(layers), None, CONTEXT)


HYBRIDS: dict[str, ModelSpec] = {
    "qwen3.6-35b-a3b": make_hybrid(40, range(3, 40, 4), QWEN_ATTENTION, GATED_DELTA_NET),
    "granite-4.0-h-small": make_hybrid(
        40, (5, 15, 25, 35), AttentionSpec(32, 8, 128), Mamba2Spec(128, 64, 128)
    ),
    "nemotron-nano-9b-v2": make_hybrid(
        31, (7, 14, 20, 27), AttentionSpec(40, 8, 128), Mamba2Spec(128, 80, 128, 8)
    ),
    "jamba-1.5-mini": make_hybrid(
        32, range(4, 32, 8), AttentionSpec(32, 8, 128), MambaSpec(8192, 16, 256)
    ),
    "lfm2-8b-a1b": make_hybrid(
        24, (2, 6, 10, 14, 18, 21), AttentionSpec(32, 8, 64), ShortConvSpec(2048)
    ),
    "without-attention": make_hybrid(24, (), QWEN_ATTENTION, Mamba2Spec(80, 64, 128)),
}
# Of a model whose state is much smaller than a block.
BLOCK_BYTES = {"lfm2-8b-a1b": 6 * PAGE_SIZE * 2 * 8 * 64 * 2}


def state_bytes(model: ModelSpec) -> int:
    """Bytes of one sequence's state, without any waste."""
    parts = [part for spec in model.recurrents for part in state_parts(spec)]
    return sum(4 * part.rows * part.width for part in parts)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_states_are_divided_with_little_waste(name: str, tp: int) -> None:
    model = HYBRIDS[name]
    layers = range(len(model.layers))
    layout = plan(model, tp)
    places = [*layout.place_layers(layers), *layout.place_states(layers)]
    layers_per_block = 1 + max(place.slot for place in places if place is not None)
    assert layout.states is not None
    taken = layout.states.num_blocks * layers_per_block * layout.states.slot_bytes
    assert tp * taken <= max(1.08 * state_bytes(model), BLOCK_BYTES.get(name, 0))
    assert layout.states.num_blocks == count_state_blocks(layout.groups)
    assert layout.states.num_tables <= MAX_STATE_TABLES
    assert len(layout.tables) == sum(not group.state_blocks for group in layout.groups)


def test_three_states_of_a_qwen_share_51_blocks_of_a_slot() -> None:
    layout = plan(HYBRIDS["qwen3.6-35b-a3b"])
    assert layout.groups == (
        CacheGroup(None, 1, num_layers=10),
        CacheGroup(num_layers=30, state_blocks=51),
    )
    # 64 positions of keys and values, 2 heads of 256 values in 16 bits.
    assert layout.states == StateLayout(3, 34, pieces_per_half=1, slot_bytes=64 * 2 * 2 * 256 * 2)
    layout = plan_cache_groups(HYBRIDS["qwen3.6-35b-a3b"], CONTEXT, 64, value_bytes=1)
    assert layout.groups[1].state_blocks == 2 * 51


def test_small_states_share_a_block() -> None:
    """A short convolution takes an eleventh of a slot's block, so half of a half is enough."""
    layout = plan(HYBRIDS["lfm2-8b-a1b"])
    assert layout.states == StateLayout(3, 1, pieces_per_half=2, slot_bytes=2 * 65536)
    assert layout.states.num_blocks == 1
    assert layout.states.divide_blocks([5], 10) == [[10], [11], [30]]


@pytest.mark.parametrize("pieces_per_half", [1, 2, 4])
def test_pieces_of_blocks_do_not_overlap(pieces_per_half: int) -> None:
    states = StateLayout(3, 5, pieces_per_half, slot_bytes=64)
    num_pool_blocks = 2 * states.num_blocks
    blocks = list(range(num_pool_blocks))[1::2]
    tables = states.divide_blocks(blocks, num_pool_blocks)
    assert [len(pieces) for pieces in tables] == [5, 5, 5]
    pieces = [piece for table in tables for piece in table]
    assert len(set(pieces)) == len(pieces)
    assert {piece // pieces_per_half % num_pool_blocks for piece in pieces} == set(blocks)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_states_of_a_table_do_not_share_a_slot(name: str, num_stages: int) -> None:
    model = HYBRIDS[name]
    layout = plan(model)
    bounds = [stage * len(model.layers) // num_stages for stage in range(num_stages + 1)]
    for first, end in zip(bounds, bounds[1:]):
        places = layout.place_states(range(first, end))
        counts = Counter(place for place in places if place is not None)
        assert max(counts.values(), default=1) == 1
        for layer, place in zip(model.layers[first:end], places, strict=True):
            assert (place is None) == (layer.recurrent is None)
            if place is not None:
                assert layout.states is not None and place.table < layout.states.num_tables


def test_a_layer_may_have_attention_and_a_state() -> None:
    both = LayerSpec(QWEN_ATTENTION, MlpSpec(64), recurrent=GATED_DELTA_NET)
    layout = plan(ModelSpec(100, 64, (both,) * 4, None, CONTEXT))
    assert layout.place_layers(range(4)) == layout.place_states(range(4))
    assert [group.num_layers for group in layout.groups] == [4, 4]


def test_states_with_windows_and_with_heads_of_several_sizes() -> None:
    window = LayerSpec(replace(QWEN_ATTENTION, window=100), MlpSpec(64))
    wide = LayerSpec(AttentionSpec(16, 3, 256), MlpSpec(64))
    state = LayerSpec(None, MlpSpec(64), recurrent=GATED_DELTA_NET)
    full = LayerSpec(QWEN_ATTENTION, MlpSpec(64))
    layout = plan(ModelSpec(100, 64, (window, full, state, state), None, CONTEXT))
    assert [group.window for group in layout.groups] == [None, 100, None]
    assert layout.layer_groups == (1, 0, None, None)
    # Layers of other sizes have a slot each; a state must fit the smallest.
    layout = plan(ModelSpec(100, 64, (wide, full, state, state, state), None, CONTEXT))
    assert layout.groups[0] == CacheGroup(None, num_layers=2)
    assert layout.states is not None and layout.states.num_tables == 2
    assert layout.states.slot_bytes == 64 * 2 * 2 * 256 * 2


def test_a_page_must_hold_a_row_of_the_state() -> None:
    model = make_hybrid(2, (1,), AttentionSpec(1, 1, 16), GATED_DELTA_NET)
    with pytest.raises(ConfigError, match="raise block_size to 16"):
        plan_cache_groups(model, CONTEXT, 4)
    assert plan_cache_groups(model, CONTEXT, 16).groups[1].state_blocks > 0


def test_a_sequence_holds_its_state_whatever_its_length() -> None:
    groups = plan(HYBRIDS["qwen3.6-35b-a3b"]).groups
    assert count_held_blocks(groups, 1, PAGE_SIZE, 1) == 1 + 51
    assert count_held_blocks(groups, 10 * PAGE_SIZE, PAGE_SIZE, 1) == 10 + 51
    assert longest_sequence(groups, 61, PAGE_SIZE, 1, CONTEXT) == 10 * PAGE_SIZE
    assert longest_sequence(groups, 50, PAGE_SIZE, 1, CONTEXT) == 0
    assert token_capacity(groups, 2 * 61, PAGE_SIZE, 10 * PAGE_SIZE) == 20 * PAGE_SIZE
    assert count_useful_blocks(groups, PAGE_SIZE, PAGE_SIZE, 1, 2) > 2 * 52
    without_attention = plan(HYBRIDS["without-attention"]).groups
    assert longest_sequence(without_attention, 100, PAGE_SIZE, 1, CONTEXT) == CONTEXT
