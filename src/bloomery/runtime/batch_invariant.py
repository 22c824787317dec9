"""The forward pass of deterministic mode: every pass over the same number of positions.

Libraries and kernels choose their algorithms by shape, so the last bits of a token's logits depend
on how many other tokens are in its step. `BatchInvariantForward` always uses the same shape:
positions go through the model in tiles of a fixed size, and each position is a sequence of its own
that attends over its own length. The last tile is filled with padding. A result may then not
depend on its place in a tile; `find_batch_invariant_tile` checks that before the first step.

Recurrent layers have another form for whole chunks, which rounds differently. Here they only take
single steps: each position is a sequence of its own for them, too. Where a tile has several
positions of a sequence, their mixers run in as many waves, each with one position of each sequence.

A request therefore gets the same tokens alone and in any batch, with chunked prefill of any chunk
size, after a prefix hit, after a preemption and after a replay, in every weight format.

Nothing here knows requests, rows or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from bloomery.attention.base import AttentionMetadata, index_dtype
from bloomery.errors import ConfigError
from bloomery.kernels.lora import AdapterBatch
from bloomery.kernels.state_cache import RecurrentMetadata
from bloomery.parallel.groups import DeviceMesh
from bloomery.runtime.runner import ModelForward
from bloomery.spec import ModelSpec

# Positions. Larger tiles waste arithmetic on few requests, smaller ones re-read the weights.
CPU_TILE_SIZE = 16
GPU_TILE_SIZE = 128


def check_deterministic_mode(model: ModelSpec, device: torch.device) -> None:
    """Refuse models of which equal bits have not been shown on this kind of device."""
    if model.recurrents and device.type == "cuda":
        raise ConfigError(
            "deterministic: models with recurrent layers are deterministic on CPUs only; start "
            "this one without --deterministic, or with --device cpu"
        )


@dataclass(frozen=True)
class BatchInvariantForward:
    """A forward pass in tiles of exactly `tile_size` positions."""

    forward: ModelForward
    max_blocks_per_seq: int
    null_blocks: Sequence[int]  # of each block table
    block_size: int
    tile_size: int
    # The blocks [blocks of a state] of a state that nobody reads, in each table of states.
    null_states: Sequence[torch.Tensor] = ()

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        layouts: Sequence[AttentionMetadata],
        output_indices: torch.Tensor | None = None,
        states: Sequence[RecurrentMetadata] = (),
        adapter_slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens = len(token_ids)
        device = token_ids.device
        metadata = layouts[0]
        if num_tokens <= self.tile_size:
            order = torch.arange(num_tokens, device=device)
        else:
            # Sorting by position keeps a token's keys out of later tiles, even if they lie in a
            # shared block that another sequence fills in this step.
            order = metadata.positions.argsort(stable=True)
        token = torch.arange(num_tokens, dtype=metadata.query_start_loc.dtype, device=device)
        sequence = torch.searchsorted(metadata.query_start_loc[1:], token, right=True)
        tables = []
        for layout, null_block in zip(layouts, self.null_blocks, strict=True):
            missing_blocks = self.max_blocks_per_seq - layout.block_tables.shape[1]
            tables.append(F.pad(layout.block_tables, (0, missing_blocks), value=null_block))
        outputs = []
        for part in order.split(self.tile_size):
            tiles = [
                self._make_tile(
                    layout.positions[part],
                    layout.slot_mapping[part],
                    block_tables[sequence[part]],
                    layout.window,
                    null_block,
                )
                for layout, block_tables, null_block in zip(
                    layouts, tables, self.null_blocks, strict=True
                )
            ]
            recurrent = self._make_waves(states, part, sequence[part], metadata)
            padded_ids = self._pad_tile(token_ids[part], 0)
            slots = None if adapter_slots is None else self._pad_tile(adapter_slots[part], -1)
            hidden = self.forward.hidden_states(padded_ids, tiles, None, recurrent, slots)
            outputs.append(hidden[: len(part)])
        hidden = outputs[0]
        if len(outputs) > 1:
            shape = num_tokens, hidden.shape[1]
            hidden = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
            hidden.index_copy_(0, order, torch.cat(outputs))
        if adapter_slots is not None:
            batch = self._adapter_batch()
            batch.begin(adapter_slots)
            batch.select(output_indices)
        return hidden if output_indices is None else hidden[output_indices]

    def compute_logits(self, hidden: torch.Tensor, as_float32: bool = True) -> torch.Tensor:
        parts = []
        slots = None if self.forward.decoder.adapter_memory is None else self._adapter_batch().slots
        for first in range(0, len(hidden), self.tile_size):
            part = hidden[first : first + self.tile_size]
            if slots is not None:
                tile_slots = slots[first : first + self.tile_size]
                self._adapter_batch().begin(self._pad_tile(tile_slots, -1))
            logits = self.forward.compute_logits(self._pad_tile(part, 0), as_float32)
            parts.append(logits[: len(part)])
        if slots is not None:
            self._adapter_batch().begin(slots)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _adapter_batch(self) -> AdapterBatch:
        """The adapter slots of the current rows; only for models that take adapters."""
        memory = self.forward.decoder.adapter_memory
        assert memory is not None
        return memory.batch

    def is_place_invariant(self, vocab_size: int) -> bool:
        """Whether equal inputs give equal results wherever in a tile they stand."""
        device = self.forward.decoder.device
        dtype = index_dtype(device)
        zeros = torch.zeros(self.tile_size, dtype=dtype, device=device)
        table_shape = (self.tile_size, self.max_blocks_per_seq)
        tiles = [
            self._make_tile(
                zeros,
                zeros + null_block * self.block_size,
                torch.full(table_shape, null_block, dtype=dtype, device=device),
                None,
                null_block,
            )
            for null_block in self.null_blocks
        ]
        ones = torch.ones_like(zeros)  # sequences that begin, so they read no state
        states = [
            single_steps(ones, null_state.expand(self.tile_size, -1))
            for null_state in self.null_states
        ]
        hidden = self.forward.hidden_states(zeros + vocab_size // 2, tiles, None, states)
        results = [hidden]
        if self.forward.decoder.is_last_stage:
            results.append(self.forward.compute_logits(hidden))
        return all(bool((result == result[:1]).all()) for result in results)

    def _make_tile(
        self,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        window: int | None,
        null_block: int,
    ) -> AttentionMetadata:
        """The layout of one tile: at most `tile_size` positions, filled up with padding."""
        return AttentionMetadata.from_single_positions(
            self._pad_tile(positions, 0),
            self._pad_tile(slot_mapping, null_block * self.block_size),
            self._pad_tile(block_tables, null_block),
            self.block_size,
            window,
        )

    def _make_waves(
        self,
        states: Sequence[RecurrentMetadata],
        tokens: torch.Tensor,
        sequence: torch.Tensor,
        layout: AttentionMetadata,
    ) -> tuple[RecurrentMetadata, ...]:
        """Describe one tile to the recurrent layers of each table of states.

        tokens, sequence: of each position of the tile, its index in the step and its sequence.
        """
        if not states:
            return ()
        seq_lens = layout.positions[tokens] + 1
        waves = [seq_lens]  # 0 for the positions of other waves
        num_sequences = len(layout.seq_lens)
        if num_sequences < len(layout.positions):
            # The positions of a sequence follow each other in the tile, as they do in the step.
            offset = tokens - layout.query_start_loc[sequence]
            first = offset.new_full((num_sequences,), len(layout.positions))
            first = first.scatter_reduce(0, sequence.long(), offset, "amin")
            wave = offset - first[sequence]
            waves = [seq_lens * (wave == number) for number in range(int(wave.max()) + 1)]
        waves = [self._pad_tile(wave, 0) for wave in waves]
        tile_states = []
        for table, null_state in zip(states, self.null_states, strict=True):
            pieces = self._pad_tile(table.state_pieces[sequence], 0)
            first_wave, *later_waves = [
                single_steps(wave, pieces.where(wave[:, None] > 0, null_state)) for wave in waves
            ]
            tile_states.append(replace(first_wave, later_waves=tuple(later_waves)))
        return tuple(tile_states)

    def _pad_tile(self, values: torch.Tensor, fill: int) -> torch.Tensor:
        """Pad values [n, ...] with `fill` to [tile_size, ...]."""
        missing = self.tile_size - len(values)
        padding = (0, 0) * (values.dim() - 1) + (0, missing)
        return F.pad(values, padding, value=fill)


def single_steps(seq_lens: torch.Tensor, state_pieces: torch.Tensor) -> RecurrentMetadata:
    """Every position as a sequence of its own: seq_lens [n], state_pieces [n, pieces]."""
    count = len(seq_lens)
    starts = torch.arange(count + 1, dtype=seq_lens.dtype, device=seq_lens.device)
    return RecurrentMetadata(count, starts, seq_lens, state_pieces.contiguous())


def find_batch_invariant_tile(
    forward: ModelForward,
    max_blocks_per_seq: int,
    null_blocks: Sequence[int],
    block_size: int,
    mesh: DeviceMesh,
    null_states: Sequence[torch.Tensor] = (),
) -> BatchInvariantForward:
    """Use full tiles if results are place invariant on every rank, else tiles of one position."""
    on_cpu = forward.decoder.device.type == "cpu"
    tile_size = CPU_TILE_SIZE if on_cpu else GPU_TILE_SIZE
    tiled = BatchInvariantForward(
        forward, max_blocks_per_seq, null_blocks, block_size, tile_size, null_states
    )
    if mesh.min_over_ranks(tiled.is_place_invariant(forward.decoder.spec.vocab)):
        return tiled
    return replace(tiled, tile_size=1)
