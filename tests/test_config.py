"""Options are flags, variables and keyword arguments at once; defaults are resolved once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from bloomery.cli import build_config, build_parser
from bloomery.config import (
    EngineConfig,
    EnginePlan,
    ServerConfig,
    cache_directory,
    child_environment,
    flag_name,
    option_fields,
    read_config_file,
    read_environment,
    resolve_plan,
    use_cache_directory,
)
from bloomery.engine.adapter_catalog import parse_lora_modules
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


def test_adapters_are_listed_by_one_flag_or_several(tmp_path: Path) -> None:
    entry = '{"name": "c", "path": "/c", "base_model_name": "m"}'
    flags = ["--lora-modules", "a=/a", "b=/b", "--lora-modules", entry, "--lora-allow", "org/*"]
    args = build_parser("serve").parse_args(["serve", "model", *flags])
    config = build_config(args, ServerConfig)
    assert config.implies_lora
    modules = parse_lora_modules(config.lora_modules)
    assert modules == [("a", "/a"), ("b", "/b"), ("c", "/c")]
    assert config.split_list(config.lora_allow) == ("org/*",)
    values, _ = read_environment({"BLOOMERY_LORA_MODULES": f"a=/a, b=/b,{entry}"}, ServerConfig)
    assert parse_lora_modules(values["lora_modules"]) == modules
    path = tmp_path / "bloomery.toml"
    path.write_text('lora-modules = {a = "/a", b = "/b", c = "/c"}')
    values = read_config_file(str(path), ServerConfig)
    assert parse_lora_modules(values["lora_modules"]) == modules


def test_host_memory_holds_at_least_the_adapters_of_the_device() -> None:
    assert resolve_for(EngineConfig(max_loras=100)).max_cpu_loras == 100
    with pytest.raises(ConfigError, match="max_cpu_loras 4 is less than max_loras 8"):
        resolve_for(EngineConfig(max_cpu_loras=4))


def test_parallel_sizes_have_short_flags() -> None:
    args = build_parser("generate").parse_args(["generate", "--tp", "2", "--pp", "3"])
    config = build_config(args)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (2, 3)


def test_the_model_may_be_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOOMERY_MODEL", "org/name")
    assert build_config(build_parser("serve").parse_args(["serve"])).model == "org/name"
    assert build_config(build_parser("serve").parse_args(["serve", "other"])).model == "other"


def test_help_names_defaults_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser("serve").parse_args(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "port to listen on; default: 8000 [BLOOMERY_PORT]" in text
    assert "capture decode steps as CUDA graphs; default: on [BLOOMERY_CUDA_GRAPHS]" in text
    for field in option_fields(EngineConfig, ServerConfig):
        assert f"[BLOOMERY_{field.name.upper()}]" in text


CONFIG_FILE = """
model = "org/name"
max-model-len = 512
prefix_cache = false
port = 8123
cors-origins = ["https://a.org", "https://b.org"]

[limits]
requests = 7
"""


def test_a_file_holds_the_options_of_engine_and_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bloomery.toml"
    path.write_text(CONFIG_FILE)
    args = build_parser("serve").parse_args(["serve", "--config", str(path), "--port", "9000"])
    config = build_config(args)
    assert (config.model, config.max_model_len, config.prefix_cache) == ("org/name", 512, False)
    server_config = build_config(args, ServerConfig)
    assert server_config.port == 9000, "a flag takes precedence"
    assert server_config.cors_origins == "https://a.org,https://b.org"
    assert server_config.limits == "requests=7"
    monkeypatch.setenv("BLOOMERY_CONFIG", str(path))
    monkeypatch.setenv("BLOOMERY_MAX_MODEL_LEN", "256")
    config = build_config(build_parser("generate").parse_args(["generate"]))
    assert (config.model, config.max_model_len) == ("org/name", 256)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length = 5", "no option 'max-model-length'; did you mean max-model-len?"),
        ("port = 'http'", "port must be a whole number, not 'http'"),
        ("port = [1, 2]", "port must be a text, a number"),
        ("port 5", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bloomery.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_config_file(str(path), ServerConfig)
    assert message in str(raised.value) and str(path) in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config_file(str(tmp_path / "absent"))


def test_ports_and_certificates_are_checked() -> None:
    with pytest.raises(ConfigError, match="port must be at most 65535, not 80000"):
        ServerConfig(port=80000)
    with pytest.raises(ConfigError, match="both ssl_certfile and ssl_keyfile"):
        ServerConfig(ssl_certfile="cert.pem")


def test_caches_go_to_the_folder_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOOMERY_CACHE_DIR", raising=False)
    monkeypatch.setattr("os.environ", dict(os.environ))
    asked = tmp_path / "caches"
    assert use_cache_directory(str(asked)) == cache_directory() == asked
    assert os.environ["TRITON_CACHE_DIR"] == str(asked / "triton")
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(ConfigError, match="cannot be written; name a folder that can"):
        use_cache_directory(str(occupied / "below"))


def test_without_a_writable_home_caches_are_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))
    os.environ.pop("BLOOMERY_CACHE_DIR", None)
    home = tmp_path / "home"
    home.write_text("")  # no folder can be created below a file
    monkeypatch.setattr(Path, "home", lambda: home)
    folder = use_cache_directory(None)
    assert folder.parent == Path(tempfile.gettempdir())
    assert folder.stat().st_mode & 0o077 == 0, "other users must not be able to write there"
    assert cache_directory() == folder


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


def test_threads_of_torch_sleep_soon_in_children_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert int(child_environment()["GOMP_SPINCOUNT"]) < 100_000
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in child_environment()
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert child_environment()["GOMP_SPINCOUNT"] == "7"
