"""Which JSON schemas are enforced correctly: public schemas with valid and invalid instances.

    PYTHONPATH=src:. python3 benchmarks/maskbench.py DIR [DIR ...] [--model PATH] [--lenient]

DIR holds the files of MaskBench (github.com/guidance-ai/jsonschemabench, maskbench/data) or of the
JSON-Schema-Test-Suite (github.com/json-schema-org/JSON-Schema-Test-Suite, tests/draft2020-12). The
grammars run over the vocabulary of a model, the embedded one by default.

Each schema counts once, under the worst of its instances:

    correct            every valid instance can be written, no invalid one can
    refused            the schema gets an error that says why
    stopped            a valid instance cannot be written because the grammar exceeds its limits on
                       the way; the request then ends with an error that says so
    left out           a valid instance cannot be written, and a warning says which ones cannot
    valid rejected     a valid instance cannot be written, and nothing says so
    invalid accepted   an invalid instance can be written

An instance is written as json.dumps writes it. Grammars fix the order of properties, so a valid
instance is also tried in the order in which its schema lists them, and with numbers that have no
exponent. Formats are enforced, so the suite's format.json is not used: there they mean nothing.
optional/format has the other tests.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

# From best to worst.
OUTCOMES = ("correct", "refused", "stopped", "left out", "valid rejected", "invalid accepted")


# Or a string, so that numbers in strings do not count.
NUMBER_WITH_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?[eE][+-]?\d+')


class SchemaCase(NamedTuple):
    """A schema and its instances: (data, whether it is valid)."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


def read_cases(path: Path) -> Iterator[SchemaCase]:
    """Read a file of MaskBench, or one of the test suite, which holds several schemas."""
    if path.name == "format.json":
        return
    content = json.loads(path.read_text())
    entries = content if isinstance(content, list) else [content]
    for number, entry in enumerate(entries):
        instances = [(test["data"], test["valid"]) for test in entry.get("tests", ())]
        name = f"{path.stem}/{number}" if len(entries) > 1 else path.stem
        yield SchemaCase(name, entry["schema"], instances)


def write_instance(data: Any, schema: Any, root: Any) -> Any:
    """Return a valid instance as a grammar writes it.

    Properties come in the order in which the schema lists them. A number without a fraction is an
    integer.
    """
    schemas = list(iterate_subschemas(schema, root, data, 0))
    constant = next((part["const"] for part in schemas if "const" in part), None)
    if isinstance(data, dict) and data == constant:
        return constant
    if isinstance(data, float) and data.is_integer():
        return int(data)
    if isinstance(data, list):
        items = next((part["items"] for part in schemas if "items" in part), None)
        return [write_instance(item, items, root) for item in data]
    if not isinstance(data, dict):
        return data
    properties: dict[str, Any] = {}
    for part in schemas:
        for name, inner in (part.get("properties") or {}).items():
            properties.setdefault(name, inner)
    required = [name for part in schemas for name in part.get("required") or ()]
    listed = [name for name in dict.fromkeys([*properties, *required]) if name in data]
    others = [name for name in data if name not in listed]
    for name in others:
        properties[name] = find_other_property(name, schemas)
    return {
        name: write_instance(data[name], properties.get(name), root) for name in listed + others
    }


def find_other_property(name: str, schemas: list[dict[str, Any]]) -> Any:
    """Return the schema of a property that `properties` does not list."""
    for part in schemas:
        for pattern, inner in (part.get("patternProperties") or {}).items():
            with suppress(re.error):
                if re.search(pattern, name):
                    return inner
    others = (part.get("additionalProperties") for part in schemas)
    return next((inner for inner in others if isinstance(inner, dict)), None)


def write_decimal(match: re.Match[str]) -> str:
    """Return a number without its exponent; strings stay."""
    text = match[0]
    return text if text.startswith('"') else format(Decimal(text), "f")


def iterate_subschemas(schema: Any, root: Any, data: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yield the schemas that describe the same value, in the order in which they appear.

    Of alternatives, the one that fits the value best comes first: it sets the order.
    """
    if not isinstance(schema, dict) or depth > 8:
        return
    keywords = ("items", "required", "const", "patternProperties", "additionalProperties")
    own = {keyword: schema[keyword] for keyword in keywords if keyword in schema}
    for keyword, value in schema.items():
        if keyword == "properties" and isinstance(value, dict):
            yield {"properties": value}
        elif keyword in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
            if keyword != "allOf":
                value = sorted(value, key=lambda inner: count_conflicts(inner, root, data))
            for inner in value:
                yield from iterate_subschemas(inner, root, data, depth + 1)
        elif keyword == "$ref" and isinstance(value, str):
            yield from iterate_subschemas(resolve(value, root), root, data, depth + 1)
    if isinstance(own.get("required", []), list):
        yield own


def count_conflicts(schema: Any, root: Any, data: Any) -> int:
    """Count what speaks against an alternative, by a look at the value's properties."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        schema = resolve(schema["$ref"], root)
    if not isinstance(schema, dict) or not isinstance(data, dict):
        return 0
    properties = schema.get("properties") or {}
    conflicts = len(set(schema.get("required") or ()) - set(data))
    conflicts += len(set(data) - set(properties))
    for name, inner in properties.items():
        if isinstance(inner, dict) and "enum" in inner and name in data:
            conflicts += 100 * (data[name] not in inner["enum"])
    return conflicts


def resolve(reference: str, root: Any) -> Any:
    """Follow a reference inside the same schema."""
    target = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or (name and name not in target):
            return None
        target = target[name] if name else target
    return target


def check_case(case: SchemaCase, vocabulary: Any, strict: bool = True) -> str:
    """Return the outcome of a schema."""
    from bloomery.errors import InvalidRequest
    from bloomery.sampling import StructuredOutputs
    from bloomery.structured.grammar import compile_grammar

    schema = case.schema
    try:
        outputs = StructuredOutputs(json=schema, strict=strict)
        grammar, warnings = compile_grammar(outputs, vocabulary, "schema")
    except InvalidRequest:
        return "refused"
    matcher = vocabulary.compile(grammar)
    outcome = "correct"
    for data, is_valid in case.instances:
        spellings = [json.dumps(data, ensure_ascii=False)]
        if is_valid:
            ordered = json.dumps(write_instance(data, schema, schema), ensure_ascii=False)
            spellings += [ordered, NUMBER_WITH_EXPONENT.sub(write_decimal, ordered)]
        texts = list(dict.fromkeys(spellings))
        accepted = any(accepts_text(matcher.deep_copy(), vocabulary, text) for text in texts)
        if accepted and not is_valid:
            return "invalid accepted"
        if is_valid and not accepted:
            outcomes = [write_text(vocabulary.compile(grammar), vocabulary, text) for text in texts]
            best = min(outcomes, key=OUTCOMES.index)
            is_left_out = any(warning.startswith("never written") for warning in warnings)
            if best == "valid rejected" and is_left_out:
                best = "left out"
            outcome = max(outcome, best, key=OUTCOMES.index)
    return outcome


def accepts_text(matcher: Any, vocabulary: Any, text: str) -> bool:
    """Whether the grammar lets a model write the text and then end."""
    try:
        tokens = vocabulary.tokenizer.greedy_tokenize(text)
    except UnicodeEncodeError:  # an unpaired surrogate, which no token spells
        return False
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def write_text(matcher: Any, vocabulary: Any, text: str) -> str:
    """Write a text with a mask for each token, as a server does; llguidance bounds each step."""
    from bloomery.errors import GRAMMAR_TOO_COMPLEX
    from bloomery.structured.matcher import explain_stop

    for token in vocabulary.tokenizer.greedy_tokenize(text):
        matcher.compute_bitmask()
        if not matcher.consume_token(token):
            is_limit = explain_stop(matcher) == GRAMMAR_TOO_COMPLEX
            return "stopped" if is_limit else "valid rejected"
    return "correct" if matcher.is_accepting() else "valid rejected"


def load_model_vocabulary(model: str | None) -> Any:
    from bloomery.config import EngineConfig
    from bloomery.describe import build_engine_plan
    from bloomery.structured.matcher import TokenVocabulary
    from bloomery.text.load import load_tokenizer

    _, artifact = build_engine_plan(EngineConfig(model=model))
    return TokenVocabulary(load_tokenizer(artifact))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--model", help="a folder, a .gguf file or a Hub id")
    parser.add_argument("--lenient", action="store_true", help="relax what cannot be enforced")
    parser.add_argument("--limit", type=int, help="schemas of each folder")
    parser.add_argument("--show", action="store_true", help="name the schemas that go wrong")
    args = parser.parse_args()
    vocabulary = load_model_vocabulary(args.model)
    for folder in args.folders:
        counts: Counter[str] = Counter()
        start = time.perf_counter()
        files = sorted(folder.rglob("*.json"))[: args.limit]
        for path in files:
            for case in read_cases(path):
                outcome = check_case(case, vocabulary, not args.lenient)
                counts[outcome] += 1
                if args.show and outcome in OUTCOMES[2:]:
                    print(f"{outcome}: {case.name}", flush=True)
        row = {
            "folder": folder.name,
            "schemas": counts.total(),
            **{outcome: counts[outcome] for outcome in OUTCOMES},
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
