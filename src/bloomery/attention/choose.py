"""Which backend serves a model: the first that refuses none of its layers; if all refuse, every reason is told."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bloomery.attention.base import Backend
from bloomery.attention.torch_paged import TorchPaged
from bloomery.attention.triton_paged import TritonPaged
from bloomery.errors import UnsupportedModel
from bloomery.spec import Attention


def choose(specs: Iterable[Attention], dtype: torch.dtype, device: torch.device) -> Backend:
    specs = list(dict.fromkeys(specs))
    reasons = []
    for backend in (TritonPaged(), TorchPaged()) if device.type == "cuda" else (TorchPaged(),):
        refused = next((reason for spec in specs if (reason := backend.refuses(spec, dtype, device))), None)
        if refused is None:
            return backend
        reasons.append(f"{type(backend).__name__}: {refused}")
    raise UnsupportedModel(f"no attention backend serves this model: {'; '.join(reasons)}")
