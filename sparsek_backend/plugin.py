"""The ``vllm.general_plugins`` entry point: makes ``--attention-backend SPARSEK`` a valid choice.

vLLM calls :func:`register` in every process it starts (API server, engine core, workers), possibly
several times.  Importing this module needs the standard library only; the backend itself is
imported when an engine selects it.
"""

from __future__ import annotations

from typing import Any

from sparsek_backend.vllm_backend import names


def register() -> None:
    """Register the backend with the vLLM that is installed.  Idempotent.

    Four things are added.  Three are for this backend's name alone: a member of vLLM's backend
    enum, a check of the settings and the model when an engine is configured, and, on the CPU
    platform (which otherwise replaces every choice by its own backend), the selection of our class.
    The fourth is for natively sparse checkpoints: their model class, by the architecture's name.
    Their config class is known to Transformers since our package was imported.

    Raises:
        ImportError: if vLLM is not installed.
    """
    from sparsek_backend.vllm_backend.register import hook_platform, register_model

    backend_member()
    hook_platform(names.BACKEND_NAME, names.BACKEND_PATH)
    register_model(names.NSA_ARCHITECTURE, names.NSA_MODEL_PATH)


def backend_member() -> Any:
    """Return vLLM's ``AttentionBackendEnum.SPARSEK``, adding it to the enum where it is missing.

    Pickles of the member refer to this function: a spawned process unpickles its configuration
    before vLLM loads any plugin there, and would otherwise not know the member.
    """
    from sparsek_backend.vllm_backend.register import ensure_member

    return ensure_member(names.BACKEND_NAME, names.BACKEND_PATH, backend_member)
