"""A pipeline is cut by the time its layers take: every kind is measured once, and all stages together are the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from bloomery.artifacts.locate import locate
from bloomery.models.decoder import Decoder
from bloomery.models.load import load
from bloomery.parallel.mesh import Mesh
from bloomery.runtime.stages import Part, costs, stage
from bloomery.spec import Model
from tests.parity.cases import CASES, make_checkpoint


@pytest.mark.parametrize("name", ["gemma2", "qwen2_moe", "opt-350m", "bloom"])
def test_each_kind_is_measured_once(name: str, tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    asked: list[range] = []

    def whole(model: Model, part: Part) -> range:
        def counted(layers: range) -> Decoder:
            asked.append(layers)
            return part(layers)

        found, head = costs(model, counted, Mesh(), native=False)
        assert len(found) == len(model.layers) and min(found) > 0 and head > 0
        assert len(asked) == len(set(model.layers))
        assert len(dict(zip(model.layers, found, strict=True)).values()) == len(asked)
        return range(len(model.layers))

    at = locate(str(tmp_path))
    loaded = load(at, "auto", torch.float32, torch.device("cpu"), cut=whole).decoder
    assert loaded.first and loaded.last


def test_stages_together_are_the_model(tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    at = locate(str(tmp_path))
    cpu = torch.device("cpu")
    parts = []
    for number in range(2):
        cut = partial(stage, mesh=Mesh(stage=number, stages=2), native=False)
        parts.append(load(at, "auto", torch.float32, cpu, cut=cut).decoder)
    count = len(parts[0].whole.layers)
    assert (parts[0].first, parts[0].last, parts[1].first, parts[1].last) == (
        True,
        False,
        False,
        True,
    )
    assert all(0 < len(part.layers) < count for part in parts)
