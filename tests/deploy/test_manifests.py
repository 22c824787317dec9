"""Kubernetes manifests, the Helm chart, the compose file and the systemd unit of deploy/.

The slow tests validate them against the published schemas, which come from package registries.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from bloomery import __version__
from bloomery.cli import build_parser
from bloomery.config import EngineConfig, ServerConfig, option_fields
from bloomery.server.metric_names import COUNTERS, GAUGES, HISTOGRAMS
from bloomery.server.routes.status import build_status_routes

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "bloomery"
# Where packages with schemas are kept between runs.
SCHEMA_FOLDER = ROOT / "build" / "deploy"
EVERYTHING = {"autoscaling": {"enabled": True}, "serviceMonitor": {"enabled": True}}
# Files for kubectl and for a chart of others.
NOT_RESOURCES = ("kustomization.yaml", "prometheus-adapter.yaml")


def load_manifests() -> dict[str, Any]:
    paths = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return {
        path.name: yaml.safe_load(path.read_text())
        for path in paths
        if path.name not in NOT_RESOURCES
    }


def server_container(deployment: Any) -> Any:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def run_helm(command: str, values: dict[str, Any]) -> str:
    """The output of a command of Helm about the chart. Helm comes with the test tools."""
    helm = shutil.which(
        "helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if helm is None:
        pytest.skip("helm is not installed")
    finished = subprocess.run(
        [helm, *command.split(), str(CHART), "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def render_chart(values: dict[str, Any]) -> dict[str, Any]:
    """The resources that Helm renders, by the names of their templates."""
    text = run_helm("template bloomery", values)
    files = re.split(r"^# Source: bloomery/templates/(\S+)\n", text, flags=re.MULTILINE)[1:]
    contents = (yaml.safe_load(text.removesuffix("---\n")) for text in files[1::2])
    return {name: content for name, content in zip(files[::2], contents) if content}


def test_the_server_understands_the_manifest() -> None:
    """Flags, variables, probes and the metrics of the autoscaler exist."""
    manifests = load_manifests()
    container = server_container(manifests["deployment.yaml"])
    assert "command" not in container  # the image's own entry point is `bloomery`
    arguments = build_parser("serve").parse_args(container["args"])
    grace = manifests["deployment.yaml"]["spec"]["template"]["spec"]
    assert grace["terminationGracePeriodSeconds"] > float(arguments.drain_seconds) + 5
    variables = {
        f"BLOOMERY_{field.name.upper()}" for field in option_fields(EngineConfig, ServerConfig)
    }
    for entry in container["env"]:
        assert entry["name"] in variables or entry["name"].startswith("HF_"), entry
    public_paths = {route.path for route in build_status_routes(False) if route.public}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in public_paths
    own_metrics = {f"bloomery_{names.own}" for names in (*GAUGES.values(), *COUNTERS.values())}
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())
    queries = [rule["seriesQuery"] for rule in adapter["rules"]["custom"]]
    for metric in manifests["autoscaler.yaml"]["spec"]["metrics"]:
        name = metric["pods"]["metric"]["name"]
        assert name in own_metrics
        assert any(query.startswith(name + "{") for query in queries)


def test_the_pod_is_restricted() -> None:
    pod = load_manifests()["deployment.yaml"]["spec"]["template"]["spec"]
    # With service links, a Service named bloomery would set BLOOMERY_PORT=tcp://...
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_chart_renders_the_manifests() -> None:
    """The chart with its default values is what deploy/kubernetes has."""
    rendered = render_chart({})
    everything = render_chart(EVERYTHING)
    for name, manifest in load_manifests().items():
        resource = rendered.get(name) or everything[name]
        labels = resource["metadata"]["labels"]
        assert labels.pop("app.kubernetes.io/managed-by") == "Helm"
        assert labels.pop("helm.sh/chart").startswith("bloomery-")
        assert resource == manifest, name
    assert "replicas" not in everything["deployment.yaml"]["spec"]


def test_values_of_the_chart() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema_rs.meta.validate(schema)
    validator = jsonschema_rs.validator_for(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    validator.validate(values)
    for wrong in (
        {"replica": 2},
        {"gpus": -1},
        {"extraArgs": ["max-model-len"]},
        {"service": {"port": 80000}},
        {"image": {"repository": ""}},
    ):
        assert not validator.is_valid({**values, **wrong}), wrong
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_helm_checks_the_chart_and_its_values() -> None:
    run_helm("lint --strict", EVERYTHING)
    with pytest.raises(AssertionError, match="gpus"):
        run_helm("template bloomery", {"gpus": -1})


def test_other_values_of_the_chart() -> None:
    values = {
        "model": "",
        "gpus": 0,
        "nameOverride": "small",
        "huggingFaceSecret": "hub",
        "extraArgs": ["--max-model-len=4096"],
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "cache": {"existingClaim": "models"},
        "networkPolicy": {"fromNamespaces": {"team": "search"}},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    }
    rendered = render_chart(values)
    container = server_container(rendered["deployment.yaml"])
    assert container["args"][:2] == ["serve", "--host=0.0.0.0"]
    assert container["args"][-1] == "--max-model-len=4096"
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert {"HF_TOKEN", "HTTPS_PROXY"} <= {entry["name"] for entry in container["env"]}
    pod = rendered["deployment.yaml"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "models"}
    assert pod["tolerations"] == values["tolerations"]
    (ingress,) = rendered["networkpolicy.yaml"]["spec"]["ingress"]
    assert ingress["from"][0]["namespaceSelector"]["matchLabels"] == {"team": "search"}
    assert rendered["service.yaml"]["metadata"]["name"] == "small"


def test_the_compose_file() -> None:
    """Both services are restricted, and their settings are known variables."""
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    known = {
        f"BLOOMERY_{field.name.upper()}" for field in option_fields(EngineConfig, ServerConfig)
    }
    known |= {"BLOOMERY_MODEL", "HF_HOME", "HF_TOKEN"}
    assert set(compose["services"]) == {"cpu", "cuda"}
    for name, service in compose["services"].items():
        assert service["read_only"] is True and service["tmpfs"] == ["/tmp"]
        assert set(service["environment"]) <= known
        assert (ROOT / service["build"]["dockerfile"]).name == f"Dockerfile.{name}"
        assert "/ready" in " ".join(service["healthcheck"]["test"])


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="docker-compose is not installed")
def test_compose_accepts_the_compose_file() -> None:
    path = DEPLOY / "compose" / "compose.yaml"
    command = ["docker-compose", "--project-name", "x", "--file", str(path)]
    profiles = ["--profile", "cpu", "--profile", "cuda"]
    checked = subprocess.run(
        [*command, *profiles, "config", "--quiet"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_systemd_unit(tmp_path: Path) -> None:
    """systemd accepts the unit, and its protection is good by systemd's own measure."""
    text = (DEPLOY / "systemd" / "bloomery.service").read_text()
    program = text.partition("ExecStart=")[2].split()[0]
    unit = tmp_path / "bloomery.service"
    unit.write_text(text.replace(program, sys.executable, 1))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True
    )
    assert checked.returncode == 0 and not checked.stderr.strip(), checked.stderr
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=40", str(unit)]
    measured = subprocess.run(command, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stdout[-200:]


def install_package(package: str) -> Path:
    """An environment with this package, kept between runs; returns its folder of programs."""
    folder = SCHEMA_FOLDER / package
    installed = folder / "installed"
    if not installed.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", package], check=True)
        installed.touch()
    return folder / "bin"


def all_resources() -> Iterator[Any]:
    yield from load_manifests().values()
    yield from render_chart(EVERYTHING).values()
    yield from render_chart({"gpus": 0, "model": ""}).values()


@pytest.mark.slow
def test_resources_match_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    """Every resource but ServiceMonitor, by the schemas in the package kubernetes-validate."""
    programs = install_package("kubernetes-validate")
    num_resources = 0
    for resource in all_resources():
        if resource["kind"] == "ServiceMonitor":
            continue
        path = tmp_path / f"{num_resources}.yaml"
        path.write_text(yaml.safe_dump(resource))
        num_resources += 1
    for version in ("1.27", "1.30", "1.33", "1.36"):
        command = [programs / "kubernetes-validate", "--strict", "-k", version]
        checked = subprocess.run(
            [*command, *sorted(tmp_path.glob("*.yaml"))], capture_output=True, text=True
        )
        output = checked.stdout + checked.stderr
        assert checked.returncode == 0, output
        assert output.count(" passed for resource ") == num_resources, output
    assert num_resources > 12


def load_queries() -> list[str]:
    """The queries of the dashboard and of the alerts."""
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    queries = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "5m")
            queries.append(re.sub(r"\$\w+", ".*", query))
    return queries


def test_alerts_read_metrics_that_exist() -> None:
    histograms = {f"bloomery_{names.own}_bucket" for names in HISTOGRAMS.values() if names.own}
    counters = {f"bloomery_{names.own}_total" for names in COUNTERS.values()}
    gauges = {f"bloomery_{names.own}" for names in GAUGES.values()}
    known = histograms | counters | gauges | {"bloomery_responses_total"}
    text = (DEPLOY / "prometheus" / "alerts.yaml").read_text()
    names = set(re.findall(r"bloomery_\w+", text))
    assert len(names) > 5 and names <= known, names - known


@pytest.mark.slow
def test_queries_are_valid_promql() -> None:
    programs = install_package("promql-parser")
    script = "import json, promql_parser, sys\n"
    script += "for query in json.load(sys.stdin): promql_parser.parse(query)"
    for queries, is_valid in ((load_queries(), True), (["rate(bloomery_running[5m)"], False)):
        checked = subprocess.run(
            [programs / "python", "-c", script],
            input=json.dumps(queries),
            capture_output=True,
            text=True,
        )
        assert (checked.returncode == 0) == is_valid, checked.stderr


@pytest.mark.slow
def test_github_and_compose_files_match_their_schemas() -> None:
    """By the schemas in the package check-jsonschema."""
    programs = install_package("check-jsonschema")
    github = ROOT / ".github"
    forms = [path for path in (github / "ISSUE_TEMPLATE").iterdir() if path.stem != "config"]
    for schema, paths in {
        "github-workflows": list((github / "workflows").iterdir()),
        "github-issue-forms": forms,
        "github-issue-config": [github / "ISSUE_TEMPLATE" / "config.yml"],
        "compose-spec": [DEPLOY / "compose" / "compose.yaml"],
    }.items():
        command = [programs / "check-jsonschema", "--builtin-schema", f"vendor.{schema}"]
        checked = subprocess.run([*command, *paths], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


SERVICE_MONITOR_CHECK = """
import { readFileSync } from "node:fs";
import { ServiceMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
for (const value of JSON.parse(readFileSync(0, "utf-8"))) {
  new ServiceMonitor(value).validate();
}
console.log("valid");
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")
def test_service_monitors_match_the_schema_of_the_operator() -> None:
    folder = SCHEMA_FOLDER / "prometheus-operator"
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        packages = ["@kubernetes-models/prometheus-operator@6"]
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages]
        subprocess.run(command, cwd=folder, check=True)
    script = folder / "check.mjs"
    script.write_text(SERVICE_MONITOR_CHECK)
    monitors = [value for value in all_resources() if value["kind"] == "ServiceMonitor"]
    assert len(monitors) == 2
    wrong = json.loads(json.dumps(monitors[0]))
    wrong["spec"]["endpoints"][0]["interval"] = 15
    for values, is_valid in ((monitors, True), ([wrong], False)):
        checked = subprocess.run(
            ["node", str(script)], input=json.dumps(values), capture_output=True, text=True
        )
        assert (checked.returncode == 0) == is_valid, checked.stderr
