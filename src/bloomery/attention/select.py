"""Selects the attention backend of a model: the first one that supports all of its layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bloomery.attention.autotune import tune_library_min_len
from bloomery.attention.base import AttentionBackend
from bloomery.attention.cpu_paged import CpuPagedAttention
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.attention.triton_paged import TritonPagedAttention
from bloomery.errors import UnsupportedModel
from bloomery.native.thread_pool import ThreadPool
from bloomery.spec import AttentionSpec


def select_backend(
    specs: Iterable[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    pool: ThreadPool | None = None,
) -> AttentionBackend:
    """Return a backend for layers of these specs; the error names every backend's reason.

    batch_invariant: a sequence's result may not depend on the other sequences of its step.
    pool: use the native CPU kernels, if they support the model.
    """
    distinct_specs = list(dict.fromkeys(specs))
    candidates: list[AttentionBackend] = [TorchPagedAttention(one_by_one=batch_invariant)]
    if device.type == "cuda":
        candidates.insert(0, TritonPagedAttention())
    elif pool is not None:
        candidates.insert(0, CpuPagedAttention(pool))
    reasons = []
    for backend in candidates:
        reason = find_unsupported(backend, distinct_specs, dtype, device)
        if reason is None:
            return backend
        reasons.append(f"{type(backend).__name__}: {reason}")
    raise UnsupportedModel(f"no attention backend supports this model: {'; '.join(reasons)}")


def tune_backend(
    backend: AttentionBackend,
    specs: Iterable[AttentionSpec],
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Measure which prefills a GPU backend should leave to the attention library."""
    if isinstance(backend, TritonPagedAttention):
        backend.library_min_len = tune_library_min_len(
            dict.fromkeys(specs), dtype, kv_cache_dtype, device
        )


def find_unsupported(
    backend: AttentionBackend,
    specs: Iterable[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Say why the backend cannot serve one of these layers; None if it serves all."""
    for spec in specs:
        reason = backend.unsupported_reason(spec, dtype, device)
        if reason is not None:
            return reason
    return None
