"""Finds the files of a LoRA adapter: a PEFT folder, a .gguf file, or a Hub id.

A Hub id may name a revision and a file: org/name@revision, org/name:file.gguf. Only safetensors and
GGUF files are downloaded. What is in the files is checked when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from bloomery.artifacts.files import check_readable
from bloomery.errors import ConfigError, ModelNotFound

ADAPTER_CONFIG = "adapter_config.json"
# A revision or a file that began with / or had .. in it could lead out of the Hub's cache.
ADAPTER_HUB_ID = re.compile(r"(?!.*\.\.)(\w[\w.-]*/\w[\w.-]*)(@\w[\w./-]*)?(:\w[\w./ -]*)?")
# Revisions that may come from a pull request: its name, and the (short) hash of a commit.
FOREIGN_REVISION = re.compile(r"@(refs/.*|pr/.*|[0-9a-fA-F]{7,})")
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")
DOWNLOADED_FILES = (ADAPTER_CONFIG, "adapter_model*.safetensors")


def locate_adapter(source: str) -> Path:
    """Return the folder or file of an adapter, and download it if need be."""
    path = expand_home(source)
    if path.is_dir():
        if not (path / ADAPTER_CONFIG).is_file():
            raise ModelNotFound(
                f"{source}: no {ADAPTER_CONFIG}; this is not the folder of a LoRA adapter"
            )
        check_readable(path / ADAPTER_CONFIG)
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(
                f"{source}: a file, but not a .gguf; give the folder of an adapter, or a .gguf file"
            )
        check_readable(path)
        return path.resolve()
    hub_id = ADAPTER_HUB_ID.fullmatch(source)
    if hub_id is None:
        raise ModelNotFound(
            f"{source}: no such folder or file; an adapter of the Hugging Face Hub is named "
            "org/name"
        )
    repository, revision, file = hub_id.groups(default="")
    return _download_adapter(repository, revision[1:] or None, file[1:])


def expand_home(source: str) -> Path:
    """Replace a ~ at the beginning by the home folder it stands for."""
    try:
        return Path(source).expanduser()
    except (RuntimeError, ValueError):  # ValueError: the name of the user has a null character
        raise ModelNotFound(f"{source}: there is no such user; give the whole path") from None


def is_inside(path: Path, folders: Sequence[Path]) -> bool:
    """Whether a path and the files of an adapter there are below one of the folders.

    Where they are links, what these lead to counts. The folders are resolved.
    """
    try:
        location = path.resolve()
        files = [location, *((location / name).resolve() for name in ADAPTER_FILES)]
    except RuntimeError:  # a link leads to itself
        return False
    return any(
        location != folder and all(file.is_relative_to(folder) for file in files)
        for folder in folders
    )


def _download_adapter(repository: str, revision: str | None, file: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    patterns = [file] if file else list(DOWNLOADED_FILES)
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HTTPError, OSError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelNotFound(
            f"{repository}: no such local folder, and the Hub did not deliver it ({reason}); check "
            "the spelling, the network and HF_TOKEN"
        ) from error
    path = folder / (file or ADAPTER_CONFIG)
    if not path.is_file():
        raise ModelNotFound(f"{repository}: it has no {path.name}, so it is not a LoRA adapter")
    return path if file else folder


class AdapterAllowList:
    """Which adapters clients may name: those in some folders, and those of some Hub ids.

    An entry is a folder if it begins with /, ~ or a dot, or if it exists. Any other entry is a
    pattern of Hub ids, such as org/* or org/name. It permits their branches and tags. Pull requests
    and commits are permitted by patterns with a revision, such as org/name@refs/pr/3.
    """

    def __init__(self, entries: Iterable[str] = ()):
        self.folders: list[Path] = []
        self.hub_patterns: list[str] = []
        for entry in entries:
            try:
                path = expand_home(entry)
            except ModelNotFound as error:
                raise ConfigError(f"lora_allow: {error}") from None
            if path.is_dir():
                self.folders.append(path.resolve())
            elif entry[0] in "/~.":
                raise ConfigError(f"lora_allow: there is no folder {entry}")
            else:
                self.hub_patterns.append(entry)

    def __bool__(self) -> bool:
        return bool(self.folders or self.hub_patterns)

    def find_source(self, name: str) -> str | None:
        """Return where the adapter is that a request names, or None if there is none.

        Each adapter of a folder has one name: its path below the folder.
        """
        relative = PurePosixPath(name)
        is_plain = str(relative) == name and not relative.is_absolute()
        for folder in self.folders if is_plain and ".." not in relative.parts else ():
            path = folder / name
            if not is_inside(path, self.folders):
                continue
            if (path / ADAPTER_CONFIG).is_file() or (path.suffix == ".gguf" and path.is_file()):
                return str(path.resolve())
        return name if self._matches_hub_id(name) else None

    def allows(self, source: str) -> bool:
        """Whether an adapter may be loaded from a path or a Hub id."""
        path = expand_home(source)
        return is_inside(path, self.folders) if path.exists() else self._matches_hub_id(source)

    def list_names(self) -> list[str]:
        """The names of all adapters at the top of the folders."""
        return sorted(
            path.name
            for folder in self.folders
            for path in folder.iterdir()
            if (path / ADAPTER_CONFIG).is_file() or path.suffix == ".gguf"
            if is_inside(path, self.folders)
        )

    def _matches_hub_id(self, name: str) -> bool:
        """Whether a pattern permits a Hub id.

        Raises ModelNotFound where the repository is permitted, but not the revision.
        """
        hub_id = ADAPTER_HUB_ID.fullmatch(name)
        if hub_id is None:
            return False
        repository, revision, _ = hub_id.groups(default="")
        if self._matches_pattern(repository + revision):
            return True
        if not self._matches_pattern(repository):
            return False
        if FOREIGN_REVISION.fullmatch(revision):
            raise ModelNotFound(
                f"{name}: everybody can open a pull request, so pull requests and commits must be "
                "allowed one by one; name a branch or a tag, or start the server with --lora-allow "
                f"{repository}{revision}"
            )
        return True

    def _matches_pattern(self, text: str) -> bool:
        """Whether a pattern has the same parts as the text and matches it."""
        return any(
            ("@" in pattern) == ("@" in text) and fnmatchcase(text, pattern)
            for pattern in self.hub_patterns
        )
