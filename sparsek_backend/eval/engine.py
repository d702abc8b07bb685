"""A vLLM engine with a chosen attention backend, for the workers of `eval` and `bench`."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparsek_backend.eval.workers import python_path
from sparsek_backend.extras import needing
from sparsek_backend.plugin import register
from sparsek_backend.vllm_backend.names import BACKEND_NAME


def open_engine(
    model: str,
    *,
    settings: Mapping[str, Any] | None,
    baseline: str | None = None,
    in_process: bool = True,
    create: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Any:
    """A `vllm.LLM`.

    Args:
        settings: the `sparsek` settings, or None for another backend.
        baseline: that other backend; None is vLLM's own choice.
        in_process: whether the engine core runs in this process, so that its counters can be read
            here; False is how a server runs it.

    Raises:
        ImportError: vLLM is not installed; the message has the install command.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with needing("this needs vLLM (without a GPU: bash deploy/quickstart.sh)", extra="vllm"):
        from vllm import LLM
        from vllm.platforms import current_platform
    for name in [name for name in os.environ if name.startswith("SPARSEK_")]:
        del os.environ[name]  # the settings given are the whole of them
    register()
    chosen: dict[str, Any] = {} if baseline is None else {"attention_backend": baseline}
    if settings is not None:
        chosen["attention_backend"] = BACKEND_NAME
        chosen["additional_config"] = {"sparsek": dict(settings)}
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        arguments.setdefault("enforce_eager", True)
    return (create or LLM)(model=model, seed=0, disable_log_stats=False, **chosen, **arguments)


def ensure_entry_point() -> None:
    """Let the processes that this one starts find the plugin, also if it is not installed."""
    if importlib.metadata.entry_points(group="vllm.general_plugins", name="sparsek"):
        return
    folder = Path(tempfile.mkdtemp(prefix="sparsek-plugin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    metadata = folder / "sparsek_backend-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sparsek-backend\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nsparsek = sparsek_backend.plugin:register\n"
    )
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = python_path(folder)


def read_report(_worker: Any) -> str:
    """Runs in vLLM's worker process: what our backend did there; nothing if it never ran."""
    from sparsek_backend.vllm_backend.stats import STATS
    from sparsek_kernels.fallback import fallback_counts

    shares = STATS.attended.shares(STATS.context).items()
    attended = "".join(f", {share:.1%} of the context attended in {x}" for x, share in shares)
    report = f"{BACKEND_NAME}, {STATS.forward_calls} forward calls{attended}"
    fallbacks = {reason: count for reason, count in fallback_counts().items() if count}
    report += f", fallbacks {fallbacks}" if fallbacks else ""
    return report if STATS.forward_calls else ""


def backend_report(engine: Any, settings: Mapping[str, Any] | None) -> str:
    """Name of the backend that an engine ran, with its own counters as proof.

    Raises:
        RuntimeError: our backend was asked for and its forward never ran.
    """
    if settings is None:
        return "vLLM's own"
    report = str(engine.collective_rpc(read_report)[0])  # ranks attend the same keys
    if not report:
        raise RuntimeError(f"{BACKEND_NAME} was chosen, but its forward never ran")
    return report


def close_engine(engine: Any) -> None:
    """Shut the engine core down, so that the worker's process can end."""
    with contextlib.suppress(AttributeError):
        engine.llm_engine.engine_core.shutdown()
