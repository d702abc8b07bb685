"""Manifests: rendered, valid, and equal in what every server needs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from tests import processes

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUBECTL = Path(sys.executable).parent / "kubectl"
OVERLAYS = {"8b": "1", "70b": "8"}
FILES = ["leaderworkerset.yaml", "rayservice.yaml"]
METRICS = "/run/sparsek/metrics"
SCHEMAS = {
    schema["title"]: Draft202012Validator(schema)
    for schema in map(json.loads, (p.read_text() for p in (KUBERNETES / "schemas").glob("*.json")))
}


def rendered(name: str) -> list[dict[str, Any]]:
    """The objects of an overlay, as kustomize renders it, or of a file."""
    if name in OVERLAYS:
        result = processes.run(KUBECTL, "kustomize", KUBERNETES / name)
        assert result.returncode == 0, result.stderr
        return list(yaml.safe_load_all(result.stdout))
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def pod_templates(node: object) -> Iterator[dict[str, Any]]:
    """Every pod template inside an object."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        else:
            for value in node.values():
                yield from pod_templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from pod_templates(value)


def validate(resource: dict[str, Any]) -> None:
    """Check one object against Kubernetes' schemas, or against ours and its pods against theirs."""
    if resource["kind"] not in SCHEMAS:
        kubernetes_validate.validate(resource, "1.37", strict=True)
        return
    SCHEMAS[resource["kind"]].validate(resource)
    for template in pod_templates(resource):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        kubernetes_validate.validate({**pod, "template": template}, "1.37", strict=True)


@pytest.mark.parametrize("name", [*OVERLAYS, *FILES])
def test_manifests_keep_to_their_schemas_and_every_server_can_be_watched(name: str) -> None:
    resources = rendered(name)
    for resource in resources:
        validate(resource)
    templates = list(pod_templates(resources))
    assert templates
    for template in templates:
        (container,) = template["spec"]["containers"]
        variables = {variable["name"]: variable for variable in container["env"]}
        assert variables["PROMETHEUS_MULTIPROC_DIR"]["value"] == METRICS
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes[mounts[METRICS]]["emptyDir"] == {}, "counters of dead processes would stay"
        if "args" not in container:  # those of serve.sh, which empties the folder
            empties = container["lifecycle"]["postStart"]["exec"]["command"]
            assert empties == ["find", METRICS, "-mindepth", "1", "-delete"]
        assert set(mounts.values()) == set(volumes)
        assert template["spec"]["enableServiceLinks"] is False
        resources_of = container["resources"]
        gpus = [resources_of[kind].get("nvidia.com/gpu") for kind in ("requests", "limits")]
        assert gpus[0] == gpus[1]
        if name in OVERLAYS:
            assert gpus[0] == OVERLAYS[name]
            assert container["readinessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize("name", OVERLAYS)
def test_selectors_of_an_overlay_find_its_own_pods(name: str) -> None:
    by_kind = {resource["kind"]: resource for resource in rendered(name)}
    deployment = by_kind["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selectors = [by_kind["Service"]["spec"]["selector"]]
    selectors += [
        by_kind[kind]["spec"]["selector"]["matchLabels"]
        for kind in ("Deployment", "PodMonitor", "PodDisruptionBudget")
    ]
    assert all(selector.items() <= labels for selector in selectors)
    autoscaler = by_kind["HorizontalPodAutoscaler"]["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    queue = autoscaler["metrics"][0]["pods"]["metric"]["name"]
    adapter = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())
    assert queue in [rule["name"]["as"] for rule in adapter["rules"]["custom"]]


def test_chart_values_keep_to_the_schema_and_name_the_backend() -> None:
    values = yaml.safe_load((KUBERNETES / "production-stack.yaml").read_text())
    SCHEMAS["values of the production-stack chart"].validate(values)
    for model in values["servingEngineSpec"]["modelSpec"]:
        config = model["vllmConfig"]
        assert config["extraArgs"] == ["--attention-backend", "SPARSEK"]
        assert config["tensorParallelSize"] == model["requestGPU"]
        assert config["enablePrefixCaching"], "left out, the chart turns it off"
        assert config["prometheusMultiprocDir"] == METRICS
        assert set(caches(model["env"]).values()) == {"/data/vllm", "/data/triton"}


def test_values_for_llm_d_keep_to_the_schema_and_name_the_backend() -> None:
    values = yaml.safe_load((KUBERNETES / "llm-d.yaml").read_text())
    SCHEMAS["values of the llm-d modelservice chart"].validate(values)
    decode = values["decode"]
    (container,) = decode["containers"]
    assert container["args"][:2] == ["--attention-backend", "SPARSEK"]
    assert not values["modelArtifacts"]["authSecretName"], "a pod would wait for the secret"
    folder = values["modelArtifacts"]["mountPath"]
    assert set(caches(container["env"]).values()) == {f"{folder}/vllm", f"{folder}/triton"}
    assert decode["enableServiceLinks"] is False
    port = decode["monitoring"]["podmonitor"]["portName"]
    assert [(port, values["routing"]["servicePort"])] == [
        (one["name"], one["containerPort"]) for one in container["ports"]
    ]


def caches(env: list[dict[str, str]]) -> dict[str, str]:
    """Where a chart's server keeps what it compiles: all of its variables."""
    return {variable["name"]: variable["value"] for variable in env}


def test_a_misspelt_field_is_refused() -> None:
    (service, *_) = [r for r in rendered("rayservice.yaml") if r["kind"] == "RayService"]
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    with pytest.raises(ValidationError, match="workerGroupSpec"):
        validate(service)


def test_vllm_knows_every_option_of_the_manifests() -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    known = (Path(vllm.origin).parent / "engine" / "arg_utils.py").read_text()
    for name in [*OVERLAYS, "leaderworkerset.yaml"]:
        for template in pod_templates(rendered(name)):
            (container,) = template["spec"]["containers"]
            options = {option.split("=")[0] for option in container["args"] if option[:2] == "--"}
            unknown = {option for option in options if f'"{option}"' not in known}
            assert unknown <= {"--headless"}, unknown
