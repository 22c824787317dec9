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
from bloomery.models.checkpoint import Report, open_source, progress, reported
from bloomery.models.decoder import Decoder
from bloomery.models.weights import Weights


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
) -> Loaded:
    found = description(artifact)
    source = open_source(artifact, load_format)
    shown = progress(source, sys.stderr) if show_progress and source.nbytes else nullcontext()
    with reported(source, report) if report is not None else shown:
        names = as_stored(found.names, source.names())
        weights = Weights(source, names, dtype, device)
        decoder = Decoder(found.model, weights)
    notes = []
    if found.unread:
        notes.append(f"the model's description has keys without a meaning here: {', '.join(found.unread)}")
    unused = [name for name in source.unused() if not any(fnmatch(name, pattern) for pattern in names.ignored)]
    if unused:
        notes.append(f"{len(unused)} tensors of the checkpoint are not part of the model: {', '.join(unused[:4])} ...")
    return Loaded(decoder, weights.bytes, tuple(notes))
