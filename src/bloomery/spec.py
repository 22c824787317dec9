"""The architecture of a model as data: dataclasses that every model family is described with.

No torch and no I/O. A field names a mechanism, not a family. Alternatives are types (a position is
a RopeSpec, an AlibiSpec or None), so that impossible combinations cannot be written. Every layer
has its own spec, so that alternating windows need no flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu"]


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


@dataclass(frozen=True)
class MlpSpec:
    """A feed-forward block with `size` inner units."""

    size: int
    activation: ActivationName = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: each token uses `top_k` of them."""

    num_experts: int
    top_k: int
    mlp: MlpSpec
    renormalize: bool = True
    shared: MlpSpec | None = None  # an expert that every token uses
    shared_gate: bool = False  # multiply its output by sigmoid(w . x)


@dataclass(frozen=True)
class LayerSpec:
    """Norm -> block -> post-norm -> residual, for attention and then for the MLP.

    `parallel`: both blocks read the same residual, and both outputs are added to it.
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    attn_norm: NormSpec | None = None
    attn_post_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None  # None with `parallel`: the MLP reads attn_norm's output
    mlp_post_norm: NormSpec | None = None
    # Norms of residual + block output, for models that normalise the sum.
    attn_sum_norm: NormSpec | None = None
    mlp_sum_norm: NormSpec | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    # The residual is the norm's output, not its input. Not together with `parallel`.
    residual_after_norm: bool = False


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


# ---- tensor names of a checkpoint --------------------------------------------------------------


@dataclass(frozen=True)
class SplitTensors:
    """A matrix stored as several tensors: q, k and v, or gate and up."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class FusedTensor:
    """A matrix stored as one tensor.

    `grouped`: its rows are [kv_head][q.. k v][head_dim] rather than [all q, all k, all v].
    """

    name: str
    grouped: bool = False


@dataclass(frozen=True)
class TensorNames:
    """Canonical name -> name in the checkpoint, without `.weight` and `.bias`.

    Names within a layer are relative to `layer`. `extra` has the tensors that only some models
    have. In a layer: attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, attn_sum_norm,
    mlp_sum_norm, q_norm, k_norm, router, shared_gate. Outside: positions, embed_norm, project_in,
    project_out. A q_norm or k_norm with {h} in its name is stored as one [dim] weight per head.
    """

    embed: str
    layer: str  # with {i}, ending in a dot
    attn_qkv: SplitTensors | FusedTensor
    attn_out: str
    mlp_up: str | SplitTensors | FusedTensor
    mlp_down: str
    final_norm: str = ""
    head: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False  # GPT-2's Conv1D stores weights as [in, out]
    # Prefix of one expert, with {e}, ending in a dot: expert_up and expert_down are relative to it.
    # mlp_up and mlp_down are used by the dense layers of the same model.
    experts: str = ""
    expert_up: str | SplitTensors | FusedTensor = ""
    expert_down: str = ""
    stacked_experts: bool = False  # one [expert, out, in] tensor; `experts` has no {e}
    shared_up: str | SplitTensors | FusedTensor = ""
    shared_down: str = ""
    # The prefix of the names above, then the prefixes that other checkpoints use instead ("" if
    # the bare model was saved). The first prefix under which the checkpoint has `embed` replaces
    # prefixes[0] in every name but `head`.
    prefixes: tuple[str, ...] = ()
    # Patterns (fnmatch) of tensors that are not used: causal masks, rope tables, a vision tower.
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointQuantization:
    """The method that quantized a checkpoint. Tensor names show which weights are quantized."""

    method: Literal["bitsandbytes", "gptq", "awq", "compressed-tensors", "fp8", "mxfp4"]
    zero_point_offset: int = 0  # added to GPTQ's zero points: 1 in the first version of the format
    # Tensors that every quantized weight must have; without them its values would be wrong.
    required_tensors: tuple[str, ...] = ()
