"""Loads the recurrent mixers of decoder layers."""

from __future__ import annotations

import torch

from bloomery.kernels.gated_delta_net import DeltaNetWeights
from bloomery.kernels.mamba2 import Mamba2Weights
from bloomery.kernels.short_conv import ShortConvWeights
from bloomery.layers.recurrent import (
    DeltaNetMixer,
    Mamba2Mixer,
    MambaMixer,
    RecurrentBlock,
    RecurrentMixer,
    ShortConvMixer,
)
from bloomery.layout import UNSHARDED, Range, WeightShard, conv_sizes
from bloomery.models.weights import ModelWeights
from bloomery.parallel.groups import CommunicationGroup
from bloomery.spec import (
    GatedDeltaNetSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
    recurrent_out_size,
)


def load_recurrent_block(
    spec: RecurrentSpec,
    hidden: int,
    weights: ModelWeights,
    prefix: str,
    group: CommunicationGroup | None,
    out_group: CommunicationGroup | None,
) -> RecurrentBlock:
    """Load this rank's part of a recurrent mixer with its projections.

    out_group: the ranks among which the output is summed; None: the caller sums it.
    """
    in_bias, out_bias = projection_biases(spec)
    return RecurrentBlock(
        weights.recurrent_in(prefix, spec, hidden, in_bias),
        load_mixer(spec, weights, prefix, group),
        weights.linear(
            prefix,
            weights.names.recurrent_out,
            [hidden],
            recurrent_out_size(spec),
            out_bias,
            shard=weights.layout.recurrent_out(spec),
            group=out_group,
        ),
    )


def projection_biases(spec: RecurrentSpec) -> tuple[bool, bool]:
    """Whether the input and the output projection have biases."""
    match spec:
        case GatedDeltaNetSpec():
            return False, False
        case Mamba2Spec():
            return spec.in_bias, spec.out_bias
        case MambaSpec() | ShortConvSpec():
            return spec.bias, spec.bias


def load_mixer(
    spec: RecurrentSpec, weights: ModelWeights, prefix: str, group: CommunicationGroup | None
) -> RecurrentMixer:
    """Load what a mixer has between its projections."""
    match spec:
        case GatedDeltaNetSpec():
            return load_delta_net(spec, weights, prefix)
        case Mamba2Spec():
            return load_mamba2(spec, weights, prefix, group)
        case MambaSpec():
            return load_mamba(spec, weights, prefix, group)
        case ShortConvSpec():
            conv, conv_bias = load_conv(spec, weights, prefix, spec.bias)
            local = weights.layout.recurrent(spec)
            assert isinstance(local, ShortConvSpec)
            return ShortConvMixer(local, ShortConvWeights(conv, conv_bias), weights.pool)


def load_delta_net(spec: GatedDeltaNetSpec, weights: ModelWeights, prefix: str) -> DeltaNetMixer:
    """Load a gated delta net."""
    extra = weights.names.extra
    heads = weights.layout.split_evenly(spec.num_value_heads)
    conv, _ = load_conv(spec, weights, prefix, False)
    norm = weights.norm(spec.norm, prefix + extra["recurrent_norm"], spec.value_dim)
    assert norm is not None
    local = weights.layout.recurrent(spec)
    assert isinstance(local, GatedDeltaNetSpec)
    mixer_weights = DeltaNetWeights(
        conv,
        load_decay(weights, prefix, (spec.num_value_heads,), heads),
        weights.elements(prefix + extra["dt_bias"], (spec.num_value_heads,), heads),
        norm,
    )
    return DeltaNetMixer(local, mixer_weights, weights.pool)


def load_mamba2(
    spec: Mamba2Spec, weights: ModelWeights, prefix: str, group: CommunicationGroup | None
) -> Mamba2Mixer:
    """Load a Mamba-2 mixer."""
    extra = weights.names.extra
    layout = weights.layout
    heads = layout.split_evenly(spec.num_heads)
    inner = spec.num_heads * spec.head_dim
    conv, conv_bias = load_conv(spec, weights, prefix, spec.conv_bias)
    norm_weight = None
    norm_group = None
    if spec.norm is not None:
        if spec.norm.weight:
            name = prefix + extra["recurrent_norm"] + ".weight"
            norm_weight = weights.elements(name, (inner,), layout.split_evenly(inner))
        if spec.norm_groups % layout.size:
            norm_group = group
    local = layout.recurrent(spec)
    assert isinstance(local, Mamba2Spec)
    mixer_weights = Mamba2Weights(
        conv,
        conv_bias,
        load_decay(weights, prefix, (spec.num_heads,), heads),
        weights.elements(prefix + extra["dt_bias"], (spec.num_heads,), heads),
        weights.elements(prefix + extra["D"], (spec.num_heads,), heads),
        build_factors(local, conv.device),
    )
    return Mamba2Mixer(local, mixer_weights, norm_weight, norm_group, weights.pool)


def build_factors(spec: Mamba2Spec, device: torch.device) -> torch.Tensor | None:
    """Return the factor of each channel of x | B | C, or None if all are 1."""
    scales = torch.tensor(spec.part_scales[1:4], dtype=torch.float32)
    if bool((scales == 1).all()):
        return None
    return scales.repeat_interleave(torch.tensor(conv_sizes(spec))).to(device)


def load_mamba(
    spec: MambaSpec, weights: ModelWeights, prefix: str, group: CommunicationGroup | None
) -> MambaMixer:
    """Load a Mamba-1 mixer."""
    extra = weights.names.extra
    layout = weights.layout
    channels = layout.split_evenly(spec.inner)
    conv, conv_bias = load_conv(spec, weights, prefix, spec.conv_bias)
    sizes = (spec.dt_rank, spec.state_size, spec.state_size)
    project_x = weights.linear(
        prefix,
        extra["x_proj"],
        [sum(sizes)],
        spec.inner,
        False,
        shard=layout.recurrent_out(spec),
        group=group,
    )
    dt_shard = UNSHARDED if layout.size == 1 else WeightShard(rows=(channels,))
    project_dt = weights.linear(
        prefix, extra["dt_proj"], [spec.inner], spec.dt_rank, True, shard=dt_shard
    )
    dt_norm, b_norm, c_norm = (
        weights.norm(spec.norm, prefix + extra.get(role, ""), size)
        for role, size in zip(("dt_norm", "b_norm", "c_norm"), sizes, strict=True)
    )
    local = layout.recurrent(spec)
    assert isinstance(local, MambaSpec)
    return MambaMixer(
        local,
        conv,
        conv_bias,
        project_x,
        project_dt,
        load_decay(weights, prefix, (spec.inner, spec.state_size), channels),
        weights.elements(prefix + extra["D"], (spec.inner,), channels),
        (dt_norm, b_norm, c_norm),
        weights.pool,
    )


def load_conv(
    spec: RecurrentSpec, weights: ModelWeights, prefix: str, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Load this rank's channels of the causal convolution: [channels, width], and the bias."""
    names = weights.names.recurrent_conv
    parts = conv_sizes(spec)
    ranges = weights.layout.recurrent_conv(spec)
    conv = weights.stacked_elements(prefix, names, ".weight", parts, spec.conv_width)
    bias = None
    if has_bias:
        bias = weights.stacked_elements(prefix, names, ".bias", parts, 1)[:, 0]
    if weights.layout.size == 1:
        return conv, bias
    return select_channels(conv, ranges), None if bias is None else select_channels(bias, ranges)


def select_channels(values: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
    """Return these ranges of rows."""
    return torch.cat([values[start:end] for start, end in ranges])


def load_decay(
    weights: ModelWeights, prefix: str, shape: tuple[int, ...], rows: Range
) -> torch.Tensor:
    """Load A, which checkpoints store as a logarithm of -A, or as A itself."""
    extra = weights.names.extra
    if "neg_A" in extra:
        return weights.elements(prefix + extra["neg_A"], shape, rows)
    return -torch.exp(weights.elements(prefix + extra["A_log"], shape, rows))
