"""How tensor parallel ranks and pipeline stages divide a model; this module does no communication.

A rank's part of a spec is again a spec: fewer heads, narrower MLPs, fewer layers. Attention, KV
caches and kernels see only that spec. Heads must divide evenly, inner dimensions need not. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bloomery.errors import ConfigError
from bloomery.spec import (
    AlibiSpec,
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RecurrentSpec,
    ShortConvSpec,
    recurrent_in_sizes,
    recurrent_out_size,
)

Range = tuple[int, int]
# Quantized formats store values in blocks of these sizes; most kernels cannot split a block.
BLOCK_SIZES = (256, 128, 64, 32)
MAX_IMBALANCE = 1.05  # largest part over an even part that is accepted to keep blocks intact


@dataclass(frozen=True)
class WeightShard:
    """The part of a weight matrix that one rank holds."""

    rows: tuple[Range, ...] | None = None  # outputs; None: all
    cols: Range | None = None  # inputs; None: all
    # Where inputs are split, results are summed over the ranks: only one of them adds the bias.
    bias: bool = True


UNSHARDED = WeightShard()


@dataclass(frozen=True)
class TensorParallelLayout:
    """The part of every layer that one tensor parallel rank holds."""

    rank: int = 0
    size: int = 1

    # ---- specs ----

    def layer(self, spec: LayerSpec) -> LayerSpec:
        """Return this rank's part of a layer."""
        if self.size == 1:
            return spec
        return replace(
            spec,
            attention=spec.attention and self.attention(spec.attention),
            mlp=spec.mlp and self.mlp(spec.mlp),
            recurrent=spec.recurrent and self.recurrent(spec.recurrent),
        )

    def attention(self, spec: AttentionSpec) -> AttentionSpec:
        """Return this rank's part of an attention block."""
        if self.size == 1:
            return spec
        (first, end), (kv_first, kv_end) = self.heads(spec)
        position = spec.position
        if isinstance(position, AlibiSpec):
            position = replace(position, first_head=first, total_heads=spec.num_heads)
        return replace(
            spec, num_heads=end - first, num_kv_heads=kv_end - kv_first, position=position
        )

    def recurrent(self, spec: RecurrentSpec) -> RecurrentSpec:
        """Return this rank's part of a recurrent mixer: whole heads, or a range of channels."""
        if self.size == 1:
            return spec
        match spec:
            case GatedDeltaNetSpec():
                first, end = self.key_heads(spec)
                return replace(
                    spec,
                    num_key_heads=end - first,
                    num_value_heads=spec.num_value_heads // self.size,
                )
            case Mamba2Spec():
                first, end = self.state_groups(spec)
                whole_norm = spec.norm_groups % self.size != 0
                return replace(
                    spec,
                    num_heads=spec.num_heads // self.size,
                    num_groups=end - first,
                    norm_groups=1 if whole_norm else spec.norm_groups // self.size,
                )
            case MambaSpec():
                return replace(spec, inner=spec.inner // self.size)
            case ShortConvSpec():
                return replace(spec, size=spec.size // self.size)

    def mlp(self, spec: MlpSpec | MoeSpec) -> MlpSpec | MoeSpec:
        """Return this rank's part of an MLP, or of every expert of an MoE block.

        Every rank has a part of every expert, so all ranks have the same work.
        """
        if isinstance(spec, MoeSpec):
            shared = spec.shared and self._narrow_mlp(spec.shared)
            return replace(spec, mlp=self._narrow_mlp(spec.mlp), shared=shared)
        return self._narrow_mlp(spec)

    def _narrow_mlp(self, spec: MlpSpec) -> MlpSpec:
        start, end = self.split_dimension(spec.size)
        return replace(spec, size=end - start)

    # ---- dimensions ----

    def heads(self, spec: AttentionSpec) -> tuple[Range, Range]:
        """Return this rank's query heads and KV heads.

        Ranks that share a KV head each hold a copy.
        """
        num_heads = spec.num_heads // self.size
        heads = (self.rank * num_heads, (self.rank + 1) * num_heads)
        kv_first = self.rank * spec.num_kv_heads // self.size
        kv_end = (self.rank + 1) * spec.num_kv_heads // self.size
        return heads, (kv_first, max(kv_end, kv_first + 1))

    def key_heads(self, spec: GatedDeltaNetSpec) -> Range:
        """Return the key heads that this rank's value heads use; ranks may share one."""
        if spec.tiled_heads:
            return 0, spec.num_key_heads
        first = self.rank * spec.num_key_heads // self.size
        return first, max((self.rank + 1) * spec.num_key_heads // self.size, first + 1)

    def state_groups(self, spec: Mamba2Spec) -> Range:
        """Return the groups of B and C that this rank's heads use; ranks may share one."""
        first = self.rank * spec.num_groups // self.size
        return first, max((self.rank + 1) * spec.num_groups // self.size, first + 1)

    def split_evenly(self, size: int) -> Range:
        """Return this rank's range of a dimension that divides evenly."""
        return self.rank * size // self.size, (self.rank + 1) * size // self.size

    def split_dimension(self, size: int) -> Range:
        """Return this rank's range of an inner dimension.

        The range consists of the largest blocks that split it nearly evenly, else of the smallest.
        """
        for block in BLOCK_SIZES:
            num_blocks = -(-size // block)
            largest_share = -(-num_blocks // self.size) * block
            if largest_share * self.size <= MAX_IMBALANCE * size:
                break
        if num_blocks < self.size:
            block = 1
            num_blocks = size
        start = self.rank * num_blocks // self.size * block
        end = (self.rank + 1) * num_blocks // self.size * block
        return start, min(end, size)

    def vocab_range(self, vocab: int) -> Range:
        """Return this rank's token ids: the same number for each rank, except the last ones."""
        width = self.vocab_shard_size(vocab)
        return min(self.rank * width, vocab), min((self.rank + 1) * width, vocab)

    def vocab_shard_size(self, vocab: int) -> int:
        """Return the largest number of token ids that a rank holds."""
        return -(-vocab // self.size)

    # ---- weights ----

    def qkv(self, spec: AttentionSpec) -> WeightShard:
        """Return the shard of the QKV projection: rows of q | k | v | gate.

        With a norm over all heads every rank computes all of q and k, which is cheaper than another
        all-reduce.
        """
        if self.size == 1:
            return UNSHARDED
        q_heads, (kv_first, kv_end) = self.heads(spec)
        k_offset = spec.num_heads
        v_offset = spec.num_heads + spec.num_kv_heads
        heads = [q_heads, (k_offset + kv_first, k_offset + kv_end)]
        if norms_all_heads(spec):
            heads = [(0, v_offset)]
        if not spec.keys_as_values:
            heads.append((v_offset + kv_first, v_offset + kv_end))
        dim = spec.head_dim
        rows = [(start * dim, end * dim) for start, end in heads]
        gate_dim = gate_size(spec) // spec.num_heads
        if gate_dim:
            gate_offset = sum(qkv_sizes(spec))
            first, end = q_heads
            rows.append((gate_offset + first * gate_dim, gate_offset + end * gate_dim))
        return WeightShard(rows=tuple(rows))

    def out(self, spec: AttentionSpec) -> WeightShard:
        """Return the shard of the output projection: the columns of this rank's heads."""
        (first, end), _ = self.heads(spec)
        return self._split_inputs((first * spec.head_dim, end * spec.head_dim))

    def recurrent_parts(self, spec: RecurrentSpec) -> list[Range]:
        """Return this rank's range of each part of a recurrent mixer's input projection."""
        match spec:
            case GatedDeltaNetSpec():
                first, end = self.key_heads(spec)
                keys = (first * spec.key_dim, end * spec.key_dim)
                values = self.split_evenly(spec.num_value_heads * spec.value_dim)
                heads = self.split_evenly(spec.num_value_heads)
                return [keys, keys, values, values, heads, heads]
            case Mamba2Spec():
                first, end = self.state_groups(spec)
                inner = self.split_evenly(spec.num_heads * spec.head_dim)
                group = (first * spec.state_size, end * spec.state_size)
                return [inner, inner, group, group, self.split_evenly(spec.num_heads)]
            case MambaSpec() | ShortConvSpec():
                return [self.split_evenly(size) for size in recurrent_in_sizes(spec)]

    def recurrent_in(self, spec: RecurrentSpec) -> WeightShard:
        """Return the shard of the input projection: rows of each of its parts."""
        if self.size == 1:
            return UNSHARDED
        return WeightShard(rows=tuple(offset_ranges(spec, self.recurrent_parts(spec), 0)))

    def recurrent_conv(self, spec: RecurrentSpec) -> tuple[Range, ...]:
        """Return this rank's channels of the causal convolution."""
        parts = self.recurrent_parts(spec)
        match spec:
            case GatedDeltaNetSpec():
                return tuple(offset_ranges(spec, parts, 0)[:3])
            case Mamba2Spec():
                return tuple(offset_ranges(spec, parts, 1)[:3])
            case MambaSpec() | ShortConvSpec():
                return (parts[0],)

    def recurrent_out(self, spec: RecurrentSpec) -> WeightShard:
        """Return the shard of the output projection: columns of this rank's heads or channels."""
        return self._split_inputs(self.split_evenly(recurrent_out_size(spec)))

    def up(self, spec: MlpSpec) -> WeightShard:
        """Return the shard of the up projection: rows of up, or of gate | up."""
        if self.size == 1:
            return UNSHARDED
        start, end = self.split_dimension(spec.size)
        offsets = [0]
        if spec.gated:
            offsets.append(spec.size)
        return WeightShard(rows=tuple((offset + start, offset + end) for offset in offsets))

    def down(self, spec: MlpSpec) -> WeightShard:
        """Return the shard of the down projection: columns of the inner dimension."""
        return self._split_inputs(self.split_dimension(spec.size))

    def table(self, vocab: int) -> WeightShard:
        """Return the shard of the embedding or of the logits head: rows of token ids."""
        if self.size == 1:
            return UNSHARDED
        return WeightShard(rows=(self.vocab_range(vocab),))

    def _split_inputs(self, cols: Range) -> WeightShard:
        if self.size == 1:
            return UNSHARDED
        return WeightShard(cols=cols, bias=self.rank == 0)


def norms_all_heads(spec: AttentionSpec) -> bool:
    """Whether q and k are normed over all heads at once."""
    return spec.qk_norm is not None and spec.qk_norm_over == "all"


def qkv_sizes(spec: AttentionSpec) -> list[int]:
    """Return the rows of q, k and v in the QKV projection; no v if keys serve as values."""
    kv_size = spec.num_kv_heads * spec.head_dim
    sizes = [spec.num_heads * spec.head_dim, kv_size]
    return sizes if spec.keys_as_values else [*sizes, kv_size]


def gate_size(spec: AttentionSpec) -> int:
    """Return the rows of the output gate in the QKV projection; they follow q, k and v."""
    if spec.gate is None:
        return 0
    return spec.num_heads * (1 if spec.gate.per_head else spec.head_dim)


def offset_ranges(spec: RecurrentSpec, parts: Sequence[Range], first: int) -> list[Range]:
    """Return ranges of the parts from `first` on as rows of a matrix that begins with that part."""
    offset = 0
    ranges = []
    for size, (start, end) in list(zip(recurrent_in_sizes(spec), parts, strict=True))[first:]:
        ranges.append((offset + start, offset + end))
        offset += size
    return ranges


def conv_sizes(spec: RecurrentSpec) -> tuple[int, ...]:
    """The channels of each part that passes the causal convolution."""
    sizes = recurrent_in_sizes(spec)
    match spec:
        case GatedDeltaNetSpec():
            return sizes[:3]
        case Mamba2Spec():
            return sizes[1:4]
        case MambaSpec() | ShortConvSpec():
            return sizes[:1]


# ---- what can be split ---------------------------------------------------------------------------


def check_parallel_sizes(model: ModelSpec, tp: int, pp: int) -> None:
    """Raise ConfigError if the model cannot be split so; the message names sizes that work."""
    num_layers = len(model.layers)
    if pp > num_layers:
        raise ConfigError(
            f"pp {pp} is more stages than the model has layers; at most {num_layers} would work"
        )
    if not supports_tensor_parallel(model, tp):
        most_heads = max(count_heads(layer) for layer in model.layers)
        sizes = [
            str(size) for size in range(1, most_heads + 1) if supports_tensor_parallel(model, size)
        ]
        raise ConfigError(
            f"tp {tp} does not divide the model's {describe_heads(model)}; "
            f"{', '.join(sizes)} would work"
        )


def describe_heads(model: ModelSpec) -> str:
    """The kinds of heads that tensor parallel ranks divide, for a message."""
    counts = sorted({(spec.num_heads, spec.num_kv_heads) for spec in model.attentions})
    kinds = [f"{heads} heads over {kv} KV heads" for heads, kv in counts]
    for spec in dict.fromkeys(model.recurrents):
        match spec:
            case GatedDeltaNetSpec():
                kinds.append(f"{spec.num_value_heads} value heads over {spec.num_key_heads}")
            case Mamba2Spec():
                kinds.append(f"{spec.num_heads} Mamba heads in {spec.num_groups} groups")
            case MambaSpec() | ShortConvSpec():
                kinds.append(f"{recurrent_out_size(spec)} recurrent channels")
    return " and ".join(kinds)


def count_heads(layer: LayerSpec) -> int:
    """The most ranks that may divide the mixer of a layer, at least 1."""
    count = 1
    if layer.attention is not None:
        count = layer.attention.num_heads
    match layer.recurrent:
        case GatedDeltaNetSpec(num_value_heads=heads) | Mamba2Spec(num_heads=heads):
            count = max(count, heads)
    return count


def supports_tensor_parallel(model: ModelSpec, size: int) -> bool:
    """Whether `size` ranks can share the layers of the model."""
    every_rank_has_tokens = (size - 1) * -(-model.vocab // size) < model.vocab
    return every_rank_has_tokens and all(
        splits_attention(layer.attention, size)
        and splits_recurrent(layer.recurrent, size)
        and splits_mlp(layer.mlp, size)
        for layer in model.layers
    )


def splits_attention(spec: AttentionSpec | None, size: int) -> bool:
    """Whether `size` ranks can divide the heads; ranks may share a KV head."""
    if spec is None:
        return True
    return spec.num_heads % size == 0 and divides_or_is_shared(spec.num_kv_heads, size)


def splits_mlp(spec: MlpSpec | MoeSpec | None, size: int) -> bool:
    """Whether every rank gets inner units."""
    if spec is None:
        return True
    return (spec.mlp if isinstance(spec, MoeSpec) else spec).size >= size


def splits_recurrent(spec: RecurrentSpec | None, size: int) -> bool:
    """Whether `size` ranks can divide a recurrent mixer into equal parts."""
    match spec:
        case GatedDeltaNetSpec():
            if spec.num_value_heads % size:
                return False
            if spec.tiled_heads:
                return spec.num_value_heads // size % spec.num_key_heads == 0
            return divides_or_is_shared(spec.num_key_heads, size)
        case Mamba2Spec():
            if spec.num_heads % size:
                return False
            whole_norm = spec.norm is None or spec.norm_groups == 1
            return divides_or_is_shared(spec.num_groups, size) and (
                whole_norm or spec.norm_groups % size == 0
            )
        case MambaSpec() | ShortConvSpec():
            return recurrent_out_size(spec) % size == 0
    return True


def divides_or_is_shared(count: int, size: int) -> bool:
    """Whether each rank gets equally many of these, or equally many ranks share each of them."""
    return count % size == 0 or size % count == 0


def split_stages(layer_costs: Sequence[float], head_cost: float, num_stages: int) -> list[range]:
    """Return the layers of each pipeline stage, so that the slowest stage is as fast as possible.

    The last stage also computes the head.
    """
    num_layers = len(layer_costs)
    cost_before = [0.0, *accumulate(layer_costs)]
    # best[n]: of the first n layers split into the stages so far, the cost of the slowest stage
    # (as small as possible) and the first layer of each stage.
    best: list[tuple[float, tuple[int, ...]]] = [(total, (0,)) for total in cost_before]
    for stage in range(1, num_stages):
        extra = head_cost if stage == num_stages - 1 else 0.0
        longer: list[tuple[float, tuple[int, ...]]] = []
        for end in range(num_layers + 1):
            candidates = []
            for start in range(stage, end):
                slowest_before, starts = best[start]
                cost = cost_before[end] - cost_before[start] + extra
                candidates.append((max(slowest_before, cost), (*starts, start)))
            longer.append(min(candidates, default=(float("inf"), ())))
        best = longer
    starts = best[num_layers][1]
    ends = (*starts[1:], num_layers)
    return [range(start, end) for start, end in zip(starts, ends)]
