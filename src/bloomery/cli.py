"""The `bloomery` command line: one subcommand per task, flags derived from the configuration.

Torch and the modules of a command are imported only when that command runs, so that
`bloomery --help` is quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from bloomery import __version__
from bloomery.config import (
    ConfigClass,
    EngineConfig,
    ServerConfig,
    flag_name,
    option_fields,
    parse_option,
    read_environment,
)
from bloomery.errors import BloomeryError
from bloomery.sampling import SamplingParams

CHAT_HELP = """\
  /reset          forget the conversation
  /system TEXT    set the system prompt and start a new conversation
  /help           this list
  Ctrl-C stops an answer, Ctrl-D ends the chat."""
# Control characters other than newline and tab. They are dropped from the model's output, which
# must not be able to drive the terminal.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
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
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
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


# ---- flags ---------------------------------------------------------------------------------------


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of `command` alone, or of all commands when it is not one of them.

    Building one command's parser does not import the modules of the others.
    """
    parser = argparse.ArgumentParser(
        prog="bloomery",
        description="Run open large language models. Without MODEL: the embedded "
        "SmolLM2-135M-Instruct.",
        epilog="Every model flag is also a variable: --max-model-len is BLOOMERY_MAX_MODEL_LEN.",
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
    add_sampling_flags(parser)


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
        parser = add_command(subparsers, name, module.run_command, help_text)
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
        help="folder, .gguf file or Hub id; default: the embedded model",
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
        "help": field.metadata["help"],
    }
    if field.metadata["kind"] is bool:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        settings["metavar"] = flag_metavar(field)
    group.add_argument(*flags, **settings)


def flag_metavar(field: dataclasses.Field[Any]) -> str:
    choices = field.metadata["choices"]
    if choices:
        return "|".join(choices)
    return {int: "N", float: "X"}.get(field.metadata["kind"], "TEXT")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sampling")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        metavar="N",
        help="most output tokens; default: what fits the context",
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
    """Build a configuration: flags take precedence over variables, variables over defaults."""
    values, warnings = read_environment(of=config_class)
    if config_class is EngineConfig:
        values["model"] = args.model
        for warning in warnings:
            logging.warning(warning)
    for field in option_fields(config_class):
        value = getattr(args, field.name)
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
    for delta in llm.stream(prompt, build_sampling_params(args, llm.default_params)):
        write_text(delta.text)
    print()
    return 0


def run_profile(args: argparse.Namespace) -> int:
    from bloomery.tools import profile

    return profile.run_profile(load_llm(args, skip_tokenizer_init=True), args)


def run_chat(args: argparse.Namespace) -> int:
    """Chat in the terminal until the input ends. Lines that begin with / are commands."""
    llm = load_llm(args)
    params = build_sampling_params(args, llm.default_params)
    print(f"{llm.plan.name}. Type a message; /help lists the commands.")
    system_prompt = args.system
    messages = start_conversation(system_prompt)
    for line in read_lines():
        command, _, argument = line.partition(" ")
        if command in ("/reset", "/system"):
            if command == "/system" and argument:
                system_prompt = argument
            messages = start_conversation(system_prompt)
            print("A new conversation.")
        elif command == "/help":
            print(CHAT_HELP)
        elif line.strip():
            answer_message(llm, messages, line, params)
    return 0


def start_conversation(system_prompt: str | None) -> list[dict[str, str]]:
    if not system_prompt:
        return []
    return [{"role": "system", "content": system_prompt}]


def read_lines() -> Iterator[str]:
    """Yield the lines that the user types, with line editing and history in a terminal."""
    prompt = "\n> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  importing it gives input() editing and history
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def answer_message(
    llm: Any, messages: list[dict[str, str]], text: str, params: SamplingParams
) -> None:
    """Stream the model's answer to `text` and append both to the conversation.

    Ctrl-C ends the answer early and keeps its text. An error leaves `messages` unchanged.
    """
    conversation = [*messages, {"role": "user", "content": text}]
    answer = ""
    num_tokens = 0
    start_time = time.monotonic()
    ttft_seconds = 0.0
    try:
        stream = llm.stream(llm.build_chat_prompt(conversation), params)
        try:
            for delta in stream:
                ttft_seconds = ttft_seconds or time.monotonic() - start_time
                answer += delta.text
                num_tokens += len(delta.token_ids)
                write_text(delta.text)
        except KeyboardInterrupt:
            stream.close()
    except BloomeryError as error:
        print(f"bloomery: {error}", file=sys.stderr)
        return
    messages[:] = [*conversation, {"role": "assistant", "content": answer}]
    decode_seconds = time.monotonic() - start_time - ttft_seconds
    tokens_per_second = (num_tokens - 1) / max(decode_seconds, 1e-9)
    print()
    if sys.stdout.isatty():
        ttft_ms = ttft_seconds * 1000
        summary = f"{num_tokens} tokens, TTFT {ttft_ms:.0f} ms, {tokens_per_second:.0f} tokens/s"
        print(f"\x1b[2m{summary}\x1b[0m")


def write_text(text: str) -> None:
    """Write the model's output to the terminal, without control characters."""
    sys.stdout.write(CONTROL_CHARACTERS.sub("", text))
    sys.stdout.flush()


COMMANDS: Mapping[str, Callable[[Subparsers, str], None]] = {
    "generate": add_generate_command,
    "serve": add_serve_command,
    "chat": add_chat_command,
    "plan": tool_command(
        "bloomery.tools.plan.command",
        "estimate what a model needs, where it fits and how fast it runs; reads no weights",
    ),
    "bench": tool_command(
        "bloomery.tools.bench.command",
        "put load on a server and measure TTFT, ITL, TPOT and throughput",
    ),
    "profile": add_profile_command,
    "quantize": tool_command(
        "bloomery.tools.quantize", "write a checkpoint again in fewer bits per weight"
    ),
}
