"""The products of LoRA adapters: shrink, expand, and tables that replace an embedding.

    lora_shrink   x [rows, in] -> [rows, parts * rank], with the A of each row's device slot
    lora_expand   y += B times the part of the shrunk row that an output reads
    lora_lookup   token ids -> rows of the table of each row's slot
    lora_project  x -> logits, with the table of each row's slot

Each row has the number of its adapter's device slot, or -1 if it has no adapter. So one launch
serves any mix of adapters, and a captured step holds whatever the rows need. The matrices of all
slots lie in one block of memory, slot after slot. With experts, a row is a (token, choice) pair,
and each slot has the matrices of all experts.

A linear layer may be several layers of the adapter: q, k and v, or gate and up. Each of them is a
part with an A of its own, and its outputs read the rank columns of that part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bloomery.kernels.launch import (
    jit,
    kernel_constant,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool

# Up to this many rows, each adapter of a block of rows gets programs of its own. With more rows,
# most blocks have one adapter, and a program takes all adapters of its block one after another.
MAX_PARALLEL_ROWS = 128
SHRINK_COLUMNS = 512  # columns of A that a program reads at a time for a few rows
MAX_SPLITS = 8  # programs among which the columns of A are divided; twice as many for few rows
# Thousands of programs read the shrunk row of a fused kernel, some words at one place of the cache.
# Copies of it spread them over the cache's slices.
SHRUNK_COPIES = 64
NUM_COPIES = kernel_constant(SHRUNK_COPIES)


class AdapterBatch:
    """The adapter slot of each row of the current forward pass."""

    def __init__(self) -> None:
        # The shrunk rows of all layers of a step of one row: see FusedLora. None on a CPU.
        self.shrunk: torch.Tensor | None = None
        self.num_slots = 0  # on the device; 0: rows are not grouped
        # The adapters' products run on this stream beside those of the base model; None: after.
        self.side_stream: torch.cuda.Stream | None = None
        self.groups: RowGroups | None = None
        self.slots: torch.Tensor | None = None  # [rows] int32, -1: none; None: no row has one
        self.all_slots: torch.Tensor | None = None  # of all rows of the forward pass
        # Whether a row's adapter may change layers outside of the decoder layers. Few do.
        self.changes_outer = True

    @property
    def outer_slots(self) -> torch.Tensor | None:
        """The slots as layers outside of the decoder layers see them."""
        return self.slots if self.changes_outer else None

    @property
    def has_one_row(self) -> bool:
        """Whether the whole step, and not only what `select` has left of it, is one row."""
        return self.all_slots is not None and len(self.all_slots) == 1

    def begin(self, slots: torch.Tensor | None) -> None:
        """Set the slots of a forward pass."""
        self.slots = slots
        self.all_slots = slots
        self._group_rows()
        if self.has_one_row and self.shrunk is not None:
            self.shrunk.zero_()

    def select(self, rows: torch.Tensor | slice | None) -> None:
        """From here on layers see only these rows; None: all of them again."""
        self.slots = self.all_slots
        if self.slots is not None and rows is not None:
            self.slots = self.slots[rows]
        self._group_rows()

    def _group_rows(self) -> None:
        """Group the rows by adapter for the kernels of a GPU."""
        self.groups = None
        if self.slots is not None and len(self.slots) > 1 and self.num_slots:
            self.groups = group_rows(self.slots, self.num_slots)


class RowGroups(NamedTuple):
    """The rows of a step in blocks, each of one adapter.

    Rows without an adapter have blocks of their own, so that kernels reach every row.
    """

    rows: torch.Tensor  # [blocks, rows of a block] int32; -1: none
    slots: torch.Tensor  # [blocks] int32; -1: no adapter


class LoraMatrices(NamedTuple):
    """The matrices of one linear layer, of all slots. B has the adapter's scale in it."""

    a: torch.Tensor  # [slots, experts, parts * rank, in]; without experts there is one
    b: torch.Tensor  # [slots, experts, out, rank]
    parts: torch.Tensor  # [out] int32: the part that each output reads
    bias: torch.Tensor | None = None  # [slots, out]: added to the bias of the base model


class FusedLora(NamedTuple):
    """The adapter of a step of one row, for a kernel that computes it with the base product.

    The first programs of that kernel shrink the row, and the others use the result when they have
    read their weights. They see by the values themselves whether these are there: `shrunk` must be
    0 when the kernel starts.
    """

    matrices: LoraMatrices
    slots: torch.Tensor  # [1] int32
    shrunk: torch.Tensor  # [SHRUNK_COPIES, parts * rank] float32


class LoraRows(NamedTuple):
    """Which matrices the rows of a product use."""

    slots: torch.Tensor  # [tokens] int32, -1: none
    # [tokens, choices] int32: each token has a row for each of its experts; ids outside of the
    # range have none.
    experts: torch.Tensor | None = None
    groups: RowGroups | None = None  # of the tokens, where it is known; not used with experts

    def matrix_rows(self, num_experts: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield each slot and expert in use and its rows; waits for the device."""
        slots = self.slots.long()
        experts = torch.zeros_like(slots)
        if self.experts is not None:
            slots = slots.repeat_interleave(self.experts.shape[1])
            experts = self.experts.flatten().long()
        is_used = (slots >= 0) & (experts >= 0) & (experts < num_experts)
        matrix = torch.where(is_used, slots * num_experts + experts, -1)
        for index in matrix.unique().tolist():
            if index >= 0:
                yield index // num_experts, index % num_experts, (matrix == index).nonzero()[:, 0]


def lora_shrink(
    x: torch.Tensor, matrices: LoraMatrices, rows: LoraRows, pool: ThreadPool | None = None
) -> torch.Tensor:
    """x [rows, in] -> [rows, parts * rank] in float32; rows without an adapter are not defined.

    On a GPU the result has partial sums: [splits, rows, parts * rank].
    """
    if pool is not None and pool.accepts(x):
        return ops.lora_shrink(pool, x, matrices.a, rows.slots, rows.experts)
    if use_triton(x):
        return lora_shrink_triton(x, matrices, rows)
    return lora_shrink_reference(x, matrices, rows)


def lora_shrink_reference(x: torch.Tensor, matrices: LoraMatrices, rows: LoraRows) -> torch.Tensor:
    """The same as `lora_shrink`, in torch."""
    _, num_experts, width, _ = matrices.a.shape
    shrunk = torch.zeros(len(x), width, dtype=torch.float32, device=x.device)
    for slot, expert, index in rows.matrix_rows(num_experts):
        shrunk[index] = x[index].float() @ matrices.a[slot, expert].float().t()
    return shrunk


def lora_expand(
    shrunk: torch.Tensor,
    matrices: LoraMatrices,
    rows: LoraRows,
    y: torch.Tensor,
    pool: ThreadPool | None = None,
) -> None:
    """Add B times the shrunk rows, and the bias of the adapter, to y [rows, out], in place."""
    if pool is not None and pool.accepts(shrunk, y):
        _, b, parts, bias = matrices
        ops.lora_expand(pool, shrunk, b, parts, rows.slots, y, rows.experts, bias)
        return
    if use_triton(y):
        lora_expand_triton(shrunk.view(-1, *shrunk.shape[-2:]), matrices, rows, y)
        return
    lora_expand_reference(shrunk, matrices, rows, y)


def lora_expand_reference(
    shrunk: torch.Tensor, matrices: LoraMatrices, rows: LoraRows, y: torch.Tensor
) -> None:
    """The same as `lora_expand`, in torch."""
    _, num_experts, _, rank = matrices.b.shape
    columns = matrices.parts.long()[:, None] * rank + torch.arange(rank, device=y.device)
    for slot, expert, index in rows.matrix_rows(num_experts):
        read = shrunk[index][:, columns]  # [rows, out, rank]
        delta = (read * matrices.b[slot, expert].float()).sum(-1)
        if matrices.bias is not None:
            delta = delta + matrices.bias[slot].float()
        y[index] = (y[index].float() + delta).to(y.dtype)


def lora_bias(
    shrunk: torch.Tensor,
    matrices: LoraMatrices,
    rows: LoraRows,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return bias + B times the only shrunk row: [out].

    With one row, an adapter is nothing but another bias. So every kernel that fuses a bias with the
    product, whatever the format of the weights, fuses the adapter as well. Needs Triton.
    """
    out = torch.empty(1, len(matrices.parts), dtype=dtype, device=shrunk.device)
    lora_expand_triton(shrunk, matrices, rows, out, bias, accumulates=False)
    return out[0]


def block_rows_of(num_rows: int) -> int:
    """Return how many rows a program multiplies."""
    return 16 if num_rows <= MAX_PARALLEL_ROWS else 64


def count_splits(num_rows: int, inputs: int) -> int:
    """Return among how many programs the columns of A are divided."""
    most = 2 * MAX_SPLITS if num_rows <= MAX_PARALLEL_ROWS else MAX_SPLITS
    tiles = -(-inputs // SHRINK_COLUMNS)
    return -(-tiles // -(-tiles // most))


class RowBlocks(NamedTuple):
    """How the rows of a product are divided among programs."""

    size: int
    parallel: int  # programs among which the adapters of a block are divided
    programs: int

    @classmethod
    def of(cls, rows: LoraRows, num_rows: int, num_matrices: int) -> RowBlocks:
        """Choose the blocks: those of the groups, or neighbouring rows."""
        size = block_rows_of(num_rows)
        if rows.groups is not None and rows.experts is None:
            return cls(size, 1, len(rows.groups.slots))
        parallel = 1 if num_rows > MAX_PARALLEL_ROWS else min(16, num_rows, num_matrices)
        return cls(size, parallel, -(-num_rows // size) * parallel)


def count_blocks(num_rows: int, num_slots: int) -> int:
    """Return how many blocks rows may need that have any of the slots, or none."""
    return num_rows // block_rows_of(num_rows) + min(num_slots + 1, num_rows)


def group_rows(slots: torch.Tensor, num_slots: int) -> RowGroups:
    """Group the rows by their slot: slots [rows] int32, -1 for none. Needs Triton."""
    num_rows = len(slots)
    size = block_rows_of(num_rows)
    num_blocks = count_blocks(num_rows, num_slots)
    rows = torch.empty(num_blocks, size, dtype=torch.int32, device=slots.device)
    block_slots = torch.empty(num_blocks, dtype=torch.int32, device=slots.device)
    group_rows_kernel[(num_slots + 1,)](
        slots,
        rows,
        block_slots,
        num_rows,
        num_blocks,
        num_slots,
        GROUPS_POW2=next_power_of_2(num_slots + 1),
        SIZE=size,
        WIDTH=min(256, max(16, next_power_of_2(num_rows))),
        num_warps=4,
        **pdl_options(slots.device),
    )
    return RowGroups(rows, block_slots)


def group_rows_reference(slots: torch.Tensor, num_slots: int) -> RowGroups:
    """The same as `group_rows`, in torch."""
    num_rows = len(slots)
    size = block_rows_of(num_rows)
    num_blocks = count_blocks(num_rows, num_slots)
    rows = torch.full((num_blocks, size), -1, dtype=torch.int32)
    block_slots = torch.full((num_blocks,), -1, dtype=torch.int32)
    block = 0
    for slot in (*range(num_slots), -1):
        own = (slots == slot).nonzero()[:, 0]
        count = -(-len(own) // size)
        rows[block : block + count].view(-1)[: len(own)] = own.int()
        block_slots[block : block + count] = slot
        block += count
    return RowGroups(rows, block_slots)


@jit(do_not_specialize=["num_rows", "num_blocks", "num_slots"])
def group_rows_kernel(
    slots,  # [num_rows]
    rows,  # [num_blocks, SIZE]
    block_slots,  # [num_blocks]
    num_rows,
    num_blocks,
    num_slots,
    GROUPS_POW2: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program places the rows of one slot.

    The last one places the rows without an adapter, and marks the blocks that are not used.
    """
    # Without `launch_dependents`: later kernels read the groups before their own wait.
    wait_for_previous(PDL)
    own = tl.program_id(0)
    own_slot = tl.where(own == num_slots, -1, own)
    group = tl.arange(0, GROUPS_POW2)
    counts = tl.zeros([GROUPS_POW2], tl.int32)
    for start in range(0, num_rows, WIDTH):
        row = start + tl.arange(0, WIDTH)
        is_row = row < num_rows
        slot = tl.load(slots + row, mask=is_row, other=-1)
        row_group = tl.where(slot < 0, num_slots, slot)
        is_own = is_row[None, :] & (row_group[None, :] == group[:, None])
        counts += tl.sum(is_own.to(tl.int32), 1)
    blocks = (counts + SIZE - 1) // SIZE
    first = tl.sum(tl.where(group < own, blocks, 0), 0)
    count = tl.sum(tl.where(group == own, counts, 0), 0)
    end = first + (count + SIZE - 1) // SIZE
    place = first * SIZE
    for start in range(0, num_rows, WIDTH):
        row = start + tl.arange(0, WIDTH)
        slot = tl.load(slots + row, mask=row < num_rows, other=-2)
        is_own = slot == own_slot
        index = place + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(rows + index, row, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    filler = place + tl.arange(0, SIZE)
    tl.store(rows + filler, -1, mask=filler < end * SIZE)
    if own == num_slots:
        for start in range(end * SIZE, num_blocks * SIZE, WIDTH):
            index = start + tl.arange(0, WIDTH)
            tl.store(rows + index, -1, mask=index < num_blocks * SIZE)
        end = num_blocks
    for start in range(first, end, WIDTH):
        block = start + tl.arange(0, WIDTH)
        tl.store(block_slots + block, own_slot, mask=block < end)


def lora_shrink_triton(
    x: torch.Tensor,
    matrices: LoraMatrices,
    rows: LoraRows,
    joins: bool = False,
) -> torch.Tensor:
    """Run the kernel: partial sums [splits, rows, parts * rank].

    `joins`: it follows work of another stream.
    """
    x = x.contiguous()
    num_rows, inputs = x.shape
    num_slots, num_experts, width, _ = matrices.a.shape
    splits = count_splits(num_rows, inputs)
    out = torch.empty(splits, num_rows, width, dtype=torch.float32, device=x.device)
    blocks = RowBlocks.of(rows, num_rows, num_slots * num_experts)
    block_width = 16 if num_rows <= MAX_PARALLEL_ROWS else min(64, next_power_of_2(width))
    grid = (blocks.programs, -(-width // block_width), splits)
    groups = rows.groups or RowGroups(rows.slots, rows.slots)
    lora_shrink_kernel[grid](
        x,
        matrices.a,
        rows.slots,
        rows.slots if rows.experts is None else rows.experts,
        *groups,
        out,
        num_rows,
        matrices.a.stride(0),
        matrices.a.stride(1),
        INPUTS=inputs,
        WIDTH=width,
        NUM_EXPERTS=num_experts,
        HAS_EXPERTS=rows.experts is not None,
        ROWS_PER_TOKEN=num_rows // len(rows.slots),
        GROUPED=rows.groups is not None and rows.experts is None,
        PARALLEL=blocks.parallel,
        BLOCK_ROWS=blocks.size,
        BLOCK_WIDTH=block_width,
        BLOCK_IN=SHRINK_COLUMNS if num_rows <= MAX_PARALLEL_ROWS else 64,
        FEW_ROWS=num_rows <= MAX_PARALLEL_ROWS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        **pdl_options(x.device, joins),
    )
    return out


def lora_expand_triton(
    shrunk: torch.Tensor,
    matrices: LoraMatrices,
    rows: LoraRows,
    y: torch.Tensor,
    start: torch.Tensor | None = None,
    accumulates: bool = True,
    joins: bool = False,
) -> None:
    """Run the kernel: shrunk has partial sums [splits, rows, parts * rank].

    With `accumulates` the products are added to y; otherwise y becomes start [out] + products.
    `joins`: it follows work of another stream.
    """
    num_slots, num_experts, outputs, rank = matrices.b.shape
    splits, num_rows, width = shrunk.shape
    blocks = RowBlocks.of(rows, num_rows, num_slots * num_experts)
    block_out = 64
    if num_rows > 1:
        block_out = 128 if outputs <= 8192 or blocks.size > 16 else 256
    grid = (blocks.programs, -(-outputs // block_out))
    groups = rows.groups or RowGroups(rows.slots, rows.slots)
    bias = matrices.bias
    lora_expand_kernel[grid](
        shrunk,
        matrices.b,
        matrices.parts,
        y if bias is None else bias,
        y if start is None else start,
        rows.slots,
        rows.slots if rows.experts is None else rows.experts,
        *groups,
        y,
        num_rows,
        matrices.b.stride(0),
        matrices.b.stride(1),
        0 if bias is None else bias.stride(0),
        OUTPUTS=outputs,
        WIDTH=width,
        RANK=rank,
        RANK_POW2=max(16, next_power_of_2(rank)),
        SPLITS=splits,
        NUM_EXPERTS=num_experts,
        HAS_EXPERTS=rows.experts is not None,
        ROWS_PER_TOKEN=num_rows // len(rows.slots),
        HAS_BIAS=bias is not None,
        HAS_START=start is not None,
        ACCUMULATES=accumulates,
        GROUPED=rows.groups is not None and rows.experts is None,
        PARALLEL=blocks.parallel,
        BLOCK_ROWS=blocks.size,
        BLOCK_OUT=block_out,
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32",
        num_warps=4,
        **pdl_options(y.device, joins),
    )


@jit
def load_matrix_ids(
    slots,
    experts,
    row,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
):
    """Return slot * NUM_EXPERTS + expert of each row, -1 where it has no adapter."""
    slot = tl.load(slots + row // ROWS_PER_TOKEN, mask=row < num_rows, other=-1)
    matrix = slot * NUM_EXPERTS
    if HAS_EXPERTS:
        expert = tl.load(experts + row, mask=row < num_rows, other=-1)
        is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
        matrix = tl.where((slot >= 0) & is_expert, matrix + expert, -1)
    return tl.where(slot >= 0, matrix, -1)


@jit
def rank_distinct(matrix, BLOCK_ROWS: tl.constexpr):
    """Number the distinct matrices of a block of rows.

    Returns the number of each row's matrix, -1 for none, and how many distinct ones there are.
    """
    i = tl.arange(0, BLOCK_ROWS)
    # A matrix is numbered by the distinct matrices that are larger than it.
    same_before = (matrix[:, None] == matrix[None, :]) & (i[None, :] < i[:, None])
    is_first = (tl.sum(same_before.to(tl.int32), 1) == 0) & (matrix >= 0)
    larger = (matrix[None, :] > matrix[:, None]) & is_first[None, :]
    number = tl.sum(larger.to(tl.int32), 1)
    return tl.where(matrix >= 0, number, -1), tl.sum(is_first.to(tl.int32), 0)


@jit
def locate_rows(
    slots,
    experts,
    group_rows,
    group_slots,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    GROUPED: tl.constexpr,
    PARALLEL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Return the rows of a program, the matrix of each, its number, and how many there are."""
    i = tl.arange(0, BLOCK_ROWS)
    if GROUPED:
        block = tl.program_id(0)
        slot = tl.load(group_slots + block)
        row = tl.load(group_rows + block * BLOCK_ROWS + i)
        matrix = tl.where(row >= 0, slot, -1)
        number = tl.where(matrix >= 0, 0, -1)
        count = tl.where(slot >= 0, 1, 0)
    else:
        row = tl.program_id(0) // PARALLEL * BLOCK_ROWS + i
        matrix = load_matrix_ids(
            slots, experts, row, num_rows, NUM_EXPERTS, HAS_EXPERTS, ROWS_PER_TOKEN
        )
        number, count = rank_distinct(matrix, BLOCK_ROWS)
    return row, matrix, number, count


@jit
def lora_shrink_kernel(
    x,  # [num_rows, INPUTS]
    a,  # [slots, NUM_EXPERTS, WIDTH, INPUTS]
    slots,  # [num_rows / ROWS_PER_TOKEN]
    experts,  # [num_rows]
    group_rows,  # [blocks, BLOCK_ROWS]
    group_slots,  # [blocks]
    out,  # [splits, num_rows, WIDTH]
    num_rows,
    slot_stride,
    expert_stride,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    GROUPED: tl.constexpr,
    PARALLEL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program multiplies a block of rows, for every PARALLEL-th of its distinct adapters."""
    launch_dependents(PDL)
    if HAS_EXPERTS:
        wait_for_previous(PDL)  # the router of this step writes the experts
    row, matrix, number, count = locate_rows(
        slots,
        experts,
        group_rows,
        group_slots,
        num_rows,
        NUM_EXPERTS,
        HAS_EXPERTS,
        ROWS_PER_TOKEN,
        GROUPED,
        PARALLEL,
        BLOCK_ROWS,
    )
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    is_column = column < WIDTH
    split = tl.program_id(2)
    out += split.to(tl.int64) * num_rows * WIDTH
    k = tl.arange(0, BLOCK_IN)
    per_split = tl.cdiv(tl.cdiv(INPUTS, BLOCK_IN), tl.num_programs(2)) * BLOCK_IN
    first_in = split * per_split
    end_in = tl.minimum(first_in + per_split, INPUTS)
    if GROUPED and FEW_ROWS:
        slot = tl.max(matrix, 0).to(tl.int64)
        if slot < 0:
            wait_for_previous(PDL)
            return
        # The groups are known and A does not change in a step, so A arrives during the wait.
        own_a = a + slot * slot_stride
        is_own = matrix >= 0
        a_tile = load_shrink_tile(own_a, column, first_in + k, is_column, end_in, INPUTS)
        wait_for_previous(PDL)
        total = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
        for start in tl.range(first_in, end_in, BLOCK_IN, num_stages=1):
            x_tile = load_rows(x, row, is_own, start + k, end_in, INPUTS)
            next_k = start + BLOCK_IN + k
            next_tile = load_shrink_tile(own_a, column, next_k, is_column, end_in, INPUTS)
            total = tl.dot(x_tile, tl.trans(a_tile), total, input_precision=PRECISION)
            a_tile = next_tile
        store_rows(out, row, is_own, column, is_column, total, WIDTH)
        return
    if not HAS_EXPERTS:
        wait_for_previous(PDL)
    for current in range(tl.program_id(0) % PARALLEL, count, PARALLEL):
        is_own = number == current
        own = tl.max(tl.where(is_own, matrix, -1), 0).to(tl.int64)
        own_a = a + own // NUM_EXPERTS * slot_stride + own % NUM_EXPERTS * expert_stride
        total = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
        for start in range(first_in, end_in, BLOCK_IN):
            a_tile = load_shrink_tile(own_a, column, start + k, is_column, end_in, INPUTS)
            x_tile = load_rows(x, row, is_own, start + k, end_in, INPUTS)
            total = tl.dot(x_tile, tl.trans(a_tile), total, input_precision=PRECISION)
        store_rows(out, row, is_own, column, is_column, total, WIDTH)


@jit
def load_shrink_tile(a, column, k, is_column, end_in, INPUTS: tl.constexpr):
    """Load a tile of A: [columns, k]."""
    mask = is_column[:, None] & (k < end_in)[None, :]
    return tl.load(a + column[:, None] * INPUTS + k[None, :], mask=mask, other=0.0)


@jit
def load_rows(x, row, is_own, k, end_in, INPUTS: tl.constexpr):
    """Load columns k of some rows of x: [rows, k]."""
    mask = is_own[:, None] & (k < end_in)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * INPUTS + k[None, :], mask=mask, other=0.0)


@jit
def store_rows(out, row, is_own, column, is_column, values, WIDTH: tl.constexpr):
    """Store values [rows, columns] of some rows."""
    mask = is_own[:, None] & is_column[None, :]
    offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + offset, values.to(out.dtype.element_ty), mask=mask)


@jit
def lora_expand_kernel(
    shrunk,  # [SPLITS, num_rows, WIDTH]
    b,  # [slots, NUM_EXPERTS, OUTPUTS, RANK]
    parts,  # [OUTPUTS]
    bias,  # [slots, OUTPUTS]
    start,  # [OUTPUTS]
    slots,  # [num_rows / ROWS_PER_TOKEN]
    experts,  # [num_rows]
    group_rows,  # [blocks, BLOCK_ROWS]
    group_slots,  # [blocks]
    y,  # [num_rows, OUTPUTS]
    num_rows,
    slot_stride,
    expert_stride,
    bias_stride,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANK_POW2: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_START: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    GROUPED: tl.constexpr,
    PARALLEL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT outputs of a block of rows.

    It does so for every PARALLEL-th of the block's distinct adapters.
    """
    launch_dependents(PDL)
    if HAS_EXPERTS:
        wait_for_previous(PDL)  # the router of this step writes the experts
    row, matrix, number, count = locate_rows(
        slots,
        experts,
        group_rows,
        group_slots,
        num_rows,
        NUM_EXPERTS,
        HAS_EXPERTS,
        ROWS_PER_TOKEN,
        GROUPED,
        PARALLEL,
        BLOCK_ROWS,
    )
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = output < OUTPUTS
    r = tl.arange(0, RANK_POW2)
    part = tl.load(parts + output, mask=is_output, other=-1)
    first_part = tl.min(tl.where(is_output, part, 2147483647), 0)
    last_part = tl.max(part, 0)
    base = tl.zeros([BLOCK_OUT], tl.float32)
    if GROUPED:
        slot = tl.max(matrix, 0).to(tl.int64)
        if (tl.max(row, 0) < 0) | (ACCUMULATES & (slot < 0)):
            wait_for_previous(PDL)
            return
        # The groups are known and B does not change in a step, so B arrives during the wait.
        is_own = matrix >= 0
        own_rank = tl.where(slot >= 0, RANK, 0)
        used_slot = tl.maximum(slot, 0)
        b_tile = load_expand_tile(b + used_slot * slot_stride, output, r, is_output, own_rank, RANK)
        if HAS_BIAS:
            own_bias = tl.load(bias + used_slot * bias_stride + output, mask=is_output, other=0.0)
            base += tl.where(slot >= 0, own_bias.to(tl.float32), 0.0)
        wait_for_previous(PDL)
        if HAS_START:  # a kernel of the step may have written it
            base += tl.load(start + output, mask=is_output, other=0.0).to(tl.float32)
        is_stored = row >= 0
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32) + base[None, :]
        if ACCUMULATES:
            is_stored = is_own
            total += load_rows(y, row, is_own, output, OUTPUTS, OUTPUTS).to(tl.float32)
        for current_part in range(first_part, tl.where(slot >= 0, last_part + 1, first_part)):
            total = add_expanded(
                total,
                shrunk,
                b_tile,
                part,
                current_part,
                row,
                is_own,
                r,
                num_rows,
                WIDTH,
                RANK,
                SPLITS,
                PRECISION,
            )
        store_rows(y, row, is_stored, output, is_output, total, OUTPUTS)
        return
    if not HAS_EXPERTS:
        wait_for_previous(PDL)
    if HAS_START:  # a kernel of the step may have written it
        base += tl.load(start + output, mask=is_output, other=0.0).to(tl.float32)
    if not ACCUMULATES:  # noqa: SIM102 (one condition is constant)
        if tl.program_id(0) % PARALLEL == 0:
            is_free = (matrix < 0) & (row < num_rows)
            values = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32) + base[None, :]
            store_rows(y, row, is_free, output, is_output, values, OUTPUTS)
    for current in range(tl.program_id(0) % PARALLEL, count, PARALLEL):
        is_own = number == current
        own = tl.max(tl.where(is_own, matrix, -1), 0).to(tl.int64)
        slot = own // NUM_EXPERTS
        own_b = b + slot * slot_stride + own % NUM_EXPERTS * expert_stride
        b_tile = load_expand_tile(own_b, output, r, is_output, RANK, RANK)
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32) + base[None, :]
        if ACCUMULATES:
            total += load_rows(y, row, is_own, output, OUTPUTS, OUTPUTS).to(tl.float32)
        if HAS_BIAS:
            own_bias = tl.load(bias + slot * bias_stride + output, mask=is_output, other=0.0)
            total += own_bias.to(tl.float32)[None, :]
        for current_part in range(first_part, last_part + 1):
            total = add_expanded(
                total,
                shrunk,
                b_tile,
                part,
                current_part,
                row,
                is_own,
                r,
                num_rows,
                WIDTH,
                RANK,
                SPLITS,
                PRECISION,
            )
        store_rows(y, row, is_own, output, is_output, total, OUTPUTS)


@jit
def load_expand_tile(b, output, r, is_output, used_rank, RANK: tl.constexpr):
    """Load a tile of B: [outputs, rank]."""
    mask = is_output[:, None] & (r < used_rank)[None, :]
    return tl.load(b + output[:, None] * RANK + r[None, :], mask=mask, other=0.0)


@jit
def add_expanded(
    total,  # [rows, outputs]
    shrunk,  # [SPLITS, num_rows, WIDTH]
    b_tile,  # [outputs, rank]
    part,  # of each output
    current_part,
    row,
    is_own,
    r,
    num_rows,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the total and B times the shrunk rows, for the outputs of one part."""
    mask = is_own[:, None] & (r < RANK)[None, :]
    column = (current_part * RANK + r)[None, :]
    low = tl.load(shrunk + row.to(tl.int64)[:, None] * WIDTH + column, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        split_row = (split * num_rows + row).to(tl.int64)[:, None]
        low += tl.load(shrunk + split_row * WIDTH + column, mask=mask, other=0.0)
    own_tile = tl.where((part == current_part)[:, None], b_tile, 0.0).to(b_tile.dtype)
    return tl.dot(low.to(b_tile.dtype), tl.trans(own_tile), total, input_precision=PRECISION)


def lora_lookup(
    token_ids: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    first_id: int,
    out: torch.Tensor,
    active: torch.Tensor | None = None,
    pool: ThreadPool | None = None,
) -> None:
    """Write the rows of token ids [n] in the table of each row's slot into `out` [n, width].

    tables [slots, ids, width] hold the ids from `first_id` on. Other ids, and rows without an
    adapter, become 0. With `active` [slots], only rows of active slots are written.
    """
    if pool is not None and pool.accepts(tables[:0], out):
        ops.lora_lookup(pool, token_ids, tables, slots, first_id, out, active)
        return
    if use_triton(out):
        lora_lookup_triton(token_ids, tables, slots, first_id, out, active)
        return
    lora_lookup_reference(token_ids, tables, slots, first_id, out, active)


def lora_lookup_reference(
    token_ids: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    first_id: int,
    out: torch.Tensor,
    active: torch.Tensor | None = None,
) -> None:
    """The same as `lora_lookup`, in torch."""
    index = token_ids.long() - first_id
    is_inside = (index >= 0) & (index < tables.shape[1])
    slot = slots.long()
    values = tables[slot.clamp(min=0), index.clamp(0, tables.shape[1] - 1)]
    values = torch.where((is_inside & (slot >= 0))[:, None], values, 0).to(out.dtype)
    out.copy_(values if active is None else torch.where(uses(active, slots), values, out))


def lora_lookup_triton(
    token_ids: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    first_id: int,
    out: torch.Tensor,
    active: torch.Tensor | None = None,
) -> None:
    """Run the kernel."""
    _, num_ids, width = tables.shape
    block = min(1024, next_power_of_2(width))
    lora_lookup_kernel[(len(token_ids), -(-width // block))](
        token_ids,
        tables,
        slots,
        slots if active is None else active,
        out,
        first_id,
        num_ids,
        tables.stride(0),
        WIDTH=width,
        HAS_ACTIVE=active is not None,
        BLOCK=block,
        num_warps=4,
        **pdl_options(out.device),
    )


@jit(do_not_specialize=["first_id", "num_ids"])
def lora_lookup_kernel(
    token_ids,  # [rows]
    tables,  # [slots, num_ids, WIDTH]
    slots,  # [rows]
    active,  # [slots]
    out,  # [rows, WIDTH]
    first_id,
    num_ids,
    slot_stride,
    WIDTH: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program copies BLOCK columns of one row."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    index = tl.load(token_ids + row).to(tl.int64) - first_id
    is_inside = (slot >= 0) & (index >= 0) & (index < num_ids)
    written_width = WIDTH
    if HAS_ACTIVE:
        is_active = tl.load(active + tl.maximum(slot, 0)) != 0
        written_width = tl.where((slot >= 0) & is_active, WIDTH, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        tables + slot * slot_stride + index * WIDTH + column,
        mask=column < tl.where(is_inside, WIDTH, 0),
        other=0.0,
    )
    tl.store(
        out + row * WIDTH + column, values.to(out.dtype.element_ty), mask=column < written_width
    )


def lora_project(
    x: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    active: torch.Tensor,
    pool: ThreadPool | None = None,
) -> None:
    """Write x [n, in] times the table of each row's slot into `out` [n, outputs], in place.

    tables [slots, outputs, in]. Only rows of active slots are written; active [slots] int32.
    """
    if pool is not None and pool.accepts(tables[:0], x, out):
        ops.lora_shrink(pool, x, tables[:, None], slots, None, out, active)
        return
    for slot in range(len(tables)):
        chosen = uses(active, slots) & (slots == slot)[:, None]
        out.copy_(torch.where(chosen, (x @ tables[slot].t()).to(out.dtype), out))


def uses(active: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Whether each row has an active slot: [n, 1]."""
    return ((slots >= 0) & (active[slots.long().clamp(min=0)] != 0))[:, None]


# ---- one row: fused with the base product --------------------------------------------------------

# Reads the address until the value there is not +0.
WAIT_FOR_VALUE = kernel_constant(
    """{
    .reg .pred is_there;
    .reg .b32 spins;
    mov.b32 $0, $1;
    mov.b32 spins, 0;
wait:
    setp.ne.b32 is_there, $0, 0;
    @is_there bra done;
    ld.volatile.global.b32 $0, [$2];
    add.s32 spins, spins, 1;
    setp.gt.s32 is_there, spins, 4000000;
    @!is_there bra wait;
done:
    }"""
)


@jit
def store_shrunk(values, row, shrunk, WIDTH: tl.constexpr):
    """Store values [1, n] of the shrunk row in all copies.

    A 0 becomes -0: the value +0 tells the other programs that a value is not there yet.
    """
    column = row[None, :]
    copy = tl.arange(0, NUM_COPIES)[:, None]
    stored = tl.where(values == 0, -0.0, values)
    tl.store(shrunk + copy * WIDTH + column, stored, mask=(copy >= 0) & (column < WIDTH))


@jit
def locate_shrunk(part, shrunk, WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_POW2: tl.constexpr):
    """Return pointers to the values of the shrunk row that outputs of these parts read: [n, rank].

    Beyond the rank they point to the next part, and nothing reads there.
    """
    shrunk += tl.program_id(0) % NUM_COPIES * WIDTH
    return shrunk + part[:, None] * RANK + tl.arange(0, RANK_POW2)[None, :]


@jit
def load_shrunk(pointer, RANK: tl.constexpr, RANK_POW2: tl.constexpr):
    """Load values of the shrunk row: +0 where one is not there yet."""
    mask = (tl.arange(0, RANK_POW2) < RANK)[None, :]
    return tl.load(pointer, mask=mask, other=-0.0, volatile=True)


@jit
def load_expand(row, slot, b, slot_stride, RANK: tl.constexpr, RANK_POW2: tl.constexpr):
    """Load rows of B from an adapter's slot: [n, rank]; zeros without an adapter."""
    r = tl.arange(0, RANK_POW2)
    return tl.load(
        b + slot * slot_stride + row[:, None] * RANK + r[None, :],
        mask=(r < tl.where(slot >= 0, RANK, 0))[None, :],
        other=0.0,
    )


@jit
def expand_fused(
    b_tile,
    low,
    low_pointer,
    uses_shrunk,
    RANK: tl.constexpr,
    RANK_POW2: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Multiply rows of B by the shrunk row, when it is there: [n], without the norm's scale.

    Where `uses_shrunk` is false, nothing waits and the result is 0.

    The programs that shrink come first in the grid, so they run already. Every thread waits for
    the values that it holds: a vote of all would cost time, and threads that hold the same value
    may see it at different times. The limit, some seconds, only keeps an error from blocking the
    device for ever.
    """
    mask = (tl.arange(0, RANK_POW2) < RANK)[None, :] & uses_shrunk
    if not IS_INTERPRETED:
        # The value at a masked pointer is of another part, or beyond the last one.
        bits = tl.where(mask, low.to(tl.int32, bitcast=True), 1)
        bits = tl.inline_asm_elementwise(
            WAIT_FOR_VALUE, "=r,r,l", [bits, low_pointer], tl.int32, False, 1
        )
        low = bits.to(tl.float32, bitcast=True)
    return tl.sum(b_tile.to(tl.float32) * tl.where(mask, low, 0.0), 1)


@jit
def load_slot_bias(bias, slot, stride, row):
    """Return the bias of these rows in an adapter's slot; zeros without an adapter."""
    value = tl.load(bias + tl.maximum(slot, 0) * stride + row).to(tl.float32)
    return tl.where(slot >= 0, value, 0.0)
