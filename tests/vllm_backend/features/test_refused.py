"""What is refused, is refused while the engine is configured: by name, with what to do instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.vllm_backend.test_startup import configure, reasons
from tests.vllm_backend.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("registered")

SERVED_CACHES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def test_every_kv_cache_dtype_of_vllm() -> None:
    """Served, or refused with a remedy; none is taken for another."""
    from vllm.config.cache import CacheDType

    for name in get_args(CacheDType):
        dtype = torch.float16 if name == "float16" else torch.bfloat16
        found = reasons(kv_cache_dtype=name, dtype=dtype, device_capability=(9, 0))
        assert (found == []) == (name in SERVED_CACHES), name
        assert all("remedy: --kv-cache-dtype auto" in reason for reason in found), name


@pytest.mark.parametrize(("cache", "model"), [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_a_cache_of_another_dtype_than_the_model(cache: str, model: str, llama: Path) -> None:
    words = rf"{cache} kv_cache_dtype not supported with {model}.*remedy: --kv-cache-dtype auto"
    with pytest.raises(ValueError, match=words):
        configure(llama, kv_cache_dtype=cache, dtype=model)
    assert configure(llama, kv_cache_dtype=cache, dtype=cache) is not None


def test_adaptive_verification() -> None:
    (reason,) = reasons(use_adaptive_verification=True)
    assert "adaptive verification" in reason
    assert "remedy: leave enable_adaptive_verification out of --speculative-config" in reason


def test_rocm(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability (9, 4) of an MI300 is not Hopper's."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    (reason,) = reasons(device_capability=(9, 4))
    assert "compute capability not supported" in reason
    assert "remedy: use an NVIDIA GPU" in reason


def test_prefill_context_parallelism(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsek_backend.vllm_backend import validate

    config = configure(llama)
    monkeypatch.setattr(config.parallel_config, "prefill_context_parallel_size", 2)
    words = "SPARSEK cannot serve.*remedy: --prefill-context-parallel-size 1"
    with pytest.raises(ValueError, match=words):
        validate.check_engine(config)


def test_a_requirement_that_the_installed_vllm_does_not_know(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.29 vLLM asks no backend whether it serves decode context parallelism."""
    from sparsek_backend.vllm_backend import validate

    asked = {"head_size": 64, "use_dcp": True, "use_adaptive_verification": True}
    monkeypatch.setattr(validate.AttentionBackend, "validate_configuration", lambda head_size: [])
    monkeypatch.setattr(
        validate.SparseKBackend, "validate_configuration", lambda head_size, device_capability: []
    )
    (reason,) = validate._reasons(asked)
    assert reason.startswith("use_adaptive_verification not supported")


def check_shared_context(
    monkeypatch: pytest.MonkeyPatch, model: Path, *, interleave: int = 64, **options: Any
) -> None:
    """Validate an engine with pages of 64 tokens, which two ranks hold between them."""
    from sparsek_backend.vllm_backend import validate

    config = configure(model, block_size=64, **options)
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 2)
    monkeypatch.setattr(config.parallel_config, "cp_kv_cache_interleave_size", interleave)
    validate.check_engine(config)


@pytest.mark.parametrize(
    ("words", "model", "settings", "connector"),
    [
        ("KV connectors", "llama", {}, "OffloadingConnector"),
        ("mode infllm", "minicpm", {"mode": "infllm"}, None),
        ("ALiBi", "alibi", {}, None),
    ],
    ids=["KV connector", "mode infllm", "ALiBi"],
)
def test_what_needs_all_keys_on_one_rank(
    words: str,
    model: str,
    settings: dict[str, Any],
    connector: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {"additional_config": {"sparsek": settings}}
    if connector is not None:
        options["kv_transfer_config"] = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    message = rf"{words} not supported with decode context.*remedy: --decode-context-parallel-size"
    with pytest.raises(ValueError, match=message):
        check_shared_context(monkeypatch, make_tiny_model(model, tmp_path), **options)


def test_what_ranks_with_shared_pages_lack_on_a_gpu(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.vllm_backend import validate

    config = configure(llama)
    resolved = validate.engine_config(config)
    assert validate._not_sharded(config, resolved) == []
    monkeypatch.setattr(config.cache_config, "cache_dtype", "fp8")
    resolved = replace(resolved, batch_invariant=True)
    assert validate._not_sharded(config, resolved) == ["an fp8 KV cache", "batch invariance"]


def test_ranks_that_take_parts_of_pages_in_turn(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the 64 tokens of a record, too, lie on one rank."""
    for settings in ({}, {"decode_tokens": 64}):
        options = {"additional_config": {"sparsek": settings}}
        check_shared_context(monkeypatch, llama, **options)
        with pytest.raises(ValueError, match="got 32; remedy: --cp-kv-cache-interleave-size 64"):
            check_shared_context(monkeypatch, llama, interleave=32, **options)


def test_encoder_decoder_models(tmp_path: Path) -> None:
    from transformers import T5Config

    config = T5Config(vocab_size=512, d_model=64, num_layers=1, num_heads=2)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"SPARSEK cannot serve.*cross-attention.*remedy: leave"):
        configure(tmp_path, skip_tokenizer_init=True)


def test_every_other_kv_connector(llama: Path) -> None:
    """By its name, with the option that was given; a connector of the user's own too."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from sparsek_backend.vllm_backend import validate

    config = configure(llama)
    for name in (*KVConnectorFactory._registry, "MyConnector"):
        config.kv_transfer_config = KVTransferConfig(kv_connector=name, kv_role="kv_both")
        if name in validate.KV_CONNECTORS:
            validate.check_engine(config)
            continue
        words = rf"KV connector {name} not supported \(remedy: leave --kv-transfer-config out"
        with pytest.raises(ValueError, match=words):
            validate.check_engine(config)
    config.kv_transfer_config = None
    config.cache_config.kv_offloading_size = 1
    validate.check_engine(config)


def test_page_sizes_of_two_engines(llama: Path) -> None:
    """A prefilling and a decoding engine exchange whole pages: both have the default size."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    configure(llama, kv_transfer_config=transfer)
    words = r"--block-size not supported with NixlConnector.*\(remedy: leave --block-size out\)"
    with pytest.raises(ValueError, match=words):
        configure(llama, kv_transfer_config=transfer, block_size=64)
