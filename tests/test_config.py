"""Options are flags, variables and keyword arguments at once; defaults are resolved once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.cli import build_config, build_parser
from bloomery.config import (
    EngineConfig,
    EnginePlan,
    ServerConfig,
    child_environment,
    flag_name,
    option_fields,
    read_environment,
    resolve_plan,
)
from bloomery.errors import ConfigError


def resolve_for(config: EngineConfig, device: str = "cpu", context: int = 4096) -> EnginePlan:
    return resolve_plan(
        config, name="m", path="p", kind="folder", dtype="bfloat16", device=device, context=context
    )


def test_every_option_is_a_flag_and_a_variable() -> None:
    for field in option_fields():
        kind = field.metadata["kind"]
        samples = {
            int: "7",
            float: "0.5",
            bool: "false",
            str: (field.metadata["choices"] or ["word"])[-1],
        }
        text = samples[kind]
        by_variable, warnings = read_environment({f"BLOOMERY_{field.name.upper()}": text})
        assert not warnings
        flag = flag_name(field)
        arguments = [f"--no{flag[1:]}"] if kind is bool else [flag, text]
        config = build_config(build_parser().parse_args(["generate", *arguments]))
        assert by_variable[field.name] == getattr(config, field.name)
        assert field.metadata["help"]


def test_parallel_sizes_have_short_flags() -> None:
    args = build_parser("generate").parse_args(["generate", "--tp", "2", "--pp", "3"])
    config = build_config(args)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (2, 3)


def test_an_unknown_variable_is_reported_with_the_closest_name() -> None:
    values, warnings = read_environment({"BLOOMERY_MAX_MODEL_LENGTH": "5", "HOME": "x"})
    assert values == {}
    assert warnings == [
        "BLOOMERY_MAX_MODEL_LENGTH has no meaning; did you mean BLOOMERY_MAX_MODEL_LEN?"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is not one of auto, float32, float16, bfloat16"),
        ({"max_num_seqs": 0}, "max_num_seqs must be positive, not 0"),
        (
            {"gpu_memory_utilization": 1.5},
            "gpu_memory_utilization is a share of the device, at most 1, not 1.5",
        ),
        ({"kv_cache_gib": float("nan")}, "kv_cache_gib must be positive"),
    ],
)
def test_a_wrong_value_is_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_a_variable_of_the_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="BLOOMERY_THREADS must be a whole number, not 'two'"):
        read_environment({"BLOOMERY_THREADS": "two"})
    with pytest.raises(
        ConfigError, match="BLOOMERY_PREFIX_CACHE must be true or false, not 'maybe'"
    ):
        read_environment({"BLOOMERY_PREFIX_CACHE": "maybe"})


def test_defaults_follow_the_device() -> None:
    cpu = resolve_for(EngineConfig())
    gpu = resolve_for(EngineConfig(), device="cuda")
    assert (cpu.dtype, gpu.dtype) == ("float32", "bfloat16")
    assert cpu.steps_in_flight == 1 < gpu.steps_in_flight
    assert cpu.max_model_len == 4096 and not cpu.max_model_len_is_fixed
    assert cpu.threads >= 1


def test_a_context_beyond_the_model_is_refused_with_the_longest() -> None:
    with pytest.raises(ConfigError, match="ask for at most 4096"):
        resolve_for(EngineConfig(max_model_len=5000))
    assert resolve_for(EngineConfig(max_model_len=100)).max_model_len_is_fixed


def test_api_keys_can_be_in_a_file_and_children_do_not_inherit_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    assert ServerConfig(api_key=f"a, @{path}").api_keys == ("a", "first", "second")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        _ = ServerConfig(api_key="@/nowhere/to/be/found").api_keys
    monkeypatch.setenv("BLOOMERY_API_KEY", "secret")
    monkeypatch.setenv("BLOOMERY_PORT", "1")
    assert "secret" not in child_environment().values()
    assert child_environment()["BLOOMERY_PORT"] == "1"
