"""A damaged library is not loaded, and a failed build says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.native import build
from bloomery.native.build import NativeBuildError, build_library, is_intact


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
    with pytest.raises(NativeBuildError, match="no C compiler"):
        build_library(folder=tmp_path)


def test_a_compiler_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="failed"):
        build_library(("-not-an-option",), tmp_path)
    assert not list(tmp_path.glob("*.so"))
