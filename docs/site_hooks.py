"""Hooks of MkDocs: files outside docs/ that a page links to become part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?P<target>\.\.?/[^)#\s]+)(?P<anchor>#[^)]*)?\)")
SOURCE_FOLDER = "source"  # where these files are in the site


def outside_path(page: str, target: str) -> str | None:
    """The path from the root of a file outside docs/; None for a page of the documentation."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def on_files(files: Any, config: Any) -> Any:
    """Add each file outside docs/ to which a page links, as plain text."""
    for page in files.documentation_pages():
        for match in LINK.finditer(page.content_string):
            path = outside_path(page.src_uri, match["target"])
            if path is None or not (ROOT / path).is_file():
                continue
            name = site_name(path)
            if files.get_file_from_path(name) is None:
                content = (ROOT / path).read_text()
                files.append(File.generated(config, name, content=content))
    return files


def site_name(path: str) -> str:
    """Markdown and files without an ending become text, so that browsers show them."""
    is_shown = path.endswith((".txt", ".json", ".png", ".svg"))
    return f"{SOURCE_FOLDER}/{path}" if is_shown else f"{SOURCE_FOLDER}/{path}.txt"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at the copies."""

    def replace_link(match: re.Match[str]) -> str:
        path = outside_path(page.file.src_uri, match["target"])
        if path is None or not (ROOT / path).is_file():
            return match[0]
        folder = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(site_name(path), folder)})"

    return LINK.sub(replace_link, markdown)
