"""From StructuredOutputs to a Lark grammar for llguidance.

Strict is the default: a schema keyword that cannot be enforced is an error that names the keyword
and its place in the schema. Otherwise such keywords are relaxed and reported as warnings. Runs of
whitespace in JSON are bounded, because some models go on with whitespace until max_tokens.

This module knows no tokens and no tensors. It imports llguidance only when a grammar is made, so a
server whose clients never ask for one does not load the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from bloomery.errors import InvalidRequest
from bloomery.sampling import StructuredOutputs
from bloomery.structured.lark_pattern import lark_to_pattern
from bloomery.structured.structural_tag import quote_text, structural_tag_to_lark

MAX_GRAMMAR_BYTES = 1 << 20  # of a schema or grammar, in UTF-8
MAX_SCHEMA_DEPTH = 100  # nested objects and lists of a schema; llguidance reads at most 128
MAX_WARNINGS = 16
# One space, or a new line and its indentation, which does not mix spaces and tabs.
BOUNDED_WHITESPACE = r" |\r?\n( {0,40}|\t{0,20})"
# The model may choose how it spells forced text in tokens. Otherwise llguidance would tokenize that
# text by calling back into Python, from threads that compute masks.
GRAMMAR_HEADER = '%llguidance {"no_forcing": true}\n'

# Dates and times that exist. llguidance's own patterns allow February 29 in any year and leap
# seconds at any time; a leap second is allowed here only at the end of a day in UTC.
DAY = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
TIME = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)

# Labels of host names. Those of internationalized names ("xn--...") are left out, because a pattern
# cannot tell whether what follows is Punycode.
_LETTER = "[0-9A-Za-z]"
_INNER = "[0-9A-Za-z-]"
_LABEL = (
    f"(?:[0-9A-WYZa-wyz](?:{_INNER}{{0,61}}{_LETTER})?"
    f"|[xX](?:-{_INNER}{{0,60}}{_LETTER}|[0-9A-MO-Za-mo-z](?:{_INNER}{{0,60}}{_LETTER})?"
    f"|[nN](?:{_LETTER}(?:{_INNER}{{0,59}}{_LETTER})?"
    f"|-{_LETTER}(?:{_INNER}{{0,58}}{_LETTER})?)?)?)"
)
HOST = rf"{_LABEL}(?:\.{_LABEL})*"

# Internet addresses. The last 32 bits of an IPv6 address may be written as IPv4. llguidance's own
# pattern does not allow that.
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST_GROUPS = f"(?:{_GROUP}:{_GROUP}|{IPV4})"


def ipv6_pattern() -> str:
    """Return a pattern of addresses with all eight groups, and of those with "::" for some."""
    options = [f"(?:{_GROUP}:){{6}}{_LAST_GROUPS}"]
    for num_after in range(8):  # groups after "::"; at least one group is left out
        num_before = 7 - num_after
        before = f"(?:{_GROUP}(?::{_GROUP}){{0,{num_before - 1}}})?" if num_before else ""
        after = {0: "", 1: _GROUP}.get(num_after, f"(?:{_GROUP}:){{{num_after - 2}}}{_LAST_GROUPS}")
        options.append(f"{before}::{after}")
    return f"(?:{'|'.join(options)})"


# Mail addresses, whose local part may be quoted and whose host may be an address.
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
LOCAL_PART = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})"
IPV6 = ipv6_pattern()
MAIL_HOST = rf"(?:{HOST}|\[{IPV4}\]|\[IPv6:{IPV6}\])"

FORMAT_PATTERNS = {
    "date": f"^{DAY}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DAY}[tT]{TIME}$",
    "hostname": f"^{HOST}$",
    "ipv6": f"^{IPV6}$",
    "email": f"^{LOCAL_PART}@{MAIL_HOST}$",
}
MAX_HOST_LENGTH = 253
# Valid values that the patterns leave out, because exact ones would cost tens of milliseconds or do
# not exist. A model is never allowed to write them, and the client is told.
_LEFT_OUT_TIMES = "leap seconds in other time zones than UTC"
_LEFT_OUT_HOSTS = "internationalized host names (xn--)"
LEFT_OUT_VALUES = {
    "time": _LEFT_OUT_TIMES,
    "date-time": _LEFT_OUT_TIMES,
    "hostname": _LEFT_OUT_HOSTS,
    "email": _LEFT_OUT_HOSTS,
}

# What \s means in ECMAScript, whose patterns JSON Schema uses. In llguidance it has U+0085 instead
# of U+FEFF.
_SPACES = r"\t-\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
_SPACE_ESCAPES = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}

# Keywords whose values are mappings of names to schemas.
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OLD_DRAFT = re.compile(r"json-schema\.org/draft-0[3467]/")
DATA_KEYWORDS = ("enum", "const", "default", "examples", "x-guidance")  # no schemas inside

# Messages of llguidance about JSON schemas, and the keywords they are about.
KEYWORDS_OF_MESSAGE = (
    (re.compile(r"Unimplemented keys: \[(?P<keys>.*?)\]"), ()),
    (re.compile(r"oneOf"), ("oneOf",)),
    (re.compile(r"Unknown format: (?P<value>.*)"), ("format",)),
    (re.compile(r"min/maxProperties"), ("minProperties", "maxProperties")),
    (re.compile(r"patternPropert"), ("patternProperties",)),
    (re.compile(r"Pointer '|Resource '"), ("$ref",)),
    (re.compile(r"regex parse error:\n\s*(?P<value>.*)"), ("pattern", "patternProperties")),
    (re.compile(r"Invalid type: (?P<value>.*)"), ("type",)),
    (re.compile(r" for '(?P<keyword>[A-Za-z$]+)', got "), ()),
)
JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")

# The parts of llguidance's messages about a grammar: the place, an excerpt, an error in a pattern.
_MESSAGE_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_EXCERPT = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
_PATTERN_ERROR = re.compile(r"regex parse error:\n.*\nerror: (?P<reason>[^\n]*)", re.DOTALL)
_FOUND_TOKEN = re.compile(r' \(at ".*', re.DOTALL)
_LOOK_AROUND = re.compile(r"lookarounds not supported yet.*", re.DOTALL)


def to_lark(
    outputs: StructuredOutputs, field: str = "structured_outputs"
) -> tuple[str, tuple[str, ...]]:
    """Return Lark text whose start rule matches the output, and warnings about relaxed keywords.

    Errors are InvalidRequest and name the request field `field`.
    """
    try:
        if outputs.json is not None:
            return json_schema_to_lark(parse_schema(outputs.json), outputs)
        if outputs.json_object:
            return json_schema_to_lark({"type": "object"}, outputs)
        if outputs.regex is not None:
            return f"start: {regex_to_terminal(outputs.regex)}\n", ()
        if outputs.choice is not None:
            return choice_to_lark(outputs.choice), ()
        if outputs.grammar is not None:
            return grammar_to_lark(outputs.grammar), ()
        return tag_to_lark(outputs)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), field) from None


class GrammarCompiler(Protocol):
    """Compiles grammars for the tokens of one model (a TokenVocabulary)."""

    def compile(self, grammar: str) -> Any:
        """Return a matcher of llguidance. Raises InvalidRequest if the grammar is wrong."""
        ...


def compile_grammar(
    outputs: StructuredOutputs | str, vocabulary: GrammarCompiler, field: str
) -> tuple[str, tuple[str, ...]]:
    """Return the grammar that an engine takes, and warnings. `outputs` may be ready Lark text.

    The grammar is compiled and its first mask computed, so that an engine can trust it.
    """
    lark = outputs if isinstance(outputs, str) else ""
    warnings: tuple[str, ...] = ()
    if isinstance(outputs, StructuredOutputs):
        lark, warnings = to_lark(outputs, field)
    grammar = GRAMMAR_HEADER + lark
    try:
        matcher = vocabulary.compile(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(explain_compile_error(str(error), outputs), field) from None
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise InvalidRequest("the grammar allows no output at all: nothing can match it", field)
    return grammar, warnings


def explain_compile_error(message: str, outputs: StructuredOutputs | str) -> str:
    """Explain what only a model's vocabulary shows, such as an unknown special token."""
    start, _, reason = message.partition(": ")
    client_text = "" if isinstance(outputs, str) else outputs.grammar or ""
    place = ""
    if client_text and "::=" not in client_text:
        place = message_place(reason, first_line=GRAMMAR_HEADER.count("\n") + 1)
    return f"{start}: {place}{clean_message(reason)}"


# ---- JSON schema ---------------------------------------------------------------------------------


def parse_schema(schema: Any) -> dict[str, Any]:
    """Return the schema as a dict. It may be given as JSON text; `true` allows any JSON value."""
    parsed = read_json(schema, "JSON schema")
    if parsed is True:
        return {}
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"a JSON schema must be an object, not {json.dumps(parsed)[:40]}")
    return parsed


def read_json(value: Any, what: str) -> Any:
    """Parse JSON text, or check an object. Both are bounded in bytes and in depth."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        check_size(text, what)
        check_depth(text, what)
        parsed = json.loads(text)
        if "\\ud" in text.lower():
            check_size(json.dumps(parsed, ensure_ascii=False), what)
        return parsed
    except (RecursionError, TypeError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"the {what} is not valid JSON: {reason}") from None


def check_size(text: str, what: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"the {what} has half of a surrogate pair: remove it") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the {what} has {num_bytes} bytes, but at most {MAX_GRAMMAR_BYTES} are allowed: "
            "simplify it"
        )


def check_depth(text: str, what: str) -> None:
    """Bound the nesting before a recursive parser sees the text."""
    depth = 0
    for bracket in re.findall(r"[\[{}\]]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(
                f"the {what} is nested deeper than {MAX_SCHEMA_DEPTH} levels: flatten it, "
                "for example with $defs and $ref"
            )


def schema_rule(schema: Mapping[str, Any], outputs: StructuredOutputs) -> str:
    """Return the schema as the body of a Lark rule, with the options for whitespace."""
    whitespace: dict[str, Any] = {"whitespace_pattern": BOUNDED_WHITESPACE}
    if outputs.whitespace_pattern is not None:
        whitespace = {"whitespace_pattern": outputs.whitespace_pattern}
    if outputs.disable_any_whitespace:
        # Separators as most models write them.
        whitespace = {
            "whitespace_flexible": False,
            "item_separator": ", ?",
            "key_separator": ": ?",
        }
    options = schema.get("x-guidance")
    if not isinstance(options, Mapping):
        options = {}
    options = {**whitespace, **options, "lenient": not outputs.strict}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def json_schema_to_lark(
    schema: dict[str, Any], outputs: StructuredOutputs
) -> tuple[str, tuple[str, ...]]:
    """Return the grammar of a schema. Raises InvalidRequest for what cannot be enforced."""
    warnings = prepare_schema(schema, outputs)
    return f"start: {schema_rule(schema, outputs)}\n", warnings


def prepare_schema(schema: dict[str, Any], outputs: StructuredOutputs) -> tuple[str, ...]:
    """Make a schema enforceable, in place, and return warnings about what is not enforced.

    Raises InvalidRequest if that is not possible.
    """
    if outputs.whitespace_pattern:
        check_whitespace_pattern(outputs.whitespace_pattern)
    drop_ignored_keywords(schema)
    left_out = use_exact_formats(schema)
    relaxed: list[str] = []
    while True:
        is_error, messages = validate_lark(f"start: {schema_rule(schema, outputs)}\n")
        if not is_error:
            break
        message = messages[0]
        can_relax = not outputs.strict and len(relaxed) < MAX_WARNINGS
        if not can_relax or not remove_pattern(schema, message, relaxed):
            raise InvalidRequest(explain_schema_error(schema, message, outputs.strict))
    relaxed += [describe_relaxed(schema, message) for message in messages[:MAX_WARNINGS]]
    return tuple(dict.fromkeys([*relaxed, *left_out[:MAX_WARNINGS]]))


def prepare_tool_schema(
    schema: dict[str, Any], strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the parameters of a tool as they can be enforced, and warnings about the others.

    A strict tool must be enforced in full. Of another one at least the names are.
    """
    outputs = StructuredOutputs(json=schema, strict=strict)
    try:
        parsed = parse_schema(schema)
        warnings = prepare_schema(parsed, outputs)
    except InvalidRequest as error:
        if strict:
            raise
        return keep_parameter_names(schema), (f"not enforced: {error}",)
    return parsed, warnings


def add_input_pattern(schema: dict[str, Any], lark: str) -> tuple[str, ...]:
    """Make the only parameter of a custom tool match a grammar; return warnings if it cannot."""
    try:
        pattern = lark_to_pattern(grammar_to_lark(lark))
    except InvalidRequest as error:
        return (f"the grammar is not enforced: {error}",)
    (parameter,) = schema["properties"].values()
    parameter["pattern"] = f"^{pattern}$"
    return ()


def keep_parameter_names(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object schema with the names and simple types of a schema that is wrong."""
    properties = schema.get("properties")
    names: dict[str, Any] = {}
    if isinstance(properties, Mapping):
        for name, value in properties.items():
            kind = value.get("type") if isinstance(value, Mapping) else None
            names[name] = {"type": kind} if kind in JSON_TYPES else {}
    simple: dict[str, Any] = {"type": "object", "properties": names}
    required = schema.get("required")
    if isinstance(required, list):
        simple["required"] = [name for name in required if isinstance(name, str)]
    return simple


def validate_lark(lark: str) -> tuple[bool, list[str]]:
    """Return whether a grammar is wrong, and what llguidance says about it."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar_with_warnings(lark)


def check_whitespace_pattern(pattern: str) -> None:
    try:
        regex_to_terminal(pattern)
    except InvalidRequest as error:
        raise InvalidRequest(f"whitespace_pattern cannot be used: {error}") from None


def remove_pattern(schema: dict[str, Any], message: str, relaxed: list[str]) -> bool:
    """Remove a pattern that is right but not supported, such as look-ahead, and note that."""
    keywords, value = read_message(message)
    place = find_place(schema, keywords, value)
    if "not supported" not in message or place is None or place.keyword != "pattern":
        return False
    relaxed.append(describe_relaxed(schema, message))
    del place.schema["pattern"]
    return True


def describe_relaxed(schema: dict[str, Any], message: str) -> str:
    keywords, value = read_message(message)
    place = describe_place(schema, keywords, value)
    return f"not enforced: {place} ({clean_message(message)})"


def drop_ignored_keywords(schema: dict[str, Any]) -> None:
    """Drop, in place, the keywords beside a `$ref` that drafts up to 7 ignore."""
    if not _OLD_DRAFT.search(str(schema.get("$schema"))):
        return
    for _, part in list(iterate_schemas(schema, "#")):
        if isinstance(part.get("$ref"), str):
            for keyword, value in list(part.items()):
                # A value that is an object may be the target of another reference.
                if not keyword.startswith("$") and not isinstance(value, dict):
                    del part[keyword]


def use_exact_formats(schema: dict[str, Any]) -> list[str]:
    """Replace formats and escapes that llguidance reads otherwise by exact patterns, in place.

    Returns warnings about valid values that the patterns leave out.
    """
    warnings = []
    for path, part in list(iterate_schemas(schema, "#")):
        format = part.get("format")
        pattern = part.get("pattern")
        if isinstance(pattern, str):
            part["pattern"] = use_exact_escapes(pattern)
        if not isinstance(format, str) or format not in FORMAT_PATTERNS:
            continue
        if format in LEFT_OUT_VALUES:
            warnings.append(f'never written: {LEFT_OUT_VALUES[format]}, by "format" at {path}')
        exact = FORMAT_PATTERNS[part.pop("format")]
        if "pattern" not in part:
            part["pattern"] = exact
        else:
            others = part.get("allOf")
            part["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": exact}]
        if format == "hostname":
            part.setdefault("maxLength", MAX_HOST_LENGTH)
    return warnings


def use_exact_escapes(pattern: str) -> str:
    return re.sub(r"\\.", lambda match: _SPACE_ESCAPES.get(match[0], match[0]), pattern)


def explain_schema_error(schema: dict[str, Any], message: str, is_strict: bool) -> str:
    """Turn a message of llguidance into one that names the keyword and its place."""
    reason = clean_message(message)
    keywords, value = read_message(message)
    if not keywords:
        return f"the JSON schema cannot be enforced: {reason}"
    place = describe_place(schema, keywords, value)
    advice = "Change or remove it"
    is_supported = keywords[0] in ("$ref", "pattern", "type", "patternProperties")
    is_mistake = reason.startswith("Expected")
    if is_strict and not is_supported and not is_mistake:
        advice += ", or set strict to false to relax it"
    return f"the JSON schema cannot be enforced because of {place}: {reason}. {advice}"


def clean_message(message: str) -> str:
    """Return llguidance's own words, without places in the grammar and excerpts of it."""
    reason = message.split("failed to compile JSON schema: ")[-1]
    reason = _MESSAGE_PLACE.sub("", _EXCERPT.split(reason)[0])
    reason = _PATTERN_ERROR.sub(lambda match: match["reason"], reason)
    reason = _LOOK_AROUND.sub("look-around and word boundaries are not supported", reason)
    reason = _FOUND_TOKEN.sub("", reason.replace(" (in regex)", ""))
    return " ".join(reason.split())[:300]


def message_place(message: str, first_line: int = 1) -> str:
    """Return the place that a message names, in a text that begins at `first_line`."""
    match = _MESSAGE_PLACE.match(message)
    if match is None or int(match["line"]) < first_line:
        return ""
    line = int(match["line"]) - first_line + 1
    return f"line {line}, column {match['column']}: "


def read_message(message: str) -> tuple[tuple[str, ...], str]:
    """Return the keywords that a message is about, and the value that it quotes."""
    for pattern, keywords in KEYWORDS_OF_MESSAGE:
        match = pattern.search(message)
        if match:
            groups = match.groupdict()
            if "keys" in groups:
                keywords = tuple(re.findall(r'"([^"]+)"', match["keys"]))
            elif "keyword" in groups:
                keywords = (match["keyword"],)
            return keywords, groups.get("value") or ""
    return (), ""


def describe_place(schema: dict[str, Any], keywords: tuple[str, ...], value: str) -> str:
    """Name a keyword and its place, or only the keywords if no place is known."""
    place = find_place(schema, keywords, value)
    if place is not None:
        return f'"{place.keyword}" at {place.path}'
    return " and ".join(f'"{keyword}"' for keyword in keywords) or "a part of the schema"


class KeywordPlace(NamedTuple):
    """Where a schema uses a keyword."""

    keyword: str
    path: str
    schema: dict[str, Any]  # the part that has the keyword


def find_place(
    schema: dict[str, Any], keywords: tuple[str, ...], value: str
) -> KeywordPlace | None:
    """Find the first of the keywords whose value contains `value`."""
    for path, part in iterate_schemas(schema, "#"):
        for keyword in keywords:
            text = json.dumps(part.get(keyword), ensure_ascii=False).replace("\\\\", "\\")
            if keyword in part and value.strip() in text:
                return KeywordPlace(keyword, path, part)
    return None


def iterate_schemas(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema inside `schema` with its path, `schema` itself first."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from iterate_schemas(item, f"{path}/{index}")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            for name, inner in value.items():
                yield from iterate_schemas(inner, f"{path}/{keyword}/{name}")
        elif keyword not in DATA_KEYWORDS:
            yield from iterate_schemas(value, f"{path}/{keyword}")


# ---- other grammars ------------------------------------------------------------------------------


def tag_to_lark(outputs: StructuredOutputs) -> tuple[str, tuple[str, ...]]:
    """Return the grammar of a structural tag, each of whose schemas is checked."""
    warnings: list[str] = []

    def checked_rule(schema: Mapping[str, Any]) -> str:
        prepared = dict(schema)
        warnings.extend(prepare_schema(prepared, outputs))
        return schema_rule(prepared, outputs)

    tag = read_json(outputs.structural_tag, "structural tag")
    return structural_tag_to_lark(tag, checked_rule), tuple(dict.fromkeys(warnings))


def regex_to_terminal(pattern: str) -> str:
    """Return a pattern that must match the whole output as a Lark terminal."""
    from llguidance import regex_to_lark

    check_size(pattern, "regular expression")
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and not inner.endswith(r"\$"):
        inner = inner[:-1]
    escaped = regex_to_lark(inner, "d").replace("\n", r"\n")
    if not escaped:
        raise InvalidRequest("the regular expression is empty: it would allow no output")
    is_error, messages = validate_lark(f"start: /{escaped}/\n")
    if is_error:
        raise InvalidRequest(explain_pattern_error(messages[0]))
    return f"/{escaped}/"


def explain_pattern_error(message: str) -> str:
    """Say what is wrong with a pattern, in words about the pattern alone."""
    reason = re.sub(r'^invalid regex ".*": ', "", clean_message(message))
    if "not supported" in reason:
        return f"the regular expression cannot be used: {reason}"
    return f"the regular expression is not valid: {reason}"


def choice_to_lark(choice: Any) -> str:
    texts = list(choice)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest("choice must be a list of strings, at least one, none of them empty")
    check_size("".join(texts), "list of choices")
    options = "\n     | ".join(map(quote_text, texts))
    return f"start: {options}\n"


def grammar_to_lark(grammar: str) -> str:
    """Return a grammar as Lark. GBNF, the EBNF of llama.cpp and vLLM, is converted.

    Errors name the line and the column of the client's own text.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    check_size(grammar, "grammar")
    is_gbnf = "::=" in grammar and not is_lark_syntax(grammar)
    lark = grammar
    if is_gbnf:
        try:
            lark = gbnf_to_lark(grammar)
        except Exception as error:  # the converter raises whatever its parser meets
            reason = " ".join(str(error).split())[:300]
            raise InvalidRequest(f"the grammar is not valid GBNF: {reason}") from None
    is_error, messages = validate_lark(lark)
    if not is_error:
        return lark
    reason = clean_message(messages[0])
    if is_gbnf:
        raise InvalidRequest(f"the grammar is not valid GBNF: {reason}")
    if not is_lark_syntax(grammar):
        raise InvalidRequest(
            f"the grammar is neither Lark nor GBNF: {reason}. "
            "Write rules as `start: ...` in Lark, or as `root ::= ...` in GBNF"
        )
    raise InvalidRequest(f"the grammar is not valid Lark: {message_place(messages[0])}{reason}")
