"""The causal convolution of recurrent mixers, continued from the last inputs of each sequence.

Every channel is a filter of its own: y[p] = bias + sum of weight[j] * x[p - width + 1 + j]. The
state has the last `width` inputs, that of position p in column p % width (spec.state_parts).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bloomery.kernels.state_cache import (
    RecurrentMetadata,
    StateView,
    read_states,
    write_states,
)


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    view: StateView,
    metadata: RecurrentMetadata,
) -> torch.Tensor:
    """Convolve x [tokens, channels] with weight [channels, width]; returns float32, updates states.

    Tokens that belong to no sequence get zeros.
    """
    width = weight.shape[1]
    query_lens, seq_lens = metadata.host_lengths()
    states = read_states(view, metadata)
    x = x.float()
    out = torch.zeros_like(x)
    first = 0
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        start = max(seq_len - query_len, 0)
        if not query_len:
            continue
        past = torch.arange(start - width + 1, start, device=x.device) % width
        new = x[first : first + query_len]
        inputs = torch.cat((states[index][:, past], new.T), 1)  # [channels, width - 1 + new]
        out[first : first + query_len] = F.conv1d(
            inputs[None], weight[:, None], bias, groups=len(weight)
        )[0].T
        end = start + query_len
        last = torch.arange(end - width, end, device=x.device) % width
        states[index][:, last] = inputs[:, -width:]
        first += query_len
    write_states(view, metadata, states)
    return out


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)
