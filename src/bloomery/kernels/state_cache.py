"""Where the states of recurrent layers lie: in blocks of the same pool as keys and values.

A layer's part of the pool is `memory` [blocks, values] in float32. A state consists of parts, which
are matrices [rows, width] (spec.state_parts). Each part begins at a new block, and a block holds as
many whole rows as fit:

    row r of a part lies in its block r // rows_per_block, from r % rows_per_block * width on

The memory of a block of the scheduler is in two places, so a block of `memory` is half of one, or a
part of that half. cache_groups.StateLayout calls it a piece. `memory` has the first halves of all
blocks of the scheduler, then all second halves. Some pieces hold the states of other layers.

A sequence that computes its position 0 starts from zeros. What its blocks hold then is not read, so
nobody has to clear them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bloomery.kernels.launch import jit, tl
from bloomery.spec import StatePart


@dataclass(frozen=True)
class RecurrentMetadata:
    """The layout of one step as the recurrent layers of one block table see it.

    Sequences are in the order of AttentionMetadata: those with one new position first. The tuples
    are the host's copy of the lengths; a step that is replayed from a CUDA graph or a CPU trace has
    none. A padding sequence has seq_len 0 or the blocks of the padding row.
    """

    num_decodes: int  # leading sequences with one new position
    query_start_loc: torch.Tensor  # [sequences + 1] index of each sequence's first new position
    seq_lens: torch.Tensor  # [sequences] positions once the new ones are computed
    state_pieces: torch.Tensor  # [sequences, pieces of a state]: blocks of `memory`
    host_query_lens: tuple[int, ...] = ()
    host_seq_lens: tuple[int, ...] = ()
    # What is computed after this, from the states that this leaves, with the same positions. Those
    # that belong to another wave have seq_len 0.
    later_waves: tuple[RecurrentMetadata, ...] = ()

    def host_lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return new positions and lengths of all sequences; on a GPU this may wait for it."""
        if self.host_query_lens:
            return self.host_query_lens, self.host_seq_lens
        return tuple(self.query_start_loc.diff().tolist()), tuple(self.seq_lens.tolist())


@dataclass(frozen=True)
class LayerStates:
    """The memory of one layer's states, and which of it the sequences of a step use."""

    memory: torch.Tensor  # [blocks, values] float32
    metadata: RecurrentMetadata


@dataclass(frozen=True)
class StateView:
    """One part of the states of one layer, for the sequences of a step."""

    memory: torch.Tensor  # [blocks, values] float32
    blocks: torch.Tensor  # [sequences, blocks of the part]
    part: StatePart

    @property
    def rows_per_block(self) -> int:
        return self.memory.shape[1] // self.part.width

    def read(self) -> torch.Tensor:
        """Copy the states of all sequences: [sequences, rows, width]."""
        part = self.part
        per_block = self.rows_per_block
        values = self.memory[self.blocks.long(), : per_block * part.width]
        rows = values.reshape(len(self.blocks), -1, part.width)
        return rows[:, : part.rows].clone()

    def write(self, states: torch.Tensor) -> None:
        """Store the states of all sequences: [sequences, rows, width]."""
        part = self.part
        per_block = self.rows_per_block
        num_sequences, num_blocks = self.blocks.shape
        padded = states.new_zeros(num_sequences, num_blocks * per_block, part.width)
        padded[:, : part.rows] = states
        used = per_block * part.width
        self.memory[self.blocks.long(), :used] = padded.view(num_sequences, num_blocks, used)


def read_states(view: StateView, metadata: RecurrentMetadata) -> torch.Tensor:
    """Copy the states that the sequences continue from, zeros where a sequence begins."""
    query_lens, seq_lens = metadata.host_lengths()
    begins = [seq_len <= query_len for query_len, seq_len in zip(query_lens, seq_lens, strict=True)]
    states = view.read()
    states[torch.tensor(begins, device=states.device)] = 0
    return states


def write_states(view: StateView, metadata: RecurrentMetadata, states: torch.Tensor) -> None:
    """Store the states of the sequences that have new positions; those of padding are dropped."""
    query_lens, seq_lens = metadata.host_lengths()
    computed = [
        index
        for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        if query_len and seq_len
    ]
    StateView(view.memory, view.blocks[computed], view.part).write(states[computed])


def iterate_positions(
    metadata: RecurrentMetadata,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the sequences that have a first new position, a second one, and so on.

    With them come the indices of these positions in the step.
    """
    query_lens, _ = metadata.host_lengths()
    starts = metadata.query_start_loc[:-1].long()
    lengths = torch.tensor(query_lens, device=starts.device)
    for offset in range(max(query_lens, default=0)):
        sequences = (lengths > offset).nonzero()[:, 0]
        yield sequences, starts[sequences] + offset


@jit
def load_state_rows(blocks, rows, rows_per_block, width, block_stride, mask):
    """Where rows of a part lie in the memory; `blocks` points to the part's blocks."""
    block = tl.load(blocks + rows // rows_per_block, mask=mask, other=0).to(tl.int64)
    return block * block_stride + (rows % rows_per_block) * width


def count_part_blocks(part: StatePart, block_values: int) -> int:
    """Blocks of `block_values` float32 values that hold one part of a state."""
    return -(-part.rows // (block_values // part.width))


def view_states(
    memory: torch.Tensor, state_pieces: torch.Tensor, parts: Sequence[StatePart]
) -> tuple[StateView, ...]:
    """Divide the states of a layer into their parts; state_pieces [sequences, pieces of a state].

    A layer may need fewer pieces than a state has.
    """
    views = []
    first = 0
    for part in parts:
        end = first + count_part_blocks(part, memory.shape[1])
        views.append(StateView(memory, state_pieces[:, first:end], part))
        first = end
    return tuple(views)
