"""A thread pool for the tests of native kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from bloomery.native.build import (
    SANITIZER_FLAGS,
    NativeBuildError,
    build_library,
    processor_flags,
)
from bloomery.native.thread_pool import ThreadPool, load_library


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    library = None
    # tests/deploy/test_arm_kernels.py sets this: the kernels of another kind of processor.
    if "NATIVE_LIBRARY" in os.environ:
        library = load_library(os.environ["NATIVE_LIBRARY"])
    # `make sanitize` sets this: checks memory accesses and undefined behaviour.
    if "NATIVE_CHECKS" in os.environ:
        library = load_library(str(build_library(SANITIZER_FLAGS)))
    try:
        pool = ThreadPool(2, library)
    except NativeBuildError as reason:
        pytest.skip(str(reason))
    with torch.inference_mode():
        yield pool
    pool.close()


# Kernels for other processors than this one, which can run them: the features that this one must
# have for them to differ from its own, and how to compile them.
OLDER_KERNELS = {
    "avx2": ({"avx512_vnni", "avx_vnni"}, ("-mno-avx512f", "-mno-avxvnni")),
    "avxvnni": ({"avx512_vnni"}, ("-mno-avx512f", "-mavxvnni")),
}


@pytest.fixture(params=["own", *OLDER_KERNELS], scope="module")
def any_pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    """The best kernels for this processor, and those for others."""
    if request.param == "own":
        yield request.getfixturevalue("pool")
        return
    features, flags = OLDER_KERNELS[request.param]
    own_features = set(processor_flags())
    if not features & own_features or (
        request.param == "avxvnni" and "avx_vnni" not in own_features
    ):
        pytest.skip("this processor's own kernels are those, or it cannot run them")
    if {"NATIVE_LIBRARY", "NATIVE_CHECKS"} & set(os.environ):
        pytest.skip("the library is given")
    pool = ThreadPool(2, load_library(str(build_library(flags))))
    with torch.inference_mode():
        yield pool
    pool.close()
