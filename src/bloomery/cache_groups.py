"""Cache groups: which layers share block tables, and how many blocks a sequence takes.

Layers that cache the same positions form a group: those that keep every position, and those that
keep the last `window` positions. A group has its own block tables, so a window group can give back
blocks that its layers no longer read.

All groups take blocks from one pool, and a block has the same bytes in every group. A block holds
`layers_per_block` layers. It is a slice of as many tensors, the *layer slots*. A group with more
layers has several block tables, and each of its layers belongs to one table and one layer slot:

    Gemma 3 27B: 10 layers that keep all positions and 52 with a window; 10 layers per block
      group "full":   1 table  of 10 layers
      group "window": 6 tables of 8 or 9 layers

A model whose layers all keep the same positions has one group, one table and a slot for each layer.

Positions are counted in pages. A page is one block in each table. Where the keys and values of a
group are twice as large per position, its blocks hold half as many positions, and a page takes two.

Layers with a recurrent state form the last group. It caches no positions: a sequence has
`state_blocks` blocks, however long the sequence is. In each layer slot, the states of several
layers lie in them one after the other, in pieces: the halves of blocks, or parts of halves.

    Qwen3.6-35B-A3B: 10 layers of attention, 30 gated delta nets; 10 layers per block
      group "full":      1 table of 10 layers
      group "recurrent": 51 blocks, with 3 states of 34 half blocks in each layer slot

A layer with attention beside a recurrent mixer belongs to two groups. In a model without attention
the planner chooses the bytes of a block.

Arithmetic only: the scheduler, the workers and `bloomery plan` all use it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bloomery.errors import ConfigError
from bloomery.layout import TensorParallelLayout
from bloomery.messages import CacheGroup
from bloomery.spec import AttentionSpec, ModelSpec, RecurrentSpec, StatePart, state_parts

# Block tables of a sequence over all groups that cache positions. Each costs the host and the
# device a little per step.
MAX_TABLES = 8
# Tables of states, one for each layer that shares a layer slot. They are written once, when a
# sequence starts, so more of them cost little.
MAX_STATE_TABLES = 16
# The memory of a hybrid model is divided for sequences of this length, each with its live state and
# a checkpoint. Chosen: longer than most, so that keys and values waste less than states.
TYPICAL_LENGTH = 8192
STATES_PER_SEQUENCE = 2
TABLE_COST = 0.01  # share of this memory that one table less is worth. Chosen.
FLOAT_BYTES = 4  # states are stored in float32
PIECES_PER_HALF = (1, 2, 4, 8)  # what half a block may be divided into for states
MAX_STATE_WASTE = 0.03  # share of a state's blocks that may be empty
MAX_STATE_BLOCKS = 64  # of a state of one layer in a model without attention
CHECKPOINTS_PER_ROW = 4  # that memory is set aside for where it is plenty


@dataclass(frozen=True)
class CacheLayout:
    """The cache groups of a model."""

    groups: tuple[CacheGroup, ...]
    # The group in which each layer of the whole model has its keys and values; None: it has none.
    layer_groups: tuple[int | None, ...]
    # Which layers have a recurrent state. They belong to the last group.
    recurrent_layers: tuple[bool, ...] = ()
    states: StateLayout | None = None  # None: no layer has one

    @property
    def tables(self) -> tuple[BlockTableSpec, ...]:
        """The block tables of keys and values, in the order of the blocks in messages."""
        return tuple(
            BlockTableSpec(
                index,
                group.window,
                group.blocks_per_page,
                self.blocks_per_page // group.blocks_per_page,
            )
            for index, group in enumerate(self.groups)
            for _ in range(group.num_tables)
            if not group.state_blocks
        )

    @property
    def blocks_per_page(self) -> int:
        """Blocks that the kernels divide a page into, the same number in every table."""
        return max(group.blocks_per_page for group in self.groups)

    def place_layers(self, layers: range) -> tuple[LayerPlace | None, ...]:
        """Assign each layer of a pipeline stage to a block table and a layer slot.

        The layers of a group take turns over its tables, so a stage needs as few slots as possible.
        None: the layer has no attention.
        """
        first_tables = [0]
        for group in self.groups:
            first_tables.append(first_tables[-1] + group.num_tables)
        counts = [0] * len(self.groups)
        places: list[LayerPlace | None] = []
        for layer in layers:
            index = self.layer_groups[layer]
            if index is None:
                places.append(None)
                continue
            slot, turn = divmod(counts[index], self.groups[index].num_tables)
            counts[index] += 1
            places.append(LayerPlace(first_tables[index] + turn, slot))
        return tuple(places)

    def place_states(self, layers: range) -> tuple[LayerPlace | None, ...]:
        """Assign each recurrent layer of a pipeline stage to a table of states and a layer slot.

        The tables are counted from 0. None: the layer has no state.
        """
        count = 0
        places: list[LayerPlace | None] = []
        for layer in layers:
            if self.states is None or not self.recurrent_layers[layer]:
                places.append(None)
                continue
            slot, table = divmod(count, self.states.num_tables)
            count += 1
            places.append(LayerPlace(table, slot))
        return tuple(places)


@dataclass(frozen=True)
class BlockTableSpec:
    """One block table of a sequence."""

    group: int
    window: int | None
    blocks_per_page: int
    # Kernels read all tables with blocks of the same number of positions. A block of this table is
    # so many of them.
    kernel_blocks: int


@dataclass(frozen=True)
class StateLayout:
    """How the states of a sequence are divided over its blocks. The same in every layer slot."""

    num_tables: int  # layers that share a layer slot; each has a table of pieces
    num_pieces: int  # of one layer's state, the largest if they differ
    pieces_per_half: int  # of a block
    slot_bytes: int  # of a block in one layer slot

    @property
    def num_blocks(self) -> int:
        """Blocks of a sequence's states."""
        return -(-self.num_tables * self.num_pieces // (2 * self.pieces_per_half))

    def divide_blocks(self, blocks: Sequence[int], num_pool_blocks: int) -> list[list[int]]:
        """Return the pieces of each table: [tables, pieces].

        The pieces of the pool are counted block by block, first in the first halves of all blocks,
        then in the second halves.
        """
        pieces = [
            (half * num_pool_blocks + block) * self.pieces_per_half + piece
            for block in blocks
            for half in (0, 1)
            for piece in range(self.pieces_per_half)
        ]
        count = self.num_pieces
        return [pieces[table * count : (table + 1) * count] for table in range(self.num_tables)]


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer of a pipeline stage has its keys and values, or its state."""

    table: int  # index of its block table
    slot: int  # index of its layer slot; layers of different tables may share one


@dataclass(frozen=True)
class AttentionKind:
    """Layers of attention that share block tables."""

    window: int | None
    num_layers: int
    ratio: int = 1  # bytes of a position over those of the kind that has the fewest


def single_group(model: ModelSpec) -> CacheLayout:
    """All layers in one group. It frees what no layer reads any more."""
    kind = merge_kinds(model.attentions)
    indices = tuple(0 if layer.attention is not None else None for layer in model.layers)
    return CacheLayout((CacheGroup(kind.window, num_layers=kind.num_layers),), indices)


def merge_kinds(attentions: Sequence[AttentionSpec]) -> AttentionKind:
    """One kind for all layers."""
    known = [attention.window for attention in attentions if attention.window is not None]
    window = max(known) if known and len(known) == len(attentions) else None
    return AttentionKind(window, len(attentions))


def plan_cache_groups(
    model: ModelSpec,
    max_len: int,
    page_size: int,
    tp: int = 1,
    scaled: bool = False,
    value_bytes: int = 2,
) -> CacheLayout:
    """Divide the layers of a model into cache groups.

    max_len: the longest sequence; a window that holds all of it is none.
    page_size: positions of a page.
    tp: tensor parallel ranks.
    scaled: keys and values are stored with a scale per head.
    value_bytes: of a stored key or value, without its scale.
    All ranks get the same result. Groups whose heads do not fit blocks of equal size are merged.
    """
    layers = [
        replace(layer, attention=layer.attention and cut_window(layer.attention, max_len))
        for layer in model.layers
    ]
    model = replace(model, layers=tuple(layers))
    kinds, equal_heads = divide_attention(model.attentions, page_size, tp, scaled)
    windows = [kind.window for kind in kinds]

    def find_group(attention: AttentionSpec | None) -> int | None:
        if attention is None:
            return None
        return windows.index(attention.window) if len(kinds) > 1 else 0

    layer_groups = tuple(find_group(layer.attention) for layer in model.layers)
    states = measure_states(model, page_size, tp, value_bytes)
    if states is None and len(kinds) == 1:
        return single_group(model)
    if not equal_heads:
        layers_per_block = kinds[0].num_layers  # layers of a slot take equally many bytes
    elif not kinds and states is not None:
        layers_per_block = states.num_layers
    else:
        layers_per_block = choose_layers_per_block(kinds, max_len, page_size, states)
    groups = [
        CacheGroup(
            kind.window, -(-kind.num_layers // layers_per_block), kind.ratio, kind.num_layers
        )
        for kind in kinds
    ]
    if states is None:
        return CacheLayout(tuple(groups), layer_groups)
    state_layout = states.divide(layers_per_block)
    groups.append(CacheGroup(num_layers=states.num_layers, state_blocks=state_layout.num_blocks))
    recurrent_layers = tuple(layer.recurrent is not None for layer in model.layers)
    return CacheLayout(tuple(groups), layer_groups, recurrent_layers, state_layout)


def divide_attention(
    attentions: Sequence[AttentionSpec], page_size: int, tp: int, scaled: bool
) -> tuple[list[AttentionKind], bool]:
    """Divide layers of attention into kinds that have blocks of equal size.

    Returns them, and whether all layers of a kind have heads of the same size.
    """
    windows = [attention.window for attention in attentions]
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    sizes: list[tuple[int, int]] = []  # KV heads of a rank and head dim, by kind
    for kind in kinds:
        heads = {
            (local_kv_heads(attention, tp), attention.head_dim)
            for attention in attentions
            if attention.window == kind
        }
        if len(heads) > 1:
            return [merge_kinds(attentions)], False
        sizes += heads
    values = [kv_heads * head_dim for kv_heads, head_dim in sizes]
    ratios = [size // min(values) for size in values]
    equal_blocks = all(
        size == ratio * min(values) and ratio & (ratio - 1) == 0 and page_size % ratio == 0
        for size, ratio in zip(values, ratios, strict=True)
    )
    splits_evenly = len(set(values)) <= 1 or all(
        attention.num_kv_heads % tp == 0 or tp % attention.num_kv_heads == 0
        for attention in attentions
    )
    same_scales = not scaled or len({head_dim for _, head_dim in sizes}) <= 1
    if not (equal_blocks and splits_evenly and same_scales):
        return [merge_kinds(attentions)], False
    return [
        AttentionKind(kind, windows.count(kind), ratio)
        for kind, ratio in zip(kinds, ratios, strict=True)
    ], True


def cut_window(attention: AttentionSpec, max_len: int) -> AttentionSpec:
    """Remove a window that never hides a position; a chunk hides as much as a window of its size.

    Chunks begin at fixed positions, so a query sees at most a whole one.
    """
    limits = [attention.window or max_len, attention.chunk or max_len]
    window = min(limits)
    return replace(attention, window=window if window < max_len else None)


def local_kv_heads(attention: AttentionSpec, tp: int) -> int:
    """KV heads of a tensor parallel rank, at most. Ranks that share a head each hold a copy."""
    return -(-attention.num_kv_heads // tp)


@dataclass(frozen=True)
class StateSize:
    """The recurrent states of a model's layers, and the memory that takes them.

    The memory of a block is in two halves, for keys and for values. A half is one piece or several.
    Each part of a state begins at a new piece, and a piece holds as many whole rows as fit.
    """

    num_layers: int
    states: Sequence[tuple[StatePart, ...]]  # the parts of all kinds of states
    half_values: int  # of a block in one layer slot, in float32

    def divide(self, layers_per_block: int) -> StateLayout:
        """Choose the size of a piece: the largest that wastes little, or what wastes least."""
        num_tables = -(-self.num_layers // layers_per_block)
        needed = num_tables * count_values(self.states)
        choices: list[tuple[int, StateLayout]] = []  # wasted blocks that matter
        for pieces_per_half in PIECES_PER_HALF:
            piece_values = self.half_values // pieces_per_half
            is_aligned = self.half_values % (4 * pieces_per_half) == 0  # to 16 bytes
            if pieces_per_half > 1 and not (
                is_aligned and piece_values >= max(widths(self.states))
            ):
                break
            num_pieces = max(count_pieces(parts, piece_values) for parts in self.states)
            slot_bytes = 2 * self.half_values * FLOAT_BYTES
            layout = StateLayout(num_tables, num_pieces, pieces_per_half, slot_bytes)
            waste = 2 * layout.num_blocks * self.half_values / needed - 1
            choices.append((layout.num_blocks if waste > MAX_STATE_WASTE else 0, layout))
        return min(choices, key=lambda choice: choice[0])[1]


def measure_states(model: ModelSpec, page_size: int, tp: int, value_bytes: int) -> StateSize | None:
    """Return the size of the states and of the blocks that take them; None: no layer has one."""
    if not model.recurrents:
        return None
    states = [local_state_parts(spec, tp) for spec in set(model.recurrents)]
    if model.attentions:
        position_values = min(
            local_kv_heads(attention, tp) * attention.head_dim for attention in model.attentions
        )
        half_values = position_values * page_size * value_bytes // FLOAT_BYTES
        widest = max(widths(states))
        if half_values < widest:
            pages = -(-widest // max(half_values, 1))
            raise ConfigError(
                f"a KV cache block of {page_size} positions is too small for a row of "
                f"the recurrent state ({widest} values): "
                f"raise block_size to {page_size * next_power_of_two(pages)}"
            )
    else:
        half_values = choose_half_values(states)
    return StateSize(len(model.recurrents), states, half_values)


def local_state_parts(spec: RecurrentSpec, tp: int) -> tuple[StatePart, ...]:
    """The parts of a state on one tensor parallel rank. All ranks have equally many heads."""
    return state_parts(TensorParallelLayout(0, tp).recurrent(spec))


def count_pieces(parts: Iterable[StatePart], piece_values: int) -> int:
    """Pieces of so many float32 values that the state of one layer takes."""
    return sum(-(-part.rows // (piece_values // part.width)) for part in parts)


def count_values(states: Sequence[tuple[StatePart, ...]]) -> int:
    """The values of the largest state of a layer."""
    return max(sum(part.rows * part.width for part in parts) for parts in states)


def choose_half_values(states: Sequence[tuple[StatePart, ...]]) -> int:
    """Return the size of half a block in a model without attention.

    The fewest blocks that waste little win, otherwise what wastes least.
    """
    needed = count_values(states)
    choices: list[tuple[bool, float, int]] = []
    for count in range(1, 2 * MAX_STATE_BLOCKS + 1):
        for part in {part for parts in states for part in parts}:
            half_values = max(-(-part.rows // count) * part.width, *widths(states))
            half_values = -(-half_values // 4) * 4  # aligned to 16 bytes
            halves = max(count_pieces(parts, half_values) for parts in states)
            num_blocks = -(-halves // 2)
            waste = 2 * num_blocks * half_values / needed - 1
            if num_blocks <= MAX_STATE_BLOCKS:
                wasteful = waste > MAX_STATE_WASTE
                choices.append((wasteful, waste if wasteful else num_blocks, half_values))
    return min(choices)[2]


def widths(states: Sequence[tuple[StatePart, ...]]) -> list[int]:
    """The widths of all parts."""
    return [part.width for parts in states for part in parts]


def next_power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def choose_layers_per_block(
    kinds: Sequence[AttentionKind], max_len: int, page_size: int, states: StateSize | None
) -> int:
    """Return the layers per block that waste the least memory for a sequence of `max_len`.

    A group's last blocks are partly empty if its layers are no multiple. Of equal choices the one
    with the fewest tables wins.
    """
    length = max_len if states is None else min(max_len, TYPICAL_LENGTH)

    def cost(layers_per_block: int) -> tuple[float, int]:
        memory = 0.0  # in positions of one layer
        num_tables = 0
        for kind in kinds:
            tables = -(-kind.num_layers // layers_per_block)
            memory += tables * layers_per_block * kind.ratio * min(kind.window or length, length)
            num_tables += tables
        if states is not None:
            state_layout = states.divide(layers_per_block)
            num_state_blocks = STATES_PER_SEQUENCE * state_layout.num_blocks
            memory += num_state_blocks * layers_per_block * page_size
            num_tables += state_layout.num_tables
            memory *= 1 + TABLE_COST * num_tables
        return memory, num_tables

    def has_few_tables(layers_per_block: int) -> bool:
        tables = sum(-(-kind.num_layers // layers_per_block) for kind in kinds)
        state_tables = 0 if states is None else -(-states.num_layers // layers_per_block)
        return tables <= max(MAX_TABLES, len(kinds)) and state_tables <= MAX_STATE_TABLES

    # With the layers of the largest group there is one table per group.
    counts = [kind.num_layers for kind in kinds] + ([states.num_layers] if states else [])
    choices = [
        size for size in range(1, max(counts) + 1) if size == max(counts) or has_few_tables(size)
    ]
    return min(choices, key=cost)


# ---- blocks of a sequence ------------------------------------------------------------------------


def count_pages(length: int, page_size: int) -> int:
    """Pages that hold `length` positions."""
    return -(-length // page_size)


def first_visible_page(group: CacheGroup, position: int, page_size: int) -> int:
    """The first page that queries from `position` on may read."""
    if group.window is None:
        return 0
    return max(position - group.window + 1, 0) // page_size


def count_held_pages(group: CacheGroup, length: int, page_size: int, step_tokens: int) -> int:
    """The most pages that a sequence of `length` positions ever holds in a group.

    It is computed in steps of at most `step_tokens` positions. A window group holds the positions
    of a step and those that the first of them reads.
    """
    if group.state_blocks:
        return 0
    num_pages = count_pages(length, page_size)
    if group.window is None:
        return num_pages
    # Blocks are given back page by page, so a page may be held until the next one is complete.
    held_positions = group.window - 1 + max(step_tokens, page_size)
    return min(num_pages, held_positions // page_size + 2)


def count_held_blocks(
    groups: Sequence[CacheGroup], length: int, page_size: int, step_tokens: int
) -> int:
    """The most blocks that a sequence of `length` positions ever holds, its state included."""
    pages = sum(
        group.page_blocks * count_held_pages(group, length, page_size, step_tokens)
        for group in groups
    )
    return pages + count_state_blocks(groups)


def count_state_blocks(groups: Sequence[CacheGroup]) -> int:
    """The blocks of a sequence's recurrent state."""
    return sum(group.state_blocks for group in groups)


def count_useful_blocks(
    groups: Sequence[CacheGroup],
    max_len: int,
    page_size: int,
    step_tokens: int,
    max_num_seqs: int,
) -> int:
    """The most blocks that a batch can use: its sequences, and checkpoints for later ones."""
    held = count_held_blocks(groups, max_len, page_size, step_tokens)
    return max_num_seqs * (held + CHECKPOINTS_PER_ROW * count_state_blocks(groups))


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, page_size: int, step_tokens: int, max_len: int
) -> int:
    """The longest sequence, at most `max_len`, that a pool of `num_blocks` can hold."""
    lengths = range(1, max_len + 1)
    return bisect(
        lengths,
        num_blocks,
        key=lambda length: count_held_blocks(groups, length, page_size, step_tokens),
    )


def token_capacity(
    groups: Sequence[CacheGroup], num_blocks: int, page_size: int, max_len: int
) -> int:
    """Tokens that a pool of `num_blocks` holds, in sequences of `max_len` if that matters."""
    if all(group.window is None and not group.state_blocks for group in groups):
        return num_blocks // sum(group.page_blocks for group in groups) * page_size
    return num_blocks * max_len // count_held_blocks(groups, max_len, page_size, 1)
