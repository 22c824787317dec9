"""Fixtures of the tool tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quant.checkpoints import make_llama


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama checkpoint in full precision; do not write to it."""
    return make_llama(tmp_path_factory.mktemp("llama"))
