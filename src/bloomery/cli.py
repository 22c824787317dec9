"""The command line: one verb a command, flags derived from config. Torch is imported only once there is work to do."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from bloomery import __version__
from bloomery.config import Config, Options, ServerConfig, from_environment, options, parse
from bloomery.errors import BloomeryError
from bloomery.sampling import SamplingParams

CHAT_HELP = """\
  /reset          forget the conversation
  /system TEXT    set the system prompt and start anew
  /help           this list
  Ctrl-C stops an answer, Ctrl-D ends the chat."""
# What a model writes must not drive the terminal: control characters other than newline and tab are dropped.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser(next(iter(arguments), None)).parse_args(arguments)
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


# ---- flags -------------------------------------------------------------------------------------------


def parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """Of all commands; where a wanted one is among them, of that alone: the modules of the others are not imported."""
    top = argparse.ArgumentParser(
        prog="bloomery",
        description="Run open large language models. Without MODEL: the embedded SmolLM2-135M-Instruct.",
        epilog="Every model flag is also a variable: --max-model-len is BLOOMERY_MAX_MODEL_LEN.",
    )
    top.add_argument("--version", action="version", version=f"bloomery {__version__}")
    verbs = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add in COMMANDS.items():
        if name == wanted or wanted not in COMMANDS:
            add(verbs, name)
    return top


def generate_command(verbs: Any, name: str) -> None:
    made = verb(verbs, name, generate, "complete a prompt and exit")
    made.add_argument("-p", "--prompt", help="text to complete; default: standard input")
    made.add_argument(
        "--chat", action="store_true", help="put the prompt through the model's chat template"
    )
    sampling_flags(made)


def serve_command(verbs: Any, name: str) -> None:
    verb(verbs, name, serve, "serve a model over HTTP, with a web page", ServerConfig)


def chat_command(verbs: Any, name: str) -> None:
    made = verb(verbs, name, chat, "talk to a model in the terminal")
    made.add_argument("--system", help="system prompt")
    sampling_flags(made)


def profile_command(verbs: Any, name: str) -> None:
    from bloomery.tools import profile

    profile.flags(verb(verbs, name, profiled, "show where a step's time goes, by torch's profiler"))


def instrument(module: str, help: str) -> Callable[[Any, str], None]:
    """A command that measures or foretells: a module with `flags` of its own, and `run`."""

    def add(verbs: Any, name: str) -> None:
        found = import_module(module)
        made: argparse.ArgumentParser = verbs.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + "."
        )
        made.set_defaults(run=found.run)
        found.flags(made)

    return add


def verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, *more: Options
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = verbs.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + "."
    )
    made.set_defaults(run=run)
    made.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, .gguf file or Hub id; default: the embedded model",
    )
    groups: dict[str, Any] = {}
    for field in options(*more, Config):
        group = groups.setdefault(field.metadata["group"], None) or made.add_argument_group(
            field.metadata["group"]
        )
        groups[field.metadata["group"]] = group
        flag = "--" + field.name.replace("_", "-")
        about = {"dest": field.name, "default": None, "help": field.metadata["help"]}
        if field.metadata["kind"] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **about)
        else:
            group.add_argument(flag, metavar=metavar(field), **about)
    return made


def metavar(field: Any) -> str:
    choices = field.metadata["choices"]
    return (
        "|".join(choices) if choices else {int: "N", float: "X"}.get(field.metadata["kind"], "TEXT")
    )


def sampling_flags(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("Sampling")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        metavar="N",
        help="longest answer; default: the room there is",
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


def configuration(args: argparse.Namespace, kind: Options = Config) -> Any:
    """Flags over variables over defaults."""
    values, warnings = from_environment(of=kind)
    if kind is Config:
        values["model"] = args.model
        for warning in warnings:
            logging.warning(warning)
    for field in options(kind):
        given = getattr(args, field.name)
        if given is not None:
            flag = f"--{field.name.replace('_', '-')}"
            values[field.name] = parse(field, given, flag) if isinstance(given, str) else given
    return kind(**values)


def sampling(args: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
        "stop",
    )
    return replace(
        default, **{name: value for name in names if (value := getattr(args, name)) is not None}
    )


# ---- commands ----------------------------------------------------------------------------------------


def load(args: argparse.Namespace, **more: Any) -> Any:
    from bloomery.llm import LLM

    config = configuration(args)
    wishes = {
        field.name: getattr(config, field.name)
        for field in options()
        if field.name != "prefix_cache"
    }
    return LLM(
        config.model, enable_prefix_caching=config.prefix_cache, progress=True, **wishes, **more
    )


def serve(args: argparse.Namespace) -> int:
    from bloomery.start import start

    return start(configuration(args), configuration(args, ServerConfig))


def generate(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    llm = load(args)
    asked = llm.front.conversation([{"role": "user", "content": prompt}]) if args.chat else prompt
    for piece in llm.stream(asked, sampling(args, llm.default_params)):
        show(piece.text)
    print()
    return 0


def profiled(args: argparse.Namespace) -> int:
    from bloomery.tools import profile

    return profile.run(load(args, skip_tokenizer_init=True), args)


def chat(args: argparse.Namespace) -> int:
    llm = load(args)
    params = sampling(args, llm.default_params)
    print(f"{llm.front.stack.plan.name}. Type a message; /help lists what else you can do.")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    for line in lines():
        command, _, rest = line.partition(" ")
        if command in ("/reset", "/system"):
            opening = (
                [{"role": "system", "content": rest}] if command == "/system" and rest else opening
            )
            messages = list(opening)
            print("A new conversation.")
        elif command == "/help":
            print(CHAT_HELP)
        elif line.strip():
            answer(llm, messages, line, params)
    return 0


def lines() -> Iterator[str]:
    """What a person types, with editing and history where the terminal has them."""
    prompt = "\n> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # importing it is what gives input() editing and history
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def answer(llm: Any, messages: list[dict[str, str]], text: str, params: SamplingParams) -> None:
    """Ask, stream, remember. Ctrl-C keeps what was said so far; an error leaves the conversation as it was."""
    asked = [*messages, {"role": "user", "content": text}]
    said = ""
    tokens = 0
    begun = time.monotonic()
    first = 0.0
    try:
        stream = llm.stream(llm.front.conversation(asked), params)
        try:
            for piece in stream:
                first = first or time.monotonic() - begun
                said = said + piece.text
                tokens = tokens + len(piece.token_ids)
                show(piece.text)
        except KeyboardInterrupt:
            stream.close()
    except BloomeryError as error:
        print(f"bloomery: {error}", file=sys.stderr)
        return
    messages[:] = [*asked, {"role": "assistant", "content": said}]
    speed = (tokens - 1) / max(time.monotonic() - begun - first, 1e-9)
    print()
    if sys.stdout.isatty():
        print(
            f"\x1b[2m{tokens} tokens, first after {first * 1000:.0f} ms, {speed:.0f} tokens/s\x1b[0m"
        )


def show(text: str) -> None:
    sys.stdout.write(CONTROLS.sub("", text))
    sys.stdout.flush()


COMMANDS: Mapping[str, Callable[[Any, str], None]] = {
    "generate": generate_command,
    "serve": serve_command,
    "chat": chat_command,
    "plan": instrument(
        "bloomery.tools.plan.command",
        "what a model needs, where it fits and how fast it could be; reads no weights",
    ),
    "bench": instrument(
        "bloomery.tools.bench.command", "put load on a server and measure what its users would feel"
    ),
    "profile": profile_command,
    "quantize": instrument("bloomery.tools.quantize", "write a checkpoint again in fewer bits"),
}
