"""The ``vllm.general_plugins`` entry point: makes ``--attention-backend SPARSEK`` a valid choice.

vLLM calls :func:`register` in every process it starts (API server, engine core, workers), possibly
several times.  Importing this module needs the standard library only; the backend itself is
imported when an engine selects it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sparsek_backend.vllm_backend import names

RAY_PREFIXES, SETTINGS = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "SPARSEK_"
"""vLLM's variable with the prefixes of those that it copies to Ray's workers, and ours."""


def register() -> None:
    """Register the backend with the vLLM that is installed.  Idempotent.

    Four things are added.  Three are for this backend's name alone: a member of vLLM's backend
    enum, a check of the settings and the model when an engine is configured, and, on the CPU
    platform (which otherwise replaces every choice by its own backend), the selection of our class.
    The fourth is for natively sparse checkpoints: their model class, by the architecture's name.
    Their config class is known to Transformers since our package was imported.  And workers of Ray,
    which have another environment, get the settings that are set in this one.

    Raises:
        ImportError: if vLLM is not installed.
        SystemExit: this is a server's command line, and a setting on it is wrong.
    """
    from sparsek_backend.vllm_backend.register import hook_platform, register_model

    refuse_wrong_settings(sys.argv[1:], os.environ)
    prefixes = os.environ.get(RAY_PREFIXES, "").split(",")
    if SETTINGS not in prefixes:  # settings reach Ray's workers, as vLLM's own variables do
        os.environ[RAY_PREFIXES] = ",".join(filter(None, (*prefixes, SETTINGS)))
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


def refuse_wrong_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """End a server whose command line selects SPARSEK with a setting that is wrong by itself.

    vLLM has read nothing yet, so the message comes early and stands alone.  All other settings, and
    what goes with which model, are checked when the engine is configured.

    Args:
        arguments: of the command line.
        environ: environment variables.

    Raises:
        SystemExit: a setting is unknown or has a value that it cannot have.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--attention-backend", "--attention_backend", default="")
    parser.add_argument("--additional-config", "--additional_config", default="{}")
    try:
        given, _ = parser.parse_known_args(arguments)
        additional = json.loads(given.additional_config)
    except (argparse.ArgumentError, ValueError):  # vLLM says what is wrong with them
        return
    if given.attention_backend.upper() != names.BACKEND_NAME:
        return
    from sparsek_backend.config import ConfigError, check_values, read_section

    try:
        check_values(read_section(additional), environ)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
