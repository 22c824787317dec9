"""docs/architecture.md matches the code: every file and function that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bloomery"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
HOP_ROW = re.compile(r"\| (\d+) \| `([\w/*.]+)` \| (.+?) \| (.+?) \|")
HOPS = [(int(number), path, functions) for number, path, functions, _ in HOP_ROW.findall(PAGE)]


def defined_names(path: Path) -> set[str]:
    """Return `function`, `Class` and `Class.method` for everything that a file defines."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            methods = [
                member.name
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            names.update(f"{node.name}.{method}" for method in methods)
    return names


def test_the_hops_are_numbered_in_order() -> None:
    numbers = [number for number, _, _ in HOPS]
    assert numbers == list(range(1, len(HOPS) + 1)) and len(HOPS) > 20


@pytest.mark.parametrize("path, functions", [hop[1:] for hop in HOPS], ids=str)
def test_the_functions_of_a_hop_exist(path: str, functions: str) -> None:
    files = sorted(SOURCE.glob(path))
    assert files, f"{path} does not exist"
    names = set().union(*(defined_names(file) for file in files))
    class_name = ""
    for function in re.findall(r"`([\w.*]+)`", functions):
        full_name = function
        if function.startswith("."):  # a further method of the class named before
            full_name = class_name + function
        class_name = full_name.partition(".")[0]
        pattern = re.compile(full_name.replace(".", r"\.").replace("*", r"\w*"))
        assert any(pattern.fullmatch(name) for name in names), f"{full_name} is not in {path}"


def test_every_path_on_the_page_exists() -> None:
    paths = set(re.findall(r"`((?:src|tests|benchmarks|docs)/[\w/.-]+)`", PAGE))
    paths |= {f"src/bloomery/{name}" for name in re.findall(r"`([\w]+/[\w/]+\.py)`", PAGE)}
    placeholders = {"src/bloomery/families/x.py", "src/bloomery/quant/x.py"}
    placeholders |= {"src/bloomery/kernels/x.py", "src/bloomery/server/routes/x.py"}
    missing = [
        path
        for path in sorted(paths - placeholders)
        if not (ROOT / path).exists() and not (ROOT / path.removeprefix("src/bloomery/")).exists()
    ]
    assert missing == []
