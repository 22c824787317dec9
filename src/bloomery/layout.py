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
from bloomery.spec import AlibiSpec, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

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
        return replace(spec, attention=self.attention(spec.attention), mlp=self.mlp(spec.mlp))

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


# ---- what can be split ---------------------------------------------------------------------------


def check_parallel_sizes(model: ModelSpec, tp: int, pp: int) -> None:
    """Raise ConfigError if the model cannot be split so; the message names sizes that work."""
    num_layers = len(model.layers)
    if pp > num_layers:
        raise ConfigError(
            f"pp {pp} is more stages than the model has layers; at most {num_layers} would work"
        )
    if not supports_tensor_parallel(model, tp):
        head_counts = sorted(
            {(layer.attention.num_heads, layer.attention.num_kv_heads) for layer in model.layers}
        )
        most_heads = max(heads for heads, _ in head_counts)
        sizes = [
            str(size) for size in range(1, most_heads + 1) if supports_tensor_parallel(model, size)
        ]
        model_heads = " and ".join(f"{heads} heads over {kv} KV heads" for heads, kv in head_counts)
        raise ConfigError(
            f"tp {tp} does not divide the model's {model_heads}; {', '.join(sizes)} would work"
        )


def supports_tensor_parallel(model: ModelSpec, size: int) -> bool:
    """Whether `size` ranks can share the layers of the model."""
    every_rank_has_tokens = (size - 1) * -(-model.vocab // size) < model.vocab
    if not every_rank_has_tokens:
        return False
    for layer in model.layers:
        mlp = layer.mlp.mlp if isinstance(layer.mlp, MoeSpec) else layer.mlp
        kv_heads = layer.attention.num_kv_heads
        if mlp.size < size or layer.attention.num_heads % size:
            return False
        if kv_heads % size and size % kv_heads:
            return False
    return True


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
