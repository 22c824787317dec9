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

Arithmetic only: the scheduler, the workers and `bloomery plan` all use it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bloomery.messages import CacheGroup
from bloomery.spec import AttentionSpec, ModelSpec

# Block tables of a sequence over all groups. Each costs the host and the device a little per step.
MAX_TABLES = 8


@dataclass(frozen=True)
class CacheLayout:
    """The cache groups of a model."""

    groups: tuple[CacheGroup, ...]
    layer_groups: tuple[int, ...]  # the group of each layer of the whole model

    @property
    def tables(self) -> tuple[BlockTableSpec, ...]:
        """All block tables of a sequence, group after group, as the scheduler orders blocks."""
        return tuple(
            BlockTableSpec(
                index,
                group.window,
                group.blocks_per_page,
                self.blocks_per_page // group.blocks_per_page,
            )
            for index, group in enumerate(self.groups)
            for _ in range(group.num_tables)
        )

    @property
    def blocks_per_page(self) -> int:
        """Blocks that the kernels divide a page into, the same number in every table."""
        return max(group.blocks_per_page for group in self.groups)

    def place_layers(self, layers: range) -> tuple[LayerPlace, ...]:
        """Assign each layer of a pipeline stage to a block table and a layer slot.

        The layers of a group take turns over its tables, so a stage needs as few slots as possible.
        """
        first_tables = [0]
        for group in self.groups:
            first_tables.append(first_tables[-1] + group.num_tables)
        counts = [0] * len(self.groups)
        places = []
        for layer in layers:
            index = self.layer_groups[layer]
            slot, turn = divmod(counts[index], self.groups[index].num_tables)
            counts[index] += 1
            places.append(LayerPlace(first_tables[index] + turn, slot))
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
class LayerPlace:
    """Where a layer of a pipeline stage has its keys and values."""

    table: int  # index of its block table
    slot: int  # index of its layer slot; layers of different tables may share one


def single_group(model: ModelSpec) -> CacheLayout:
    """All layers in one group. It frees what no layer reads any more."""
    windows = [attention.window for attention in model.attentions]
    known = [window for window in windows if window is not None]
    window = max(known) if len(known) == len(windows) else None
    num_layers = len(windows)
    return CacheLayout((CacheGroup(window, num_layers=num_layers),), (0,) * num_layers)


def plan_cache_groups(
    model: ModelSpec, max_len: int, page_size: int, tp: int = 1, scaled: bool = False
) -> CacheLayout:
    """Divide the layers of a model into cache groups.

    max_len: the longest sequence; a window that holds all of it is none.
    page_size: positions of a page.
    tp: tensor parallel ranks.
    scaled: keys and values are stored with a scale per head.
    All ranks get the same result. Groups whose heads do not fit blocks of equal size are merged.
    """
    layers = [
        replace(layer, attention=layer.attention and cut_window(layer.attention, max_len))
        for layer in model.layers
    ]
    model = replace(model, layers=tuple(layers))
    windows = [attention.window for attention in model.attentions]
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    if len(kinds) == 1:
        return single_group(model)
    sizes: list[tuple[int, int]] = []  # KV heads of a rank and head dim, by kind
    for kind in kinds:
        attentions = [spec for spec in model.attentions if spec.window == kind]
        heads = {(local_kv_heads(attention, tp), attention.head_dim) for attention in attentions}
        if len(heads) > 1:
            return single_group(model)
        sizes += heads
    values = [kv_heads * head_dim for kv_heads, head_dim in sizes]
    ratios = [size // min(values) for size in values]
    equal_blocks = all(
        size == ratio * min(values) and ratio & (ratio - 1) == 0 and page_size % ratio == 0
        for size, ratio in zip(values, ratios, strict=True)
    )
    splits_evenly = len(set(values)) == 1 or all(
        attention.num_kv_heads % tp == 0 or tp % attention.num_kv_heads == 0
        for attention in model.attentions
    )
    same_scales = not scaled or len({head_dim for _, head_dim in sizes}) == 1
    if not (equal_blocks and splits_evenly and same_scales):
        return single_group(model)
    counts = [windows.count(kind) for kind in kinds]
    layers_per_block = choose_layers_per_block(kinds, counts, ratios, max_len)
    groups = tuple(
        CacheGroup(kind, -(-count // layers_per_block), ratio, count)
        for kind, count, ratio in zip(kinds, counts, ratios, strict=True)
    )
    return CacheLayout(groups, tuple(kinds.index(window) for window in windows))


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


def choose_layers_per_block(
    windows: Sequence[int | None], counts: Sequence[int], ratios: Sequence[int], max_len: int
) -> int:
    """Return the layers per block that waste the least memory for a sequence of `max_len`.

    A group's last blocks are partly empty if its layers are no multiple. Of equal choices the one
    with the fewest tables wins.
    """

    def cost(layers_per_block: int) -> tuple[int, int]:
        memory = 0
        num_tables = 0
        for window, count, ratio in zip(windows, counts, ratios, strict=True):
            tables = -(-count // layers_per_block)
            memory += tables * layers_per_block * ratio * min(window or max_len, max_len)
            num_tables += tables
        return memory, num_tables

    # With the layers of the largest group there is one table per group.
    choices = [
        size
        for size in range(1, max(counts) + 1)
        if cost(size)[1] <= max(MAX_TABLES, len(counts)) or size == max(counts)
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
    num_pages = count_pages(length, page_size)
    if group.window is None:
        return num_pages
    # Blocks are given back page by page, so a page may be held until the next one is complete.
    held_positions = group.window - 1 + max(step_tokens, page_size)
    return min(num_pages, held_positions // page_size + 2)


def count_held_blocks(
    groups: Sequence[CacheGroup], length: int, page_size: int, step_tokens: int
) -> int:
    """The most blocks that a sequence of `length` positions ever holds."""
    return sum(
        group.page_blocks * count_held_pages(group, length, page_size, step_tokens)
        for group in groups
    )


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
    """Tokens that a pool of `num_blocks` holds in sequences of `max_len`, if some have windows."""
    if all(group.window is None for group in groups):
        return num_blocks // sum(group.page_blocks for group in groups) * page_size
    return num_blocks * max_len // count_held_blocks(groups, max_len, page_size, 1)
