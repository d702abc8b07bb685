"""The check of a vLLM version's sources: the installed version passes, and gaps are named."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.vllm_backend.vllm_api import lacking


def test_the_installed_version() -> None:
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    assert lacking(Path(found.origin).parent) == []


def test_gaps_are_named(tmp_path: Path) -> None:
    source = "def split_decodes_and_prefills(common_attn_metadata): ...\n"
    folder = tmp_path / "v1/attention/backends"
    folder.mkdir(parents=True)
    folder.joinpath("utils.py").write_text(source, encoding="utf-8")
    found = "\n".join(lacking(tmp_path))
    assert "split_decodes_and_prefills(decode_threshold)" in found
    assert "get_kv_cache_shape or AttentionBackend.supported_kv_cache_layouts" in found
