"""The page's built assets are what its sources make, small, and fit for a strict content security policy."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "web"
BUILT = ROOT / "src" / "bloomery" / "server" / "web"
INPUTS = [
    ".npmrc",
    "index.html",
    "package-lock.json",
    "package.json",
    "src",
    "svelte.config.js",
    "tsconfig.json",
    "vite.config.ts",
]
LIMIT = 200_000  # bytes, compressed
# Never fetched: the names of namespaces, and where libraries' warnings point.
HARMLESS = re.compile(
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


@pytest.fixture(scope="module")
def page() -> Page:
    parser = Page()
    parser.feed((BUILT / "index.html").read_text())
    return parser


class Page(HTMLParser):
    """What a policy cares about: every tag with its attributes, and the text inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline += data.strip()


def test_built_from_these_sources(manifest: dict) -> None:
    found = [
        path
        for name in INPUTS
        for path in (
            [SOURCES / name] if (SOURCES / name).is_file() else (SOURCES / name).rglob("*")
        )
    ]
    names = sorted(path.relative_to(SOURCES).as_posix() for path in found if path.is_file())
    listing = "".join(f"{digest(SOURCES / name)}  {name}\n" for name in names)
    assert hashlib.sha256(listing.encode()).hexdigest() == manifest["source"], (
        "web/ changed since the page was built: run `make web` and commit src/bloomery/server/web with it"
    )


def test_nothing_built_was_edited_added_or_lost(manifest: dict) -> None:
    built = {name: digest(path) for name, path in built_files().items() if name != "manifest.json"}
    assert built == manifest["files"], (
        "src/bloomery/server/web differs from what the build wrote: run `make web`"
    )


def test_small() -> None:
    sizes = {name: len(gzip.compress(path.read_bytes(), 9)) for name, path in built_files().items()}
    assert sum(sizes.values()) < LIMIT, sizes


def test_index_obeys_a_strict_policy(page: Page) -> None:
    assert page.inline == ""
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
    names = [name for name in built_files() if name not in ("index.html", "manifest.json")]
    assert names
    for name in names:
        assert re.fullmatch(r"assets/[\w.-]+-[\w-]{8}\.(js|css|svg)", name), name


@pytest.mark.parametrize(
    "name", [name for name in built_files() if name.endswith((".js", ".css", ".html", ".svg"))]
)
def test_no_address_elsewhere(name: str) -> None:
    text = built_files()[name].read_text()
    addresses = [
        match
        for match in re.findall(r"(?:https?|wss?)://[^\s\"'`)\\]+", text)
        if not HARMLESS.match(match)
    ]
    assert addresses == []
    assert not re.search(r"url\(\s*['\"]?(//|https?:|data:)", text), (
        "a style that loads from elsewhere"
    )
    assert not re.search(r"\beval\(|new Function\(", text), (
        "code made from text, which the policy refuses"
    )
