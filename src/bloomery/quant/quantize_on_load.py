"""Quantizes the weights of any full-precision checkpoint while they are loaded.

A panel of rows is quantized at a time on the device, so no complete dense matrix is in memory. The
embedding and the LM head get 8 bits in every integer format, because quality suffers most from
quantizing them. Routers are never quantized: they are small, and a token that is sent to the wrong
expert is worse than a rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bloomery.kernels.packed import PackedWeight
from bloomery.quant.base import CheckpointTensors, LinearSpec
from bloomery.quant.dense import DenseFormat
from bloomery.quant.lazy_tensor import LazyTensor, Range, prefetch, select_ranges
from bloomery.quant.loaded_weight import LoadedWeight, concatenate
from bloomery.quant.packed_matrix import PackedMatrix, open_unquantized

# float32 [rows, in] -> quantized rows. The result for a row must not depend on other rows.
QuantizeRows = Callable[[torch.Tensor], PackedWeight]
CPU_PANEL_SIZE = 1 << 19  # values quantized at once on a CPU: as many as its caches hold
# Values quantized at once on a GPU. With fewer, launching kernels would limit the speed.
GPU_PANEL_SIZE = 1 << 24
GPU_PANELS_AHEAD = 16  # panels that are read while another one is quantized


@dataclass(frozen=True)
class OnLoadFormat:
    """A full-precision checkpoint whose weights are quantized when they are loaded."""

    quantize_layer: QuantizeRows  # for linear layers inside decoder layers
    quantize_outer: QuantizeRows  # for the embedding and the LM head

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
        if linear.unquantized:
            return open_unquantized(tensors, linear)
        weight = DenseFormat().open_matrix(tensors, linear).weight
        quantize = self.quantize_layer if linear.in_decoder_layer else self.quantize_outer
        columns = linear.shape[1]

        def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> LoadedWeight:
            panels = load_panels(weight, ranges, columns, device)
            # Panels are converted to float32 on the device, not before they are sent there.
            return concatenate([quantize(panel.float()) for panel in panels])

        return PackedMatrix.from_loader(linear, load)


def load_panels(
    stored: LazyTensor, ranges: Sequence[Range], columns: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Load rows of a stored tensor a panel at a time, in the stored dtype.

    `columns` is the number of values in a row; it limits the rows of a panel. On a GPU later panels
    are read while the caller uses one.
    """
    on_cpu = device.type == "cpu"
    panel_size = CPU_PANEL_SIZE if on_cpu else GPU_PANEL_SIZE
    panel_rows = max(1, panel_size // columns)
    loads = (
        stored.rows(panel).start_load(stored.dtype, device)
        for panel in split_ranges(ranges, panel_rows)
    )
    return prefetch(loads, 1 if on_cpu else GPU_PANELS_AHEAD)


def split_ranges(ranges: Sequence[Range], panel_rows: int) -> Iterator[list[Range]]:
    """Split the rows of `ranges` into panels of at most `panel_rows` rows."""
    num_rows = sum(end - start for start, end in ranges)
    for start in range(0, num_rows, panel_rows):
        end = min(start + panel_rows, num_rows)
        yield list(select_ranges(ranges, start, end))
