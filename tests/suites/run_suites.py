"""Runs the test suites of other projects against a real server with the embedded model.

    python -m tests.suites.run_suites [SUITE...]     all suites, or those named
    --folder F     where sources and environments are kept between runs; default: build/suites
    --last         read the reports of the last run instead of running the clients' own tests
    --write        put the table of results into docs/quality.md

The official clients of OpenAI and Anthropic bring their own tests in their source distributions.
Those tests were made for a mock server: they use ids that exist nowhere and names of other models.
The known failures of a suite explain messages that were seen, and say whether the server is right
to send them. They still count as failures. The exit status is the number of the others.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import time
import venv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from xml.etree import ElementTree

from tests.clients.run_heavy import GROUPS, run_group, running_server
from tests.server.playback import TOOL_TEMPLATE_PATH

ROOT = Path(__file__).parent.parent.parent
QUALITY_PAGE = ROOT / "docs" / "quality.md"
PROBLEM_TAGS = ("failure", "error")  # of a JUnit report
# What an explanation says of the server.
RIGHT = "rightly refused"
MISSING = "not implemented"
UNCHECKED = "not compared"
TABLE = re.compile(r"(<!-- suites -->\n).*?(<!-- end of suites -->)", re.DOTALL)
# What both projects' tests import beside their client.
NEEDED = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "httpx2",
    "respx",
    "aiohttp",
    "rich",
    "inline-snapshot",
    "dirty-equals",
    "time-machine",
    "http-snapshot[httpx]",
    "opentelemetry-sdk",
    "trio",
)


@dataclass(frozen=True)
class KnownFailure:
    """Explains the tests that fail with a message in which the pattern is found."""

    pattern: str
    reason: str
    verdict: str


@dataclass(frozen=True)
class SdkSuite:
    """The tests of an official client, of the routes that this server has."""

    package: str
    version: str
    tests: tuple[str, ...]
    models: tuple[str, ...]  # the names that the tests use
    base_path: str
    known_failures: tuple[KnownFailure, ...] = ()
    more_packages: tuple[str, ...] = ()


@dataclass
class SuiteResult:
    name: str
    passed: int = 0
    skipped: int = 0
    known: Counter[KnownFailure] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)  # others


SDK_SUITES = {
    "openai": SdkSuite(
        "openai",
        "3.49.0",
        (
            "test_models.py",
            "test_completions.py",
            "test_embeddings.py",
            "test_responses.py",
            "responses",
            "conversations",
            "chat",
        ),
        ("gpt-3.5-turbo-instruct", "gpt-6-astra", "text-embedding-3-small", "model"),
        "/v1",
        (
            KnownFailure(
                "not, or no longer, stored here", "ids that only a mock server knows", RIGHT
            ),
            KnownFailure("audio is not supported", "audio as output", RIGHT),
            KnownFailure("'foo' is not one", "a key of logit_bias that is no token id", RIGHT),
            KnownFailure(
                "conversation and previous_response_id exclude",
                "a conversation and a previous response at once",
                RIGHT,
            ),
            KnownFailure("prompt is not supported", "prompts stored by OpenAI", MISSING),
            KnownFailure("405 - this route takes GET$", "deletion of models", MISSING),
            KnownFailure("405 - this route takes DELETE, GET$", "responses/compact", MISSING),
            KnownFailure("input is missing", "responses without input", UNCHECKED),
            KnownFailure("only with stream: true", "stream_options without stream", RIGHT),
            KnownFailure("limit must be a whole number", "a page of 0 entries", UNCHECKED),
            KnownFailure(
                "invalid for expected schema",
                "base64 embeddings, where the client expects numbers",
                UNCHECKED,
            ),
        ),
    ),
    "anthropic": SdkSuite(
        "anthropic",
        "2.8.0",
        ("test_messages.py", "test_models.py"),
        ("claude-opus-5-5", "claude-1.3", "model_id"),
        "",
        (
            KnownFailure("container is not supported", "a container for code", MISSING),
            KnownFailure("cannot call tools", "tools, with a model that has none", RIGHT),
            KnownFailure("schema must be an object or boolean", "a tool without a schema", RIGHT),
            KnownFailure("is not served here", "the name of another model", RIGHT),
        ),
    ),
}


def fetch_source(suite: SdkSuite, folder: Path) -> Path:
    """Download the source distribution and return the folder it unpacks to."""
    name = f"{suite.package}-{suite.version}"
    source = folder / name
    if source.exists():
        return source
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
    requirement = f"{suite.package}=={suite.version}"
    subprocess.run([*command, ":all:", requirement, "--dest", folder], check=True)
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return source


def prepare_environment(suite: SdkSuite, folder: Path) -> Path:
    """An environment with the client and what its tests need; returns its interpreter."""
    environment = folder / f"{suite.package}-environment"
    interpreter = environment / "bin" / "python"
    installed = environment / "installed"
    if not installed.exists():
        venv.create(environment, with_pip=True)
        packages = [f"{suite.package}=={suite.version}", *NEEDED, *suite.more_packages]
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *packages], check=True)
        installed.touch()
    return interpreter


def run_sdk_suite(name: str, url: str, folder: Path) -> None:
    """Run a client's own tests and write their report."""
    suite = SDK_SUITES[name]
    source = fetch_source(suite, folder)
    interpreter = prepare_environment(suite, folder)
    report = folder / f"{name}.xml"
    report.unlink(missing_ok=True)
    paths = [f"tests/api_resources/{path}" for path in suite.tests]
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout", "300"]
    environ = {**os.environ, "TEST_API_BASE_URL": url + suite.base_path}
    environ.pop("PYTHONPATH", None)
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(
            [interpreter, "-m", "pytest", *options, "--junitxml", report, *paths],
            cwd=source,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if not report.exists():
        raise SystemExit(f"{name}: its tests do not start; see {folder / name}.log")


def read_sdk_report(name: str, folder: Path) -> SuiteResult:
    suite = SDK_SUITES[name]
    title = f"{name} {suite.version}, its own tests"
    return read_report(title, folder / f"{name}.xml", suite.known_failures)


def read_report(name: str, report: Path, known_failures: Iterable[KnownFailure]) -> SuiteResult:
    result = SuiteResult(name)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test_id = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        if case.find("skipped") is not None:
            result.skipped += 1
        elif case.find("failure") is None and case.find("error") is None:
            result.passed += 1
        else:
            add_failure(result, test_id, case, known_failures)
    return result


def add_failure(
    result: SuiteResult,
    test_id: str,
    case: ElementTree.Element,
    known_failures: Iterable[KnownFailure],
) -> None:
    """Count a failure by its explanation, or keep it with its message."""
    problems = (element.get("message", "") for element in case if element.tag in PROBLEM_TAGS)
    message = next(problems, "")
    for known in known_failures:
        if re.search(known.pattern, message):
            result.known[known] += 1
            return
    result.failed.append(f"{test_id}: {message[:200]}")


def run_client_suite(url: str, folder: Path) -> SuiteResult:
    """The heavy clients of tests/clients, each a program of its own."""
    result = SuiteResult("heavy clients: " + ", ".join(GROUPS))
    for name in GROUPS:
        if run_group(name, url, folder / "clients"):
            result.passed += 1
        else:
            result.failed.append(name)
    return result


def format_table(results: Iterable[SuiteResult], day: date) -> str:
    lines = [
        f"Results of {day}, with the embedded model on a CPU and a chat template with tools:",
        "",
    ]
    lines += [
        "| suite | passed | failed, explained | failed, not explained | skipped by itself |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        num_known = sum(result.known.values())
        counts = f"{result.passed} | {num_known} | {len(result.failed)} | {result.skipped}"
        lines.append(f"| {result.name} | {counts} |")
    explained = [
        f"| {result.name.partition(',')[0]} | {count} | {known.reason} | {known.verdict} |"
        for result in results
        for known, count in result.known.most_common()
    ]
    if explained:
        header = ["| suite | failed | tests of | this server |", "|---|---|---|---|"]
        lines += ["", "The failures that are explained:", "", *header, *explained]
    return "\n".join(lines) + "\n"


def run_all(names: Iterable[str], folder: Path) -> list[SuiteResult]:
    """Run the suites against one server."""
    aliases = [model for suite in SDK_SUITES.values() for model in suite.models]
    results = []
    # With a template for tools the clients' tests reach the routes that call them.
    with running_server(*dict.fromkeys(aliases), template=TOOL_TEMPLATE_PATH) as url:
        for name in names:
            if name == "clients":
                results.append(run_client_suite(url, folder))
            else:
                run_sdk_suite(name, url, folder)
                results.append(read_sdk_report(name, folder))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (*SDK_SUITES, "clients")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(names))
    parser.add_argument("--folder", type=Path, default=Path("build/suites"))
    parser.add_argument("--last", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = arguments.suites or names
    if arguments.last:
        results = [read_sdk_report(name, folder) for name in names if name in SDK_SUITES]
    else:
        results = run_all(names, folder)
    for result in results:
        for test_id in result.failed:
            print(f"FAILED {result.name}: {test_id}", flush=True)
    reports = [folder / f"{name}.xml" for name in names if name in SDK_SUITES]
    finished = min((path.stat().st_mtime for path in reports), default=time.time())
    table = format_table(results, datetime.fromtimestamp(finished, UTC).date())
    print(table)
    if arguments.write:
        page = QUALITY_PAGE.read_text()
        QUALITY_PAGE.write_text(TABLE.sub(lambda match: match[1] + "\n" + table + match[2], page))
    return sum(len(result.failed) for result in results)


if __name__ == "__main__":
    sys.exit(main())
