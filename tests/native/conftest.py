"""A team of two threads for the tests of native kernels; stopped behind them, so that other tests see torch alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from bloomery.native.build import CHECKS, build
from bloomery.native.team import Team, bind, team


@pytest.fixture(scope="module", autouse=True)
def crew() -> Iterator[Team]:
    if "NATIVE_CHECKS" in os.environ:  # make sanitize: every access and every shift looked at
        team().call = bind(str(build(CHECKS)))
    reason = team().start(2)
    if reason is not None:
        pytest.skip(reason)
    with torch.inference_mode():
        yield team()
    team().stop()
