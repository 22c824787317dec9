"""From files to a decoder on its device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from bloomery.artifacts import gguf
from bloomery.artifacts.locate import Artifact
from bloomery.describe import describe_file, description
from bloomery.families import Description, as_stored
from bloomery.layout import Layout
from bloomery.models.checkpoint import (
    FileSource,
    Report,
    Source,
    open_source,
    progress,
    reported,
    unheard,
)
from bloomery.models.decoder import Decoder
from bloomery.models.stream import Stream
from bloomery.models.weights import Weights
from bloomery.parallel.mesh import Mesh
from bloomery.quant.choose import WARNINGS, choose
from bloomery.quant.gguf import BlocksFormat
from bloomery.spec import Model

Cut = Callable[
    [Model, Callable[[range], Decoder]], range
]  # of a model, and of what loads some layers: which stay here


@dataclass(frozen=True)
class Loaded:
    decoder: Decoder
    bytes: int  # of weights in memory
    notes: tuple[str, ...]  # what was found and left alone


def opened(artifact: Artifact, load_format: str) -> tuple[Description, Source]:
    """What the model is, and its tensors; the header of a GGUF file, which says both, is read once."""
    if artifact.kind == "gguf" and load_format == "auto":
        file = gguf.read(artifact.path, words=False)
        return describe_file(file), FileSource.gguf(file)
    return description(artifact), open_source(artifact, load_format)


def load(
    artifact: Artifact,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    show_progress: bool = False,
    report: Report | None = None,
    mesh: Mesh = Mesh(),  # frozen
    quantize: str = "auto",
    native: bool = False,
    cut: Cut | None = None,
) -> Loaded:
    """The model, or of the layers that `cut` leaves here what belongs to this rank; with `native` a GGUF's blocks stay
    blocks on a CPU too."""
    found, source = opened(artifact, load_format)
    names = as_stored(found.names, source.names())
    kept = (
        (native or device.type != "cpu")
        and artifact.kind == "gguf"
        and quantize == "auto"
        and load_format == "auto"
    )
    form = BlocksFormat() if kept else choose(found.quantization, quantize)

    def rank() -> Weights:
        return Weights(
            source, names, dtype, device, form, layout=Layout(mesh.group.rank, mesh.group.size)
        )

    model = found.model
    layers = (
        cut(model, lambda some: Decoder(model, rank(), mesh.group, some))
        if cut
        else range(len(model.layers))
    )
    shown = (
        progress(source.nbytes, sys.stderr)
        if show_progress and source.nbytes
        else nullcontext(unheard)
    )
    told = shown if report is None else reported(source.nbytes, report)
    with told as source.advance, streamed(source, device):
        weights = rank()
        decoder = Decoder(model, weights, mesh.group, layers)
    notes = [WARNINGS[quantize]] if quantize in WARNINGS else []
    if (
        quantize != "auto"
        and isinstance(source, FileSource)
        and any(entry.decode for entry in source.entries.values())
    ):
        notes.append(
            f"{quantize}: the file's blocks are expanded and rounded once more; left alone they lose nothing"
        )
    if found.unread:
        notes.append(
            f"the model's description has keys without a meaning here: {', '.join(found.unread)}"
        )
    unused = [
        name
        for name in source.unused()
        if not any(fnmatch(name, pattern) for pattern in names.ignored)
    ]
    if unused and mesh.stages == 1:
        notes.append(
            f"{len(unused)} tensors of the checkpoint are not part of the model: {', '.join(unused[:4])} ..."
        )
    return Loaded(decoder, weights.bytes, tuple(notes))


@contextmanager
def streamed(source: Source, device: torch.device) -> Iterator[None]:
    """Files go to a GPU by a stream; to a CPU they are mapped."""
    if device.type == "cpu" or not isinstance(source, FileSource):
        yield
        return
    with Stream(device) as source.stream:
        yield
    source.stream = None
