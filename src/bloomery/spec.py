"""The vocabulary in which a model family is described. Pure data: no torch, no I/O.

A field names a mechanism, never a family. Concepts nest (a position is a Rope, an Alibi or nothing), so that
impossible mixtures cannot be written; layers are a tuple, so that alternating windows need no flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Norm:
    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False  # layer norms only
    weight: bool = True
    unit_offset: bool = False  # multiply by (1 + weight), as Gemma stores it


# ---- rotary positions and the ways to stretch them ---------------------------------------------


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Dynamic:
    """NTK-aware base that grows with the position once it passes `original`."""

    factor: float
    original: int


@dataclass(frozen=True)
class Llama3:
    """Low frequencies slowed by `factor`, high ones kept, a smooth ramp between."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class Yarn:
    """Interpolation of low frequencies only, with cos and sin scaled by `attention`."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRope:
    """One divisor a frequency: `short` within the original context, `long` when serving beyond it."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    short_attention: float = 1.0
    long_attention: float = 1.0


@dataclass(frozen=True)
class Rope:
    dim: int  # how many of a head's dimensions turn
    theta: float = 10000.0
    interleaved: bool = False  # pairs (0,1), (2,3).. as GPT-J; otherwise halves as NeoX
    scaling: Linear | Dynamic | Llama3 | Yarn | LongRope | None = None


@dataclass(frozen=True)
class Alibi:
    scale: float = 1.0  # Falcon scales its slopes with the logits
    max_bias: float = 8.0
    first: int = (
        0  # where a rank has some of the model's heads: its first, of how many; 0: all are here
    )
    heads: int = 0


# ---- the blocks of a layer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    position: Rope | Alibi | None = None
    bias: bool = False
    out_bias: bool = False
    scale: float | None = None  # default head_dim ** -0.5
    window: int | None = None  # a query sees the last `window` positions, itself included
    softcap: float | None = None
    clip: float | None = None  # q, k and v clamped to [-clip, clip]
    qk_norm: Norm | None = None
    # what one norm spans, and the shape of its weight: a head [dim]; each head its own [heads, dim]; all [heads * dim]
    qk_norm_over: Literal["head", "each", "all"] = "head"

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Mlp:
    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Moe:
    experts: int
    top_k: int
    mlp: Mlp
    renormalize: bool = True
    shared: Mlp | None = None  # an expert every token visits
    shared_gate: bool = False  # its output times sigmoid(w . x)


@dataclass(frozen=True)
class Layer:
    """pre-norm -> block -> post-norm -> residual, twice; `parallel` adds both blocks to one residual."""

    attention: Attention
    mlp: Mlp | Moe
    attn_norm: Norm | None = None
    attn_post_norm: Norm | None = None
    mlp_norm: Norm | None = None  # None together with parallel: the block reads attn_norm's output
    mlp_post_norm: Norm | None = None
    attn_sum_norm: Norm | None = None  # norm of residual + block, for models that normalise the sum
    mlp_sum_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True)
class Model:
    vocab: int
    hidden: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    context: int  # the longest sequence the checkpoint claims
    embed_dim: int | None = None  # width of the embedding where it is projected to `hidden`
    embed_norm: Norm | None = None
    embed_scale: float = 1.0
    positions: int = 0  # size of the learned position table, 0 for none
    position_offset: int = 0
    tied: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None


# ---- where each tensor lives in the checkpoint -------------------------------------------------


@dataclass(frozen=True)
class Split:
    """One canonical matrix stored as several: q, k and v, or gate and up."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Fused:
    """Stored as one; `grouped` means [kv_head][q.. k v][head_dim] rather than [all q, all k, all v]."""

    name: str
    grouped: bool = False


@dataclass(frozen=True)
class Names:
    """Canonical name -> checkpoint name, without `.weight` and `.bias`. Layer entries are relative to `layer`.

    `extra` holds what only some models have: attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, attn_sum_norm,
    mlp_sum_norm, q_norm, k_norm, router, shared_gate (in a layer); positions, embed_norm, project_in, project_out.
    A q_norm or k_norm with {h} in it is stored head by head, one [dim] weight each.
    """

    embed: str
    layer: str  # with {i}, ending in a dot
    attn_qkv: Split | Fused
    attn_out: str
    mlp_up: str | Split | Fused
    mlp_down: str
    final_norm: str = ""
    head: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False  # GPT-2's Conv1D stores weights as [in, out]
    experts: str = (
        ""  # with {e}, ending in a dot: one expert's expert_up and expert_down are relative to it
    )
    expert_up: str | Split | Fused = (
        ""  # mlp_up and mlp_down stay those of the dense layers among the sparse ones
    )
    expert_down: str = ""
    stacked_experts: bool = (
        False  # all experts in one [expert, out, in] tensor, and `experts` without {e}
    )
    shared_up: str | Split | Fused = ""
    shared_down: str = ""
    # What the names above begin with, then what other writers put there: "" where the bare model was saved. The first
    # one under which the checkpoint holds `embed` applies to every name that begins with prefixes[0], `head` aside.
    prefixes: tuple[str, ...] = ()
    # Patterns (fnmatch) of tensors that may lie unused in the checkpoint: causal masks, rotary tables, a vision tower.
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantization:
    """Who packed a checkpoint's products; which of them, and how, their tensors say."""

    method: Literal["bitsandbytes", "gptq", "awq", "compressed-tensors", "fp8", "mxfp4"]
    first_zero: int = 0  # what GPTQ's zeros count from: 1 in the first version of the format
    needed: tuple[
        str, ...
    ] = ()  # tensors without which a packed product would be read as another one
