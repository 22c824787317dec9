"""Which library is loaded: never a damaged or unfit one; a failed build says why and what helps."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.native import build
from bloomery.native.build import (
    KERNEL_VARIANTS,
    NativeBuildError,
    build_library,
    find_library,
    find_prebuilt,
    is_intact,
)

SOURCES = Path(build.__file__).parents[2]
CONTENT = b"a library"
ALL_FLAGS = {flag for variant in KERNEL_VARIANTS for flag in variant.flags}


@pytest.fixture(autouse=True)
def _compiler(pool: object) -> None:
    """Skip the tests if there is no compiler."""


def test_a_damaged_library_is_not_loaded(tmp_path: Path) -> None:
    library = build_library()
    content = library.read_bytes()
    copy = tmp_path / library.name
    for damaged in (
        content[: len(content) // 2],
        content[:-1],
        b"",
        content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    ):
        copy.write_bytes(damaged)
        assert not is_intact(copy)
    assert is_intact(library)


def test_without_a_compiler_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(NativeBuildError, match="no C compiler") as caught:
        build_library(folder=tmp_path)
    assert "times slower" in str(caught.value) and "install gcc" in str(caught.value)


def test_an_installation_without_a_compiler_goes_on_with_a_warning(tmp_path: Path) -> None:
    environment = {
        "PATH": str(tmp_path),
        "PYTHONPATH": str(SOURCES),
        "BLOOMERY_CACHE_DIR": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, "-m", "bloomery.native.build"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("warning: there is no C compiler")


def test_a_compiler_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="failed"):
        build_library(("-not-an-option",), tmp_path)
    assert not list(tmp_path.glob("*.so"))


# ---- libraries of a wheel ------------------------------------------------------------------------


@pytest.fixture
def wheel_folder(tmp_path: Path) -> Path:
    """A folder with an intact file for every variant."""
    for variant in KERNEL_VARIANTS:
        digest = hashlib.sha256(CONTENT).digest()
        (tmp_path / variant.file_name()).write_bytes(CONTENT + digest)
    return tmp_path


@pytest.mark.parametrize("variant", KERNEL_VARIANTS, ids=lambda variant: variant.name)
def test_a_processor_gets_the_fastest_library_that_it_can_run(
    wheel_folder: Path, variant: build.KernelVariant
) -> None:
    library = find_prebuilt(wheel_folder, variant.machine, variant.flags)
    assert library is not None and library.name == variant.file_name()
    missing_one = variant.flags[1:]
    slower = find_prebuilt(wheel_folder, variant.machine, missing_one)
    assert slower is None or slower.name != variant.file_name()


def test_other_machines_get_no_library(wheel_folder: Path) -> None:
    assert find_prebuilt(wheel_folder, "riscv64", ALL_FLAGS) is None
    assert find_prebuilt(wheel_folder / "missing", "x86_64", ALL_FLAGS) is None


def test_a_damaged_library_gives_way_to_a_slower_one(wheel_folder: Path) -> None:
    fastest, slower, *_ = KERNEL_VARIANTS
    (wheel_folder / fastest.file_name()).write_bytes(CONTENT)
    library = find_prebuilt(wheel_folder, fastest.machine, ALL_FLAGS)
    assert library is not None and library.name == slower.file_name()


def test_a_library_of_other_sources_is_not_loaded(
    wheel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FLAGS", ("-O0",))
    for variant in KERNEL_VARIANTS:
        assert find_prebuilt(wheel_folder, variant.machine, variant.flags) is None


def test_the_library_of_the_wheel_comes_before_a_compiled_one(
    wheel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = KERNEL_VARIANTS[0]
    monkeypatch.setattr(build, "PREBUILT_FOLDER", wheel_folder)
    monkeypatch.setattr(build.platform, "machine", lambda: variant.machine)
    monkeypatch.setattr(build, "processor_flags", lambda: list(variant.flags))
    assert find_library() == wheel_folder / variant.file_name()
    monkeypatch.setattr(build, "processor_flags", list)
    assert find_library() == build_library()
