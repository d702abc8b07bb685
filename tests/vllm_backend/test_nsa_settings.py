"""Settings, counts and log lines of natively sparse models, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparsek_backend.config import ConfigError, resolve_config
from sparsek_backend.nn import NSAConfig
from sparsek_backend.vllm_backend.accounting import nsa_attended
from sparsek_backend.vllm_backend.nsa.pages import tail_elements, view_nsa_pages
from sparsek_backend.vllm_backend.report import describe_nsa_layers

SECTION = {"top_n": 8, "window_size": 256}


@pytest.mark.parametrize("additional", [None, {"mode": "auto"}, {"mode": "nsa"}])
def test_the_models_section_decides(additional: dict[str, Any] | None) -> None:
    resolved = resolve_config(additional, {}, None, SECTION)
    assert resolved.config.mode == "nsa"
    assert resolved.nsa == NSAConfig(top_n=8, window_size=256)


def test_batch_invariance_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"natively sparse.*unset VLLM_BATCH_INVARIANT"):
        resolve_config(None, {}, None, SECTION, batch_invariant=True)


def test_other_models_have_none() -> None:
    assert resolve_config(None, {}).nsa is None


REFUSED: dict[str, tuple[dict[str, Any] | None, dict[str, str], dict[str, Any] | None, str]] = {
    "no section": ({"mode": "nsa"}, {}, None, "setting mode .* has no nsa section"),
    "other mode": (None, {"SPARSEK_MODE": "dense"}, SECTION, r"mode \(from SPARSEK_MODE\)"),
    "ignored field": ({"window_size": 64}, {}, SECTION, "window_size .* no effect in mode 'nsa'"),
    "unknown field": (None, {}, {"topn": 3}, "nsa section .* got topn"),
    "no object": (None, {}, [64], r"nsa section .* expected an object, got \[64\]"),
    "infinite value": (None, {}, {"top_n": float("inf")}, "nsa section .* top_n: expected an int"),
    "bad value": (None, {}, {"cmp_stride": 5}, "cmp_block_size: expected a multiple"),
}


@pytest.mark.parametrize(
    ("additional", "environ", "section", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_refusals(
    additional: dict[str, Any] | None,
    environ: dict[str, str],
    section: dict[str, Any] | None,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config(additional, environ, None, section)


def test_attended_keys_are_those_of_the_rule() -> None:
    config = NSAConfig(8, 4, 16, 5, window_size=20)
    spec = config.spec
    for position in range(200):
        own = position // 16
        blocks = range(own + 1) if own < 5 else [*range(4), own]  # any four earlier ones
        selected = sum(min(16, position + 1 - 16 * block) for block in blocks)
        expected = spec.num_compressed(position + 1) + selected + min(position + 1, 20)
        assert nsa_attended(config, np.array([position]))[0] == expected


@pytest.mark.parametrize("shared", [False, True])
def test_views_share_nothing(shared: bool) -> None:
    """Eight views (four with one K and V) cover a page, tail included, without overlap."""
    config = NSAConfig(shared_kv=shared)
    heads, page, dim, pages = 2, 32, 8, 3
    cache_heads = heads * config.num_branches
    used = cache_heads * page * 2 * dim
    stride = used + tail_elements(config, cache_heads, page, dim)
    raw = torch.zeros(pages * stride)
    shape, strides = (pages, cache_heads, page, 2 * dim), (stride, page * 2 * dim, 2 * dim, 1)
    views = view_nsa_pages(raw.as_strided(shape, strides), config)
    names = ("k_slc", "v_slc", "k_cmp", "v_cmp")
    if not shared:
        names = ("k_raw", "v_raw", "k_swa", "v_swa", *names)
    for name in names:
        getattr(views, name).add_(1.0)
    assert (raw == 1.0).all()


def test_pages_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache: expected pages of at least"):
        view_nsa_pages(torch.zeros(3, 6, 32, 16), NSAConfig())


def test_log_line() -> None:
    line = describe_nsa_layers([0, 1, 2], NSAConfig(shared_kv=True), 64, "cuda", 1 / 16)
    assert line == (
        "SPARSEK layers 0-2: nsa, mlp of 32 tokens every 16 + 16 blocks of 64 (1 initial, 2 local) "
        "+ window 512, one K and V for all branches, 6.2 % compressed, pages of 64, Triton kernels"
    )
