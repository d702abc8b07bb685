"""The interface of vLLM: the installed version has what we need, and we take what it passes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_backend.vllm_api import OURS, OVERRIDING, lacking, passed_in_vain


def test_the_installed_version() -> None:
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    assert lacking(Path(found.origin).parent) == []
    assert passed_in_vain(Path(found.origin).parent) == []


def test_what_ours_does_not_take_is_named(tmp_path: Path) -> None:
    """By a version that passes one argument more than today's."""
    source = """
class AttentionBackend:
    def get_supported_kernel_block_sizes(kv_cache_spec=None): ...
    def supports_sink(cls, of_tomorrow): ...
class AttentionMetadataBuilder:
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...
"""
    folder = tmp_path / "v1/attention"
    folder.mkdir(parents=True)
    folder.joinpath("backend.py").write_text(source, encoding="utf-8")
    assert passed_in_vain(tmp_path) == ["SparseKBackend.supports_sink(cls, of_tomorrow)"]


def test_our_classes_with_methods_of_vllm_are_found() -> None:
    for classes in OVERRIDING.values():
        for file, name in classes:
            assert f"class {name}" in (OURS / file).read_text(encoding="utf-8")


def test_gaps_are_named(tmp_path: Path) -> None:
    source = "def split_decodes_and_prefills(common_attn_metadata): ...\n"
    folder = tmp_path / "v1/attention/backends"
    folder.mkdir(parents=True)
    folder.joinpath("utils.py").write_text(source, encoding="utf-8")
    found = "\n".join(lacking(tmp_path))
    assert "split_decodes_and_prefills(decode_threshold)" in found
    assert "get_kv_cache_shape or AttentionBackend.supported_kv_cache_layouts" in found


@pytest.mark.usefixtures("registered")
def test_what_we_override_takes_what_vllm_passes() -> None:
    """By the installed version's signatures, ``kv_cache_spec`` of the page sizes included."""
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

    from sparsek_backend.vllm_backend.nsa.backend import NSABackend
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    compared = set()
    for backend in (SparseKBackend, NSABackend):
        parts: tuple[tuple[type, Any], ...] = (
            (backend, AttentionBackend),
            (backend.get_impl_cls(), AttentionImpl),
            (backend.get_builder_cls(), AttentionMetadataBuilder),
        )
        for ours, theirs in parts:
            for name, function in inspect.getmembers(theirs, inspect.isroutine):
                own = getattr(ours, name)
                if name.startswith("__") or own.__module__.startswith("vllm."):
                    continue
                taken = inspect.signature(own).parameters.values()
                if any(one.kind is one.VAR_KEYWORD for one in taken):
                    continue
                passed = set(inspect.signature(function).parameters)
                assert passed <= {one.name for one in taken}, (ours, name)
                compared.add(name)
        sizes = backend.get_supported_kernel_block_sizes()
        assert [str(size) for size in backend.get_supported_kernel_block_sizes(None)] == [
            str(size) for size in sizes
        ]
    assert {"get_supported_kernel_block_sizes", "build", "forward", "customize_spec"} <= compared


def test_a_spec_whose_states_stand_for_several_tokens_is_no_full_attention() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from sparsek_backend.vllm_backend.compat import is_full_attention

    spec = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    assert is_full_attention(spec)
    if not hasattr(spec, "tokens_per_state"):
        pytest.skip("this version has one state for each token")
    assert not is_full_attention(replace(spec, tokens_per_state=8))
