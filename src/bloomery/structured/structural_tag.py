"""From structural tags to Lark: free text in which tags hold structured content.

Both forms that vLLM and xgrammar accept are read: `structures` with `triggers`, and the newer
`format`, a tree of typed parts. Text outside of tags is free. Once a trigger is written, what
follows must be one of the tags that begin with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bloomery.errors import InvalidRequest

ANY_TEXT = "/(?s:.*)/"
FORMAT_TYPES = (
    "const_string, json_schema, any_text, regex, grammar, sequence, or, optional, star, plus, tag, "
    "triggered_tags, tags_with_separator"
)

# A JSON schema -> the body of a Lark rule that matches it.
SchemaRule = Callable[[Mapping[str, Any]], str]


def structural_tag_to_lark(tag: Any, schema_rule: SchemaRule) -> str:
    """Return the grammar of a structural tag. Raises InvalidRequest if it cannot be read."""
    if not isinstance(tag, Mapping):
        raise InvalidRequest("a structural tag must be an object")
    builder = TagGrammarBuilder(schema_rule)
    if "structures" in tag:
        structures = read_list(tag, "structures")
        tags = [
            {
                "begin": read_text(structure, "begin"),
                "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
                "end": read_text(structure, "end"),
            }
            for structure in structures
        ]
        start = builder.add_triggered_tags({"triggers": tag.get("triggers"), "tags": tags})
    elif "format" in tag:
        start = builder.add_format(tag["format"])
    else:
        raise InvalidRequest(
            'a structural tag needs either "structures" and "triggers", or "format"'
        )
    return "\n".join([f"start: {start}", *builder.rules]) + "\n"


class TagGrammarBuilder:
    """Collects the rules of one grammar. Each `add_` method returns an expression for its part."""

    def __init__(self, schema_rule: SchemaRule):
        self.schema_rule = schema_rule
        self.rules: list[str] = []

    def add_rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def add_format(self, format: Any, end: str = "") -> str:
        """Add a part of the tree, and the text `end` that closes it."""
        from bloomery.structured.grammar import grammar_to_lark, regex_to_terminal

        if not isinstance(format, Mapping):
            raise InvalidRequest("each part of a structural tag must be an object with a type")
        kind = format.get("type")
        if kind == "any_text":
            if end:
                return self.add_rule(ANY_TEXT, f"[suffix={quote_text(end)}]")
            return self.add_rule(ANY_TEXT)
        closing = f" {quote_text(end)}" if end else ""
        match kind:
            case "const_string":
                return quote_text(read_text(format, "value")) + closing
            case "json_schema":
                schema = format.get("json_schema", {})
                if not isinstance(schema, Mapping):
                    raise InvalidRequest('"json_schema" of a structural tag must be an object')
                return self.add_rule(self.schema_rule(schema)) + closing
            case "regex":
                return self.add_rule(regex_to_terminal(read_text(format, "pattern"))) + closing
            case "grammar":
                lark = grammar_to_lark(read_text(format, "grammar"))
                return self.add_rule(f"%lark {{\n{lark}\n}}") + closing
            case "sequence" | "or":
                parts = [self.add_format(part) for part in read_list(format, "elements")]
                separator = " " if kind == "sequence" else " | "
                return f"({separator.join(parts)}){closing}"
            case "optional" | "star" | "plus":
                operator = {"optional": "?", "star": "*", "plus": "+"}[kind]
                return f"({self.add_format(format.get('content'))}){operator}{closing}"
            case "tag":
                return self.add_tag(format) + closing
            case "triggered_tags":
                return self.add_triggered_tags(format, end)
            case "tags_with_separator":
                return self.add_separated_tags(format) + closing
        raise InvalidRequest(
            f"a structural tag cannot have a part of the type {kind!r}; known are {FORMAT_TYPES}"
        )

    def add_tag(self, tag: Any, trigger: str = "") -> str:
        """Add begin, content and end of a tag. The text `trigger` of its begin is there already."""
        if not isinstance(tag, Mapping):
            raise InvalidRequest("each tag of a structural tag must be an object")
        begin = read_text(tag, "begin").removeprefix(trigger)
        end = tag.get("end", "")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, Sequence) or not all(isinstance(text, str) for text in ends):
            raise InvalidRequest('"end" of a tag must be a string or a list of strings')
        if len(ends) == 1:
            body = self.add_format(tag.get("content"), ends[0])
        else:
            options = " | ".join(quote_text(text) for text in ends)
            body = f"{self.add_format(tag.get('content'))} ({options})"
        return self.add_rule(f"{quote_text(begin)} {body}" if begin else body)

    def add_triggered_tags(self, format: Mapping[str, Any], end: str = "") -> str:
        """Add free text with tags; a tag must follow where a trigger is written."""
        triggers = read_list(format, "triggers")
        tags = read_list(format, "tags")
        choices = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise InvalidRequest('"triggers" must be strings, none of them empty')
            bodies = [
                self.add_tag(tag, trigger)
                for tag in tags
                if read_text(tag, "begin").startswith(trigger)
            ]
            if not bodies:
                raise InvalidRequest(f"no tag begins with the trigger {trigger!r}")
            text = self.add_rule(ANY_TEXT, f"[suffix={quote_text(trigger)}]")
            choices.append(f"{text} ({' | '.join(bodies)})")
        for tag in tags:
            if not any(read_text(tag, "begin").startswith(trigger) for trigger in triggers):
                raise InvalidRequest(f"no trigger is a beginning of {read_text(tag, 'begin')!r}")
        triggered = self.add_rule(" | ".join(choices))
        rest = self.add_rule(ANY_TEXT, f"[suffix={quote_text(end)}]" if end else "")
        if format.get("stop_after_first"):
            options = f"{triggered} {quote_text(end)}" if end else triggered
            return f"({options})" if format.get("at_least_one") else f"({options} | {rest})"
        count = "+" if format.get("at_least_one") else "*"
        return f"({triggered}){count} {rest}"

    def add_separated_tags(self, format: Mapping[str, Any]) -> str:
        """Add tags with a separator between them and no other text."""
        tags = [self.add_tag(tag) for tag in read_list(format, "tags")]
        tag = self.add_rule(" | ".join(tags))
        if format.get("stop_after_first"):
            body = tag
        else:
            separator = read_text(format, "separator")
            more = f"{quote_text(separator)} {tag}" if separator else tag
            body = f"{tag} ({more})*"
        return f"({body})" if format.get("at_least_one") else f"({body})?"


def quote_text(text: str) -> str:
    """Return a text as a literal in Lark."""
    return json.dumps(text, ensure_ascii=False)


def read_text(part: Any, key: str) -> str:
    value = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(value, str):
        raise InvalidRequest(f'a part of the structural tag needs the text "{key}"')
    return value


def read_list(part: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = part.get(key)
    if not isinstance(value, list | tuple) or not value:
        raise InvalidRequest(
            f'a part of the structural tag needs "{key}", a list that is not empty'
        )
    return value
