"""Loads a model: reads the files of a checkpoint and builds a decoder on its device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from bloomery.artifacts import gguf
from bloomery.artifacts.locate import ModelArtifact
from bloomery.describe import describe_gguf_file, describe_model
from bloomery.errors import UnsupportedModel
from bloomery.families import ModelDescription, resolve_tensor_names
from bloomery.layout import TensorParallelLayout
from bloomery.models.adapter_files import AdapterReader
from bloomery.models.adapter_memory import AdapterMemory
from bloomery.models.checkpoint import (
    AdvanceProgress,
    FileSource,
    ProgressReport,
    WeightSource,
    forward_progress,
    ignore_progress,
    open_source,
    show_progress,
)
from bloomery.models.decoder import Decoder
from bloomery.models.weight_stream import WeightStream
from bloomery.models.weights import ModelWeights
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import DeviceMesh
from bloomery.quant.gguf import GgufFormat
from bloomery.quant.select import QUALITY_WARNINGS, select_format
from bloomery.spec import ModelSpec, TensorNames

LoadLayers = Callable[[range], Decoder]  # loads the layers of a range
SelectLayers = Callable[[ModelSpec, LoadLayers], range]  # the layers of this pipeline stage


@dataclass(frozen=True)
class LoadedModel:
    """The result of `load_model`."""

    decoder: Decoder
    weight_bytes: int  # in memory
    expert_bytes: int  # of these, the matrices of experts
    notes: tuple[str, ...]  # for the operator, such as tensors that were ignored
    adapter_reader: AdapterReader | None = None  # if the model takes LoRA adapters


def load_model(
    artifact: ModelArtifact,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    print_progress: bool = False,
    report: ProgressReport | None = None,
    mesh: DeviceMesh = DeviceMesh(),  # noqa: B008 (it is frozen)
    quantize: str = "auto",
    keep_gguf_blocks: bool = False,
    select_layers: SelectLayers | None = None,
    pool: ThreadPool | None = None,
    adapter_memory: AdapterMemory | None = None,
) -> LoadedModel:
    """Load the model, or this rank's part of it.

    `select_layers` chooses the layers of this pipeline stage; without it all layers are loaded.
    `keep_gguf_blocks`: a GGUF checkpoint stays quantized on a CPU too; on a GPU it always does.
    `pool`: native CPU kernels will run the model. `adapter_memory`: it takes LoRA adapters.
    """
    model_info, source = open_model(artifact, load_format)
    names = resolve_tensor_names(model_info, source)
    format = select_format(model_info.quantization, quantize)
    unchanged = quantize == "auto" and load_format == "auto"
    if artifact.kind == "gguf" and unchanged and (keep_gguf_blocks or device.type != "cpu"):
        format = GgufFormat()
    layout = TensorParallelLayout(mesh.group.rank, mesh.group.size)

    def open_weights(memory: AdapterMemory | None = None) -> ModelWeights:
        return ModelWeights(source, names, dtype, device, format, layout, pool, memory)

    def load_layers(layer_range: range) -> Decoder:
        return Decoder(model, open_weights(), mesh.group, layer_range)

    model = model_info.model
    if not model.attentions:
        raise UnsupportedModel(
            f"{artifact.path}: none of the layers has attention; recurrent layers run only in "
            "models that have attention layers too"
        )
    layers = range(len(model.layers))
    if select_layers is not None:
        layers = select_layers(model, load_layers)
    skipped = match_patterns(source.names(), (*names.ignored, *names.vision))
    num_bytes = source.nbytes - source.stored_bytes(skipped)
    progress: AbstractContextManager[AdvanceProgress] = nullcontext(ignore_progress)
    if report is not None:
        progress = forward_progress(num_bytes, report)
    elif print_progress and num_bytes:
        progress = show_progress(num_bytes, sys.stderr)
    with progress as source.advance, stream_weights(source, device):
        weights = open_weights(adapter_memory)
        decoder = Decoder(model, weights, mesh.group, layers)
    decoder.prepare_prologues()
    notes = collect_notes(model_info, source, names, quantize, complete=mesh.num_stages == 1)
    reader = None
    if adapter_memory is not None:
        module_names = model_info.module_names or names
        reader = AdapterReader(
            adapter_memory, names, module_names, len(model.layers), model_info.permuted
        )
    return LoadedModel(decoder, weights.loaded_bytes, weights.expert_bytes, notes, reader)


def open_model(artifact: ModelArtifact, load_format: str) -> tuple[ModelDescription, WeightSource]:
    """Describe the model and open its weights. The header of a GGUF file is read once for both."""
    if artifact.kind == "gguf" and load_format == "auto":
        file = gguf.read_gguf(artifact.path, read_string_arrays=False)
        return describe_gguf_file(file), FileSource.gguf(file)
    return describe_model(artifact), open_source(artifact, load_format)


def collect_notes(
    model_info: ModelDescription,
    source: WeightSource,
    names: TensorNames,
    quantize: str,
    complete: bool,
) -> tuple[str, ...]:
    """Return notes for the operator about this checkpoint.

    complete: the whole model was loaded, so every tensor should have been used.
    """
    notes = []
    skipped = match_patterns(source.names(), names.vision)
    if skipped:
        gigabytes = source.stored_bytes(skipped) / 1e9
        notes.append(
            f"text only: {len(skipped)} tensors of the vision part ({gigabytes:.2f} GB) are "
            f"skipped: {', '.join(skipped[:2])} ..."
        )
    if quantize in QUALITY_WARNINGS:
        notes.append(QUALITY_WARNINGS[quantize])
    if quantize != "auto" and isinstance(source, FileSource) and source.has_quantized_tensors():
        notes.append(
            f"{quantize}: the file's quantized blocks are dequantized and quantized again, which "
            "loses precision; without this option they are used as they are"
        )
    if model_info.unread:
        keys = ", ".join(model_info.unread)
        notes.append(f"the model's description has keys that are ignored: {keys}")
    if complete:
        known = set(match_patterns(source.unused(), (*names.ignored, *names.vision)))
        unused = [name for name in source.unused() if name not in known]
        if unused:
            examples = ", ".join(unused[:4])
            notes.append(
                f"{len(unused)} tensors of the checkpoint are not part of the model: {examples} ..."
            )
    return tuple(notes)


def match_patterns(tensors: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that fit one of the patterns."""
    return [name for name in tensors if any(fnmatch(name, pattern) for pattern in patterns)]


@contextmanager
def stream_weights(source: WeightSource, device: torch.device) -> Iterator[None]:
    """Let the source read files through a WeightStream, if the device is a GPU."""
    if device.type == "cpu" or not isinstance(source, FileSource):
        yield
        return
    with WeightStream(device) as source.stream:
        yield
    source.stream = None
