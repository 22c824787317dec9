"""Building blocks of the families with experts: tensor names, DeepSeek's router, dense layers.

It defines no family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from bloomery.families.llama import NAMES, read_mlp
from bloomery.families.reader import ConfigReader
from bloomery.spec import LayerSpec, MoeSpec, RouterSpec, SplitTensors, TensorNames

IS_SPARSE = {"sparse": True, "dense": False}
# A guard against division by zero if all scores underflow.
MIN_NORMALIZER = 1e-20


def build_moe_names(router: str, shared: str = "", mlp: str = "mlp", **extra: str) -> TensorNames:
    """Name the tensors of a Llama with experts; `shared` and `mlp` are the prefixes of MLPs."""
    return replace(
        NAMES,
        mlp_up=SplitTensors((f"{mlp}.gate_proj", f"{mlp}.up_proj")),
        mlp_down=f"{mlp}.down_proj",
        extra={**NAMES.extra, "router": router, **extra},
        experts=f"{mlp}.experts.{{e}}.",
        expert_up=SplitTensors(("gate_proj", "up_proj")),
        expert_down="down_proj",
        shared_up=SplitTensors((f"{shared}.gate_proj", f"{shared}.up_proj")),
        shared_down=f"{shared}.down_proj",
    )


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
    return RouterSpec(
        score="sigmoid",
        correction_bias=True,
        num_groups=config.size("n_group", 1),
        top_groups=config.size("topk_group", 1),
        normalize=config.flag("norm_topk_prob"),
        min_normalizer=MIN_NORMALIZER,
        scale=config.number("routed_scaling_factor", 1.0),
    )


def read_experts(
    config: ConfigReader, router: RouterSpec, size_key: str = "moe_intermediate_size"
) -> MoeSpec:
    """Read experts of one size. A shared expert is as wide as `num_shared_experts` of them."""
    mlp = read_mlp(config, size_key)
    num_shared = config.integer("num_shared_experts", 0)
    return MoeSpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        mlp=replace(mlp, bias=False),
        router=router,
        shared=replace(mlp, size=num_shared * mlp.size) if num_shared else None,
    )


def put_experts(
    layers: Iterable[LayerSpec], moe: MoeSpec, is_sparse: Callable[[int], bool]
) -> list[LayerSpec]:
    """Replace the MLP of every layer i with `is_sparse(i)` by experts."""
    return [replace(layer, mlp=moe) if is_sparse(i) else layer for i, layer in enumerate(layers)]


def read_sparse_layers(
    config: ConfigReader, is_sparse_by_default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Return which layers have experts: from `mlp_layer_types` if present, else by the rule."""
    return config.layer_choices("mlp_layer_types", IS_SPARSE, is_sparse_by_default)
