"""Roofline model: the least time of a step, and the time it should take with our code.

A step is described by four counts (StepWork), and its LoRA adapters by two each (StepAdapter). Its
floor is the time that the hardware cannot beat: for each kernel the larger of bytes over bandwidth
and operations over rate. The expected time is the floor plus the overheads of StepCalibration,
which were fitted to measured steps.

Pure arithmetic over a model spec and a HardwareSpec: no torch, no files, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, hypot
from typing import NamedTuple, Protocol

from bloomery.adapter_sizes import AdapterValues
from bloomery.hardware import FEW_ROWS, PACKED_EFFICIENCY, SINGLE_ROW, HardwareSpec
from bloomery.layout import gate_size, qkv_sizes
from bloomery.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RecurrentSpec,
    ShortConvSpec,
    recurrent_in_sizes,
    recurrent_out_size,
    state_parts,
)

# ---- parameters and bytes ------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters, grouped by how a step uses them."""

    matrices: int  # of the layers: every step reads all of them
    experts: int  # of the layers: a step reads those that its tokens are routed to
    embed: int  # looked up: a step reads a few rows
    head: int  # the output projection; the same parameters as `embed` when tied
    vectors: int  # norms and biases
    tied: bool
    largest: int  # the largest single matrix
    # Of the matrices that several layers share: what a step reads again after their first layer.
    reread: int = 0

    @property
    def total(self) -> int:
        counts = self.matrices + self.experts + self.embed + self.vectors
        return counts if self.tied else counts + self.head


def count_parameters(model: ModelSpec) -> ParameterCounts:
    hidden = model.hidden
    embed_dim = model.embed_dim or hidden
    layers = Counter(model.layers)
    repeated = _list_repeated_blocks(model)
    reread = sum(sum(_shared_sizes(layer, hidden)) for layer in repeated)
    matrices = sum(count * sum(_matrix_sizes(layer, hidden)) for layer, count in layers.items())
    matrices -= reread
    if model.embed_dim:
        matrices += 2 * embed_dim * hidden  # projections after the embedding and before the head
    vectors = sum(count * _vector_size(layer, hidden) for layer, count in layers.items())
    vectors -= sum(_shared_vector_size(layer, hidden) for layer in repeated)
    vectors += _norm_size(model.final_norm, hidden) + _norm_size(model.embed_norm, hidden)
    if model.head_bias:
        vectors += model.vocab
    return ParameterCounts(
        matrices=matrices,
        experts=sum(count * _experts_size(layer, hidden) for layer, count in layers.items()),
        embed=model.vocab * embed_dim + model.positions * hidden,
        head=model.vocab * embed_dim,
        vectors=vectors,
        tied=model.tied,
        largest=max(max(_matrix_sizes(layer, hidden)) for layer in layers),
        reread=reread,
    )


def _list_repeated_blocks(model: ModelSpec, most: int | None = None) -> list[LayerSpec]:
    """Return the layers whose shared block an earlier layer has as well, `most` of each block."""
    uses = Counter[int]()
    repeated = []
    for layer in model.layers:
        if layer.shared_block is not None:
            earlier = uses[layer.shared_block.index]
            uses[layer.shared_block.index] += 1
            if earlier and (most is None or earlier <= most):
                repeated.append(layer)
    return repeated


def _matrix_sizes(layer: LayerSpec, hidden: int) -> tuple[int, ...]:
    """Parameters of each matrix of a layer that every token is multiplied by."""
    recurrent = _recurrent_sizes(layer.recurrent, hidden)
    if layer.shared_block is not None:
        out = hidden * hidden
        return *_shared_sizes(layer, hidden), *_low_rank_sizes(layer, hidden), out, *recurrent
    return (
        *_attention_sizes(layer.attention, hidden, hidden),
        *recurrent,
        *_feed_forward_sizes(layer.mlp, hidden),
    )


def _shared_sizes(layer: LayerSpec, hidden: int) -> tuple[int, ...]:
    """Parameters of the matrices of a layer's attention and MLP, which it shares."""
    attention = _attention_sizes(layer.attention, hidden, 2 * hidden)
    return *attention, *_feed_forward_sizes(layer.mlp, hidden)


def _low_rank_sizes(layer: LayerSpec, hidden: int) -> tuple[int, ...]:
    """Parameters of the low-rank parts of a layer with a shared block."""
    sizes = []
    if layer.attention is not None:
        rank = layer.attention.low_rank
        sizes += [rank * (2 * hidden + rows) for rows in qkv_sizes(layer.attention)]
    if isinstance(layer.mlp, MlpSpec):
        rows = _mlp_sizes(layer.mlp, hidden)[0] // hidden
        sizes.append(layer.mlp.low_rank * (hidden + rows))
    return tuple(sizes)


def _attention_sizes(attention: AttentionSpec | None, hidden: int, inputs: int) -> tuple[int, ...]:
    if attention is None:
        return ()
    qkv = inputs * (sum(qkv_sizes(attention)) + gate_size(attention))
    return qkv, attention.num_heads * attention.head_dim * hidden


def _recurrent_sizes(recurrent: RecurrentSpec | None, hidden: int) -> tuple[int, ...]:
    if recurrent is None:
        return ()
    in_out = (hidden * sum(recurrent_in_sizes(recurrent)), recurrent_out_size(recurrent) * hidden)
    if not isinstance(recurrent, MambaSpec):
        return in_out
    x_proj = recurrent.inner * (recurrent.dt_rank + 2 * recurrent.state_size)
    return *in_out, x_proj, recurrent.dt_rank * recurrent.inner


def _feed_forward_sizes(mlp: MlpSpec | MoeSpec | None, hidden: int) -> tuple[int, ...]:
    if mlp is None:
        return ()
    if isinstance(mlp, MlpSpec):
        return _mlp_sizes(mlp, hidden)
    router = hidden * (mlp.num_experts + mlp.shared_gate)
    shared_expert = _mlp_sizes(mlp.shared, hidden) if mlp.shared else ()
    latent = 2 * (hidden * mlp.latent,) if mlp.latent else ()
    return router, *shared_expert, *latent


def _mlp_sizes(mlp: MlpSpec, hidden: int) -> tuple[int, int]:
    """Parameters of the input projections (up, and gate if there is one) and of the output."""
    up = hidden * mlp.size
    down = mlp.size * hidden
    if mlp.gated:
        return 2 * up, down
    return up, down


def _experts_size(layer: LayerSpec, hidden: int) -> int:
    if not isinstance(layer.mlp, MoeSpec):
        return 0
    return layer.mlp.num_experts * _expert_size(layer.mlp, hidden)


def _expert_size(moe: MoeSpec, hidden: int) -> int:
    """Parameters of one expert, with its biases: a step reads those of chosen experts only."""
    hidden = moe.latent or hidden
    return sum(_mlp_sizes(moe.mlp, hidden)) + _mlp_vector_size(moe.mlp, hidden)


def _norm_size(norm: NormSpec | None, size: int) -> int:
    if norm is None:
        return 0
    return size * (norm.weight + norm.bias)


def _vector_size(layer: LayerSpec, hidden: int) -> int:
    """Parameters of all norms, biases, sinks and convolutions of a layer."""
    norms = (
        layer.attn_norm,
        layer.attn_post_norm,
        layer.attn_sum_norm,
        layer.mlp_norm,
        layer.mlp_post_norm,
        layer.mlp_sum_norm,
    )
    total = sum(_norm_size(norm, hidden) for norm in norms)
    if layer.shared_block is not None:
        total += _norm_size(layer.shared_block.norm, 2 * hidden)
    if layer.attention is not None:
        total += _attention_vector_size(layer.attention, hidden)
    if layer.recurrent is not None:
        total += _recurrent_vector_size(layer.recurrent, hidden)
    if isinstance(layer.mlp, MlpSpec):
        total += _mlp_vector_size(layer.mlp, hidden)
    if isinstance(layer.mlp, MoeSpec):
        total += _moe_vector_size(layer.mlp, hidden)
    return total


def _shared_vector_size(layer: LayerSpec, hidden: int) -> int:
    """Parameters of the norms and biases of a layer's shared block."""
    own = replace(layer, attn_norm=None, recurrent=None)
    return _vector_size(own, hidden)


def _attention_vector_size(attention: AttentionSpec, hidden: int) -> int:
    total = 0
    q_size = attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    if attention.bias:
        total += sum(qkv_sizes(attention))
        if attention.gate is not None and attention.gate.stored == "packed":
            total += gate_size(attention)
    if attention.out_bias:
        total += hidden
    if attention.qk_norm:
        sizes = (q_size, kv_size)
        if attention.qk_norm_over == "head":
            sizes = (attention.head_dim, attention.head_dim)
        total += sum(_norm_size(attention.qk_norm, size) for size in sizes)
    total += _norm_size(attention.v_norm, attention.head_dim)
    if attention.sinks:
        total += attention.num_heads
    return total


def _recurrent_vector_size(recurrent: RecurrentSpec, hidden: int) -> int:
    """Parameters of the convolution, the decays, the norms and the biases of a mixer."""
    channels = state_parts(recurrent)[0].rows
    inner = recurrent_out_size(recurrent)
    total = channels * recurrent.conv_width
    in_size = sum(recurrent_in_sizes(recurrent))
    match recurrent:
        case GatedDeltaNetSpec():
            total += 2 * recurrent.num_value_heads
            total += _norm_size(recurrent.norm, recurrent.value_dim)
        case Mamba2Spec():
            total += 3 * recurrent.num_heads + recurrent.conv_bias * channels
            total += recurrent.in_bias * in_size + recurrent.out_bias * hidden
            total += _norm_size(recurrent.norm, inner)
        case MambaSpec():
            # A, D and the bias of dt
            total += inner * recurrent.state_size + 2 * inner + recurrent.conv_bias * channels
            total += recurrent.bias * (in_size + hidden)
            total += _norm_size(recurrent.norm, recurrent.dt_rank + 2 * recurrent.state_size)
        case ShortConvSpec():
            total += recurrent.bias * (channels + in_size + hidden)
    return total


def _moe_vector_size(moe: MoeSpec, hidden: int) -> int:
    norms = (
        moe.router_norm,
        moe.expert_norm,
        moe.expert_post_norm,
        moe.shared_norm,
        moe.shared_post_norm,
    )
    total = sum(_norm_size(norm, hidden) for norm in norms)
    router = moe.router
    total += moe.num_experts * (router.bias + router.correction_bias + router.expert_scale)
    if moe.shared is not None:
        total += _mlp_vector_size(moe.shared, hidden)
    return total


def _mlp_vector_size(mlp: MlpSpec, hidden: int) -> int:
    """Parameters of the biases of an MLP and of its activation."""
    num_inputs = 2 if mlp.gated else 1
    biases = mlp.bias * (num_inputs * mlp.size + hidden)
    return biases + 2 * (mlp.activation == "xielu")


def kv_bytes_per_token(model: ModelSpec, kv_bits: float = 16) -> float:
    """Bytes of KV cache that one token takes in all layers."""
    values = sum(2 * spec.num_kv_heads * spec.head_dim for spec in model.attentions)
    return values * kv_bits / 8


def kv_bytes(model: ModelSpec, length: int, kv_bits: float = 16) -> float:
    """Bytes of KV cache that a decode step of one sequence of `length` tokens reads.

    Layers with a sliding window read no more than the window, layers with chunks no more than the
    last chunk.
    """
    total = 0.0
    for attention in model.attentions:
        num_tokens = min(length, attention.window or length)
        if attention.chunk:
            num_tokens = min(num_tokens, (length - 1) % attention.chunk + 1)
        total += 2 * attention.num_kv_heads * attention.head_dim * num_tokens * kv_bits / 8
    return total


def state_bytes(model: ModelSpec) -> int:
    """Bytes of one sequence's recurrent state in all layers, in float32."""
    parts = [part for spec in model.recurrents for part in state_parts(spec)]
    return 4 * sum(part.rows * part.width for part in parts)


def scores_bytes(heads: int, tokens: int) -> float:
    """Bytes of the full attention score matrix in 16 bits, which Flash Attention never stores."""
    return heads * tokens * tokens * 2.0


def activation_bytes(model: ModelSpec, tokens: int, sampled: int, bits: float = 16) -> float:
    """Bytes a step needs besides weights and KV cache: its widest layer, and the fp32 logits."""
    layer_width = max(_activation_width(layer) for layer in set(model.layers))
    hidden_bytes = tokens * (3 * model.hidden + layer_width) * bits / 8
    logits_bytes = sampled * model.vocab * 4
    return hidden_bytes + logits_bytes


def _activation_width(layer: LayerSpec) -> int:
    """The most values per token that are alive at once inside a layer."""
    mlp_width = 0
    if layer.mlp is not None:
        mlp = layer.mlp
        inner = mlp if isinstance(mlp, MlpSpec) else replace(mlp.mlp, size=mlp.mlp.size * mlp.top_k)
        mlp_width = inner.size * (3 if inner.gated else 2)  # inputs and output of the activation
    mixer_width = 0
    if layer.attention is not None:
        attention = layer.attention
        # The projection's outputs, then queries, gate and result of attention.
        projected = sum(qkv_sizes(attention)) + gate_size(attention)
        queries = attention.num_heads * attention.head_dim
        mixer_width += projected + queries + gate_size(attention)
    if layer.recurrent is not None:
        # The projection's outputs, then the convolution's outputs and the mixer's result.
        projected = sum(recurrent_in_sizes(layer.recurrent))
        mixer_width += 2 * projected + recurrent_out_size(layer.recurrent)
    return max(mlp_width, mixer_width)


def visible_positions(attention: AttentionSpec) -> int:
    """The most positions that a query sees, 0 if there is no limit."""
    limits = [limit for limit in (attention.window, attention.chunk) if limit]
    return min(limits, default=0)


@dataclass(frozen=True)
class WeightPrecision:
    """How many bits weights take. Norms and biases keep at least 16 bits."""

    name: str
    bits: float  # per value of the layers' matrices, including scales and zeros of its group
    outer_bits: float = 16  # per value of embedding and head
    compute_format: str = "bf16"  # of the matrix products; hardware without it uses a wider one
    # For weights in several formats: the share of values in each.
    format_shares: Mapping[str, float] = field(default_factory=dict)
    # Additional bits per value of the largest matrix while a library dequantizes it.
    unpacked_bits: float = 0.0
    # Per value of experts, where they alone are quantized; 0: as the other matrices.
    expert_bits: float = 0.0


def _by_name(*precisions: WeightPrecision) -> Mapping[str, WeightPrecision]:
    return {precision.name: precision for precision in precisions}


# bitsandbytes' double quantization: blocks of 64 with an 8-bit maximum, and an fp32 scale for 256
# of these maxima.
DOUBLE_QUANTIZED_BITS = 4 + 8 / 64 + 32 / (64 * 256)
# Precisions of the formats of `--quantization`. Embedding and head take 8 bits, because errors
# there cost most. Groups of 128 (or 64) share a scale and a zero of 16 bits each.
PRECISIONS: Mapping[str, WeightPrecision] = _by_name(
    WeightPrecision("fp32", 32, 32, "fp32"),
    WeightPrecision("bf16", 16),
    WeightPrecision("fp8", 8, 8, "fp8"),  # one scale per row is negligible
    WeightPrecision("int8", 8, 8, "int8"),
    WeightPrecision("w8a8", 8, 8, "int8"),
    WeightPrecision("int4", 4 + 32 / 128, 8, "int4"),
    WeightPrecision("int4-64", 4 + 32 / 64, 8, "int4"),
    WeightPrecision("nf4", DOUBLE_QUANTIZED_BITS, 8, "nf4"),
    WeightPrecision("fp4", DOUBLE_QUANTIZED_BITS, 8, "nf4"),
)
# Precisions of bitsandbytes, which has no fused kernels. Embedding and head keep 16 bits. A matrix
# is dequantized before it is multiplied: int8 to 16 bits; nf4 (blocks of 64 with an fp32 maximum)
# to 16 and then to 32 bits.
LIBRARY_PRECISIONS: Mapping[str, WeightPrecision] = _by_name(
    WeightPrecision("bf16", 16),
    WeightPrecision("int8", 8, compute_format="int8", unpacked_bits=16),
    WeightPrecision("nf4", 4 + 32 / 64, compute_format="nf4", unpacked_bits=48),
)


def weights_bytes(model: ModelSpec, precision: WeightPrecision, pp: int = 1) -> float:
    """Bytes of all weights at a precision, on all devices.

    A block that several layers share is in every pipeline stage that has one of them.
    """
    counts = count_parameters(model)
    outer = counts.total - counts.matrices - counts.experts - counts.vectors
    vector_bits = max(precision.outer_bits, 16)
    copies = _list_repeated_blocks(model, pp - 1)
    matrices = counts.matrices + sum(sum(_shared_sizes(copy, model.hidden)) for copy in copies)
    layer_bits = matrices * precision.bits + counts.vectors * vector_bits
    expert_bits = counts.experts * (precision.expert_bits or precision.bits)
    return (layer_bits + expert_bits + outer * precision.outer_bits) / 8


def peak_bytes(model: ModelSpec, precision: WeightPrecision) -> float:
    """Bytes of the weights, plus the largest matrix as a library dequantizes it."""
    unpacked = count_parameters(model).largest * precision.unpacked_bits / 8
    return weights_bytes(model, precision) + unpacked


# ---- a step --------------------------------------------------------------------------------------


class SequenceChunk(Protocol):
    """One sequence's part of a step: `count` tokens from position `start` on."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def samples(self) -> bool:
        """Whether the last token's logits are sampled."""
        ...


class StepWork(NamedTuple):
    """The four counts that a step's time depends on."""

    tokens: int  # computed
    attended: int  # KV cache positions read: the sum of the sequences' lengths after the step
    sampled: int  # tokens whose logits are computed
    pairs: int  # (query, key) pairs of attention; a prompt of n tokens has n(n + 1) / 2


class StepAdapter(NamedTuple):
    """A LoRA adapter of some tokens of a step."""

    values: AdapterValues  # of one device
    tokens: float
    sampled: float


def count_step_work(chunks: Iterable[SequenceChunk]) -> StepWork:
    tokens = 0
    attended = 0
    sampled = 0
    pairs = 0
    for chunk in chunks:
        count = chunk.count
        end = chunk.start + count
        tokens += count
        attended += end
        sampled += chunk.samples
        pairs += end if count == 1 else count * (chunk.start + end + 1) // 2
    return StepWork(tokens, attended, sampled, pairs)


@dataclass(frozen=True)
class StepFloor:
    """The least time of one step, and its bytes and operations, summed over all devices."""

    seconds: float
    bytes: float
    operations: float
    messages: int  # collectives, and transfers between pipeline stages
    communication: float  # seconds of the messages if nothing overlapped; not part of `seconds`

    @property
    def ms(self) -> float:
        return self.seconds * 1e3


class MatmulCost(NamedTuple):
    """Seconds of multiplying a group of matrices, at full bandwidth and full rate."""

    read: float  # to read the matrices once
    per_row: float  # of arithmetic, for each row of inputs
    packed_format: str | None  # how the weights are packed; None: not packed
    # Of a CPU's own kernels, which were measured for few rows:
    first_row: float = 0.0
    per_decode_row: float = 0.0


class AttentionCost(NamedTuple):
    """Seconds of attention in all layers that have the same window or chunk."""

    window: int  # positions that a query sees at most; 0: any number
    read: float  # of one KV cache position
    decode_pair: float  # of one (query, key) pair, for single queries
    prefill_pair: float  # of one pair, for chunks of a prompt


class ExpertsCost(NamedTuple):
    """Cost of all experts of the MoE layers that have the same routing."""

    cost: MatmulCost
    skipped: float  # the share of experts that a token is not routed to


# Operations of a scan for each value of the state and each token: decay, read, update and output.
STATE_OPERATIONS = 8


def count_all_reduces(layer: LayerSpec, tp: int) -> int:
    """Collectives of a layer: one for each block, or one for two blocks on the same input.

    Small sums of recurrent mixers count as sums of hidden states. dt, B and C of Mamba-1 are
    products of all channels. A norm of Mamba-2 may be over heads of several ranks.
    """
    if layer.parallel:
        return 1
    blocks = (layer.attention, layer.recurrent, layer.mlp)
    count = len(blocks) - blocks.count(None) - layer.sums_mixers
    match layer.recurrent:
        case MambaSpec():
            return count + 1
        case Mamba2Spec(norm=NormSpec(), norm_groups=groups) if groups % tp:
            return count + 1
    return count


class Roofline:
    """Step times of one model on one kind of hardware, precomputed to a few multiplications.

    The methods take the counts of StepWork one by one. `pairs` defaults to `attended`, which is
    right for steps that only decode. With pipeline stages the seconds are the time in which one
    step passes all stages; other steps may follow it.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareSpec,
        precision: WeightPrecision = PRECISIONS["bf16"],
        kv_bits: float = 16,
        tp: int = 1,
        pp: int = 1,
    ):
        self.model = model
        self.hardware = hardware
        self.tp = tp
        self.pp = pp
        self.calibration = hardware.calibration
        self.is_cpu = hardware.is_cpu
        self.bandwidth = hardware.bandwidth * tp
        # Collectives of a step in which the logits are not gathered: one for the embedding, two in
        # a layer, one where attention and MLP read the same input.
        self.num_all_reduces = 1 + sum(count_all_reduces(layer, tp) for layer in model.layers)
        self._count_bytes_and_values(precision)
        self._sum_layers(kv_bits)
        is_wide = self.is_cpu or precision.compute_format == "fp32"
        self.adapter_format = "fp32" if is_wide else "bf16"
        self.state_bytes = state_bytes(model)
        self.state_operations = STATE_OPERATIONS * self.state_bytes // 4  # of a token
        self._precompute_costs(precision)

    def _count_bytes_and_values(self, precision: WeightPrecision) -> None:
        counts = count_parameters(self.model)
        vector_bits = max(precision.outer_bits, 16.0)
        self.matrices_values = counts.matrices + counts.reread
        layer_bits = self.matrices_values * precision.bits + counts.vectors * vector_bits
        self.matrices_bytes = layer_bits / 8
        self.head_values = counts.head
        self.head_bytes = counts.head * precision.outer_bits / 8
        self.expert_weight_bytes = (precision.expert_bits or precision.bits) / 8

    def _sum_layers(self, kv_bits: float) -> None:
        """Sum KV cache bytes, attention operations and expert values over layers that are alike."""
        # (experts, experts per token) -> values of one expert
        self.expert_values: dict[tuple[int, int], int] = {}
        # window or chunk (0: none) -> bytes of one KV cache position. KV heads that cannot be split
        # are repeated on several ranks.
        self.kv_position_bytes: dict[int, float] = {}
        # window -> operations of one (query, key) pair
        self.pair_operations: dict[int, int] = {}
        for layer in self.model.layers:
            mlp = layer.mlp
            if isinstance(mlp, MoeSpec):
                routing = (mlp.num_experts, mlp.top_k)
                expert = _expert_size(mlp, self.model.hidden)
                self.expert_values[routing] = self.expert_values.get(routing, 0) + expert
        for attention in self.model.attentions:
            window = visible_positions(attention)
            kv_heads = ceil(attention.num_kv_heads / self.tp) * self.tp
            position_bytes = 2 * kv_heads * attention.head_dim * kv_bits / 8
            pair_operations = 4 * attention.num_heads * attention.head_dim
            self.kv_position_bytes[window] = self.kv_position_bytes.get(window, 0) + position_bytes
            self.pair_operations[window] = self.pair_operations.get(window, 0) + pair_operations

    def _precompute_costs(self, precision: WeightPrecision) -> None:
        compute_format = precision.compute_format
        most_bits = max(precision.outer_bits, precision.bits)
        wide_format = "fp32" if most_bits > 16 or compute_format == "fp32" else "bf16"
        packed = _packed_format(precision.bits, compute_format)
        head_compute = "fp8" if compute_format == "fp8" else None
        head_packed = _packed_format(precision.outer_bits, head_compute)
        shares = precision.format_shares or {packed or wide_format: 1.0}
        head_shares = {head_packed or wide_format: 1.0}
        self.rate = self.hardware.mean_rate(shares) * self.tp
        self.matrices = self._matmul_cost(self.matrices_values, self.matrices_bytes, shares, packed)
        self.head = self._matmul_cost(self.head_values, self.head_bytes, head_shares, head_packed)
        expert_shares = shares
        expert_packed = packed
        if precision.expert_bits:
            expert_packed = _packed_format(precision.expert_bits, None)
            expert_shares = {expert_packed or wide_format: 1.0}
        self.experts = tuple(
            ExpertsCost(
                self._matmul_cost(
                    count * values,
                    count * values * self.expert_weight_bytes,
                    expert_shares,
                    expert_packed,
                ),
                skipped=1 - top_k / count,
            )
            for (count, top_k), values in self.expert_values.items()
        )
        self.logits_read = 4 * self.model.vocab / self.bandwidth
        # Unpacking a matrix reads it packed and writes and reads it in 16 bits.
        self.unpack_ratio = 1 + 16 / precision.bits
        self.state_read = self.state_bytes / self.bandwidth
        self.state_compute = self.state_operations / (self.hardware.rate(wide_format) * self.tp)
        decode_rate = self._attention_rate("decode attention", wide_format)
        prefill_rate = self._attention_rate("prefill attention", wide_format)
        self.attention = tuple(
            AttentionCost(
                window,
                position_bytes / self.bandwidth,
                self.pair_operations[window] / decode_rate,
                self.pair_operations[window] / prefill_rate,
            )
            for window, position_bytes in self.kv_position_bytes.items()
        )

    def _attention_rate(self, kernel_format: str, wide_format: str) -> float:
        """The rate of attention. Only CPUs have measured rates for its kernels."""
        known = kernel_format in self.hardware.rates
        return self.hardware.rate(kernel_format if known else wide_format) * self.tp

    def _matmul_cost(
        self, values: int, size: float, shares: Mapping[str, float], packed: str | None
    ) -> MatmulCost:
        """Cost of a group of matrices that has `values` values in `size` bytes."""
        hardware = self.hardware
        operations = 2 * values / self.tp
        read = size / self.bandwidth
        per_row = operations / hardware.mean_rate(shares)
        if not hardware.is_cpu:
            return MatmulCost(read, per_row, packed)
        decode_shares = {}
        for name, share in shares.items():
            few_rows = name + FEW_ROWS
            decode_shares[few_rows if few_rows in hardware.rates else name] = share
        first_row = operations / hardware.mean_rate(shares, SINGLE_ROW)
        per_decode_row = operations / hardware.mean_rate(decode_shares)
        return MatmulCost(read, per_row, packed, first_row, per_decode_row)

    # ---- floor -----------------------------------------------------------------------------------

    def floor_seconds(
        self, tokens: int, attended: int, sampled: int, pairs: int | None = None
    ) -> float:
        """Seconds the step takes at least."""
        seconds = max(self.matrices.read, self.matrices.per_row * tokens)
        for cost, skipped in self.experts:
            read = cost.read * (1 - skipped**tokens)
            seconds += max(read, cost.per_row * tokens * (1 - skipped))
        if sampled:
            seconds += max(self.head.read, self.head.per_row * sampled)
        if self.state_bytes:
            seconds += max(self._state_seconds(tokens, sampled))
        pairs = attended if pairs is None else pairs
        return seconds + max(self._attention_seconds(tokens, attended, pairs))

    def _state_seconds(self, tokens: int, sampled: int) -> tuple[float, float]:
        """Seconds of reading and writing recurrent states, and of the scans' arithmetic.

        Each sequence reads and writes its state once in a step. Sequences that do not sample are
        in the middle of a prompt, where the state hardly counts; a step has at least one sequence.
        """
        return 2 * max(sampled, 1) * self.state_read, self.state_compute * tokens

    def _attention_seconds(self, tokens: int, attended: int, pairs: int) -> tuple[float, float]:
        """Seconds of reading the KV cache and of attention's arithmetic.

        A step with more pairs than positions has prefill chunks.
        """
        read_seconds = 0.0
        compute_seconds = 0.0
        for window, read, decode_pair, prefill_pair in self.attention:
            limit = window * tokens or pairs
            per_pair = prefill_pair if pairs > attended else decode_pair
            read_seconds += read * min(attended, limit)
            compute_seconds += per_pair * min(pairs, limit)
        return read_seconds, compute_seconds

    def adapter_seconds(self, adapters: Iterable[StepAdapter]) -> float:
        """Seconds that the LoRA adapters of a step add to its floor, and to its expected time.

        Each adapter is read once, however many tokens have it. All pipeline stages have as many
        layers.
        """
        read_values = 0.0
        operations = 0.0
        for values, tokens, sampled in adapters:
            used, routed = self._expert_shares(tokens)
            read_values += values.matrices + values.experts * used + values.head * (sampled > 0)
            operations += 2 * (values.matrices + values.experts * routed) * tokens
            operations += 2 * values.head * sampled
        value_bytes = 4 if self.adapter_format == "fp32" else 2
        read_seconds = read_values * value_bytes / self.hardware.bandwidth
        return self.pp * max(read_seconds, operations / self.hardware.rate(self.adapter_format))

    def _expert_shares(self, tokens: float) -> tuple[float, float]:
        """Shares of the experts' values: read for so many tokens, and multiplied by each token."""
        total = sum(count * values for (count, _), values in self.expert_values.items())
        used = 0.0
        routed = 0.0
        for (count, top_k), values in self.expert_values.items():
            used += count * values / total * (1 - (1 - top_k / count) ** tokens)
            routed += top_k * values / total
        return used, routed

    def step_floor(
        self, tokens: int, attended: int, sampled: int, pairs: int | None = None
    ) -> StepFloor:
        """The floor with its bytes, operations and messages."""
        pairs = attended if pairs is None else pairs
        read = self.matrices_bytes
        operations = 2.0 * (self.matrices_values * tokens + self.head_values * sampled)
        if sampled:
            read += self.head_bytes
        for (count, top_k), values in self.expert_values.items():
            used = 1 - (1 - top_k / count) ** tokens
            read += count * values * self.expert_weight_bytes * used
            operations += 2 * top_k * values * tokens
        read += 2 * max(sampled, 1) * self.state_bytes
        operations += self.state_operations * tokens
        for window, position_bytes in self.kv_position_bytes.items():
            read += position_bytes * min(attended, window * tokens or attended)
            operations += self.pair_operations[window] * min(pairs, window * tokens or pairs)
        messages, sent_bytes = self.count_messages(tokens, sampled)
        seconds = max(
            self.floor_seconds(tokens, attended, sampled, pairs),
            sent_bytes / self.hardware.link_bandwidth,
        )
        communication = self.communication_seconds(tokens, sampled)
        return StepFloor(seconds, read, operations, messages, communication)

    def count_messages(self, tokens: int, sampled: int) -> tuple[int, float]:
        """Messages between devices, and the bytes a device sends.

        Tensor parallel: all-reduces of hidden states, and one gather of the logits. Pipeline
        parallel: hidden states in 16 bits from stage to stage, with the embeddings if a layer reads
        these.
        """
        hidden_bytes = tokens * self.model.hidden * 2.0
        count = self.pp - 1
        passes_embeddings = any(layer.shared_block is not None for layer in self.model.layers)
        sent_bytes = (self.pp - 1) * hidden_bytes * (2 if passes_embeddings else 1)
        if self.tp > 1:
            count += self.num_all_reduces + (1 if sampled else 0)
            all_reduce_bytes = 2 * (self.tp - 1) / self.tp * hidden_bytes
            logits_bytes = sampled * self.model.vocab / self.tp * 4
            sent_bytes += self.num_all_reduces * all_reduce_bytes + logits_bytes
        return count, sent_bytes

    def communication_seconds(self, tokens: int, sampled: int) -> float:
        """Seconds of all messages: a latency each, and their bytes over the link."""
        if self.tp == self.pp == 1:
            return 0.0
        count, sent_bytes = self.count_messages(tokens, sampled)
        latency = count * self.hardware.link_latency
        return latency + sent_bytes / self.hardware.link_bandwidth

    # ---- expected --------------------------------------------------------------------------------

    def expected_seconds(
        self, tokens: int, attended: int, sampled: int, pairs: int | None = None
    ) -> float:
        """Seconds our own code should take.

        Reading and computing overlap only in part. Their combined time is modelled as the
        hypotenuse of the two.
        """
        calibration = self.calibration
        num_layers = len(self.model.layers)
        decode_only = tokens == sampled
        is_larger = tokens > 1  # index into the calibration's pairs
        seconds = self._matmul_seconds(self.matrices, tokens, 1.0, decode_only)
        for cost, skipped in self.experts:
            rows = tokens * (1 - skipped)
            seconds += self._matmul_seconds(cost, rows, 1 - skipped**tokens, decode_only)
        if sampled:
            seconds += self._matmul_seconds(self.head, sampled, 1.0, True)
            logits_reads = calibration.logits_reads_per_sample * sampled
            seconds += logits_reads * self.logits_read / calibration.memory_efficiency
        if self.state_bytes:
            read, compute = self._state_seconds(tokens, sampled)
            seconds += hypot(
                read / calibration.memory_efficiency, compute / calibration.compute_efficiency
            )
        pairs = attended if pairs is None else pairs
        read, compute = self._attention_seconds(tokens, attended, pairs)
        seconds += hypot(
            read / (calibration.memory_efficiency * calibration.attention_efficiency),
            compute / calibration.compute_efficiency,
        )
        layer_seconds = (
            calibration.kernels_per_layer[is_larger] * calibration.kernel_gap_seconds
            + sampled * calibration.sequence_seconds_per_layer
        )
        if self.matrices.packed_format is not None:
            layer_seconds += calibration.unpack_seconds_per_layer[is_larger]
        if not decode_only and sampled > 1:
            layer_seconds += calibration.mixed_seconds_per_layer
        seconds += calibration.step_overhead_seconds + num_layers * layer_seconds
        if not decode_only and tokens > calibration.max_captured_tokens:
            num_kernels = num_layers * calibration.kernels_per_layer[1]
            launches = num_kernels * calibration.eager_launch_seconds
            if self.is_cpu:
                seconds += launches
            else:
                seconds = max(seconds, launches)  # the host launches while the GPU computes
        return seconds + self.communication_seconds(tokens, sampled)

    def _matmul_seconds(
        self, cost: MatmulCost, rows: float, read_share: float, decode_only: bool
    ) -> float:
        """Multiply `rows` inputs by a share of the matrices.

        Packed weights are multiplied by a fused kernel or, where arithmetic dominates, unpacked
        first.
        """
        calibration = self.calibration
        read = cost.read * read_share
        compute = cost.per_row * rows / calibration.compute_efficiency
        if cost.first_row:
            first_row = max(cost.first_row, cost.read) * read_share
            per_row = cost.per_decode_row if decode_only else cost.per_row
            cpu_compute = per_row * rows / calibration.compute_efficiency
            return hypot(first_row / calibration.memory_efficiency, cpu_compute)
        if cost.packed_format is None:
            return hypot(read / calibration.memory_efficiency, compute)
        efficiency = calibration.packed_efficiency[cost.packed_format][rows > 1]
        packed_read = read / (calibration.memory_efficiency * efficiency)
        if cost.packed_format == "fp8":
            return hypot(packed_read, compute)
        fused = hypot(packed_read, compute / calibration.fused_unpack_efficiency)
        unpacked_first = read * self.unpack_ratio / calibration.memory_efficiency + compute
        return min(fused, unpacked_first)

    def reference_steps(self) -> tuple[tuple[int, int, int, float], ...]:
        """Expected times of typical steps, from which the scheduler's step-time model starts.

        Each entry is (tokens, KV cache positions read by decodes, attention pairs of prefill
        chunks, seconds), as EngineCapacity carries them.
        """
        steps = []
        for batch in (1, 8, 64, 256):
            for length in (100, 2000):
                attended = batch * length
                seconds = self.expected_seconds(batch, attended, batch)
                steps.append((batch, attended, 0, seconds))
        for chunk in (32, 128, 256, 512, 1024, 2048, 8192):
            for start in (0, 1000):
                pairs = chunk * (start + chunk // 2)
                seconds = self.expected_seconds(chunk, start + chunk, 1, pairs)
                steps.append((chunk, 0, pairs, seconds))
        return tuple(steps)


def _packed_format(bits: float, compute_format: str | None) -> str | None:
    """The packed format of weights with `bits` per value; None when they are not packed."""
    if bits >= 16:
        return None
    if compute_format in PACKED_EFFICIENCY:
        return compute_format
    return "int4" if bits < 6 else "int8"
