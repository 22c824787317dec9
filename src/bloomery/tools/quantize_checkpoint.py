"""Writes a checkpoint again in fewer bits per weight, one layer and one shard at a time.

A shard is either complete or absent. After an interruption the same command continues with the
first layer that has no shard. GPTQ needs the inputs of every linear layer: calibration text runs
through each finished layer, loaded from the shard just written, so that a resumed conversion gives
the same result as an uninterrupted one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bloomery.artifacts.files import parse_config_json, parse_strict_json
from bloomery.artifacts.locate import ModelArtifact
from bloomery.artifacts.safetensors import read_safetensors_header
from bloomery.attention.base import AttentionMetadata, kv_cache_shape, plan_attention
from bloomery.attention.select import select_backend
from bloomery.describe import describe_model
from bloomery.errors import ConfigError, UnsupportedModel
from bloomery.families import resolve_tensor_names, separate_experts
from bloomery.fusion import Epilogue, NormPrologue
from bloomery.models.checkpoint import FileSource
from bloomery.models.decoder import Decoder
from bloomery.models.weights import ModelWeights, is_interleaved, names_of
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import SINGLE_RANK
from bloomery.quant.base import (
    CheckpointTensors,
    LinearSpec,
    PreparedWeight,
    WeightFormat,
    find_weight_name,
)
from bloomery.quant.dense import DenseFormat, DenseMatrix, DenseWeight
from bloomery.quant.gptq import GptqFormat
from bloomery.spec import ModelSpec, TensorNames
from bloomery.tools.checkpoint_writers import (
    TENSOR_WRITERS,
    StoredTensors,
    build_quantization_config,
    find_misfit,
    gptq_tensors,
)
from bloomery.tools.gptq_solver import solve_gptq

KV_BLOCK_SIZE = 16  # tokens in a block of the KV cache that calibration uses
STATE_FILE = "unfinished.json"
# Files that are copied next to the weights.
COPIED_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*")
META_DEVICE = torch.device("meta")
PROPOSED_GROUP_SIZES = (128, 64, 32, 16, -1)


@dataclass(frozen=True)
class QuantizeOptions:
    """The target format."""

    format: str  # gptq, int4, int8, fp8 or nf4
    bits: int = 4  # gptq only
    group_size: int = 128  # columns, for gptq and int4 only; -1: all columns of a row
    act_order: bool = False  # gptq only
    damping: float = 0.01  # gptq only


def quantize_checkpoint(
    artifact: ModelArtifact,
    out: Path,
    options: QuantizeOptions,
    samples: Sequence[Sequence[int]],
    dtype: str = "float32",
    device: str = "cpu",
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Quantize the linear layers of a checkpoint and write it to the folder `out`.

    `samples` is calibration text for gptq, as token ids. `advance` is called after each shard: one
    per layer, and one for all other tensors.
    """
    model_info = describe_model(artifact)
    if options.format == "gptq":
        check_can_calibrate(model_info.model)
    source = FileSource.safetensors(artifact.path)
    names = resolve_tensor_names(model_info, source)
    written_names = names
    if names.stacked_experts:
        check_can_separate(names)
        written_names = separate_experts(names, model_info.names)
    quantizer = LayerQuantizer(
        model_info.model,
        names,
        written_names,
        source,
        options,
        getattr(torch, dtype),
        torch.device(device),
        [torch.tensor(sample) for sample in samples],
    )
    num_layers = len(model_info.model.layers)
    num_shards = num_layers + 1
    shards = [
        out / f"model-{number:05}-of-{num_shards:05}.safetensors"
        for number in range(1, num_shards + 1)
    ]
    unquantized = [names.head] if names.head else []
    quantized_by_layer: list[list[LinearSpec]] = []
    listed: set[str] = set()
    for layer in range(num_layers):
        # What an earlier layer shares is in the shard of that layer.
        linears = [linear for linear in quantizer.list_linears(layer) if linear.name not in listed]
        listed.update(linear.name for linear in linears)
        unquantized += [linear.name for linear in linears if linear.unquantized]
        quantized_by_layer.append([linear for linear in linears if not linear.unquantized])
    quantized = chain.from_iterable(quantized_by_layer)
    check_shapes(options, list(chain.from_iterable(map(quantizer.list_written, quantized))))
    start_or_resume(out, options, samples, source)
    for layer, linears in enumerate(quantized_by_layer):
        shard = shards[layer]
        if not shard.exists():
            tensors = quantizer.quantize_layer(layer, linears)
            others = quantizer.read_other_tensors(layer, linears)
            write_shard(shard, tensors | others)
        quantizer.advance_samples(layer, shard)
        advance()
    layer_prefixes = tuple(names.layer.format(i=layer) for layer in range(num_layers))
    outer = [name for name in source.names() if not name.startswith(layer_prefixes)]
    write_shard(shards[-1], read_tensors(source, outer))
    quantization_config = build_quantization_config(
        options.format, options.group_size, options.bits, options.act_order, unquantized
    )
    finish_folder(artifact.path, out, shards, quantization_config)
    advance()


def check_can_calibrate(model: ModelSpec) -> None:
    """Refuse models through which samples cannot run layer by layer."""
    if len(model.attentions) < len(model.layers) or model.recurrents:
        raise UnsupportedModel(
            "config.json: gptq needs attention in every layer, and no recurrent layers; choose "
            "another --format, or quantize when the model is loaded (--quantization int4)"
        )


def check_can_separate(names: TensorNames) -> None:
    """Refuse experts in one tensor that cannot be written as a tensor for each."""
    if is_interleaved(names.expert_up):
        raise UnsupportedModel(
            "config.json: the experts are one tensor with gate and up rows by turns, which is "
            "written in no other format; quantize when the model is loaded (--quantization int4)"
        )


def check_shapes(options: QuantizeOptions, linears: Sequence[LinearSpec]) -> None:
    """Check that the format can hold every weight, before any time is spent."""

    def find_misfits(group_size: int) -> Iterator[str]:
        for linear in linears:
            if reason := find_misfit(options.format, linear.shape, group_size, options.bits):
                yield f"{linear.name}: {reason}"

    first_misfit = next(find_misfits(options.group_size), None)
    if first_misfit is None:
        return
    remedy = "choose --format int8 or fp8, which take any size"
    for group_size in PROPOSED_GROUP_SIZES:
        if next(find_misfits(group_size), None) is None:
            remedy = f"try --group {group_size}"
            break
    raise ConfigError(f"{first_misfit}; {remedy}")


# ---- files ---------------------------------------------------------------------------------------


def start_or_resume(
    out: Path, options: QuantizeOptions, samples: Sequence[Sequence[int]], source: FileSource
) -> None:
    """Create the folder, or check that the same conversion left it unfinished."""
    weight_files = sorted({entry.file.resolve() for entry in source.entries.values()})
    file_states = []
    for file in weight_files:
        stat = file.stat()
        file_states.append((str(file), stat.st_size, stat.st_mtime_ns))
    state = {
        **asdict(options),
        "model": hash_json(file_states),
        "calibration": hash_json([list(sample) for sample in samples]),
    }
    state_file = out / STATE_FILE
    if not out.exists() or not any(out.iterdir()):
        out.mkdir(parents=True, exist_ok=True)
        partial = out / "state.part"
        partial.write_text(json.dumps(state))
        partial.replace(state_file)
        return
    stored_state = None
    if state_file.is_file():
        stored_state = parse_strict_json(state_file.read_bytes(), str(state_file))
    if stored_state != state:
        raise ConfigError(
            f"{out}: is not empty, and holds no unfinished conversion of this model with these "
            "options; choose another folder"
        )


def hash_json(data: Any) -> str:
    """Hash data by its JSON text: 16 hexadecimal digits."""
    text = json.dumps(data).encode()
    return blake2b(text, digest_size=8).hexdigest()


def read_tensors(source: FileSource, names: Sequence[str]) -> StoredTensors:
    """Read tensors unchanged from the checkpoint's files."""
    tensors: StoredTensors = {}
    for name in names:
        with safe_open(source.entries[name].file, "pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def write_shard(shard: Path, tensors: StoredTensors) -> None:
    """Write a shard and rename it into place, so that it is complete or absent."""
    partial = shard.with_suffix(".part")
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, partial, {"format": "pt"})
    partial.replace(shard)


def finish_folder(
    origin: Path, out: Path, shards: Sequence[Path], quantization_config: Mapping[str, Any]
) -> None:
    """Write the index and config.json, copy the tokenizer, and remove the state file."""
    weight_map = {}
    total_size = 0
    for shard in shards:
        for name, entry in read_safetensors_header(shard).items():
            weight_map[name] = shard.name
            total_size += entry.end - entry.start
    for pattern in COPIED_FILES:
        for file in origin.glob(pattern):
            if file.is_file() and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, out / file.name)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config_file = origin / "config.json"
    config = parse_config_json(config_file.read_bytes(), str(config_file))
    config = {**config, "quantization_config": quantization_config}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / STATE_FILE).unlink()


# ---- recording the inputs of linear layers -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecordingLinear(DenseWeight):
    """A dense weight that sums up the outer products of its inputs, for GPTQ."""

    linears: tuple[LinearSpec, ...]
    hessian: torch.Tensor  # [in, in] float32: the sum of x xT

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.hessian.addmm_(x.float().T, x.float())
        return super().linear(x, bias)

    def fused_linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
    ) -> torch.Tensor | None:
        return None


@dataclass(frozen=True)
class TracedMatrix(DenseMatrix):
    """A dense matrix that knows which linear layers it was concatenated from."""

    linears: tuple[LinearSpec, ...]
    # `prepare` appends the weight that records. None: the inputs are not recorded.
    recorders: list[RecordingLinear] | None

    def cat(self, others: Sequence[Self]) -> Self:
        linears = self.linears
        for other in others:
            linears += other.linears
        return replace(super().cat(others), linears=linears)

    def prepare(
        self, dtype: torch.dtype, device: torch.device, pool: ThreadPool | None = None
    ) -> PreparedWeight:
        if device == META_DEVICE:
            return DenseWeight(torch.empty(self.shape, dtype=dtype, device=device))
        if self.recorders is None:
            return super().prepare(dtype, device, pool)
        num_inputs = self.shape[1]
        recorder = RecordingLinear(
            self.load_dense(dtype, device),
            linears=self.linears,
            hessian=torch.zeros(num_inputs, num_inputs, device=device),
        )
        self.recorders.append(recorder)
        return recorder


@dataclass(frozen=True)
class RecordingFormat:
    """A full-precision format that lists the linear layers it loads and records their inputs.

    Weights whose names contain `experts` are not recorded.
    """

    experts: str = ""
    linears: list[LinearSpec] = field(default_factory=list)
    recorders: list[RecordingLinear] = field(default_factory=list)

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> TracedMatrix:
        self.linears.append(linear)
        is_expert = bool(self.experts) and self.experts in linear.name
        is_recorded = linear.in_decoder_layer and not linear.unquantized and not is_expert
        weight = DenseFormat().open_matrix(tensors, linear).weight
        recorders = self.recorders if is_recorded else None
        return TracedMatrix(weight, (linear,), recorders)


@dataclass(frozen=True)
class LayerQuantizer:
    """Quantizes one layer at a time and carries the calibration samples through the layers.

    Experts that the checkpoint stores in one tensor are written as a tensor for each.
    """

    model: ModelSpec
    names: TensorNames
    written_names: TensorNames
    source: FileSource
    options: QuantizeOptions
    dtype: torch.dtype
    device: torch.device
    samples: list[torch.Tensor]  # token ids
    # Hidden states by sample: the inputs of the next layer.
    hidden_states: dict[int, torch.Tensor] = field(default_factory=dict)

    def load_layer(
        self,
        layer: int,
        source: FileSource,
        names: TensorNames,
        weight_format: WeightFormat,
        device: torch.device,
    ) -> Decoder:
        """Load a decoder that consists of one layer, with its weights in the given format."""
        weights = ModelWeights(source, names, self.dtype, device, weight_format)
        return Decoder(self.model, weights, SINGLE_RANK, range(layer, layer + 1))

    def list_linears(self, layer: int) -> list[LinearSpec]:
        """List the linear layers inside a decoder layer, without loading weights."""
        recording = RecordingFormat()
        self.load_layer(layer, self.source, self.names, recording, META_DEVICE)
        return [linear for linear in recording.linears if linear.in_decoder_layer]

    def list_written(self, linear: LinearSpec) -> list[LinearSpec]:
        """List the linear layers that a matrix is written as. They share its rows equally."""
        if linear.expert is None:
            return [linear]
        written = self.written_names
        layer, _, name = linear.name.rpartition(self.names.experts)
        is_up = name in names_of(self.names.expert_up)
        parts = names_of(written.expert_up) if is_up else (written.expert_down,)
        prefix = layer + written.experts.format(e=linear.expert)
        rows, columns = linear.shape
        return [LinearSpec(prefix + part, (rows // len(parts), columns)) for part in parts]

    def read_other_tensors(self, layer: int, quantized: Sequence[LinearSpec]) -> StoredTensors:
        """Read the tensors of a decoder layer that are not quantized."""
        prefix = self.names.layer.format(i=layer)
        replaced = {find_weight_name(self.source, linear.name) for linear in quantized}
        others = [
            name for name in self.source.names() if name.startswith(prefix) and name not in replaced
        ]
        return read_tensors(self.source, others)

    def quantize_layer(self, layer: int, linears: Sequence[LinearSpec]) -> StoredTensors:
        """Quantize these linear layers of a decoder layer; returns tensors by their full names."""
        hessians = self._compute_hessians(layer) if self.options.format == "gptq" else {}
        tensors: StoredTensors = {}
        for linear in linears:
            matrix = DenseFormat().open_matrix(self.source, linear)
            weight = matrix.load_dense(torch.float32, self.device)
            written = self.list_written(linear)
            for part, rows in zip(written, weight.chunk(len(written)), strict=True):
                stored = self._quantize_weight(rows, hessians.get(linear.name))
                for suffix, tensor in stored.items():
                    tensors[f"{part.name}.{suffix}"] = tensor
        return tensors

    def _quantize_weight(self, weight: torch.Tensor, hessian: torch.Tensor | None) -> StoredTensors:
        """Quantize one weight [out, in] to the tensors that are stored."""
        options = self.options
        num_inputs = weight.shape[1]
        group_size = num_inputs if options.group_size == -1 else options.group_size
        if options.format != "gptq":
            write_tensors = TENSOR_WRITERS[options.format]
            return write_tensors(weight, group_size)
        if hessian is None:
            # Experts see too few calibration tokens, so all their inputs get the same weight.
            hessian = torch.eye(num_inputs, device=weight.device)
        result = solve_gptq(
            weight,
            hessian,
            options.bits,
            group_size,
            options.act_order,
            options.damping,
        )
        return gptq_tensors(result, options.bits)

    @torch.inference_mode()
    def _compute_hessians(self, layer: int) -> dict[str, torch.Tensor]:
        """Run all samples through the layer; returns the Hessian by name of the linear layer."""
        recording = RecordingFormat(experts=self.names.experts.partition("{e}")[0])
        decoder = self.load_layer(layer, self.source, self.names, recording, self.device)
        for index in range(len(self.samples)):
            self._run_sample(decoder, index)
        return {
            linear.name: recorder.hessian
            for recorder in recording.recorders
            for linear in recorder.linears
        }

    @torch.inference_mode()
    def advance_samples(self, layer: int, shard: Path) -> None:
        """Run all samples through the finished layer, for gptq and unless it is the last one."""
        if self.options.format != "gptq" or layer + 1 == len(self.model.layers):
            return
        source = self.source.with_shard(shard)
        weight_format = GptqFormat(zero_point_offset=1)
        decoder = self.load_layer(layer, source, self.written_names, weight_format, self.device)
        for index in range(len(self.samples)):
            self.hidden_states[index] = self._run_sample(decoder, index)

    def _run_sample(self, decoder: Decoder, index: int) -> torch.Tensor:
        """Prefill one sample through a single layer; returns hidden states [tokens, hidden]."""
        token_ids = self.samples[index].to(self.device)
        num_tokens = len(token_ids)
        num_blocks = ceil(num_tokens / KV_BLOCK_SIZE)
        index_dtype = torch.int64 if self.device.type == "cpu" else torch.int32
        positions = torch.arange(num_tokens, dtype=index_dtype, device=self.device)
        block_table = range(num_blocks)
        metadata = AttentionMetadata.from_host(
            [num_tokens],
            [num_tokens],
            [block_table],
            KV_BLOCK_SIZE,
            self.device,
        )
        attention = decoder.spec.layers[0].attention
        assert attention is not None and not decoder.spec.recurrents, "see check_can_calibrate"
        shape = kv_cache_shape(attention, num_blocks, KV_BLOCK_SIZE)
        kv_cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        backend = select_backend([attention], self.dtype, self.device)
        decoder.build_rope_cache(num_tokens)
        return decoder(
            token_ids,
            positions,
            [kv_cache],
            backend,
            plan_attention(backend, [metadata]),
            hidden=self.hidden_states.get(index),
        )
