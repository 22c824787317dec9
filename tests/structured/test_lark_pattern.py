"""Patterns of grammars: they take exactly what the grammar takes, raw and in a JSON string."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bloomery.structured.grammar import add_input_pattern, regex_to_terminal
from tests.response_format.test_grammar import takes

PATCH = """start: "*** Begin" LF hunk+ "*** End" LF?
hunk: "*** File: " filename LF change_line+
filename: /(.+)/
change_line: ("+" | "-" | " ") /(.*)/ LF -> line
%import common.LF
"""
SUM = """start: term (SP ADD SP term)* -> add
  | term  // a number
term: INT
SP: " "
ADD: "+"
%import common.INT
"""
CASES = [
    (PATCH, '*** Begin\n*** File: a "b".py\n-  x = "\\n"\n+\ty\n*** End\n', True),
    (PATCH, "*** Begin\n*** File: a.py\nx\n*** End\n", False),
    (SUM, "4 + 4 + 1", True),
    (SUM, "4 + ", False),
    (r"start: /(?s:.*)END/", 'a\n"b" END', True),
    (r"start: /.*END/", 'a\n"b" END', False),
    (r"start: /[^a]+\//", 'b\n"\\/', True),
    (r"start: /\w+\s\d{2,3}/", "ab\n12", True),
    (r"start: /\p{L}+/", "é", True),
    ('start: "A\\tB"i', "a\tb", True),
    ("start: WORDS WS\nWORDS: /a+/\n%import common.WS", "aa \n", True),
    (r"start: /\w+\D/", "é!", True),
    ('start: "a".."c" ["-"] "x"~2..3', "bxx", True),
    ('start: "a".."c" ["-"] "x"~2..3', "d-xx", False),
    ("start: INT -> number\n%import common.SIGNED_NUMBER -> INT", "-1.5e3", True),
]


def custom_tool() -> dict[str, Any]:
    return {"type": "object", "properties": {"input": {"type": "string"}}}


@pytest.mark.parametrize(("lark", "text", "is_valid"), CASES)
def test_the_same_texts_match(lark: str, text: str, is_valid: bool) -> None:
    tool = custom_tool()
    assert add_input_pattern(tool, lark) == ()
    string = tool["properties"]["input"]
    assert takes(lark, text) == is_valid
    assert takes(f"start: {regex_to_terminal(string['pattern'])}", text) == is_valid
    quoted = json.dumps(text, ensure_ascii=False)
    assert takes(f"start: %json {json.dumps(string)}", quoted) == is_valid


DOUBLED = [f"r{level}: r{level + 1} r{level + 1}\n" for level in range(30)]
NESTED = [f"r{level}: r{level + 1}\n" for level in range(200)]


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        ('start: "(" start ")" | "x"', "circular"),
        ('start: /.*/ "x"\n%ignore " "', "%ignore"),
        ("start: %json {}", "%json"),
        ("start: %lark {\nstart: /a/\n}", "%lark"),
        ("start: (", "not valid Lark"),
        ("start: r0\n" + "".join(DOUBLED) + 'r30: "a"\n', "too large"),
        ("start: r0\n" + "".join(NESTED) + 'r200: "a"\n', "too large"),
    ],
)
def test_what_cannot_be_enforced_is_a_warning(lark: str, reason: str) -> None:
    tool = custom_tool()
    (warning,) = add_input_pattern(tool, lark)
    assert reason in warning
    assert tool == custom_tool()
