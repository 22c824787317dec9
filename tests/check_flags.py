"""Checks the flags of a command that would start a server, without starting it.

python -m tests.check_flags bloomery serve MODEL --max-model-len 4096
python -m tests.check_flags text-generation-launcher --model-id MODEL
"""

from __future__ import annotations

import sys

from bloomery import cli, launcher
from bloomery.config import EngineConfig, ServerConfig, option_fields, process_environment


def check_bloomery(arguments: list[str]) -> None:
    parsed = cli.build_parser(arguments[0]).parse_args(arguments)
    cli.build_config(parsed)
    cli.build_config(parsed, ServerConfig)


def check_launcher(arguments: list[str]) -> None:
    flag_values = launcher.read_flags(arguments, process_environment())
    known_options = [field.name for field in option_fields(EngineConfig, ServerConfig)]
    values, warnings = launcher.translate_flags(flag_values, known_options)
    EngineConfig(**launcher.build_fields(values, EngineConfig))
    launcher.build_server_config(values)
    if warnings:
        sys.exit("\n".join(warnings))


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program == "bloomery":
        check_bloomery(arguments)
    else:
        check_launcher(arguments)
