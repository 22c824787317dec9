"""Which package may import which: the table of docs/architecture.md, enforced on the source.

Also enforced: only compute packages import torch, only config reads the environment, only cli
imports bloomery.tools, and nothing unpickles or evaluates.
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
# Packages that may import torch and triton.
COMPUTE_PACKAGES = {
    "attention",
    "cli",
    "executors",
    "fusion",
    "kernels",
    "layers",
    "llm",
    "models",
    "native",
    "parallel",
    "quant",
    "runtime",
    "tools",
}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "compile", "__import__"}


def read_table() -> dict[str, set[str]]:
    """Package -> packages it may import, from the table of the architecture page."""
    allowed: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        row = re.fullmatch(r"\| ([\w, ]+) \| (.+) \|", line)
        if row is None or "may import" in line:
            continue
        for package in row[1].split(", "):
            allowed[package] = set(re.findall(r"\w+", row[2])) | {package}
    return allowed


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


ALLOWED_IMPORTS = read_table()
PACKAGES = {package_of(path) for path in FILES} - {"__init__", "__main__"}


def find_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            if node.module == "bloomery":  # from bloomery import families
                yield from ((node.lineno, f"bloomery.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def may_import(package: str, target: str) -> bool:
    if target == "tools":
        return package in ("cli", "tools")
    return target in ALLOWED_IMPORTS[package] or "all" in ALLOWED_IMPORTS[package]


def relative_name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_every_package_is_in_the_table() -> None:
    missing = PACKAGES - ALLOWED_IMPORTS.keys()
    assert not missing, f"not in docs/architecture.md: {missing}"


@pytest.mark.parametrize("path", FILES, ids=relative_name)
def test_imports_follow_the_table(path: Path) -> None:
    package = package_of(path)
    if package in ("__init__", "__main__"):
        return
    for line, module in find_imports(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        root, *rest = module.split(".")
        if root == "bloomery":
            target = rest[0] if rest else "__init__"
            if target == "__version__":
                continue
            assert may_import(package, target), f"{where}: {package} may not import {target}"
        elif root in ("torch", "triton"):
            assert package in COMPUTE_PACKAGES, f"{where}: {package} may not import {root}"
        else:
            assert root != "transformers", f"{where}: transformers is for tests"
            assert root not in UNSAFE_MODULES, f"{where}: {root} runs what it reads"


def test_cli_imports_tools_only_when_a_command_needs_them() -> None:
    tree = ast.parse((SOURCE / "cli.py").read_text())
    modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [module for module in modules if module.startswith("bloomery.tools")]


@pytest.mark.parametrize("path", FILES, ids=relative_name)
def test_nothing_evaluates_unpickles_or_reads_the_environment(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in UNSAFE_CALLS, f"{where}: {called}"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            assert path.name == "config.py", f"{where}: only config reads the environment"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pytest.fail(f"{where}: a type that needs TYPE_CHECKING is in the wrong package")
