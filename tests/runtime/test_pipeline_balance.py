"""Pipeline stages are split by measured layer times, and all stages together are the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from bloomery.artifacts.locate import locate_model
from bloomery.models.decoder import Decoder
from bloomery.models.load import load_model
from bloomery.parallel.groups import DeviceMesh
from bloomery.runtime.pipeline_balance import (
    LoadLayers,
    measure_layer_times,
    select_stage_layers,
)
from bloomery.spec import ModelSpec
from tests.parity.cases import CASES, make_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gemma2", "qwen2_moe", "opt-350m", "bloom", "zamba2"])
def test_each_kind_of_layer_is_measured_once(name: str, tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    loaded_layers: list[range] = []

    def select_all(model: ModelSpec, load_layers: LoadLayers) -> range:
        def counting_load(layers: range) -> Decoder:
            loaded_layers.append(layers)
            return load_layers(layers)

        times, head_time = measure_layer_times(model, counting_load, DeviceMesh())
        num_kinds = len(set(model.layers))
        assert len(times) == len(model.layers) and min(times) > 0 and head_time > 0
        assert len(loaded_layers) == num_kinds
        assert len(dict(zip(model.layers, times, strict=True)).values()) == num_kinds
        return range(len(model.layers))

    artifact = locate_model(str(tmp_path))
    decoder = load_model(artifact, "auto", torch.float32, CPU, select_layers=select_all).decoder
    assert decoder.is_first_stage and decoder.is_last_stage


def test_all_stages_together_are_the_model(tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    artifact = locate_model(str(tmp_path))
    stages = []
    for number in range(2):
        mesh = DeviceMesh(stage=number, num_stages=2)
        select_layers = partial(select_stage_layers, mesh=mesh)
        loaded = load_model(artifact, "auto", torch.float32, CPU, select_layers=select_layers)
        stages.append(loaded.decoder)
    first, last = stages
    num_layers = len(first.full_spec.layers)
    assert (first.is_first_stage, first.is_last_stage) == (True, False)
    assert (last.is_first_stage, last.is_last_stage) == (False, True)
    assert all(0 < len(stage.layers) < num_layers for stage in stages)
