"""Prints how response formats fare on public chat templates and golden conversations.

    python benchmarks/response_formats.py                    # the templates in tests/
    python benchmarks/response_formats.py FOLDER             # all *.jinja files of a folder
    python benchmarks/response_formats.py --show WORD        # details of templates with this name

For each template: where its format comes from (derived, table, none), how many sample messages it
renders, how many of them are read as they were written, and how many give the same events for every
split. Templates of llama.cpp were looked at while the derivation was written; those of other
projects are held out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bloomery.response_format.check import is_faithful, merge_events
from tests.response_format.conversations import (
    PublicTemplate,
    find_bad_split,
    golden_tools,
    judge_golden,
    look_up,
    open_template,
    parse_parts,
    read_golden,
    read_templates,
    render_messages,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--show", help="show what differs for templates with this in their name")
    parser.add_argument("--stride", type=int, default=1, help="split at every n-th position")
    options = parser.parse_args()
    templates: Sequence[PublicTemplate] = read_templates()
    if options.folder:
        paths = sorted(options.folder.glob("*.jinja"))
        templates = [PublicTemplate(path.stem, "folder", path.read_text()) for path in paths]
    if options.show:
        templates = [entry for entry in templates if options.show in entry.name]
    groups: dict[str, list[PublicTemplate]] = {}
    for template in templates:
        is_known = "llama.cpp" in template.origin
        groups.setdefault("llama.cpp" if is_known else "held out", []).append(template)
    for name, group in groups.items():
        print_group(name, group, options.stride, bool(options.show))
    if not options.folder:
        print_golden(options.show)


def print_group(name: str, templates: Sequence[PublicTemplate], stride: int, show: bool) -> None:
    sources: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for template in templates:
        counts = measure_template(template, stride, show)
        has_calls = look_up(template.source).format.calls is not None
        sources[look_up(template.source).source if has_calls else "no calls"] += 1
        if has_calls:
            totals += counts
    print(f"{name}: {len(templates)} templates; formats with calls: {dict(sources)}")
    print(f"{name}: {dict(totals)}, faithful {totals['faithful'] / totals['texts']:.1%}")


def measure_template(template: PublicTemplate, stride: int, show: bool) -> Counter[str]:
    start = time.perf_counter()
    lookup = look_up(template.source)
    milliseconds = (time.perf_counter() - start) * 1000
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for name, sample in render_messages(template.source).items():
        counts["texts"] += 1
        answer = merge_events(parse_parts(lookup.format, sample.prompt, [sample.text]))
        counts["same"] += not find_bad_split(lookup.format, sample.prompt, sample.text, stride)
        if is_faithful(answer, sample.message):
            counts["faithful"] += 1
            continue
        wrong.append(name)
        if show:
            print(f"  {name}: prompt {sample.prompt!r}\n    text {sample.text!r}\n    {answer}")
    problem = "refuses tools" if lookup.tool_problem and lookup.format.calls else ""
    print(
        f"{template.name[:44]:44s} {lookup.source:8s} {milliseconds:5.0f} ms {dict(counts)} "
        f"{' '.join(wrong)} {problem}",
        flush=True,
    )
    if show:
        print(lookup.format.to_json(), lookup.warnings)
    return counts


def print_golden(show: str | None) -> None:
    sources = {entry.name: entry.source for entry in read_templates()}
    verdicts: Counter[str] = Counter()
    splits: Counter[str] = Counter()
    for case in read_golden()["cases"]:
        name = case["template"].removesuffix(".jinja")
        if show and show not in name:
            continue
        template = open_template(sources[name])
        format = look_up(sources[name]).format
        verdict, answer, prompt = judge_golden(template, format, case)
        verdicts[verdict] += 1
        tools = golden_tools(case["tools"])
        bad_split = find_bad_split(format, prompt, case["text"][:1500], 5, tools)
        splits["same" if bad_split is None else "different"] += 1
        if verdict == "wrong":
            print(f"golden {name}: {case['text']!r}")
            if show:
                print(f"    got  {answer}\n    want {case}\n    after {prompt!r}")
    print(f"golden: {dict(verdicts)}; splits: {dict(splits)}")


if __name__ == "__main__":
    main()
