"""Where the settings of a served model come from, and which of them agree.

:func:`resolve_config` merges four sources, field by field, in falling priority: the ``sparsek``
section of ``--additional-config``, ``SPARSEK_*`` environment variables, the model's own
configuration, and the defaults.  Everything invalid stops the start with a :class:`ConfigError`
that names the field, its source, what was expected and the remedy.  docs/configuration.md lists
the fields for users.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sparsek_backend.field_types import MAX_BLOCKS as MAX_BLOCKS
from sparsek_backend.field_types import MAX_TOKENS as MAX_TOKENS
from sparsek_backend.infllm import FLAG, MODEL_CONFIG, InfLLMSelection, invalid_fields, shown
from sparsek_backend.infllm import ConfigError as ConfigError
from sparsek_backend.model_sections import read_nsa
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.seer import SeerSelection
from sparsek_backend.sparsity_config import DECODE_TOKENS as DECODE_TOKENS
from sparsek_backend.sparsity_config import FIELD_NAMES as FIELD_NAMES
from sparsek_backend.sparsity_config import FIELDS_OF_MODE
from sparsek_backend.sparsity_config import SparsityConfig as SparsityConfig
from sparsek_backend.sparsity_config import register_mode as register_mode
from sparsek_kernels.paged.policy import CELL_SIZE

SECTION = "sparsek"
SECTION_OF_FLAG = f"{FLAG} '{{\"{SECTION}\": ...}}'"
ENV_PREFIX = "SPARSEK_"
DEFAULTS = "defaults"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"

_REPLACED = {"decode_top_k": "decode_tokens, which counts tokens (64 for each block)"}
"""Settings of earlier versions, and what each became."""

_KUBERNETES_LINKS = re.compile(r"SPARSEK(_\w+)?_(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?$")


@dataclass(frozen=True)
class ResolvedConfig:
    """Settings with the source of every field."""

    config: SparsityConfig  # the merged settings; ``config.mode`` is never ``auto``
    # for each field, a phrase such as ``SPARSEK_TOP_K`` that says who set it
    sources: Mapping[str, str]
    # what the model's own selection is, where the settings follow it
    infllm: InfLLMSelection | None = None
    seer: SeerSelection | None = None  # the gates of mode ``seer``
    # settings of a natively sparse model; mode ``nsa`` and no other goes with them
    nsa: NSAConfig | None = None
    # whether a request's result may depend on nothing but the request; the config then selects per
    # token
    batch_invariant: bool = False

    @property
    def scores_without_positions(self) -> bool:
        """Whether blocks are ranked by queries and keys as they were before their rotation."""
        nope = self.infllm is not None and self.config.mode == "infllm" and self.infllm.use_nope
        return nope or self.seer is not None


def resolve_config(
    additional: object,
    environ: Mapping[str, str],
    model_sparse_config: object = None,
    model_nsa: object = None,
    batch_invariant: bool = False,
    model_folder: str | None = None,
    source: str = SECTION_OF_FLAG,
) -> ResolvedConfig:
    """Merge the sources, field by field.

    Args:
        additional: the ``sparsek`` section of ``--additional-config``, or ``None``.
        environ: environment variables; the ``SPARSEK_*`` ones are read.
        model_sparse_config: the ``sparse_config`` section of the model's config (InfLLM-v2, as in
            MiniCPM4), or ``None``.
        model_nsa: the ``nsa`` section of the model's config, or ``None``.
        batch_invariant: whether ``VLLM_BATCH_INVARIANT`` is set.
        model_folder: where gates are that no setting names.
        source: what errors call the place of ``additional``.

    Returns:
        The merged settings and where each came from.

    Raises:
        ConfigError: unknown field, invalid value, or settings that contradict each other.
    """
    values, sources = _given(additional, environ, source)
    mode = values.get("mode", "auto")
    nsa = read_nsa(mode, sources["mode"], model_nsa)
    if nsa is not None:
        mode = values["mode"] = "nsa"
    infllm, seer = None, None
    trained: dict[str, Any] = {}
    has_section = model_sparse_config not in (None, False, {})
    if mode == "infllm" and not has_section:
        raise ConfigError(
            f"SPARSEK setting mode (from {sources['mode']}): 'infllm' needs a model trained with "
            f"InfLLM-v2, and {MODEL_CONFIG} has no sparse_config section; remedy: leave mode out, "
            "which selects blocks (block_topk) for other models"
        )
    if mode in ("auto", "block_topk", "infllm") and has_section:
        infllm = InfLLMSelection.read(model_sparse_config)
        if mode == "infllm":
            infllm.check_trained_rule()
        trained = infllm.settings()
    elif mode == "seer":
        seer = SeerSelection.read(values.get("gates") or model_folder)
        trained = seer.settings()
    for name, value in trained.items():
        if name not in values:
            values[name] = value
            sources[name] = MODEL_CONFIG
    config = _validated(values, sources)
    if config.mode == "auto":
        config = config.model_copy(update={"mode": "block_topk"})
    _check_agreement(config, sources)
    if batch_invariant:
        config = _select_per_token(config, sources)
    return ResolvedConfig(config, sources, infllm, seer, nsa, batch_invariant)


def check_values(
    additional: object, environ: Mapping[str, str], batch_invariant: bool = False
) -> None:
    """Check names and values of settings, as far as they need neither the model nor each other.

    Args:
        additional: the ``sparsek`` section of ``--additional-config``, or ``None``.
        environ: environment variables; the ``SPARSEK_*`` ones are read.
        batch_invariant: whether ``VLLM_BATCH_INVARIANT`` is set, which some modes rule out.

    Raises:
        ConfigError: unknown field or invalid value.
    """
    values, sources = _given(additional, environ, SECTION_OF_FLAG)
    mode = values.pop("mode", "auto")  # another plugin may have modes of its own
    config = _validated(values, sources)
    if batch_invariant:
        _select_per_token(config.model_copy(update={"mode": mode}), sources)


def _given(
    additional: object, environ: Mapping[str, str], source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the user set, and the source of every field; ``None`` sets what it stands for."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(FIELD_NAMES, DEFAULTS)
    for place, found in (
        *_environment_settings(environ).items(),
        *_section_settings(additional, source).items(),
    ):
        told = {x: y for x, y in found.items() if y is not None or _default(x) is not None}
        values |= told
        sources |= dict.fromkeys(told, place)
    return values, sources


def _default(name: str) -> object:
    return SparsityConfig.model_fields[name].default


def _validated(values: Mapping[str, Any], sources: Mapping[str, str]) -> SparsityConfig:
    try:
        return SparsityConfig(**values)
    except ValidationError as error:
        raise ConfigError(_describe(error, sources)) from None


def _select_per_token(config: SparsityConfig, sources: dict[str, str]) -> SparsityConfig:
    """Return the settings without what depends on how a prompt is cut into chunks.

    Raises:
        ConfigError: the user asked for it, or for a mode that is not batch-invariant.
    """
    unserved = {
        "nsa": "natively sparse models are",
        "infllm": "mode infllm is",
        "seer": "mode seer is",
    }
    if config.mode in unserved:
        raise ConfigError(
            f"SPARSEK: {unserved[config.mode]} not served with {BATCH_INVARIANT}; remedy: unset "
            f"{BATCH_INVARIANT}"
        )
    if config.mode == "pattern":
        raise ConfigError(
            f"SPARSEK setting mode (from {sources['mode']}): 'pattern' lets the queries of a tile "
            f"share blocks, which {BATCH_INVARIANT} rules out; remedy: mode block_topk, or unset "
            f"{BATCH_INVARIANT}"
        )
    fixed: dict[str, Any] = {"query_tile": 1, "dense_last": 0, "sparse_phase": "both"}
    for name, value in fixed.items():
        if getattr(config, name) != value and sources[name] not in (DEFAULTS, MODEL_CONFIG):
            raise ConfigError(
                f"SPARSEK setting {name} (from {sources[name]}): expected {value} with "
                f"{BATCH_INVARIANT}, got {getattr(config, name)}, which makes results depend on "
                f"chunks or preemptions; remedy: remove {name}, or unset {BATCH_INVARIANT}"
            )
        sources[name] = BATCH_INVARIANT
    return config.model_copy(update=fixed)


def read_section(additional_config: object) -> object:
    """Return our section of ``--additional-config``; ``None`` where there is none.

    Raises:
        ConfigError: the flag is no object, or a key of it looks like our section or our fields.
    """
    if additional_config is None:
        return None
    if not isinstance(additional_config, Mapping):
        raise ConfigError(
            f"SPARSEK setting {FLAG}: expected a JSON object, got {shown(additional_config)}"
        )
    example = f'{FLAG} \'{{"{SECTION}": {{"top_k": 16}}}}\''
    fields = {_plain(name): name for name in FIELD_NAMES}
    for key in additional_config:
        plain = _plain(str(key))
        if key == SECTION:
            continue
        if plain in fields:
            raise ConfigError(
                f"SPARSEK setting {key} (from {FLAG}) stands outside of the {SECTION} section, "
                f"where nothing reads it; remedy: write {fields[plain]} as in {example}"
            )
        if plain.startswith(SECTION) or difflib.get_close_matches(plain, [SECTION], cutoff=0.75):
            raise ConfigError(
                f"SPARSEK setting {key} (from {FLAG}) is unknown; did you mean the section "
                f"{SECTION}? remedy: correct or remove it, as in {example}"
            )
    return additional_config.get(SECTION)


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "").replace("-", "")


def _section_settings(section: object, source: str) -> dict[str, dict[str, Any]]:
    """Return the flag's settings under the phrase for their source."""
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"SPARSEK setting {FLAG} {SECTION!r}: expected an object such as "
            f'{{"{SECTION}": {{"top_k": 16}}}}, got {type(section).__name__}'
        )
    for name in section:
        if name not in FIELD_NAMES:
            raise ConfigError(_unknown(str(name), source, FIELD_NAMES))
    return {source: dict(section)} if section else {}


def _environment_settings(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the settings of the ``SPARSEK_*`` variables, each under its variable's name."""
    known = {ENV_PREFIX + name.upper(): name for name in FIELD_NAMES}
    found: dict[str, dict[str, Any]] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or _KUBERNETES_LINKS.match(variable):
            continue
        if variable not in known:
            raise ConfigError(_unknown(variable, "the environment", tuple(known)))
        text = environ[variable].strip()
        if text:
            found[variable] = {known[variable]: _parse(known[variable], text)}
    return found


def _parse(name: str, text: str) -> object:
    """Read a variable as JSON; any other text stays as it is, for the validator to refuse."""
    if name in ("pattern", "gates"):  # a path, which may be a number
        return text
    if name == "dense_layers" and "," in text and not text.startswith("["):
        text = f"[{text}]"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, thousands of digits, thousands of brackets
        return text


def _unknown(name: str, source: str, known: tuple[str, ...]) -> str:
    """The message of a setting that there is not, or not any more."""
    if new := _REPLACED.get(name.removeprefix(ENV_PREFIX).lower()):
        return f"SPARSEK setting {name} (from {source}) was replaced; remedy: use {new}"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"SPARSEK setting {name} (from {source}) is unknown; {hint}"
        f"expected one of {', '.join(known)}; remedy: correct or remove it"
    )


def _describe(error: ValidationError, sources: Mapping[str, str]) -> str:
    """One sentence per invalid field, joined."""
    return "; ".join(
        f"SPARSEK setting {name} (from {sources[name]}): {text}; remedy: correct or remove it "
        f"({'not set by default' if _default(name) is None else f'default {_default(name)!r}'})"
        for name, text in ((path.split(".")[0], text) for path, text in invalid_fields(error))
    )


def _check_agreement(config: SparsityConfig, sources: Mapping[str, str]) -> None:
    """Refuse settings that the chosen mode would silently ignore, and impossible sizes."""
    used = FIELDS_OF_MODE[config.mode]
    for name in FIELD_NAMES:
        if name not in used and sources[name] not in (DEFAULTS, MODEL_CONFIG):
            raise ConfigError(
                f"SPARSEK settings contradict each other: {name} (from {sources[name]}) has no "
                f"effect in mode {config.mode!r} (from {sources['mode']}); remedy: remove {name}, "
                f"or choose a mode that uses it"
            )
    if not config.selects_blocks:
        return
    if config.mode == "pattern" and config.pattern is None:
        raise ConfigError(
            f"SPARSEK setting mode (from {sources['mode']}): 'pattern' needs a file, and pattern "
            "is not set; remedy: make one with `sparsek patterns learn MODEL --prefill --out FILE` "
            "and set pattern to its path"
        )
    if config.mode == "pattern" and config.query_tile == 1:
        raise ConfigError(
            f"SPARSEK setting query_tile (from {sources['query_tile']}): expected more than 1 in "
            "mode 'pattern', whose prefills choose blocks for a tile of queries, got 1; remedy: "
            "remove it, or mode block_topk"
        )
    if config.top_k_deep is not None and config.top_k_deep < config.top_k:
        raise ConfigError(
            f"SPARSEK setting top_k_deep (from {sources['top_k_deep']}): expected at least top_k, "
            f"{config.top_k} (from {sources['top_k']}), got {config.top_k_deep}; remedy: a larger "
            "one, or remove it"
        )
    if config.sel_block_size % CELL_SIZE:
        raise ConfigError(
            f"SPARSEK setting sel_block_size (from {sources['sel_block_size']}): expected a "
            f"multiple of {CELL_SIZE}, got {config.sel_block_size}; remedy: use 64"
        )
