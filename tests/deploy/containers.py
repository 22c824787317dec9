"""Runs the steps of a Dockerfile without Docker, in fresh Debian systems that debootstrap makes.

Each stage is a folder. RUN executes in it by chroot, with its own mounts. A built image runs as a
container would: own process, mount and network namespaces, a read-only root file system, the user
and the environment of the Dockerfile. Needs root, debootstrap and a Debian mirror.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# What Debian's slim images leave out.
SLIM_REMOVES = ("doc", "man", "locale", "info", "lintian", "groff")
# Registry settings of the caller that apply inside, and files that they refer to.
FORWARDED = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "TORCH_INDEX")
FORWARDED_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")


class Instruction(NamedTuple):
    """One instruction of a Dockerfile."""

    name: str
    argument: str

    @property
    def items(self) -> list[str]:
        """The argument as a list: in JSON, or split as a shell would."""
        if self.argument.startswith("["):
            return list(json.loads(self.argument))
        return shlex.split(self.argument)


def parse_dockerfile(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    return [Instruction(name, argument.strip()) for name, argument in pairs]


@dataclass
class BuiltImage:
    """A file system and how to run it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health_command: list[str] = field(default_factory=list)

    @property
    def megabytes(self) -> float:
        """The size of all files, in units of 10**6 bytes as registries count."""
        output = subprocess.check_output(
            ["du", "-s", "--block-size=1", str(self.folder)], text=True
        )
        return int(output.split()[0]) / 1e6


# ---- building ------------------------------------------------------------------------------------


def build_image(
    dockerfile: Path, base: Path, scratch: Path, settings: Mapping[str, str]
) -> BuiltImage:
    """Execute all stages of a Dockerfile; the image of the last one is returned.

    `settings` are variables of registries and proxies for its steps.
    """
    stages: dict[str, BuiltImage] = {}
    image = BuiltImage(scratch / "unused")
    for instruction in parse_dockerfile(dockerfile):
        if instruction.name == "FROM":
            items = instruction.items
            assert items[0] == "debian:bookworm-slim", "the base that make_base stands for"
            name = items[2] if len(items) > 2 else "final"
            image = BuiltImage(scratch / name, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
            subprocess.run(["cp", "--archive", str(base), str(image.folder)], check=True)
            stages[name] = image
        else:
            apply_instruction(image, instruction, stages, settings)
    return image


def apply_instruction(
    image: BuiltImage,
    instruction: Instruction,
    stages: Mapping[str, BuiltImage],
    settings: Mapping[str, str],
) -> None:
    match instruction.name:
        case "RUN":
            run_step(image, instruction.argument, settings)
        case "COPY":
            copy_files(image, instruction.items, stages)
        case "ENV":
            for pair in instruction.items:
                name, _, value = pair.partition("=")
                image.environment[name] = value.replace("$PATH", image.environment["PATH"])
        case "USER":
            image.user = instruction.argument
        case "ENTRYPOINT":
            image.entrypoint = instruction.items
        case "CMD":
            image.command = instruction.items
        case "HEALTHCHECK":
            options, _, command = instruction.argument.partition("CMD ")
            image.health_command = Instruction("CMD", command).items
        case "VOLUME" | "EXPOSE" | "ARG":  # arguments come from the caller's environment
            pass
        case other:
            raise NotImplementedError(f"{other} in a Dockerfile")


def run_step(image: BuiltImage, command: str, settings: Mapping[str, str]) -> None:
    """Run a shell command in the folder of the image, with the network of this machine."""
    environment = {**settings, **image.environment, "DEBIAN_FRONTEND": "noninteractive"}
    if "PIP_CERT" in environment:
        certificates = "/tmp/certificates.crt"
        shutil.copyfile(environment["PIP_CERT"], image.folder / certificates[1:])
        environment |= {"PIP_CERT": certificates}
    files = [path for path in FORWARDED_FILES if Path(path).exists()]
    saved = {path: read_if_present(image.folder / path[1:]) for path in files}
    for path in files:
        shutil.copyfile(path, image.folder / path[1:])
    shared = local_folders(environment)
    mounts = ["mount -t proc proc $R/proc", "mount --rbind /dev $R/dev"]
    for path in shared:
        mounts += [f"mkdir -p $R{path}", f"mount --bind -o ro {path} $R{path}"]
    script = "\n".join([*mounts, 'exec chroot $R /bin/sh -c "$1"'])
    launch = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", command]
    subprocess.run(launch, check=True, env={**environment, "R": str(image.folder)})
    for path, content in saved.items():
        if content is None:
            (image.folder / path[1:]).unlink()
        else:
            (image.folder / path[1:]).write_bytes(content)
    (image.folder / "tmp/certificates.crt").unlink(missing_ok=True)
    for path in shared:
        with_parents = [image.folder / path[1:], *(image.folder / path[1:]).parents]
        remove_empty(with_parents, image.folder)


def read_if_present(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def remove_empty(folders: Sequence[Path], end: Path) -> None:
    """Remove mount points that were made for a step, up to the first that is not empty."""
    for folder in folders:
        if folder == end or any(folder.iterdir()):
            return
        folder.rmdir()


def forwarded_settings() -> dict[str, str]:
    """The caller's settings of registries and proxies, those of pip's files included."""
    settings = {
        name: value for name, value in os.environ.items() if name.startswith(tuple(FORWARDED))
    }
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True).stdout
    for name, value in re.findall(r"^global\.([a-z-]+)='(.*)'$", listed, re.MULTILINE):
        settings.setdefault("PIP_" + name.upper().replace("-", "_"), value)
    return settings


def local_folders(environment: Mapping[str, str]) -> list[str]:
    """Folders with packages that pip's settings name. The files of an index lie beside it."""
    text = " ".join(value for name, value in environment.items() if name.startswith("PIP_"))
    plain = re.findall(r"(?:^| )(/[^ ]*)", text)
    beside_indexes = [str(Path(index).parent) for index in re.findall(r"file://(/[^ ]*)", text)]
    return sorted({folder for folder in [*plain, *beside_indexes] if Path(folder).is_dir()})


def copy_files(image: BuiltImage, items: Sequence[str], stages: Mapping[str, BuiltImage]) -> None:
    """COPY of the repository's files, of one file, or of a folder of another stage."""
    *options, origin, target = items
    to = image.folder / target.lstrip("/")
    if options:
        stage = stages[options[0].removeprefix("--from=")]
        to.parent.mkdir(parents=True, exist_ok=True)
        from_folder = stage.folder / origin.lstrip("/")
        subprocess.run(["cp", "--archive", str(from_folder), str(to)], check=True)
    elif origin == ".":
        list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.check_output(list_files, cwd=ROOT, text=True).split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, to / name)
    else:
        shutil.copyfile(ROOT / origin, to)


def make_base(folder: Path) -> Path:
    """Make a Debian system with what the slim images have."""
    command = ["debootstrap", "--variant=minbase", "bookworm", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for name in SLIM_REMOVES:
        shutil.rmtree(folder / "usr/share" / name, ignore_errors=True)
    for pattern in ("var/cache/apt/*.bin", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # As in the official images: packages leave neither archives nor documentation behind.
    (folder / "etc/apt/apt.conf.d/clean").write_text('Dir::Cache::pkgcache "";\n')
    excluded = "".join(f"path-exclude /usr/share/{name}/*\n" for name in SLIM_REMOVES)
    (folder / "etc/dpkg/dpkg.cfg.d/slim").write_text(excluded)
    return folder


# ---- running -------------------------------------------------------------------------------------


class RunningContainer(NamedTuple):
    """A started image; `pid` is its first process, seen from outside."""

    image: BuiltImage
    pid: int
    process: subprocess.Popen[bytes]

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as `docker exec` does."""
        enter = [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--pid",
            "--net",
            "--root",
            "--wd=/",
        ]
        user, group = self.image.user.split(":")
        drop = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        return subprocess.run(
            [*enter, *drop, *command],
            env=self.image.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def stop(self, seconds: float) -> int:
        """Send SIGTERM to the first process; returns the exit code of the container."""
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def run_container(
    image: BuiltImage, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[RunningContainer]:
    """Run the image with a read-only root and its own network until the block ends.

    Only /tmp and /data can be written, and they begin empty.
    """
    user, group = image.user.split(":")
    script = "\n".join(
        [
            "mount --bind $R $R",
            "mount -t tmpfs tmpfs $R/tmp -o mode=1777",
            f"mount -t tmpfs tmpfs $R/data -o uid={user},gid={group}",
            "mount -t proc proc $R/proc",
            "mount --rbind /dev $R/dev",
            "mount -o remount,bind,ro $R",
            "ip link set lo up",
            f'exec chroot --userspec={image.user} $R "$@"',
        ]
    )
    namespaces = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
    command = [*image.entrypoint, *(arguments or image.command)]
    variables = {**image.environment, **environment}
    path = f"{variables['PATH']}:/usr/sbin:/usr/bin:/sbin:/bin"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*namespaces, "sh", "-ec", script, "sh", *command],
            env={**variables, "PATH": path, "R": str(image.folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield RunningContainer(image, first_child(process.pid), process)
    finally:
        process.kill()
        process.wait(30)


def first_child(pid: int) -> int:
    """The process that unshare forked."""
    for _ in range(100):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.05)
    raise RuntimeError("the container did not start")
