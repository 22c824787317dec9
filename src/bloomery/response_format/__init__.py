"""How a model writes reasoning, content and tool calls: found once, then parsed and constrained.

A ResponseFormat is data. It is found at start (lookup.py), and two things are made of it: an
incremental parser for answers (parser.py) and a grammar that constrains them (grammar.py).
"""

from bloomery.response_format.format import (
    ResponseFormat,
    ToolFunction,
    load_response_format,
    parse_response_format,
)
from bloomery.response_format.grammar import build_response_grammar
from bloomery.response_format.lookup import (
    FormatLookup,
    find_response_format,
    template_reasoning_options,
)
from bloomery.response_format.parser import ResponseEvent, ResponseParser

__all__ = [
    "FormatLookup",
    "ResponseEvent",
    "ResponseFormat",
    "ResponseParser",
    "ToolFunction",
    "build_response_grammar",
    "find_response_format",
    "load_response_format",
    "parse_response_format",
    "template_reasoning_options",
]
