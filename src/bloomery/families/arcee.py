"""Arcee: a Llama whose MLP is ungated, with squared ReLU."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.nemotron import UNGATED_NAMES, read_ungated_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec

ARCEE = DEFAULTS | defaults(
    hidden=2560, mlp=18432, context=4096, hidden_act="relu2", rms_norm_eps=1e-5
)


def read_arcee(config: ConfigReader) -> ModelSpec:
    return read_model(config, [read_ungated_layer(config)] * len(config.layers()))


FAMILIES = {"arcee": ModelFamily(read_arcee, UNGATED_NAMES, ARCEE)}
