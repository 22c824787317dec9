"""The decoder model of every family: a spec says what it is, ModelWeights loads its weights.

The forward pass follows the equations of the model. It knows no batches and sequences: token ids
and positions are flat, and the attention plan has the sequences that they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from bloomery.attention.base import AttentionBackend, AttentionStep
from bloomery.fusion import ActivationEpilogue, NormPrologue
from bloomery.kernels.activation import xielu_params
from bloomery.kernels.moe import NO_FUSED_SHARED, ExpertOptions, FusedSharedExperts
from bloomery.kernels.state_cache import LayerStates
from bloomery.layers.attention import AttentionBlock, ForwardContext, RopeCache
from bloomery.layers.embedding import LogitsHead, VocabEmbedding
from bloomery.layers.linear import (
    AddResidual,
    LinearLayer,
    ResidualStream,
    add_normed,
    apply_epilogue,
    apply_norm,
    concatenate,
    materialize,
)
from bloomery.layers.mlp import MlpBlock, build_activation
from bloomery.layers.moe import ExpertRouter, LatentSpace, MoeBlock, MoeNorms
from bloomery.layers.recurrent import RecurrentBlock
from bloomery.layers.rope import build_query_scales, build_rope_table
from bloomery.models.recurrent import load_recurrent_block
from bloomery.models.weights import ModelWeights
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.quant.base import WeightMatrix
from bloomery.quant.experts import ExpertAdapters, ExpertStack
from bloomery.spec import (
    AttentionSpec,
    FusedTensor,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    QueryScaling,
    RopeSpec,
    SplitTensors,
)

# A shared expert that is wider than so many others keeps its own products: the kernel that sums the
# experts of a token is unrolled over all of them.
MAX_FUSED_SHARED = 4


@dataclass(frozen=True)
class SharedBlockEnds:
    """What a layer with a shared block has before its attention and after its MLP."""

    norm: NormPrologue | None
    out: LinearLayer


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and MLP with their norms and residual additions.

    group: tensor parallel ranks, in layers of which two blocks read the same input.
    """

    spec: LayerSpec
    attention: AttentionBlock | None
    mlp: MlpBlock | MoeBlock | None
    attn_norm: NormPrologue | None
    attn_post_norm: NormPrologue | None
    mlp_norm: NormPrologue | None
    mlp_post_norm: NormPrologue | None
    attn_sum_norm: NormPrologue | None
    mlp_sum_norm: NormPrologue | None
    group: CommunicationGroup | None = None
    pool: ThreadPool | None = None
    recurrent: RecurrentBlock | None = None
    shared_block: SharedBlockEnds | None = None

    def __call__(
        self,
        x: ResidualStream,
        kv_cache: torch.Tensor | None,
        context: ForwardContext,
        states: LayerStates | None = None,
    ) -> ResidualStream:
        """x [tokens, hidden] -> [tokens, hidden], of the context's output rows only."""
        if self.shared_block is not None:
            assert kv_cache is not None and states is not None
            return self._run_behind_block(self.shared_block, x, kv_cache, context, states)
        if self.spec.parallel:
            assert kv_cache is not None
            return self._run_parallel_blocks(x, kv_cache, context)
        if self.attention is not None or self.recurrent is not None:
            x = self._run_mixers(x, kv_cache, context, states)
        else:
            x = context.select_outputs(x)
            context.select_adapters()
        return x if self.mlp is None else self._run_mlp(x, self.mlp)

    def _run_mixers(
        self,
        x: ResidualStream,
        kv_cache: torch.Tensor | None,
        context: ForwardContext,
        states: LayerStates | None,
    ) -> ResidualStream:
        """Run the mixer, or both of them, with its norms, and add the output to the residual."""
        pool = self.pool
        norm = self.attn_norm
        if self.spec.residual_after_norm:
            x = apply_norm(x, norm, pool)
            norm = None
        residual = context.select_outputs(x)
        if self.attn_post_norm is not None:
            y = self._run_mixer(x, kv_cache, context, states, norm)
            add = AddResidual(residual, self.spec.residual_scale)
            x = add_normed(y, self.attn_post_norm, add, pool)
        elif self.spec.sums_mixers:
            assert self.attention is not None and kv_cache is not None
            assert self.recurrent is not None and states is not None
            normed = apply_norm(x, norm, pool)
            if self.group is None:
                add = self._add_mixer(residual, self.spec.attention_scale)
                attended = self.attention(normed, kv_cache, context, None, add)
                add = self._add_mixer(attended, self.spec.recurrent_scale)
            else:
                attended = materialize(self.attention(normed, kv_cache, context))
                add = AddResidual(attended * self.spec.attention_scale, self.spec.recurrent_scale)
            context.restore_adapters()
            x = self.recurrent(normed, states, context.output_rows, None, add)
            if self.group is not None:
                total = self.group.all_reduce(materialize(x))
                x = apply_epilogue(total, self._add_mixer(residual, 1.0), pool)
        else:
            scale = self.spec.attention_scale * self.spec.recurrent_scale
            add = self._add_mixer(residual, scale)
            x = self._run_mixer(x, kv_cache, context, states, norm, add)
        if self.attn_sum_norm is not None:
            x = apply_norm(x, self.attn_sum_norm, pool)
        return x

    def _run_behind_block(
        self,
        block: SharedBlockEnds,
        x: ResidualStream,
        kv_cache: torch.Tensor,
        context: ForwardContext,
        states: LayerStates,
    ) -> ResidualStream:
        """Run the recurrent mixer on the sum of x and the output of the shared block."""
        assert self.recurrent is not None and self.attention is not None
        assert isinstance(self.mlp, MlpBlock) and context.embeddings is not None
        x = materialize(x)
        both = concatenate(x, context.embeddings, self.pool)
        all_rows = replace(context, output_rows=None)  # the recurrent mixer reads all of them
        y = self.attention(both, kv_cache, all_rows, block.norm)
        y = self.mlp(y, self.mlp_norm)
        y = block.out(y, None, AddResidual(x))
        add = AddResidual(context.select_outputs(x))
        return self.recurrent(y, states, context.output_rows, self.attn_norm, add)

    def _add_mixer(self, residual: ResidualStream, scale: float) -> AddResidual:
        return AddResidual(residual, self.spec.residual_scale * scale)

    def _run_mixer(
        self,
        x: ResidualStream,
        kv_cache: torch.Tensor | None,
        context: ForwardContext,
        states: LayerStates | None,
        prologue: NormPrologue | None,
        epilogue: AddResidual | None = None,
    ) -> ResidualStream:
        """Run the layer's only mixer."""
        if self.attention is not None:
            assert self.recurrent is None and kv_cache is not None
            return self.attention(x, kv_cache, context, prologue, epilogue)
        assert self.recurrent is not None and states is not None
        return self.recurrent(x, states, context.output_rows, prologue, epilogue)

    def _run_mlp(self, x: ResidualStream, mlp: MlpBlock | MoeBlock) -> ResidualStream:
        """Run the MLP with its norms, and add its output to the residual."""
        pool = self.pool
        norm = self.mlp_norm
        if self.spec.residual_after_norm:
            x = apply_norm(x, norm, pool)
            norm = None
        add = AddResidual(x, self.spec.residual_scale * self.spec.mlp_scale)
        if self.mlp_post_norm is None:
            x = mlp(x, norm, add)
        else:
            y = mlp(x, norm)
            x = add_normed(y, self.mlp_post_norm, add, pool)
        if self.mlp_sum_norm is not None:
            x = apply_norm(x, self.mlp_sum_norm, pool)
        return x

    def _run_parallel_blocks(
        self, x: ResidualStream, kv_cache: torch.Tensor, context: ForwardContext
    ) -> ResidualStream:
        """Run attention and MLP on the same input and add both to the same residual."""
        assert self.attention is not None and self.mlp is not None
        if self.group is not None:
            return self._run_sharded_parallel_blocks(x, kv_cache, context, self.group)
        if self.mlp_norm is not None:
            add = AddResidual(context.select_outputs(x))
            attended = self.attention(x, kv_cache, context, self.attn_norm, add)
            mlp_input = materialize(context.select_outputs(x))
            return self.mlp(mlp_input, self.mlp_norm, AddResidual(attended))
        normed = apply_norm(x, self.attn_norm, self.pool)
        add = AddResidual(context.select_outputs(x))
        attended = self.attention(normed, kv_cache, context, None, add)
        return self.mlp(context.select_outputs(normed), None, AddResidual(attended))

    def _run_sharded_parallel_blocks(
        self,
        x: ResidualStream,
        kv_cache: torch.Tensor,
        context: ForwardContext,
        group: CommunicationGroup,
    ) -> ResidualStream:
        """Sum both blocks locally first, so that the ranks need one all-reduce."""
        assert self.attention is not None and self.mlp is not None
        normed = apply_norm(x, self.attn_norm, self.pool)
        attended = materialize(self.attention(normed, kv_cache, context))
        if self.mlp_norm is None:
            mlp_input = context.select_outputs(normed)
        else:
            mlp_input = apply_norm(context.select_outputs(x), self.mlp_norm, self.pool)
        total = group.all_reduce(attended + materialize(self.mlp(mlp_input)))
        return apply_epilogue(total, AddResidual(context.select_outputs(x)), self.pool)


class Decoder:
    """A model, or one rank's part of it: the layers of its pipeline stage, sharded by its layout.

    The first pipeline stage has the embedding, the last one has the head. `spec` describes this
    rank's part, `full_spec` the whole model.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: ModelWeights,
        group: CommunicationGroup | None = None,
        layers: range | None = None,
    ):
        if layers is None:
            layers = range(len(model.layers))
        if group is not None and group.size == 1:
            group = None  # one rank needs no all-reduce
        own_layers = tuple(weights.layout.layer(model.layers[i]) for i in layers)
        spec = replace(model, layers=own_layers)
        self.full_spec = model
        self.spec = spec
        self.device = weights.device
        self.dtype = weights.dtype
        self.pool = weights.pool
        self.adapter_memory = weights.adapter_memory
        self.layer_range = layers  # of the whole model
        self.is_first_stage = layers.start == 0
        self.is_last_stage = layers.stop == len(model.layers)
        # Embeddings that a layer of this or a later stage reads travel from stage to stage.
        self.keeps_embeddings = reads_embeddings(model.layers[layers.start :])
        self.receives_embeddings = self.keeps_embeddings and not self.is_first_stage
        self.sends_embeddings = reads_embeddings(model.layers[layers.stop :])
        # The factor has the model's precision, because Gemma was trained with a rounded factor.
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype))
        self.embed: VocabEmbedding | None = None
        self.position_table: torch.Tensor | None = None
        self.project_in: LinearLayer | None = None
        self.embed_norm: NormPrologue | None = None
        self.project_out: LinearLayer | None = None
        self.final_norm: NormPrologue | None = None
        self.head: LogitsHead | None = None
        if self.is_first_stage:
            self._load_embedding(weights, group)
        self.layers = [
            load_decoder_layer(model.layers[i], spec.hidden, weights, i, group) for i in layers
        ]
        if self.is_last_stage:
            self._load_head(weights, group)
        if self.adapter_memory is not None:
            self.adapter_memory.allocate()
        self.rope_cache: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
        self.query_scales: dict[QueryScaling, torch.Tensor] = {}

    def _load_embedding(self, weights: ModelWeights, group: CommunicationGroup | None) -> None:
        spec = self.spec
        extra = weights.names.extra
        self.embed = load_embedding(spec, weights, group)
        if spec.positions:
            self.position_table = weights.position_table(
                extra["positions"], spec.positions, spec.hidden
            )
        if spec.embed_dim:  # the embeddings have another width than the hidden states
            name = extra["project_in"]
            linear = weights.outer_linear(name, spec.hidden, spec.embed_dim)
            self.project_in = weights.adapt_outer_linear(linear, name, spec.hidden, spec.embed_dim)
        self.embed_norm = weights.norm(spec.embed_norm, extra.get("embed_norm", ""), spec.hidden)

    def _load_head(self, weights: ModelWeights, group: CommunicationGroup | None) -> None:
        spec = self.spec
        if spec.embed_dim:
            name = weights.names.extra["project_out"]
            linear = weights.outer_linear(name, spec.embed_dim, spec.hidden)
            self.project_out = weights.adapt_outer_linear(linear, name, spec.embed_dim, spec.hidden)
        self.final_norm = weights.norm(spec.final_norm, weights.names.final_norm, spec.hidden)
        self.head = load_head(spec, weights, self.embed, group)

    def prepare_prologues(self) -> None:
        """Let the products precompute what they need of the norm before them.

        Call it once all weights are on the device, and before a CUDA graph is captured.
        """
        for layer in self.layers:
            if layer.attention is not None:
                block = layer.shared_block
                norm = layer.attn_norm if block is None else block.norm
                layer.attention.qkv.prepare_prologue(norm)
            if isinstance(layer.mlp, MlpBlock):
                layer.mlp.up.prepare_prologue(layer.mlp_norm)

    def build_rope_cache(self, max_len: int) -> None:
        """Build the tables of rope and of query scales for `max_len` positions.

        Call it before the first forward pass.
        """
        for rope in {attention.position for attention in self.spec.attentions}:
            if isinstance(rope, RopeSpec):
                cos, sin = build_rope_table(rope, max_len)
                self.rope_cache[rope] = cos.to(self.device), sin.to(self.device)
        for scaling in {attention.query_scaling for attention in self.spec.attentions}:
            if scaling is not None:
                table = build_query_scales(scaling, max_len)
                self.query_scales[scaling] = table.to(self.device)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor | None],
        backend: AttentionBackend,
        steps: Sequence[AttentionStep],
        output_rows: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        layer_tables: Sequence[int] = (),
        states: Sequence[LayerStates | None] = (),
        adapter_slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids, positions [n] -> hidden states [n, hidden], ready for `logits`.

        `steps` has the attention of each block table, `layer_tables` the table of each layer. If
        the latter is empty, all layers use the first table. `kv_caches` and `states` have an entry
        for each layer; layers without attention or without a recurrent mixer have None.
        `output_rows` [m]: only the states of these tokens are returned. For the other tokens the
        last layer computes only keys and values.
        `hidden` [n, hidden]: the states from the previous pipeline stage. A stage that is not the
        last one returns such states. If a later layer reads the embeddings, they are appended:
        [2 n, hidden].
        `adapter_slots` [n]: the device slot of each token's LoRA adapter, if any token has one.
        """
        if self.adapter_memory is not None:
            self.adapter_memory.batch.begin(adapter_slots)
        x: ResidualStream
        embeddings = None
        if self.receives_embeddings and hidden is not None:
            x, embeddings = hidden.chunk(2)
        else:
            x = self._embed(token_ids, positions) if hidden is None else hidden
            if self.keeps_embeddings:
                embeddings = x
        contexts = self._forward_contexts(positions, backend, steps, embeddings)
        layer_tables = layer_tables or (0,) * len(self.layers)
        layers = zip(
            self.layers,
            kv_caches,
            layer_tables,
            states or (None,) * len(self.layers),
            strict=True,
        )
        for layer, kv_cache, table, layer_states in layers:
            context = contexts[table]
            if self.is_last_stage and layer is self.layers[-1]:
                context = replace(context, output_rows=output_rows)
            x = layer(x, kv_cache, context, layer_states)
        if self.sends_embeddings and embeddings is not None:
            return stack_rows(materialize(x), embeddings, self.pool)
        return apply_norm(x, self.final_norm, self.pool)

    def count_received_rows(self, num_tokens: int) -> int:
        """Return the rows that come from the previous pipeline stage."""
        return 2 * num_tokens if self.receives_embeddings else num_tokens

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.embed is None:
            raise RuntimeError("this pipeline stage has no embedding: it needs hidden states")
        x = self.embed(token_ids)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.project_in is not None:
            x = self.project_in(x)
        if self.position_table is not None:
            x = x + self.position_table[positions + self.spec.position_offset]
        return apply_norm(x, self.embed_norm, self.pool)

    def _forward_contexts(
        self,
        positions: torch.Tensor,
        backend: AttentionBackend,
        steps: Sequence[AttentionStep],
        embeddings: torch.Tensor | None,
    ) -> list[ForwardContext]:
        """Return the inputs that the layers of each block table share."""
        if positions.is_cuda or self.pool is not None:
            # These kernels look up the angles by position.
            angles: RopeCache = self.rope_cache
            scales: Mapping[QueryScaling, torch.Tensor] = self.query_scales
            table_rows: torch.Tensor | None = positions
        else:
            angles = {
                rope: (cos[positions], sin[positions])
                for rope, (cos, sin) in self.rope_cache.items()
            }
            scales = {scaling: table[positions] for scaling, table in self.query_scales.items()}
            table_rows = None
        adapter_batch = None if self.adapter_memory is None else self.adapter_memory.batch
        return [
            ForwardContext(
                backend,
                plan,
                slot_mapping,
                angles,
                table_rows,
                query_scales=scales,
                adapter_batch=adapter_batch,
                embeddings=embeddings,
                pool=self.pool,
            )
            for slot_mapping, plan in steps
        ]

    def project_features(self, state: torch.Tensor) -> torch.Tensor:
        """Project a pooled state [hidden] to the width of the embeddings, if the model does so."""
        if self.project_out is None:
            return state
        batch = None if self.adapter_memory is None else self.adapter_memory.batch
        slots = None if batch is None else batch.slots
        if batch is not None:
            batch.begin(None)  # adapters do not change this projection
        features = self.project_out(state[None].to(self.dtype))[0].float()
        if batch is not None:
            batch.begin(slots)  # the logits of other requests in the step come next
        return features

    def logits(self, hidden: torch.Tensor, as_float32: bool = True) -> torch.Tensor:
        """[n, hidden] -> [n, vocab]; call it only for positions whose logits are needed.

        Without `as_float32` the logits keep the dtype of the product if nothing else is applied.
        """
        if self.head is None:
            raise RuntimeError("this pipeline stage has no head: it computes no logits")
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits = self.head(hidden)
        scale = self.spec.logit_scale
        softcap = self.spec.logit_softcap
        if not as_float32 and scale == 1.0 and softcap is None:
            return logits
        logits = logits.float()
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits


def reads_embeddings(layers: Sequence[LayerSpec]) -> bool:
    """Whether one of these layers reads the embeddings beside the hidden states."""
    return any(layer.shared_block is not None for layer in layers)


def stack_rows(x: torch.Tensor, y: torch.Tensor, pool: ThreadPool | None) -> torch.Tensor:
    """Put rows of y below those of x, which have the same shape."""
    return concatenate(x.view(1, -1), y.view(1, -1), pool).view(2 * len(x), -1)


# ---- loading -------------------------------------------------------------------------------------


def load_embedding(
    spec: ModelSpec, weights: ModelWeights, group: CommunicationGroup | None
) -> VocabEmbedding:
    """Load this rank's part of the token embedding."""
    shard = weights.layout.table(spec.vocab)
    width = spec.embed_dim or spec.hidden
    linear = weights.outer_linear(weights.names.embed, spec.vocab, width, shard=shard)
    first, end = weights.layout.vocab_range(spec.vocab)
    adapters = None
    if weights.adapter_memory is not None:
        adapters = weights.adapter_memory.add_embedding(
            weights.names.embed, spec.vocab, width, first, end, linear.matrix
        )
    return VocabEmbedding(linear.matrix, first, end, group, weights.pool, adapters)


def load_head(
    spec: ModelSpec,
    weights: ModelWeights,
    embed: VocabEmbedding | None,
    group: CommunicationGroup | None,
) -> LogitsHead:
    """Load the head if the checkpoint stores it, even if it is tied; else use the embedding."""
    name = weights.names.head
    shard = weights.layout.table(spec.vocab)
    width = spec.embed_dim or spec.hidden
    if not spec.tied or f"{name}.weight" in weights.source.names():
        linear = weights.outer_linear(name, spec.vocab, width, spec.head_bias, shard)
    else:
        bias = weights.bias(f"{name}.bias", spec.vocab, shard) if spec.head_bias else None
        if embed is None:
            matrix = weights.outer_linear(
                weights.names.embed, spec.vocab, width, shard=shard
            ).matrix
        else:
            matrix = embed.matrix
        linear = LinearLayer(matrix, bias, None, weights.pool)
    linear = weights.adapt_outer_linear(linear, name, spec.vocab, width, shard)
    tables = None
    if weights.adapter_memory is not None:
        tables = weights.adapter_memory.add_head(
            name,
            spec.vocab,
            width,
            *weights.layout.vocab_range(spec.vocab),
            linear.matrix,
            spec.head_bias,
        )
    return LogitsHead(linear, spec.vocab, group, tables)


def load_decoder_layer(
    spec: LayerSpec,
    hidden: int,
    weights: ModelWeights,
    index: int,
    group: CommunicationGroup | None = None,
) -> DecoderLayer:
    """Load this rank's part of layer `index`."""
    prefix = weights.names.layer.format(i=index)

    def load_norm(role: str) -> NormPrologue | None:
        name = prefix + weights.names.extra.get(role, "")
        return weights.norm(getattr(spec, role), name, hidden)

    # The layer itself all-reduces the sum of blocks on the same input, once.
    mixer_group = None if spec.parallel or spec.sums_mixers else group
    mlp_group = None if spec.parallel else group
    recurrent = None
    if spec.recurrent is not None:
        recurrent = load_recurrent_block(
            spec.recurrent, hidden, weights, prefix, group, mixer_group
        )
    shared_block = None
    attention_inputs = hidden
    if spec.shared_block is not None:
        attention_inputs = 2 * hidden
        extra = weights.names.extra
        name = prefix + extra["shared_block_norm"]
        shared_block = SharedBlockEnds(
            weights.norm(spec.shared_block.norm, name, attention_inputs),
            weights.linear(prefix, extra["shared_block_out"], [hidden], hidden, False),
        )
    attention = None
    if spec.attention is not None:
        attention = load_attention_block(
            spec.attention, hidden, weights, prefix, mixer_group, attention_inputs
        )
    mlp: MlpBlock | MoeBlock | None = None
    if isinstance(spec.mlp, MoeSpec):
        mlp = load_moe_block(spec.mlp, hidden, weights, prefix, mlp_group)
    elif spec.mlp is not None:
        mlp = load_mlp_block(spec.mlp, hidden, weights, prefix, mlp_group)
    return DecoderLayer(
        spec,
        attention,
        mlp,
        attn_norm=load_norm("attn_norm"),
        attn_post_norm=load_norm("attn_post_norm"),
        mlp_norm=load_norm("mlp_norm"),
        mlp_post_norm=load_norm("mlp_post_norm"),
        attn_sum_norm=load_norm("attn_sum_norm"),
        mlp_sum_norm=load_norm("mlp_sum_norm"),
        group=group,
        pool=weights.pool,
        recurrent=recurrent,
        shared_block=shared_block,
    )


def load_attention_block(
    spec: AttentionSpec,
    hidden: int,
    weights: ModelWeights,
    prefix: str,
    group: CommunicationGroup | None,
    inputs: int | None = None,
) -> AttentionBlock:
    """Load this rank's part of an attention block, which reads vectors of `hidden` or `inputs`."""
    names = weights.names
    layout = weights.layout
    dim = spec.head_dim
    q_heads, kv_heads = layout.heads(spec)

    def load_norm(role: str, num_heads: int, own_heads: tuple[int, int]) -> NormPrologue | None:
        shapes: dict[str, int | tuple[int, int]] = {
            "head": dim,
            "each": (num_heads, dim),
            "all": num_heads * dim,
        }
        name = prefix + names.extra.get(role, "")
        return weights.norm(spec.qk_norm, name, shapes[spec.qk_norm_over], own_heads)

    qkv = weights.qkv_linear(prefix, spec, inputs or hidden)
    out = weights.linear(
        prefix,
        names.attn_out,
        [hidden],
        spec.num_heads * dim,
        spec.out_bias,
        shard=layout.out(spec),
        group=group,
    )
    q_norm = load_norm("q_norm", spec.num_heads, q_heads)
    k_norm = load_norm("k_norm", spec.num_kv_heads, kv_heads)
    v_norm = weights.norm(spec.v_norm, prefix + names.extra.get("v_norm", ""), dim)
    sinks = None
    if spec.sinks:
        sinks = weights.vector(prefix + names.extra["sinks"], spec.num_heads)[slice(*q_heads)]
    return AttentionBlock(spec, qkv, out, q_norm, k_norm, layout, weights.pool, v_norm, sinks)


def load_mlp_block(
    spec: MlpSpec,
    hidden: int,
    weights: ModelWeights,
    prefix: str,
    group: CommunicationGroup | None,
    up_name: str | SplitTensors | FusedTensor | None = None,
    down_name: str | None = None,
) -> MlpBlock:
    """Load this rank's part of an MLP; the names default to those of the family's MLP."""
    names = weights.names
    layout = weights.layout
    up = weights.linear(
        prefix,
        up_name or names.mlp_up,
        [spec.size, spec.size] if spec.gated else [spec.size],
        hidden,
        spec.bias,
        shard=layout.up(spec),
        low_rank=spec.low_rank,
    )
    down = weights.linear(
        prefix,
        down_name or names.mlp_down,
        [hidden],
        spec.size,
        spec.bias,
        shard=layout.down(spec),
        group=group,
    )
    return MlpBlock(load_activation(spec, weights, prefix), up, down)


def load_activation(spec: MlpSpec, weights: ModelWeights, prefix: str) -> ActivationEpilogue:
    """Return the activation of an MLP, with its learned numbers if it has some."""
    if spec.activation != "xielu":
        return build_activation(spec)
    if spec.xielu_alphas is not None:
        return build_activation(spec, xielu_params(*spec.xielu_alphas))
    extra = weights.names.extra
    alpha_p = weights.number(prefix + extra["xielu_alpha_p"])
    alpha_n = weights.number(prefix + extra["xielu_alpha_n"])
    return build_activation(spec, xielu_params(alpha_p, alpha_n))


def load_moe_block(
    spec: MoeSpec, hidden: int, weights: ModelWeights, prefix: str, group: CommunicationGroup | None
) -> MoeBlock:
    """Load the router, this rank's part of every expert, and the shared expert if any."""
    names = weights.names

    def load_norm(role: str) -> NormPrologue | None:
        return weights.norm(getattr(spec, role), prefix + names.extra.get(role, ""), hidden)

    shared = None
    shared_gate = None
    fused_shared = find_fused_shared(spec, hidden, weights, prefix)
    if spec.shared is not None and not fused_shared.count:
        # No group: the block all-reduces its result together with the experts'.
        shared = load_mlp_block(
            spec.shared, hidden, weights, prefix, None, names.shared_up, names.shared_down
        )
    if spec.shared_gate and not fused_shared.count:
        shared_gate = weights.linear(prefix, names.extra["shared_gate"], [1], hidden, False)
    norms = MoeNorms(
        router=load_norm("router_norm"),
        experts=load_norm("expert_norm"),
        expert_sum=load_norm("expert_post_norm"),
        shared=load_norm("shared_norm"),
        shared_output=load_norm("shared_post_norm"),
    )
    router = load_router(spec, hidden, weights, prefix, fused_shared)
    experts = load_experts(spec, spec.latent or hidden, weights, prefix, fused_shared)
    return MoeBlock(
        router,
        experts,
        shared,
        shared_gate,
        spec.shared_scale,
        norms,
        group,
        weights.pool,
        load_latent_space(spec, hidden, weights, prefix),
    )


def load_latent_space(
    spec: MoeSpec, hidden: int, weights: ModelWeights, prefix: str
) -> LatentSpace | None:
    """Load the projections around experts that read and write narrower vectors, on every rank."""
    if spec.latent is None:
        return None
    extra = weights.names.extra
    return LatentSpace(
        weights.linear(prefix, extra["latent_down"], [spec.latent], hidden, False),
        weights.linear(prefix, extra["latent_up"], [hidden], spec.latent, False),
    )


def find_fused_shared(
    spec: MoeSpec, hidden: int, weights: ModelWeights, prefix: str
) -> FusedSharedExperts:
    """Return the shared expert as experts that every token uses, if it can be stacked with them.

    Then the kernels of the experts run it as well. Native CPU kernels run it on its own.
    """
    shared = spec.shared
    size = spec.mlp.size
    norms = (
        spec.router_norm,
        spec.expert_norm,
        spec.expert_post_norm,
        spec.shared_norm,
        spec.shared_post_norm,
    )
    if shared is None or replace(shared, size=size) != spec.mlp or spec.mlp.bias:
        return NO_FUSED_SHARED
    if shared.size % size or shared.size // size > MAX_FUSED_SHARED:
        return NO_FUSED_SHARED
    has_one_input = all(norm is None for norm in norms) and spec.latent is None
    if not has_one_input or (spec.router.bias and spec.shared_gate):
        return NO_FUSED_SHARED
    if weights.pool is not None or weights.adapter_memory is not None:
        return NO_FUSED_SHARED  # an adapter may change the shared expert alone
    if not weights.has_dense_experts(prefix, spec.mlp, shared, hidden):
        return NO_FUSED_SHARED
    return FusedSharedExperts(shared.size // size, spec.shared_scale, spec.shared_gate)


def load_router(
    spec: MoeSpec, hidden: int, weights: ModelWeights, prefix: str, fused_shared: FusedSharedExperts
) -> ExpertRouter:
    """Load the router, which every rank has, and behind it the gate of a fused shared expert."""
    extra = weights.names.extra
    router = spec.router
    stored: str | SplitTensors = extra["router"]
    sizes = [spec.num_experts]
    if fused_shared.has_gate:
        stored = SplitTensors((extra["router"], extra["shared_gate"]))
        sizes.append(1)
    linear = weights.linear(prefix, stored, sizes, hidden, router.bias)
    correction_bias = None
    expert_scale = None
    if router.correction_bias:
        name = prefix + extra["correction_bias"]
        correction_bias = weights.expert_vector(name, spec.num_experts)
    if router.expert_scale:
        expert_scale = weights.expert_vector(prefix + extra["expert_scale"], spec.num_experts)
    return ExpertRouter(router, spec.top_k, linear, correction_bias, expert_scale, fused_shared)


def load_experts(
    spec: MoeSpec,
    hidden: int,
    weights: ModelWeights,
    prefix: str,
    fused_shared: FusedSharedExperts = NO_FUSED_SHARED,
) -> ExpertStack:
    """Load this rank's part of every expert."""
    names = weights.names
    mlp = spec.mlp
    num_experts = spec.num_experts
    up_parts = [mlp.size, mlp.size] if mlp.gated else [mlp.size]
    up_shard = weights.layout.up(mlp)
    down_shard = weights.layout.down(mlp)
    shared_up: list[WeightMatrix] = []
    shared_down: list[WeightMatrix] = []
    if fused_shared.count:
        assert spec.shared is not None
        shared_up, shared_down = weights.split_shared_expert(prefix, spec.shared, mlp.size, hidden)
    up = weights.experts(
        prefix, names.expert_up, num_experts, up_parts, hidden, up_shard, shared_up
    )
    down = weights.experts(
        prefix, names.expert_down, num_experts, [hidden], mlp.size, down_shard, shared_down
    )
    up_bias = None
    down_bias = None
    if mlp.bias:
        up_bias = weights.expert_bias(prefix, names.expert_up, num_experts, up_parts, up_shard)
        down_bias = weights.expert_bias(
            prefix, names.expert_down, num_experts, [hidden], down_shard
        )
    activation = build_activation(mlp)
    options = ExpertOptions(activation, up_bias, down_bias, spec.router.weights_input)
    adapters = None
    if weights.adapter_memory is not None:
        add = partial(weights.adapter_memory.add_linear, prefix, num_experts=num_experts)
        adapters = ExpertAdapters(
            add(names.expert_up, up_parts, hidden, up_shard),
            add(names.expert_down, [hidden], mlp.size, down_shard),
        )
    return ExpertStack(num_experts + fused_shared.count, up, down, options, adapters)
