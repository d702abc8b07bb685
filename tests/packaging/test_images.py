"""Images and compose file: linted, valid, and made of files and versions that exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests import processes

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
BESIDE_PYTHON = Path(sys.executable).parent


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment in the repository root."""
    return processes.run(BESIDE_PYTHON / program, *arguments, cwd=ROOT)


def test_dockerfiles_pass_the_linter() -> None:
    result = run("hadolint", "--failure-threshold", "info", *DOCKERFILES)
    assert result.returncode == 0, result.stdout


def test_shell_scripts_pass_the_linter() -> None:
    scripts = [*sorted((ROOT / "deploy").rglob("*.sh")), ROOT / ".ci" / "run"]
    result = run("shellcheck", "-x", *scripts)
    assert result.returncode == 0, result.stdout


def test_the_compose_file_keeps_to_the_compose_specification() -> None:
    schema = "vendor.compose-spec"
    result = run("check-jsonschema", "--builtin-schema", schema, DOCKER / "compose.yaml")
    assert result.returncode == 0, result.stdout


def test_the_compose_file_mounts_and_builds_from_files_that_exist() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for service in services.values():
        paths = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith(".")]
        assert all((DOCKER / path).exists() for path in paths), paths
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert services["gpu"]["ipc"] == "host"
    (device,) = services["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_asks_the_server_and_no_proxy(dockerfile: Path, status: int) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Keep the test's output clean."""

    (found,) = re.findall(r"(?m)^    CMD (\[.*\])$", dockerfile.read_text())
    _, *arguments = json.loads(found)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = [one.replace("8000", str(server.server_port)) for one in arguments]
        proxy = {"http_proxy": "http://127.0.0.1:1", "no_proxy": "", "NO_PROXY": ""}
        done = processes.run(sys.executable, *arguments, env={**os.environ, **proxy})
        server.shutdown()
    assert done.returncode == (status != 200), done.stderr


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_copy_what_the_context_has(dockerfile: Path) -> None:
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", dockerfile.read_text(), re.M)
    sources = [source for line in copied for source in line.split()]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, f".dockerignore leaves out {source}"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_a_numbered_user_and_tell_their_health(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert re.search(r"^USER 10001:10001$", text, re.M)
    assert "/health" in text
    assert "org.opencontainers.image.licenses" in text


def test_the_default_vllm_is_supported() -> None:
    (requirement,) = re.findall(r'^vllm = \["([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    found = re.search(r"^ARG VLLM_VERSION=(.+)$", DOCKERFILES[0].read_text(), re.M)
    assert found is not None
    assert found[1] in Requirement(requirement).specifier
    assert f"VLLM_VERSION:-{found[1]}" in (DOCKER / "compose.yaml").read_text()
