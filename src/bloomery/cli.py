"""The `bloomery` command line: one subcommand per task, flags derived from the configuration.

Torch and the modules of a command are imported only when that command runs, so that
`bloomery --help` is quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from bloomery import __version__
from bloomery.config import (
    ConfigClass,
    EngineConfig,
    ServerConfig,
    cache_directory,
    config_file_variable,
    flag_name,
    option_fields,
    parse_option,
    read_config_file,
    read_environment,
    use_cache_directory,
    variable_name,
)
from bloomery.errors import BloomeryError
from bloomery.logs import TerminalHandler
from bloomery.sampling import SamplingParams

SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
)

Subparsers = Any  # argparse's own type for them is private


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: sys.argv) and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = next(iter(arguments), None)
    args = build_parser(command).parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[TerminalHandler()])
    try:
        return int(args.run(args))
    except BloomeryError as error:
        print(f"bloomery: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        print(f"bloomery: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again. Until then it ends the process: see __main__.py."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- flags ---------------------------------------------------------------------------------------


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of `command` alone, or of all commands when it is not one of them.

    Building one command's parser does not import the modules of the others.
    """
    parser = argparse.ArgumentParser(
        prog="bloomery",
        description="Run open large language models. Without MODEL: the embedded "
        "SmolLM2-135M-Instruct.",
        epilog="Every model flag is also a variable and a key of --config FILE: --max-model-len is "
        "BLOOMERY_MAX_MODEL_LEN and max-model-len. Flags take precedence over variables, and "
        "variables over the file.",
    )
    parser.add_argument("--version", action="version", version=f"bloomery {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add_named_command in COMMANDS.items():
        if name == command or command not in COMMANDS:
            add_named_command(subparsers, name)
    return parser


def add_generate_command(subparsers: Subparsers, name: str) -> None:
    parser = add_model_command(subparsers, name, run_generate, "complete a prompt and exit")
    parser.add_argument("-p", "--prompt", help="text to complete; default: standard input")
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt through the model's chat template"
    )
    add_sampling_flags(parser)


def add_serve_command(subparsers: Subparsers, name: str) -> None:
    help_text = "serve a model over HTTP, with a web page"
    add_model_command(subparsers, name, run_serve, help_text, ServerConfig)


def add_chat_command(subparsers: Subparsers, name: str) -> None:
    parser = add_model_command(subparsers, name, run_chat, "talk to a model in the terminal")
    parser.add_argument("--system", help="system prompt")
    add_sampling_flags(parser, max_tokens_default="1024, and /continue goes on")


def add_warm_command(subparsers: Subparsers, name: str) -> None:
    help_text = "fill the cache directory with what a model's start compiles and measures"
    add_model_command(subparsers, name, run_warm, help_text)


def add_profile_command(subparsers: Subparsers, name: str) -> None:
    from bloomery.tools import profile

    help_text = "show where a step's time goes, by torch's profiler"
    parser = add_model_command(subparsers, name, run_profile, help_text)
    profile.add_flags(parser)


def tool_command(module_name: str, help_text: str) -> Callable[[Subparsers, str], None]:
    """Return the function that adds a command of bloomery.tools.

    The command's module has its own `add_flags` and `run_command`.
    """

    def add_tool_command(subparsers: Subparsers, name: str) -> None:
        module = import_module(module_name)

        def run_tool(args: argparse.Namespace) -> int:
            raise_on_interrupt()
            return int(module.run_command(args))

        parser = add_command(subparsers, name, run_tool, help_text)
        module.add_flags(parser)

    return add_tool_command


def add_command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
) -> argparse.ArgumentParser:
    description = help_text[0].upper() + help_text[1:] + "."
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=help_text, description=description
    )
    parser.set_defaults(run=run)
    return parser


def add_model_command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
    *more_configs: ConfigClass,
) -> argparse.ArgumentParser:
    """Add a command with the MODEL argument and a flag for every configuration field."""
    parser = add_command(subparsers, name, run, help_text)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, .gguf file or Hub id; default: the embedded model [BLOOMERY_MODEL]",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file whose keys are the names of flags, and model [BLOOMERY_CONFIG]",
    )
    groups: dict[str, Any] = {}
    for field in option_fields(*more_configs, EngineConfig):
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        add_option_flag(groups[title], field)
    return parser


def add_option_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    """Add the flag of one configuration field.

    Its default is None, so that an environment variable applies where the flag is not given.
    """
    flags = [flag_name(field)]
    if field.metadata["alias"]:
        flags.append(field.metadata["alias"])
    settings: dict[str, Any] = {
        "dest": field.name,
        "default": None,
        "help": option_help(field),
    }
    if field.metadata["kind"] is bool:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        settings["metavar"] = flag_metavar(field)
    if field.metadata["is_list"]:
        settings |= {"action": "extend", "nargs": "+"}
    group.add_argument(*flags, **settings)


def option_help(field: dataclasses.Field[Any]) -> str:
    """The help text of an option with its default, unless the text has it, and its variable."""
    text = field.metadata["help"]
    default = field.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    if default is not None and "default:" not in text:
        text += f"; default: {default}"
    return f"{text} [{variable_name(field)}]"


def flag_metavar(field: dataclasses.Field[Any]) -> str:
    choices = field.metadata["choices"]
    if choices:
        return "|".join(choices)
    return {int: "N", float: "X"}.get(field.metadata["kind"], "TEXT")


def add_sampling_flags(
    parser: argparse.ArgumentParser, max_tokens_default: str = "what fits the context"
) -> None:
    group = parser.add_argument_group("Sampling")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most output tokens; default: {max_tokens_default}",
    )
    group.add_argument(
        "-t", "--temperature", type=float, metavar="X", help="0 is greedy; default: the model's own"
    )
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer here; may be given several times",
    )


def build_config(args: argparse.Namespace, config_class: ConfigClass = EngineConfig) -> Any:
    """Build a configuration.

    Flags take precedence over variables, variables over the configuration file, and that over the
    defaults.
    """
    path = args.config or config_file_variable()
    file_values = read_config_file(path, config_class) if path else {}
    variable_values, warnings = read_environment(of=config_class)
    values = {**file_values, **variable_values}
    if config_class is EngineConfig:
        values["model"] = args.model or values.get("model") or None
        for warning in warnings:
            logging.warning(warning)
    for field in option_fields(config_class):
        value = getattr(args, field.name)
        if isinstance(value, list):
            value = "\n".join(value)
        if isinstance(value, str):
            value = parse_option(field, value, flag_name(field))
        if value is not None:
            values[field.name] = value
    return config_class(**values)


def build_sampling_params(args: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    """Replace the fields of `default` for which a flag was given."""
    flag_values = {name: getattr(args, name) for name in SAMPLING_FIELDS}
    changes = {name: value for name, value in flag_values.items() if value is not None}
    return dataclasses.replace(default, **changes)


# ---- commands ------------------------------------------------------------------------------------


def load_llm(args: argparse.Namespace, **more_options: Any) -> Any:
    """Load the model that the flags describe, as an offline LLM."""
    from bloomery.llm import LLM

    raise_on_interrupt()
    config = build_config(args)
    options = {field.name: getattr(config, field.name) for field in option_fields()}
    options["enable_prefix_caching"] = options.pop("prefix_cache")
    return LLM(config.model, progress=True, **options, **more_options)


def run_serve(args: argparse.Namespace) -> int:
    """Serve the model over HTTP until the process is told to stop."""
    from bloomery.serve_main import prestart_engine_and_serve

    return prestart_engine_and_serve(build_config(args), build_config(args, ServerConfig))


def run_generate(args: argparse.Namespace) -> int:
    """Complete one prompt, from a flag or from standard input, and stream the text."""
    prompt: Any = sys.stdin.read() if args.prompt is None else args.prompt
    llm = load_llm(args)
    if args.chat:
        prompt = llm.build_chat_prompt([{"role": "user", "content": prompt}])
    from bloomery.tools.chat import write_text

    for delta in llm.stream(prompt, build_sampling_params(args, llm.default_params)):
        write_text(delta.text)
    print()
    return 0


def run_warm(args: argparse.Namespace) -> int:
    """Start an engine once, so that later starts find its kernels in the cache directory.

    With --load-format dummy the model's weights are not needed.
    """
    use_cache_directory(build_config(args).cache_dir)
    load_llm(args, skip_tokenizer_init=True)
    print(f"The next start of this model finds its kernels in {cache_directory()}.")
    return 0


def run_profile(args: argparse.Namespace) -> int:
    from bloomery.tools import profile

    return profile.run_profile(load_llm(args, skip_tokenizer_init=True), args)


def run_chat(args: argparse.Namespace) -> int:
    """Chat in the terminal until the input ends."""
    from bloomery.tools import chat

    llm = load_llm(args)
    params = build_sampling_params(args, llm.default_params)
    if build_config(args).model is None and sys.stdout.isatty():
        chat.print_recommendation(args.device or "auto")
    return chat.run_chat(llm, params, args.system)


COMMANDS: Mapping[str, Callable[[Subparsers, str], None]] = {
    "generate": add_generate_command,
    "serve": add_serve_command,
    "run": add_chat_command,
    "chat": add_chat_command,
    "models": tool_command(
        "bloomery.tools.list_models", "list open models, which fit this machine, and their speed"
    ),
    "doctor": tool_command(
        "bloomery.tools.doctor", "check what a server needs on this machine and name remedies"
    ),
    "plan": tool_command(
        "bloomery.tools.plan.command",
        "estimate what a model needs, where it fits and how fast it runs; reads no weights",
    ),
    "bench": tool_command(
        "bloomery.tools.bench.command",
        "put load on a server and measure TTFT, ITL, TPOT and throughput",
    ),
    "warm": add_warm_command,
    "profile": add_profile_command,
    "quantize": tool_command(
        "bloomery.tools.quantize", "write a checkpoint again in fewer bits per weight"
    ),
}
