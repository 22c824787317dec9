"""Flags, variables and keyword arguments are one thing; defaults are resolved once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.cli import configuration, parser
from bloomery.config import (
    Config,
    Plan,
    ServerConfig,
    child_environment,
    from_environment,
    options,
    resolve,
)
from bloomery.errors import ConfigError


def resolved(config: Config, device: str = "cpu", context: int = 4096) -> Plan:
    return resolve(
        config, name="m", path="p", kind="folder", dtype="bfloat16", device=device, context=context
    )


def test_every_option_is_a_flag_and_a_variable() -> None:
    for field in options():
        sample = {
            int: "7",
            float: "0.5",
            bool: "false",
            str: (field.metadata["choices"] or ["word"])[-1],
        }
        text = sample[field.metadata["kind"]]
        by_variable, warnings = from_environment({f"BLOOMERY_{field.name.upper()}": text})
        assert not warnings
        flag = "--" + field.name.replace("_", "-")
        given = [f"--no{flag[1:]}"] if field.metadata["kind"] is bool else [flag, text]
        by_flag = getattr(configuration(parser().parse_args(["generate", *given])), field.name)
        assert by_variable[field.name] == by_flag
        assert field.metadata["help"]


def test_a_variable_nobody_reads_is_named_with_the_nearest() -> None:
    values, warnings = from_environment({"BLOOMERY_MAX_MODEL_LENGTH": "5", "HOME": "x"})
    assert values == {}
    assert warnings == [
        "BLOOMERY_MAX_MODEL_LENGTH has no meaning; did you mean BLOOMERY_MAX_MODEL_LEN?"
    ]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is not one of auto, float32, float16, bfloat16"),
        ({"max_num_seqs": 0}, "max_num_seqs must be positive, not 0"),
        ({"memory": 1.5}, "memory is a share of the device, at most 1, not 1.5"),
        ({"kv_cache_gib": float("nan")}, "kv_cache_gib must be positive"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(wish: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**wish)


def test_a_variable_of_the_wrong_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="BLOOMERY_THREADS must be a whole number, not 'two'"):
        from_environment({"BLOOMERY_THREADS": "two"})
    with pytest.raises(
        ConfigError, match="BLOOMERY_PREFIX_CACHE must be true or false, not 'maybe'"
    ):
        from_environment({"BLOOMERY_PREFIX_CACHE": "maybe"})


def test_defaults_follow_the_device() -> None:
    laptop = resolved(Config())
    card = resolved(Config(), device="cuda")
    assert (laptop.dtype, card.dtype) == ("float32", "bfloat16")
    assert laptop.depth == 1 < card.depth
    assert laptop.max_length == 4096 and not laptop.length_is_wish
    assert laptop.threads >= 1


def test_a_length_beyond_the_model_is_refused_with_the_number_that_works() -> None:
    with pytest.raises(ConfigError, match="ask for at most 4096"):
        resolved(Config(max_model_len=5000))
    assert resolved(Config(max_model_len=100)).length_is_wish


def test_keys_may_stand_in_a_file_and_children_do_not_inherit_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    assert ServerConfig(api_key=f"a, @{path}").keys == ("a", "first", "second")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        _ = ServerConfig(api_key="@/nowhere/to/be/found").keys
    monkeypatch.setenv("BLOOMERY_API_KEY", "secret")
    monkeypatch.setenv("BLOOMERY_PORT", "1")
    assert (
        "secret" not in child_environment().values() and child_environment()["BLOOMERY_PORT"] == "1"
    )
