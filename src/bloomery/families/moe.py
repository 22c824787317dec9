"""Building blocks of the families with experts: tensor names, routers, dense layers.

It defines no family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from bloomery.families.dense import read_mlp
from bloomery.families.llama import NAMES
from bloomery.families.reader import ConfigReader
from bloomery.spec import (
    FusedTensor,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RouterSpec,
    SplitTensors,
    TensorNames,
)

IS_SPARSE = {"sparse": True, "dense": False}
# DeepSeek's router without groups. The normalizer would be 0 if all scores underflow.
SIGMOID_ROUTER = RouterSpec(score="sigmoid", correction_bias=True, min_normalizer=1e-20)


def name_experts(
    names: TensorNames,
    folder: str,
    up: tuple[str, str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    **extra: str,
) -> TensorNames:
    """Add the tensors of experts that are stored one by one, numbered in `folder`."""
    return replace(
        names,
        extra={**names.extra, **extra},
        experts=f"{folder}.{{e}}.",
        expert_up=SplitTensors(up),
        expert_down=down,
    )


def name_stacked_experts(
    names: TensorNames, folder: str, interleaved: bool = False, **extra: str
) -> TensorNames:
    """Add the tensors of all experts of a layer, stored as [expert, in, out] in `folder`."""
    return replace(
        names,
        extra={**names.extra, **extra},
        experts=f"{folder}.",
        expert_up=FusedTensor("gate_up_proj", interleaved=interleaved),
        expert_down="down_proj",
        stacked_experts=True,
        transposed_experts=True,
    )


def build_moe_names(router: str, shared: str = "", mlp: str = "mlp", **extra: str) -> TensorNames:
    """Name the tensors of a Llama with experts; `shared` and `mlp` are the prefixes of MLPs."""
    names = replace(
        NAMES,
        mlp_up=SplitTensors((f"{mlp}.gate_proj", f"{mlp}.up_proj")),
        mlp_down=f"{mlp}.down_proj",
        extra={**NAMES.extra, "router": router, **extra},
        shared_up=SplitTensors((f"{shared}.gate_proj", f"{shared}.up_proj")),
        shared_down=f"{shared}.down_proj",
    )
    return name_experts(names, f"{mlp}.experts")


def ignore_mtp_layers(names: TensorNames) -> Callable[[ConfigReader], TensorNames]:
    """Ignore the layers for multi-token prediction, which follow the layers of the model."""

    def build_names(config: ConfigReader) -> TensorNames:
        first = len(config.layers())
        count = config.integer("num_nextn_predict_layers", 1)
        if count > 100:
            raise config.error("num_nextn_predict_layers", f"is {count}, which no model has")
        patterns = tuple(f"*layers.{first + i}.*" for i in range(count))
        return replace(names, ignored=(*names.ignored, *patterns))

    return build_names


def read_grouped_router(config: ConfigReader) -> RouterSpec:
    """Read DeepSeek's router: sigmoid scores with a correction bias, experts in groups."""
    return replace(
        SIGMOID_ROUTER,
        num_groups=config.size("n_group", 1),
        top_groups=config.size("topk_group", 1),
        normalize=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor", 1.0),
    )


def read_experts(
    config: ConfigReader,
    router: RouterSpec,
    size_key: str = "moe_intermediate_size",
    mlp: MlpSpec | None = None,
    **changes: Any,
) -> MoeSpec:
    """Read experts of one size; keywords replace what a family does differently.

    By default, an expert is a gated MLP, and a shared expert is as wide as `num_shared_experts` of
    them.
    """
    mlp = mlp or read_mlp(config, size_key)
    num_shared = config.integer("num_shared_experts", 0)
    moe = MoeSpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        mlp=replace(mlp, bias=False),
        router=router,
        shared=replace(mlp, size=num_shared * mlp.size) if num_shared else None,
    )
    return replace(moe, **changes)


def put_experts(
    layers: Iterable[LayerSpec], moe: MoeSpec, is_sparse: Iterable[bool]
) -> list[LayerSpec]:
    """Replace the MLP by experts in every layer whose flag is set."""
    return [
        replace(layer, mlp=moe) if flag else layer
        for layer, flag in zip(layers, is_sparse, strict=True)
    ]


def read_sparse_layers(
    config: ConfigReader, is_sparse_by_default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Return which layers have experts: from `mlp_layer_types` if present, else by the rule."""
    return config.layer_choices("mlp_layer_types", IS_SPARSE, is_sparse_by_default)
