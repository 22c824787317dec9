"""README, docs/ and examples/: links, tables made from the code, and every command.

Commands are in blocks marked `bash` or `python`. A comment `<!-- not run: REASON -->` before a
block says why it is not run. `bloomery serve` and `text-generation-launcher` only have their flags
checked, because one server is running for all commands.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from bloomery.server.limits import ServerLimits
from tests.chaos.http import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "examples" / "README.md",
    ]
)
# Pages whose commands are quick enough for everyday runs.
QUICK_PAGES = ("docs/api/openai.md", "docs/api/anthropic.md", "docs/api/tgi.md", "docs/sampling.md")
RUN_LANGUAGES = ("bash", "python")
# Blocks in these languages, or in none of a README, are for reading.
READ_LANGUAGES = ("text", "toml", "json", "yaml", "ini", "jinja")
FENCE = re.compile(
    r"(?P<mark><!-- not run: (?P<reason>[^>]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")
# Commands that would start a server have their flags checked instead.
PRELUDE = """
bloomery() {
  if [ "$1" = serve ]; then python -m tests.check_flags bloomery "$@"
  else command bloomery "$@"; fi
}
text-generation-launcher() { python -m tests.check_flags text-generation-launcher "$@"; }
make() { if [ "$1" != serve ]; then command make --dry-run "$@" > /dev/null; fi; }
"""


class CodeBlock(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    reason: str  # why it is not run; empty: it is run

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def list_blocks() -> Iterator[CodeBlock]:
    for path in PAGES:
        text = path.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("language")) + 1
            reason = match["reason"] or ""
            yield CodeBlock(page_name(path), line, match["language"], match["code"], reason)


BLOCKS = list(list_blocks())


# ---- links and tables ------------------------------------------------------------------------


def heading_anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        anchors.add(plain.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_and_images_exist(path: Path) -> None:
    text = FENCE.sub("", path.read_text())
    text = re.sub(r"^>.*$", "", text, flags=re.MULTILINE)  # a quotation is not our own
    targets = LINK.findall(text) + ["".join(groups) for groups in IMAGE.findall(text)]
    for target in targets:
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{target} does not exist"
        if anchor and linked.suffix == ".md":
            assert anchor in heading_anchors(linked.read_text()), f"{target}: no such heading"


def load_table_writer() -> Any:
    path = ROOT / "docs" / "write_tables.py"
    spec = importlib.util.spec_from_file_location("write_tables", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_current() -> None:
    """`python docs/write_tables.py` writes them again."""
    writer = load_table_writer()
    pages = writer.list_pages()
    assert len(pages) > 5
    for path in pages:
        text = path.read_text()
        is_current = writer.fill_tables(text) == text
        assert is_current, f"{path.name} is old: run python docs/write_tables.py"
    assert set(writer.LIMIT_MEANINGS) == {field.name for field in fields(ServerLimits)}


def test_blocks_are_marked() -> None:
    """Every block says its language, and a reason stands only before a block that would be run."""
    assert len(BLOCKS) > 15
    for block in BLOCKS:
        is_known = block.language in (*RUN_LANGUAGES, *READ_LANGUAGES)
        assert is_known or block.page == "README.md", f"{block.id} has no known language"
        if block.reason:
            assert block.language in RUN_LANGUAGES, f"{block.id} is not run anyway"
    marks = sum(path.read_text().count("<!-- not run") for path in PAGES)
    assert marks == sum(bool(block.reason) for block in BLOCKS), "a mark is not before a block"


# ---- commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """The address of a server with the embedded model, as the pages start it."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "bloomery", "serve", "--port", url.rpartition(":")[2]]
    options = ("--threads", "1", "--kv-cache-gib", "0.3")
    process = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)

    def is_ready() -> bool:
        try:
            return httpx2.get(f"{url}/ready").status_code == 200
        except httpx2.HTTPError:
            return False

    try:
        assert wait_until(is_ready, 240), "the server does not get ready"
        yield url
    finally:
        process.terminate()
        process.wait(60)


def run_blocks(blocks: list[CodeBlock], url: str, folder: Path) -> None:
    """Run the blocks of one page in order, in a folder that looks like the repository."""
    for name in ("examples", "docs", "deploy", "benchmarks", "src", "Makefile", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "URL": url,
    }
    for block in blocks:
        code = block.code.replace("http://127.0.0.1:8000", url)
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", PRELUDE + code + "\nwait\n"]
        else:
            command = [sys.executable, "-c", code]
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
        output = result.stdout + result.stderr
        assert result.returncode == 0, f"{block.id}\n{block.code}\n{output}"
        has_curl = re.search(r"^curl ", block.code, re.MULTILINE)
        assert not has_curl or '"error"' not in output, f"{block.id}\n{output}"


RUN_PAGES = sorted({block.page for block in BLOCKS if block.language in RUN_LANGUAGES})


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in QUICK_PAGES else pytest.mark.slow)
        for page in RUN_PAGES
    ],
)
def test_commands_work(page: str, server_url: str, tmp_path: Path) -> None:
    blocks = [block for block in BLOCKS if block.page == page and not block.reason]
    run_blocks([b for b in blocks if b.language in RUN_LANGUAGES], server_url, tmp_path)


# ---- the site --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_is_complete_and_needs_no_other_host(tmp_path: Path) -> None:
    """A strict build: no broken link or anchor. Pages load nothing from elsewhere."""
    environment = ROOT / "build" / "docs"
    if not (environment / "bin" / "mkdocs").exists():
        venv.create(environment, with_pip=True)
        pip = environment / "bin" / "pip"
        subprocess.run([pip, "install", "--quiet", "mkdocs-material>=9.6"], check=True)
    command = [environment / "bin" / "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 15
    for path in pages:
        html = path.read_text()
        for source in re.findall(r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)\"", html):
            assert not source.startswith(("http", "//")), f"{path.name} loads {source}"
        for source in re.findall(r"<link [^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*>", html):
            assert "http" not in source and 'href="//' not in source, f"{path.name}: {source}"
    shutil.rmtree(tmp_path, ignore_errors=True)
