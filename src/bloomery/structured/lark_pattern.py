"""From a Lark grammar without recursion to one pattern that matches the same texts.

A custom tool takes text that a grammar describes, but models write that text inside a call, mostly
as a JSON string. As a pattern it becomes a part of the tool's JSON schema, and llguidance knows how
JSON writes what a pattern matches.
"""

from __future__ import annotations

import json
import re

from bloomery.errors import InvalidRequest

MAX_PATTERN_LENGTH = 1 << 20
MAX_RULE_DEPTH = 100
# Lark's library.
COMMON_TERMINALS = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": "//[^\\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_TOKEN = re.compile(
    r"""
    %import\s+common\.(?P<imported>\w+)(?:[ ]*->[ ]*(?P<renamed>\w+))?
    | (?P<blank>\s+ | //[^\n]* | \#[^\n]* | ->[ ]*\w+)
    | [?!]?(?P<rule>\w+)[ ]*:
    | (?P<name>[A-Za-z_]\w*)
    | "(?P<first>[^"\\])"\.\."(?P<last>[^"\\])"
    | (?P<text>"(?:[^"\\]|\\.)*")(?P<text_flag>i?)
    | /(?P<pattern>(?:[^/\\\n]|\\.)+)/(?P<flags>\w*)
    | (?P<operator>[|()\[\]*+?] | \{\d*,?\d*\})
    | ~[ ]*(?P<least>\d+)(?:\.\.(?P<most>\d+))?
    """,
    re.VERBOSE,
)
_OPERATORS = {"(": "(?:", "[": "(?:", "]": ")?"}  # others are the same
# In patterns of JSON Schema these are about ASCII.
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}"
_UNICODE_ESCAPES = {
    r"\d": r"\p{Nd}",
    r"\D": r"\P{Nd}",
    r"\w": f"[{_WORD}]",
    r"\W": f"[^{_WORD}]",
}

LarkRules = dict[str, list[re.Match[str]]]  # the tokens of each rule


def lark_to_pattern(lark: str) -> str:
    """Return the pattern of a valid grammar. Raises InvalidRequest if there can be none."""
    return expand_rule("start", read_rules(lark), ())


def read_rules(lark: str) -> LarkRules:
    rules: LarkRules = {}
    rule = ""
    place = 0
    while place < len(lark):
        token = _TOKEN.match(lark, place)
        if token is None:
            text = lark[place:].split()[0][:20]
            raise InvalidRequest(f"{text!r} cannot be used in the grammar of a custom tool")
        place = token.end()
        if token["rule"]:
            rule = token["rule"]
            rules[rule] = []
        elif token["imported"]:
            rules[token["renamed"] or token["imported"]] = [token]
        elif not token["blank"]:
            rules[rule].append(token)
    return rules


def expand_rule(rule: str, rules: LarkRules, outer: tuple[str, ...]) -> str:
    """Return the pattern of a rule, in which the rules that it refers to are written out."""
    if rule in outer:
        raise InvalidRequest(f"the rule {rule!r} is circular: it refers to itself")
    pattern = ""
    for token in rules[rule]:
        if token["name"]:
            pattern += expand_rule(token["name"], rules, (*outer, rule))
        else:
            pattern += write_token(token)
        if len(pattern) > MAX_PATTERN_LENGTH or len(outer) > MAX_RULE_DEPTH:
            raise InvalidRequest("the grammar is too large when its rules are written out")
    return f"(?:{pattern})"


def write_token(token: re.Match[str]) -> str:
    if token["imported"]:
        if token["imported"] not in COMMON_TERMINALS:
            raise InvalidRequest(f"common.{token['imported']} is not known")
        return COMMON_TERMINALS[token["imported"]]
    if token["first"]:
        return f"[{re.escape(token['first'])}-{re.escape(token['last'])}]"
    if token["text"]:
        text = json.loads(token["text"], strict=False)
        return f"(?{token['text_flag']}:{re.escape(text)})"
    if token["pattern"]:
        pattern = re.sub(r"\\.", _use_unicode, token["pattern"])
        return f"(?{token['flags']}:{pattern})"
    if token["least"]:
        return f"{{{token['least']},{token['most'] or token['least']}}}"
    return _OPERATORS.get(token["operator"], token["operator"])


def _use_unicode(escape: re.Match[str]) -> str:
    return _UNICODE_ESCAPES.get(escape[0], escape[0])
