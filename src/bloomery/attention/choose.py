"""Which backend serves a model: the first that refuses none of its layers; if all refuse, every reason is told."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bloomery.attention.base import Backend
from bloomery.attention.measured import library_from
from bloomery.attention.native_paged import NativePaged
from bloomery.attention.torch_paged import TorchPaged
from bloomery.attention.triton_paged import TritonPaged
from bloomery.errors import UnsupportedModel
from bloomery.spec import Attention


def choose(
    specs: Iterable[Attention],
    dtype: torch.dtype,
    device: torch.device,
    alone: bool = False,
    native: bool = False,
    kv: torch.dtype | None = None,
) -> Backend:
    """`alone`: a sequence's result may not depend on the others in its step. `native`: by CPU kernels, if they can.
    `kv`: what the cache will hold; where that is said, what takes which prompts on a GPU is measured."""
    specs = list(dict.fromkeys(specs))
    reasons = []
    plain = TorchPaged(alone=alone)
    fast = (TritonPaged(),) if device.type == "cuda" else (NativePaged(),) if native else ()
    for backend in (*fast, plain):
        refused = next(
            (reason for spec in specs if (reason := backend.refuses(spec, dtype, device))), None
        )
        if refused is None:
            if isinstance(backend, TritonPaged) and kv is not None and not alone:
                backend.library = library_from(specs, dtype, kv, device)
            return backend
        reasons.append(f"{type(backend).__name__}: {refused}")
    raise UnsupportedModel(f"no attention backend serves this model: {'; '.join(reasons)}")
