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


@pytest.fixture(scope="session")
def avx2_pool() -> Iterator[ThreadPool]:
    """Kernels for processors without AVX-512 and VNNI, on one that has them."""
    if not {"avx512_vnni", "avx_vnni"} & set(processor_flags()):
        pytest.skip("this processor's own kernels need neither AVX-512 nor VNNI")
    if {"NATIVE_LIBRARY", "NATIVE_CHECKS"} & set(os.environ):
        pytest.skip("the library is given")
    pool = ThreadPool(2, load_library(str(build_library(("-mno-avx512f", "-mno-avxvnni")))))
    with torch.inference_mode():
        yield pool
    pool.close()


@pytest.fixture(params=["pool", "avx2_pool"], scope="module")
def any_pool(request: pytest.FixtureRequest) -> ThreadPool:
    """The best kernels for this processor, and those for older ones."""
    return request.getfixturevalue(request.param)
