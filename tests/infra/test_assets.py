"""Deployment assets, rendered and checked without Docker or a cluster: against schemas, by linters, by their own readers."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from uuid import uuid4

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
INFRA = ROOT / "infra"
KUBERNETES = "1.33"
COMPOSE: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text())
ENVIRONMENT = (INFRA / "env.example").read_text()
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((INFRA / "kubernetes" / "workers.yaml").read_text()))
RAY: dict[str, Any] = yaml.safe_load((INFRA / "ray" / "raycluster.yaml").read_text())
ONE_SHOT = {"bucket", "deploy"}


def pinned(package: str) -> str:
    """Return the version that pyproject.toml pins."""
    found = re.search(rf'"{re.escape(package)}(?:\[[a-z]+\])?==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, package
    return found[1]


def ours(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a pod template as a Pod, which has a schema of its own."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one"} | pod.get("metadata", {}),
        "spec": pod["spec"],
    }


# compose


def test_compose_meets_the_compose_specification() -> None:
    """Checked against the schema of the specification that check-jsonschema carries."""
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(INFRA / "compose.yaml")]
    done = subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_compose_file_does_not_pass(tmp_path: Path) -> None:
    """The check can fail: a service with a misspelt key."""
    broken = copy.deepcopy(COMPOSE)
    broken["services"]["worker"]["helthcheck"] = {}
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump(broken))
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(tmp_path / "compose.yaml")]
    assert subprocess.run([sys.executable, *words], check=False, capture_output=True).returncode == 1


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_a_service_is_pinned_and_says_when_it_is_ready(name: str) -> None:
    """A full version of the image, a health check (or it ends by itself), ports on this machine alone."""
    service = COMPOSE["services"][name]
    tag = service["image"].rpartition(":")[2]
    assert service["image"].startswith("${DAYBREAK_IMAGE") or re.search(r"\d+\.\d+|\d{4}-\d\d-\d\d", tag), tag
    assert "latest" not in tag
    assert ("healthcheck" in service) != (name in ONE_SHOT)
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:")
    for needed, how in service.get("depends_on", {}).items():
        assert how["condition"] == ("service_completed_successfully" if needed in ONE_SHOT else "service_healthy")


def test_compose_takes_secrets_from_the_environment_alone() -> None:
    """Each password is a required variable that the example file names, empty; every other variable has a default."""
    text = (INFRA / "compose.yaml").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    assert required == {"PREFECT_DB_PASSWORD", "MLFLOW_DB_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY"}
    named = dict(line.split("=", 1) for line in ENVIRONMENT.splitlines() if "=" in line and not line.startswith("#"))
    assert {name for name, value in named.items() if name in required and value} == set()
    assert set(re.findall(r"\$\{(\w+)[:}]", text)) <= set(named)
    for service in COMPOSE["services"].values():
        for key, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|SECRET", key) or value.startswith("${"), key


def test_images_have_the_versions_that_are_pinned() -> None:
    """Prefect's server is the release that nights run; the Ray cluster's is the nights' too."""
    assert COMPOSE["services"]["prefect"]["image"].startswith(f"prefecthq/prefect:{pinned('prefect')}-")
    assert RAY["spec"]["rayVersion"] == pinned("ray")


# Dockerfiles


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.gpu"])
def test_a_dockerfile_passes_the_linter(name: str) -> None:
    """Hadolint finds nothing; each rule that is left out has its reason beside it."""
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([linter, "--no-color", INFRA / name], check=False, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.gpu"])
def test_a_dockerfile_installs_what_is_pinned_as_another_user(name: str) -> None:
    """Its torch is pyproject's, its extras are there, and nothing runs as root."""
    text = (INFRA / name).read_text()
    (pattern,) = set(re.findall(r"sed -n '([^']+)' pyproject.toml", text))
    done = subprocess.run(["sed", "-n", pattern, ROOT / "pyproject.toml"], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"torch=={pinned('torch')}"
    (extras,) = re.findall(r"-e '\.\[([a-z0-9,]+)\]'", text)
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["10001"]


# Kubernetes


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_manifest_meets_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    """Strictly: a key that Kubernetes does not know is refused."""
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest | {"replicass": 1}, KUBERNETES, strict=True)


def test_each_worker_serves_a_pool_that_has_a_template() -> None:
    """One Deployment a pool, and prefect.yaml names no pool without one."""
    workers = [m["spec"]["template"]["spec"]["containers"][0]["args"] for m in MANIFESTS if m["kind"] == "Deployment"]
    pools = {words[words.index("--pool") + 1] for words in workers}
    assert pools == {path.stem.removeprefix("pool-") for path in (INFRA / "kubernetes").glob("pool-*.json")}
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert {deployment["work_pool"]["name"] for deployment in deployments} <= pools


def rendered(pool: str, **variables: Any) -> dict[str, Any]:
    """Return the job that Prefect's Kubernetes worker makes of a flow run in a pool."""
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    template = json.loads((INFRA / "kubernetes" / f"pool-{pool}.json").read_text())
    client = PrefectClient("http://127.0.0.1:1/api")  # is asked nothing: our templates name no block
    making = KubernetesWorkerJobConfiguration.from_template_and_values(template, variables, client=client)
    made = asyncio.run(making)
    made.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="nightly 2025-06-01"))
    return dict(made.job_manifest)


@pytest.mark.filterwarnings("default")  # kopf, which the worker watches pods with
@pytest.mark.parametrize(("pool", "more"), [("cpu", {}), ("gpu", {}), ("gpu", {"gpus": 8})])
def test_a_pool_makes_jobs_that_kubernetes_takes(pool: str, more: dict[str, Any]) -> None:
    """Prefect renders the template for a flow run; the job is valid, takes the deployment's variables, asks for GPUs."""
    job = rendered(pool, env={"DO_NOT_TRACK": "1"}, memory_limit="24Gi", **more)

    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    (box,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "DO_NOT_TRACK", "value": "1"} in box["env"]
    assert box["image"] == f"daybreak:{pool}"
    assert box["resources"]["limits"]["memory"] == "24Gi"
    assert box["resources"]["limits"].get("nvidia.com/gpu") == (more.get("gpus", 1) if pool == "gpu" else None)
    assert job["metadata"]["namespace"] == "daybreak"
    accounts = {m["metadata"]["name"] for m in MANIFESTS if m["kind"] == "ServiceAccount"}
    assert job["spec"]["template"]["spec"]["serviceAccountName"] in accounts


@pytest.mark.parametrize("pool", ["cpu", "gpu"])
def test_a_template_is_one_that_prefect_takes(pool: str) -> None:
    """Every placeholder has its variable, and the defaults meet the variables' own schema; so the form works."""
    from prefect.client.schemas.actions import WorkPoolCreate

    template = json.loads((INFRA / "kubernetes" / f"pool-{pool}.json").read_text())
    WorkPoolCreate(name=pool, type="kubernetes", base_job_template=template)
    variables = template["variables"]
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(variables["properties"])
    defaults = {name: one["default"] for name, one in variables["properties"].items() if one.get("default") is not None}
    jsonschema.Draft202012Validator(variables).validate(defaults)
    for name, one in variables["properties"].items():
        assert one.get("description"), name


# Ray

# What KubeRay's API reference lists for a RayCluster (ray.io/v1), as far as ours goes; pods are checked as pods.
GROUP: dict[str, Any] = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": {"type": "object", "required": ["spec"]},
}
COUNT = {"type": "integer", "minimum": 0}
RAY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["headGroupSpec", "rayVersion"],
    "additionalProperties": False,
    "properties": {
        "rayVersion": {"type": "string"},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                "idleTimeoutSeconds": {"type": "integer", "minimum": 1},
                "resources": {"type": "object"},
            },
        },
        "headGroupSpec": {
            "type": "object",
            "required": ["template"],
            "additionalProperties": False,
            "properties": GROUP | {"serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}},
        },
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["groupName", "minReplicas", "maxReplicas", "template"],
                "additionalProperties": False,
                "properties": GROUP
                | {"groupName": {"type": "string"}, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT},
            },
        },
    },
}


def test_the_ray_cluster_meets_its_schema_and_its_pods_theirs() -> None:
    """The cluster by KubeRay's reference, each pod template by Kubernetes'."""
    assert (RAY["apiVersion"], RAY["kind"]) == ("ray.io/v1", "RayCluster")
    jsonschema.validate(RAY["spec"], RAY_SCHEMA)
    for group in [RAY["spec"]["headGroupSpec"], *RAY["spec"]["workerGroupSpecs"]]:
        kubernetes_validate.validate(ours(group["template"]), KUBERNETES, strict=True)


@pytest.mark.filterwarnings("default")
def test_rays_autoscaler_reads_the_cluster() -> None:
    """Ray's own reading of the manifest: the head takes no bucket, workers grow from none to as many as stand there."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import validate_config

    read = _derive_autoscaling_config_from_ray_cr(RAY)

    validate_config(read)
    head, buckets = (read["available_node_types"][name] for name in (read["head_node_type"], "buckets"))
    assert head["resources"]["CPU"] == 0
    assert (buckets["min_workers"], buckets["max_workers"]) == (0, 8)
    assert buckets["resources"] == {"CPU": 4, "memory": 16 * 2**30}


def test_nights_reach_the_ray_cluster_by_its_service() -> None:
    """KubeRay names the head's service after the cluster; the example environment says so, by the client's port."""
    text = (INFRA / "kubernetes" / "secret.example.env").read_text()
    name, namespace = RAY["metadata"]["name"], RAY["metadata"]["namespace"]
    ports = {
        port["name"]: port["containerPort"]
        for port in RAY["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert f"RAY_ADDRESS=ray://{name}-head-svc.{namespace}.svc:{ports['client']}" in text


# deploy.sh


def test_deploy_sh_makes_each_pool_then_deploys(tmp_path: Path) -> None:
    """It names every pool of prefect.yaml with its template, and refuses to run without a server."""
    calls = tmp_path / "calls"
    (tmp_path / "prefect").write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    (tmp_path / "prefect").chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    script, variables = INFRA / "deploy.sh", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if "PYTHONPATH" in os.environ:
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    refused = subprocess.run(["bash", script, "process"], env=variables, check=False, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "PREFECT_API_URL" in refused.stderr

    variables["PREFECT_API_URL"] = "http://127.0.0.1:1/api"
    for kind, template in (("process", ""), ("kubernetes", " --base-job-template infra/kubernetes/pool-cpu.json")):
        calls.unlink(missing_ok=True)
        done = subprocess.run(["bash", script, kind], env=variables, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told = calls.read_text().splitlines()
        assert f"--no-prompt work-pool create cpu --type {kind} --overwrite{template}" in told
        assert told[-1] == "--no-prompt deploy --all"
