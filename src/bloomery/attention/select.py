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
    kv_cache_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Return a backend for layers of these specs; the error names every backend's reason.

    batch_invariant: a sequence's result may not depend on the other sequences of its step.
    pool: use the native CPU kernels, if they support the model.
    kv_cache_dtype: the type of the KV cache. If given, a GPU backend measures which prefills the
        attention library should take.
    """
    distinct_specs = list(dict.fromkeys(specs))
    candidates: list[AttentionBackend] = [TorchPagedAttention(one_by_one=batch_invariant)]
    triton_backend = TritonPagedAttention()
    if device.type == "cuda":
        candidates.insert(0, triton_backend)
    elif pool is not None:
        candidates.insert(0, CpuPagedAttention(pool))
    reasons = []
    for backend in candidates:
        reason = find_unsupported(backend, distinct_specs, dtype, device)
        if reason is not None:
            reasons.append(f"{type(backend).__name__}: {reason}")
            continue
        if backend is triton_backend and kv_cache_dtype is not None and not batch_invariant:
            triton_backend.library_min_len = tune_library_min_len(
                distinct_specs, dtype, kv_cache_dtype, device
            )
        return backend
    raise UnsupportedModel(f"no attention backend supports this model: {'; '.join(reasons)}")


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
