"""From files to a decoder on its device."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from bloomery.artifacts.locate import Artifact
from bloomery.describe import description
from bloomery.families import as_stored
from bloomery.layout import Layout, stages
from bloomery.models.checkpoint import Report, open_source, progress, reported
from bloomery.models.decoder import Decoder
from bloomery.models.weights import Weights
from bloomery.parallel.mesh import Mesh
from bloomery.quant.choose import WARNINGS, choose
from bloomery.quant.gguf import BlocksFormat


@dataclass(frozen=True)
class Loaded:
    decoder: Decoder
    bytes: int  # of weights in memory
    notes: tuple[str, ...]  # what was found and left alone


def load(
    artifact: Artifact,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    show_progress: bool = False,
    report: Report | None = None,
    mesh: Mesh = Mesh(),  # noqa: B008  # frozen
    quantize: str = "auto",
    native: bool = False,
) -> Loaded:
    """The model, or of the layers of a stage what belongs to this rank; with `native` a GGUF's blocks stay blocks."""
    found = description(artifact)
    source = open_source(artifact, load_format)
    shown = progress(source, sys.stderr) if show_progress and source.nbytes else nullcontext()
    with reported(source, report) if report is not None else shown:
        names = as_stored(found.names, source.names())
        kept = native and artifact.kind == "gguf" and quantize == "auto" and load_format == "auto"
        form = BlocksFormat() if kept else choose(found.quantization, quantize)
        weights = Weights(source, names, dtype, device, form, layout=Layout(mesh.group.rank, mesh.group.size))
        decoder = Decoder(found.model, weights, mesh.group, stages(found.model, mesh.stages)[mesh.stage])
    notes = [WARNINGS[quantize]] if quantize in WARNINGS else []
    if found.unread:
        notes.append(f"the model's description has keys without a meaning here: {', '.join(found.unread)}")
    unused = [name for name in source.unused() if not any(fnmatch(name, pattern) for pattern in names.ignored)]
    if unused and mesh.stages == 1:
        notes.append(f"{len(unused)} tensors of the checkpoint are not part of the model: {', '.join(unused[:4])} ...")
    return Loaded(decoder, weights.bytes, tuple(notes))
