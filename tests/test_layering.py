"""Who may import whom: the table of docs/architecture.md, read from the source and enforced.

The control tower never imports torch, nobody but config reads the environment, nothing pickles or evaluates.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bloomery"
FILES = sorted(SOURCE.rglob("*.py"))
COMPUTE = {
    "native",
    "kernels",
    "parallel",
    "quant",
    "attention",
    "layers",
    "models",
    "runtime",
    "executors",
    "cli",
    "llm",
    "profile",
}


def table() -> dict[str, set[str]]:
    """package -> packages it may import, from the architecture page."""
    rows: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        found = re.fullmatch(r"\| ([\w, ]+) \| (.+) \|", line)
        if found and "may import" not in line:
            for package in found[1].split(", "):
                rows[package] = set(re.findall(r"\w+", found[2])) | {package}
    return rows


TABLE = table()
PACKAGES = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES} - {
    "__init__",
    "__main__",
}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module imported, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            if node.module == "bloomery":  # from bloomery import families
                yield from ((node.lineno, f"bloomery.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def test_every_package_stands_in_the_table() -> None:
    assert TABLE.keys() >= PACKAGES, f"not in docs/architecture.md: {PACKAGES - TABLE.keys()}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_table(path: Path) -> None:
    package = package_of(path)
    if package in ("__init__", "__main__"):
        return
    for line, module in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        root, *rest = module.split(".")
        if root == "bloomery":
            target = rest[0] if rest else "__init__"
            if target == "__version__":
                continue
            assert target in TABLE[package] or "all" in TABLE[package], (
                f"{where}: {package} may not import {target}"
            )
        elif root in ("torch", "triton"):
            assert package in COMPUTE, (
                f"{where}: {package} is in the control tower and may not import {root}"
            )
        else:
            assert root != "transformers", f"{where}: transformers is for tests"
            assert root not in ("pickle", "marshal", "shelve", "dill", "cloudpickle"), (
                f"{where}: {root} runs what it reads"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_evaluates_unpickles_or_reads_the_environment(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "compile", "__import__"), (
                f"{where}: {called}"
            )
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            assert path.name == "config.py", f"{where}: only config reads the environment"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pytest.fail(f"{where}: a type that needs TYPE_CHECKING is in the wrong package")
