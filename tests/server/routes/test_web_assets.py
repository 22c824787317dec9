"""The built web page matches its sources, is small, and fits a strict content security policy."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "web"
BUILT = ROOT / "src" / "bloomery" / "server" / "web"
INPUTS = [
    ".npmrc",
    "docs.html",
    "index.html",
    "package-lock.json",
    "package.json",
    "src",
    "svelte.config.js",
    "tsconfig.json",
    "vite.config.ts",
]
# The first view loads what index.html names. The rest comes when it is needed: formulas, code
# colours, the dashboard, the API reference.
MAX_FIRST_LOAD_BYTES = 75_000
MAX_GZIPPED_BYTES = 230_000
# Addresses that are never fetched: XML namespaces, and links in warnings of libraries.
NEVER_FETCHED = re.compile(
    r"https?://(www\.w3\.org/|svelte\.dev/e/|github\.com/(markedjs|highlightjs)/)"
)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def built_files() -> dict[str, Path]:
    return {
        path.relative_to(BUILT).as_posix(): path
        for path in sorted(BUILT.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((BUILT / "manifest.json").read_text())


@pytest.fixture(scope="module", params=["index.html", "docs.html"])
def page(request: pytest.FixtureRequest) -> PageParser:
    parser = PageParser()
    parser.feed((BUILT / request.param).read_text())
    return parser


class PageParser(HTMLParser):
    """Collects what a content security policy restricts: tags, attributes and inline code."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline_code = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline_code += data.strip()


def test_the_build_is_made_from_the_current_sources(manifest: dict) -> None:
    paths: list[Path] = []
    for name in INPUTS:
        path = SOURCES / name
        paths += [path] if path.is_file() else path.rglob("*")
    names = sorted(path.relative_to(SOURCES).as_posix() for path in paths if path.is_file())
    listing = "".join(f"{digest(SOURCES / name)}  {name}\n" for name in names)
    assert hashlib.sha256(listing.encode()).hexdigest() == manifest["source"], (
        "web/ changed since the build: run `make web` and commit src/bloomery/server/web with it"
    )


def test_built_files_match_the_manifest(manifest: dict) -> None:
    built = {name: digest(path) for name, path in built_files().items() if name != "manifest.json"}
    assert built == manifest["files"], (
        "src/bloomery/server/web differs from what the build wrote: run `make web`"
    )


def test_the_page_is_small() -> None:
    sizes = {name: len(gzip.compress(path.read_bytes(), 9)) for name, path in built_files().items()}
    assert sum(sizes.values()) < MAX_GZIPPED_BYTES, sizes
    index = (BUILT / "index.html").read_text()
    first_names = re.findall(r'(?:src|href)="\./([^"]+)"', index)
    assert sum(sizes[name] for name in first_names) < MAX_FIRST_LOAD_BYTES, sizes


def test_pages_need_no_inline_code_or_foreign_address(page: PageParser) -> None:
    assert page.inline_code == ""
    for tag, attributes in page.tags:
        assert not any(name == "style" or name.startswith("on") for name in attributes), (
            tag,
            attributes,
        )
        for name in ("src", "href"):
            target = attributes.get(name)
            assert target is None or (
                target.startswith("./assets/") and (BUILT / target).is_file()
            ), (tag, target)
        assert tag != "script" or attributes.get("src"), "a script inside the page"


def test_asset_names_change_with_their_content() -> None:
    pages = ("index.html", "docs.html", "manifest.json")
    names = [name for name in built_files() if name not in pages]
    assert names
    for name in names:
        assert re.fullmatch(r"assets/[\w.-]+-[\w-]{8}\.(js|css|svg)", name), name


@pytest.mark.parametrize(
    "name", [name for name in built_files() if name.endswith((".js", ".css", ".html", ".svg"))]
)
def test_no_file_loads_from_another_server(name: str) -> None:
    text = built_files()[name].read_text()
    addresses = [
        match
        for match in re.findall(r"(?:https?|wss?)://[^\s\"'`)\\]+", text)
        if not NEVER_FETCHED.match(match)
    ]
    assert addresses == []
    assert not re.search(r"url\(\s*['\"]?(//|https?:|data:)", text), (
        "a style loads from another server"
    )
    assert not re.search(r"\beval\(|new Function\(", text), "the policy forbids code made from text"
