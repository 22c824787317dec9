"""Balances pipeline stages: splits the layers by the measured time of each kind of layer.

The bytes of a layer do not predict its time relative to an output head in another precision.
Therefore one layer of each kind is loaded and timed before the other layers are loaded. All ranks
use the smallest time that any of them measured, so they all split the model in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from bloomery.attention.base import AttentionMetadata, plan_attention
from bloomery.attention.select import select_backend
from bloomery.layout import split_stages
from bloomery.models.decoder import Decoder
from bloomery.parallel.groups import DeviceMesh
from bloomery.runtime.kv_cache import scratch_states, single_table_cache
from bloomery.spec import LayerSpec, ModelSpec

NUM_SEQUENCES = 4  # of the measured step
BLOCK_SIZE = 16  # positions
NUM_RUNS = 5  # the fastest counts

LoadLayers = Callable[[range], Decoder]  # loads the layers of a range


def select_stage_layers(model: ModelSpec, load_layers: LoadLayers, mesh: DeviceMesh) -> range:
    """Return the layers of this rank's pipeline stage."""
    layer_times, head_time = measure_layer_times(model, load_layers, mesh)
    return split_stages(layer_times, head_time, mesh.num_stages)[mesh.stage]


@torch.inference_mode()
def measure_layer_times(
    model: ModelSpec, load_layers: LoadLayers, mesh: DeviceMesh
) -> tuple[list[int], int]:
    """Return the nanoseconds of every layer and of the output head.

    `load_layers` is called for single layers; the last layer comes with the head.
    """
    times: dict[LayerSpec, int] = {}
    head_time = 0
    last_of_each_kind = {layer: i for i, layer in enumerate(model.layers)}
    for kind, i in last_of_each_kind.items():
        decoder = load_layers(range(i, i + 1))
        step = build_layer_step(decoder)
        times[kind] = mesh.min_over_ranks(fastest_run(step, decoder.device))
        if i == len(model.layers) - 1:
            shape = NUM_SEQUENCES, model.hidden
            hidden = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
            compute_logits = partial(decoder.logits, hidden)
            head_time = mesh.min_over_ranks(fastest_run(compute_logits, decoder.device))
    return [times[layer] for layer in model.layers], head_time


def build_layer_step(decoder: Decoder) -> Callable[[], torch.Tensor]:
    """Build a step of NUM_SEQUENCES one-token sequences through the decoder's only layer."""
    spec = decoder.spec
    device = decoder.device
    backend = select_backend(spec.attentions, decoder.dtype, device, pool=decoder.pool)
    decoder.build_rope_cache(1)
    cache = single_table_cache(spec, BLOCK_SIZE, decoder.dtype)
    caches = cache.allocate(NUM_SEQUENCES, device)
    ones = [1] * NUM_SEQUENCES
    states = scratch_states(spec, ones, device)
    block_tables = [[block] for block in range(NUM_SEQUENCES)]
    metadata = AttentionMetadata.from_host(ones, ones, block_tables, BLOCK_SIZE, device)
    token_ids = torch.zeros_like(metadata.positions)
    shape = decoder.count_received_rows(NUM_SEQUENCES), spec.hidden
    hidden = torch.zeros(shape, dtype=decoder.dtype, device=device)

    def run_step() -> torch.Tensor:
        return decoder(
            token_ids,
            metadata.positions,
            caches,
            backend,
            plan_attention(backend, [metadata]),
            None,
            hidden,
            states=states,
        )

    return run_step


def fastest_run(work: Callable[[], torch.Tensor], device: torch.device) -> int:
    """Return the nanoseconds of the fastest of NUM_RUNS runs.

    On a CPU this is the thread's CPU time, which other programs do not lengthen.
    """
    on_gpu = device.type == "cuda"
    clock = time.perf_counter_ns if on_gpu else time.thread_time_ns
    times = []
    for _ in range(NUM_RUNS):
        start = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(clock() - start)
    return min(times)
