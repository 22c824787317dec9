"""Where a pipeline is cut: by the time a layer of each kind, and the head, take here and now.

What a layer reads says little about what it costs beside a head in another precision. So of every kind one is loaded
and run before the others are. All ranks take the same figures, the least that one of them found, and thus cut alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from bloomery.attention.base import AttentionMetadata
from bloomery.attention.choose import choose
from bloomery.layout import cut
from bloomery.models.decoder import Decoder
from bloomery.parallel.mesh import Mesh
from bloomery.runtime.cache import allocate
from bloomery.spec import Layer, Model

LINES = 4  # sequences of a step
BLOCK = 16  # positions
TRIES = 5  # the best counts

Part = Callable[[range], Decoder]  # some of the layers, loaded


def stage(model: Model, part: Part, mesh: Mesh, native: bool) -> range:
    """The layers of this rank's stage."""
    return cut(*costs(model, part, mesh, native), mesh.stages)[mesh.stage]


@torch.inference_mode()
def costs(model: Model, part: Part, mesh: Mesh, native: bool) -> tuple[list[int], int]:
    """Nanoseconds of every layer, and of the head. `part` is asked for single layers; the last comes with the head."""
    found: dict[Layer, int] = {}
    head = 0
    for kind, i in {layer: i for i, layer in enumerate(model.layers)}.items():
        decoder = part(range(i, i + 1))
        found[kind] = mesh.least(best(layer_step(decoder, native), decoder.device))
        if i == len(model.layers) - 1:
            hidden = torch.zeros(LINES, model.hidden, dtype=decoder.dtype, device=decoder.device)
            head = mesh.least(best(partial(decoder.logits, hidden), decoder.device))
    return [found[layer] for layer in model.layers], head


def layer_step(decoder: Decoder, native: bool) -> Callable[[], torch.Tensor]:
    """A step of a few sequences through the decoder's only layer."""
    spec = decoder.spec
    device = decoder.device
    backend = choose([spec.layers[0].attention], decoder.dtype, device, native=native)
    decoder.reach(1)
    caches = allocate(spec, 1, BLOCK, decoder.dtype, device)
    kind = torch.int64 if device.type == "cpu" else torch.int32
    zeros = torch.zeros(LINES, dtype=kind, device=device)
    numbers = torch.arange(LINES + 1, dtype=kind, device=device)
    each = (1,) * LINES
    ragged = AttentionMetadata(
        each, each, LINES, numbers, zeros + 1, zeros, numbers[:-1], zeros[:, None], BLOCK
    )
    hidden = torch.zeros(LINES, spec.hidden, dtype=decoder.dtype, device=device)

    def step() -> torch.Tensor:
        plan = backend.plan(ragged)
        return decoder(zeros, zeros, ragged.slots, caches, backend, plan, None, hidden)

    return step


def best(work: Callable[[], torch.Tensor], device: torch.device) -> int:
    """Nanoseconds: on a CPU of its time, which other programs do not take from it."""
    clock = time.perf_counter_ns if device.type == "cuda" else time.thread_time_ns
    found = []
    for _ in range(TRIES):
        begun = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(clock() - begun)
    return min(found)
