"""The images of deploy/docker: built in a fresh Debian system, and run read-only without root."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.containers import (
    ROOT,
    BuiltImage,
    RunningContainer,
    build_image,
    forwarded_settings,
    make_base,
    parse_dockerfile,
    run_container,
)

DOCKER = ROOT / "deploy" / "docker"
MAX_MEGABYTES = {"cpu": 800, "cuda": 5000}
KEY = "a-key-of-this-test"
# Run inside: streams one answer and prints its tokens per second.
ASK = f"""
import json, time, urllib.request
body = dict(inputs="The history of iron begins", parameters=dict(max_new_tokens=128, details=True))
headers = {{"Content-Type": "application/json", "Authorization": "Bearer {KEY}"}}
url = "http://127.0.0.1:8000/generate"
speeds = []
for _ in range(3):
    started = time.perf_counter()
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request))
    count = answer["details"]["generated_tokens"]
    speeds.append(count / (time.perf_counter() - started))
print(json.dumps(dict(text=answer["generated_text"], speed=max(speeds))))
"""

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.getuid() or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap")
    return make_base(tmp_path_factory.mktemp("base") / "debian")


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def image(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BuiltImage]:
    kind: str = request.param
    scratch = tmp_path_factory.mktemp(kind)
    settings = forwarded_settings()
    if kind == "cuda":
        settings.pop(
            "PIP_FIND_LINKS", None
        )  # a folder may have a torch for CPUs, which pip prefers
    yield build_image(DOCKER / f"Dockerfile.{kind}", base, scratch, settings)
    shutil.rmtree(scratch)


def wait_until_healthy(container: RunningContainer, log: Path) -> None:
    """Wait as an orchestrator does: until the health command of the image succeeds."""
    for _ in range(240):
        assert container.process.poll() is None, log.read_text()[-2000:]
        if container.execute(container.image.health_command).returncode == 0:
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


@pytest.mark.slow
def test_the_image_serves_read_only_and_without_root(image: BuiltImage, tmp_path: Path) -> None:
    kind = "cuda" if (image.folder / "usr/bin/gcc").exists() else "cpu"
    print(f"{kind}: {image.megabytes:.0f} MB")
    assert image.megabytes <= MAX_MEGABYTES[kind]
    log = tmp_path / "log"
    variables = {"BLOOMERY_API_KEY": KEY, "BLOOMERY_DEVICE": "cpu"}
    with run_container(image, [], variables, log) as container:
        wait_until_healthy(container, log)
        identity = container.execute(["id", "--user"])
        assert identity.stdout.strip() == "10001"
        assert container.execute(["touch", "/opt/bloomery/x"]).returncode != 0
        asked = container.execute(["python3", "-c", ASK])
        assert asked.returncode == 0, asked.stderr
        answer = json.loads(asked.stdout)
        print(f"{kind}: {answer['speed']:.0f} tokens/s in the container")
        assert len(answer["text"]) > 20
        libraries = container.execute(["sh", "-c", "cat /proc/[0-9]*/maps"]).stdout
        assert "/native/prebuilt/" in libraries, "the kernels of the wheel are not loaded"
        assert container.stop(60) in (0, 143), log.read_text()[-2000:]
    assert "Traceback" not in log.read_text()


def test_both_images_have_the_same_user_and_health_check() -> None:
    shared = ("USER", "HEALTHCHECK", "ENTRYPOINT", "CMD", "VOLUME", "EXPOSE")
    cpu, cuda = (
        [step for step in parse_dockerfile(DOCKER / f"Dockerfile.{kind}") if step.name in shared]
        for kind in ("cpu", "cuda")
    )
    assert cpu == cuda
