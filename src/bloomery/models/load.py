"""From files to a decoder on its device."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from bloomery.artifacts import gguf
from bloomery.artifacts.files import strict_json
from bloomery.artifacts.locate import Artifact
from bloomery.families import Description, as_stored, describe
from bloomery.families.gguf import describe as describe_gguf
from bloomery.models.checkpoint import FileSource, Report, checkpoint_dtype, open_source, progress, reported
from bloomery.models.decoder import Decoder
from bloomery.models.weights import Weights


@dataclass(frozen=True)
class Loaded:
    decoder: Decoder
    bytes: int  # of weights in memory, as good as
    notes: tuple[str, ...]  # what was found and left alone


def description(artifact: Artifact) -> Description:
    """What the model is, before a byte of weights is read."""
    if artifact.kind == "gguf":
        file = gguf.read(artifact.path)
        source = FileSource.gguf(file)

        def vector(name: str) -> list[float]:
            return source.tensor(name, file.tensors[name].shape).load(torch.float32, torch.device("cpu")).tolist()

        return describe_gguf(file.metadata, {name: tensor.shape for name, tensor in file.tensors.items()}, vector)
    path = artifact.path / "config.json"
    return describe(strict_json(path.read_bytes(), str(path)))


def native_dtype(artifact: Artifact, load_format: str) -> torch.dtype:
    """The precision the checkpoint was made for; quantised GGUF values fit in bfloat16."""
    if artifact.kind == "gguf":
        return torch.bfloat16
    path = artifact.path / "config.json"
    return checkpoint_dtype(strict_json(path.read_bytes(), str(path)), open_source(artifact, load_format))


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
    return Loaded(decoder, weights.parameters * dtype.itemsize, tuple(notes))
