"""The architecture of a model as data: dataclasses that every model family is described with.

No torch and no I/O. A field names a mechanism, not a family. Alternatives are types (a position is
a RopeSpec, an AlibiSpec or None), so that impossible combinations cannot be written. Every layer
has its own spec, so that alternating windows need no flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]


@dataclass(frozen=True)
class NormSpec:
    """An RMS norm or a layer norm."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False  # layer norms only
    weight: bool = True
    unit_offset: bool = False  # multiply by (1 + weight), as Gemma stores it


# ---- position encodings ------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware scaling: theta grows with the length beyond `original_context`."""

    factor: float
    original_context: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones are kept, with a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """Only low frequencies are interpolated; cos and sin are multiplied by `attention_factor`."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """A divisor per frequency: `short_factor` within the original context, else `long_factor`."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_context: int
    short_attention_factor: float = 1.0
    long_attention_factor: float = 1.0


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding."""

    dim: int  # rotated dimensions of a head
    theta: float = 10000.0
    interleaved: bool = False  # rotate pairs (0,1), (2,3).. as GPT-J; otherwise halves as NeoX
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class AlibiSpec:
    """ALiBi: a bias on the scores that falls linearly with the distance."""

    scale: float = 1.0  # Falcon scales its slopes together with the scores
    max_bias: float = 8.0
    # With tensor parallelism: the first head of this rank and the number of heads of the model.
    first_head: int = 0
    total_heads: int = 0  # 0: this rank has all heads


# ---- the blocks of a layer ---------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionGateSpec:
    """A gate on the output of attention, before the output projection.

    `stored`: "packed" means that the q projection has the rows [q | gate] of each head in turn;
    "separate" means that the gate has a projection of its own.
    """

    stored: Literal["packed", "separate"] = "separate"
    per_head: bool = False  # one factor per head; otherwise one per element
    activation: Literal["sigmoid", "softplus"] = "sigmoid"


@dataclass(frozen=True)
class QueryScaling:
    """Queries are multiplied by 1 + beta * log(1 + floor((position + offset) / period))."""

    beta: float
    period: int
    offset: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head, grouped-query or multi-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    position: RopeSpec | AlibiSpec | None = None
    bias: bool = False
    out_bias: bool = False
    scale: float | None = None  # default head_dim ** -0.5
    window: int | None = None  # a query attends to the last `window` positions, itself included
    softcap: float | None = None
    clip: float | None = None  # q, k and v are clamped to [-clip, clip]
    qk_norm: NormSpec | None = None
    # What one norm spans, and the shape of its weight. "head": one head, [dim]; "each": one head,
    # with weights of its own, [heads, dim]; "all": all heads together, [heads * dim].
    qk_norm_over: Literal["head", "each", "all"] = "head"
    qk_norm_after_rope: bool = False
    v_norm: NormSpec | None = None  # of each value head
    keys_as_values: bool = False  # values are the projected keys, before their norm and rope
    sinks: bool = False  # one learned logit per head joins the softmax and has no value
    gate: AttentionGateSpec | None = None
    query_scaling: QueryScaling | None = None
    # A query attends to the positions of its own chunk: those from position // chunk * chunk on.
    chunk: int | None = None
    # Rank of products of two narrow matrices that are added to q, k and v each; 0: there are none.
    low_rank: int = 0


@dataclass(frozen=True)
class SwigluClamp:
    """SwiGLU with clamped inputs: gate * sigmoid(alpha * gate) * (up + up_offset).

    The gate is clamped from above to `limit`, up is clamped to [-limit, limit].
    """

    limit: float
    alpha: float = 1.0
    up_offset: float = 0.0


@dataclass(frozen=True)
class MlpSpec:
    """A feed-forward block with `size` inner units."""

    size: int
    activation: ActivationName = "silu"
    gated: bool = True
    bias: bool = False
    clamp: SwigluClamp | None = None  # replaces the activation
    # alpha_p and alpha_n of xielu, if they are not tensors of the checkpoint.
    xielu_alphas: tuple[float, float] | None = None
    # Rank of a product of two narrow matrices that is added to gate and up; 0: there is none.
    low_rank: int = 0


@dataclass(frozen=True)
class RouterSpec:
    """How a token's experts are chosen from the router's logits, and how they are weighted."""

    # "sparsemixer" takes one expert after another: each weight is a softmax over the logits that
    # are within `threshold` of the largest one left.
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    score_chosen_only: bool = False  # choose by logit, then score the chosen logits only
    bias: bool = False  # of the router's projection
    correction_bias: bool = False  # added to the scores for the choice, not for the weights
    logit_scale: float = 1.0
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    # Experts are divided into groups. Only experts of the best `top_groups` groups are eligible.
    num_groups: int = 1
    top_groups: int = 1
    # What ranks a group: the sum of its two best scores, or its best score.
    group_score: Literal["top2", "max"] = "top2"
    normalize: bool = True  # divide the weights by their sum
    min_normalizer: float = 0.0  # the sum is at least this
    scale: float = 1.0  # of the weights, after the normalization
    expert_scale: bool = False  # a learned factor of each expert's weights
    weights_input: bool = False  # the weights multiply the experts' input instead of their output
    threshold: float = 0.0  # "sparsemixer" only


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: each token uses `top_k` of them.

    The norms are for blocks whose router, experts and shared expert (a dense MLP in parallel) have
    norms of their own. Those before a part read the block's input, which then has no mlp_norm.
    """

    num_experts: int
    top_k: int
    mlp: MlpSpec
    router: RouterSpec = RouterSpec()
    shared: MlpSpec | None = None  # an expert that every token uses
    shared_gate: bool = False  # multiply its output by sigmoid(w . x)
    shared_scale: float = 1.0  # of its output
    # Experts read and write vectors of this width, between two projections that they share.
    latent: int | None = None
    router_norm: NormSpec | None = None
    expert_norm: NormSpec | None = None
    expert_post_norm: NormSpec | None = None  # of the sum of a token's experts
    shared_norm: NormSpec | None = None
    shared_post_norm: NormSpec | None = None


# ---- recurrent mixers --------------------------------------------------------------------------


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """Linear attention with the gated delta rule: a state [key dim, value dim] per value head.

    The input projection has the rows q | k | v | gate | beta | decay. q, k and v pass a causal
    convolution and silu, then q and k are normalised to length 1. The norm of each value head is
    multiplied by silu(gate).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    norm: NormSpec = NormSpec()
    beta_scale: float = 1.0  # of sigmoid(beta)
    # Value head h uses key head h % num_key_heads; otherwise neighbours share one.
    tiled_heads: bool = False


@dataclass(frozen=True)
class Mamba2Spec:
    """A Mamba-2 state space layer: a state [head dim, state size] per head.

    The input projection has the rows gate | x | B | C | dt. x, B and C pass a causal convolution
    and silu. Heads are divided into groups that share B and C.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm: NormSpec | None = NormSpec()  # of the gated output; None: only silu(gate) multiplies it
    norm_groups: int = 1  # parts of the output that are normed separately
    gate_after_norm: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    # Factors of the projected gate, x, B, C and dt.
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class MambaSpec:
    """A Mamba-1 state space layer: a state [inner, state size].

    The input projection has the rows x | gate. x passes a causal convolution and silu. A second
    projection of x has the rows dt | B | C, and a third one widens dt from dt_rank to inner.
    """

    inner: int
    state_size: int
    dt_rank: int
    conv_width: int = 4
    conv_bias: bool = True
    bias: bool = False  # of the input and output projections
    norm: NormSpec | None = None  # of dt, B and C each


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated short convolution: the input projection has the rows B | C | x of `size` each.

    The output is C * conv(B * x), without an activation.
    """

    size: int
    conv_width: int = 3
    bias: bool = False


RecurrentSpec = GatedDeltaNetSpec | Mamba2Spec | MambaSpec | ShortConvSpec


def recurrent_in_sizes(spec: RecurrentSpec) -> tuple[int, ...]:
    """The rows of each part of the input projection."""
    match spec:
        case GatedDeltaNetSpec():
            key_size = spec.num_key_heads * spec.key_dim
            value_size = spec.num_value_heads * spec.value_dim
            heads = spec.num_value_heads
            return (key_size, key_size, value_size, value_size, heads, heads)
        case Mamba2Spec():
            inner = spec.num_heads * spec.head_dim
            group_size = spec.num_groups * spec.state_size
            return (inner, inner, group_size, group_size, spec.num_heads)
        case MambaSpec():
            return (spec.inner, spec.inner)
        case ShortConvSpec():
            return (spec.size, spec.size, spec.size)


def recurrent_out_size(spec: RecurrentSpec) -> int:
    """The inputs of the output projection."""
    match spec:
        case GatedDeltaNetSpec():
            return spec.num_value_heads * spec.value_dim
        case Mamba2Spec():
            return spec.num_heads * spec.head_dim
        case MambaSpec():
            return spec.inner
        case ShortConvSpec():
            return spec.size


@dataclass(frozen=True)
class StatePart:
    """A matrix [rows, width] of float32 in the state of a recurrent layer."""

    rows: int
    width: int


def state_parts(spec: RecurrentSpec) -> tuple[StatePart, ...]:
    """The state of one sequence in a recurrent layer.

    First the last inputs of the convolution [channels, conv_width]: that of position p is in column
    p % conv_width, so that a step never overwrites an input that it reads. Then, if there is one,
    the state of the scan, head after head.
    """
    match spec:
        case GatedDeltaNetSpec():
            channels = 2 * spec.num_key_heads * spec.key_dim + spec.num_value_heads * spec.value_dim
            scan = StatePart(spec.num_value_heads * spec.key_dim, spec.value_dim)
        case Mamba2Spec():
            inner = spec.num_heads * spec.head_dim
            channels = inner + 2 * spec.num_groups * spec.state_size
            scan = StatePart(inner, spec.state_size)
        case MambaSpec():
            channels = spec.inner
            scan = StatePart(spec.inner, spec.state_size)
        case ShortConvSpec():
            return (StatePart(spec.size, spec.conv_width),)
    return (StatePart(channels, spec.conv_width), scan)


# ---- layers and models -------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedBlockSpec:
    """A block of a layer's attention and MLP, whose weights several layers share.

    It reads the layer's input beside the embeddings of the same tokens, [tokens, 2 * hidden], and
    has no residuals: norm -> attention -> norm -> MLP -> a linear layer. The output is added to the
    input of the recurrent mixer, but not to the residual. The last linear layer and the low-rank
    parts of attention and MLP are not shared.
    """

    index: int  # layers with the same index share the weights
    norm: NormSpec  # before the attention


@dataclass(frozen=True)
class LayerSpec:
    """Norm -> block -> post-norm -> residual, for the mixer and then for the MLP.

    The mixer is attention, a recurrent mixer, or both, which then read the same normed input and
    whose outputs are added. A layer may lack a mixer or an MLP, with the norms that belong to it.
    `parallel`: mixer and MLP read the same residual, and both outputs are added to it.
    `shared_block`: attention and MLP are a block of their own, before the recurrent mixer.
    """

    attention: AttentionSpec | None
    mlp: MlpSpec | MoeSpec | None
    attn_norm: NormSpec | None = None  # before the mixer, whatever it is
    attn_post_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None  # None with `parallel`: the MLP reads attn_norm's output
    mlp_post_norm: NormSpec | None = None
    # Norms of residual + block output, for models that normalise the sum.
    attn_sum_norm: NormSpec | None = None
    mlp_sum_norm: NormSpec | None = None
    parallel: bool = False
    recurrent: RecurrentSpec | None = None
    # Factors of the outputs of attention, of the recurrent mixer and of the MLP. They are applied
    # together with `residual_scale`, so they are for layers without the post-norms.
    attention_scale: float = 1.0
    recurrent_scale: float = 1.0
    mlp_scale: float = 1.0
    residual_scale: float = 1.0
    # The residual is the norm's output, not its input. Not together with `parallel`.
    residual_after_norm: bool = False
    shared_block: SharedBlockSpec | None = None

    @property
    def sums_mixers(self) -> bool:
        """Whether attention and a recurrent mixer read the same input."""
        has_both = self.attention is not None and self.recurrent is not None
        return has_both and self.shared_block is None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer."""

    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    context: int  # longest sequence, in tokens, according to the checkpoint
    embed_dim: int | None = None  # width of an embedding that is projected to `hidden`
    embed_norm: NormSpec | None = None
    embed_scale: float = 1.0
    positions: int = 0  # size of the learned position table, 0 for none
    position_offset: int = 0
    tied: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has one."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def recurrents(self) -> tuple[RecurrentSpec, ...]:
        """The recurrent mixer of each layer that has one."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)


# ---- tensor names of a checkpoint --------------------------------------------------------------


@dataclass(frozen=True)
class SplitTensors:
    """A matrix stored as several tensors: q, k and v, or gate and up.

    `parts`: how many consecutive parts of the matrix each tensor has, if not one each.
    `grouped`: of each tensor, whether its rows are [key head][its parts of this head]; for gated
    delta nets. Empty: none is.
    """

    names: tuple[str, ...]
    parts: tuple[int, ...] = ()
    grouped: tuple[bool, ...] = ()


@dataclass(frozen=True)
class FusedTensor:
    """A matrix stored as one tensor.

    `grouped`: its rows are [kv_head][q.. k v][head_dim] rather than [all q, all k, all v].
    `interleaved`: its rows are gate and up by turns rather than [all gate, all up].
    """

    name: str
    grouped: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class TensorNames:
    """Canonical name -> name in the checkpoint, without `.weight` and `.bias`.

    Names within a layer are relative to `layer`. `extra` has the tensors that only some models
    have. In a layer: attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, attn_sum_norm,
    mlp_sum_norm, q_norm, k_norm, v_norm, sinks, attn_gate, router, correction_bias, expert_scale,
    shared_gate, latent_down, latent_up, router_norm, expert_norm, expert_post_norm, shared_norm,
    shared_post_norm, xielu_alpha_p, xielu_alpha_n, shared_block_norm, shared_block_out. Outside:
    positions, embed_norm, project_in, project_out. A q_norm or k_norm with {h} in its name is
    stored as one [dim] weight per head. The names of sinks, correction_bias, expert_scale and the
    alphas are complete: no `.weight` is appended. The two matrices of a low-rank part have the name
    of the matrix that it is added to, with `.low_rank_down` and `.low_rank_up` appended.

    A recurrent mixer has recurrent_in, recurrent_out and recurrent_conv, and in `extra`, as far as
    its kind needs them: recurrent_norm, A_log (or neg_A, which stores -exp(A_log)), dt_bias, D
    (these four names are complete), and for Mamba-1 x_proj, dt_proj, dt_norm, b_norm, c_norm.
    """

    embed: str
    layer: str  # with {i}, ending in a dot
    attn_qkv: SplitTensors | FusedTensor
    attn_out: str
    mlp_up: str | SplitTensors | FusedTensor
    mlp_down: str
    # The rows of the input projection are in the order that the mixer's spec states.
    recurrent_in: str | SplitTensors | FusedTensor = ""
    recurrent_out: str = ""
    # The causal convolution, [channels, 1, width] or [channels, width]; q, k and v may be separate.
    recurrent_conv: str | SplitTensors = ""
    final_norm: str = ""
    head: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False  # GPT-2's Conv1D stores weights as [in, out]
    # Prefix of one expert, with {e}, ending in a dot: expert_up and expert_down are relative to it.
    # mlp_up and mlp_down are used by the dense layers of the same model.
    experts: str = ""
    expert_up: str | SplitTensors | FusedTensor = ""
    expert_down: str = ""
    # One [expert, out, in] tensor, with or without `.weight`; `experts` has no {e}. Biases are
    # [expert, out] tensors whose names end in `.bias` or `_bias`.
    stacked_experts: bool = False
    transposed_experts: bool = False  # stacked experts are stored as [expert, in, out]
    shared_up: str | SplitTensors | FusedTensor = ""
    shared_down: str = ""
    # The prefix of the names above, then the prefixes that other checkpoints use instead ("" if
    # the bare model was saved). The first prefix under which the checkpoint has `embed` replaces
    # prefixes[0] in every name but `head`.
    prefixes: tuple[str, ...] = ()
    other_heads: tuple[str, ...] = ()  # names that other checkpoints use instead of `head`
    # How checkpoints begin the names of some layers, where the names above do not say it: the begin
    # of a name -> what takes its place. The first for which this checkpoint has a tensor counts.
    # Layers that share weights have the same tensors.
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Patterns (fnmatch) of tensors that are not used: causal masks, rope tables.
    ignored: tuple[str, ...] = ()
    # Patterns of the vision part of a model that is served as text. It is never read.
    vision: tuple[str, ...] = ()

    def locate(self, name: str) -> str:
        """Return the name in the checkpoint of what the names above call `name`."""
        begins = [begin for begin in self.aliases if name.startswith(begin)]
        if not begins:
            return name
        longest = max(begins, key=len)
        return self.aliases[longest][0] + name.removeprefix(longest)


@dataclass(frozen=True)
class CheckpointQuantization:
    """The method that quantized a checkpoint. Tensor names show which weights are quantized."""

    method: Literal["bitsandbytes", "gptq", "awq", "compressed-tensors", "fp8", "mxfp4"]
    zero_point_offset: int = 0  # added to GPTQ's zero points: 1 in the first version of the format
    # Tensors that every quantized weight must have; without them its values would be wrong.
    required_tensors: tuple[str, ...] = ()
