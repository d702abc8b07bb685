"""What cannot be served stops the start, with one message that has the reason and the remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.config import ConfigError, resolve_config
from tests.vllm_backend.drafts import speculation
from tests.vllm_backend.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("registered")

GOOD = {
    "head_size": 64,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": None,
    "attn_type": "decoder",
}


def reasons(**changes: Any) -> list[str]:
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    return SparseKBackend.validate_configuration(**{**GOOD, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        *({"head_size": size} for size in (32, 40, 64, 80, 96, 112, 128, 192, 256)),
        *({"dtype": dtype} for dtype in (torch.float16, torch.bfloat16, torch.float32)),
        *({"block_size": size} for size in (None, 16, 48, 64, 128, 256)),
        {"kv_cache_dtype": "bfloat16"},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"use_mm_prefix": True},
        {"attn_type": "encoder_only"},
        {"device_capability": (9, 0)},
        {"device_capability": (8, 0)},
    ],
    ids=str,
)
def test_served(changes: dict[str, Any]) -> None:
    assert reasons(**changes) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_size": 16}, "head_size"),
        ({"head_size": 100}, "head_size"),
        ({"head_size": 512}, "head_size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"block_size": 24}, "block_size"),
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"attn_type": "encoder"}, "attention type encoder"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_pcp": True}, "PCP"),
        ({"use_rswa": True}, "R-SWA"),
        ({"device_capability": (7, 5)}, "compute capability"),
    ],
    ids=str,
)
def test_refused_with_a_remedy(changes: dict[str, Any], words: str) -> None:
    (reason,) = reasons(**changes)
    assert words in reason
    assert "remedy:" in reason


def test_every_requirement_of_vllm_is_served_or_has_a_remedy() -> None:
    """Remedies go by the argument that asks too much, never by the words of vLLM's reasons."""
    import inspect

    from vllm.v1.attention.backend import AttentionBackend

    from sparsek_backend.vllm_backend.sparsek.backend import LEAVE, REMEDIES

    parameters = inspect.signature(AttentionBackend.validate_configuration).parameters
    flags = [name for name in parameters if name.startswith("use_") and name not in GOOD]
    for name in flags:
        served = name in ("use_kv_connector", "use_dcp")
        assert (reasons(**{name: True}) == []) == served, name
    for name, (_, remedy) in REMEDIES.items():
        newer = name in ("use_dcp", "use_adaptive_verification")
        assert remedy.startswith(LEAVE) or name in parameters or newer


def test_a_remedy_belongs_to_the_cause() -> None:
    """Two causes, each with its own; one reason of two causes, with the first one's."""
    first, second = reasons(head_size=16, use_mla=True)
    assert "head size is a multiple of 8" in first
    assert "MLA backends" in second
    (both,) = reasons(kv_cache_dtype="fp8", use_mm_prefix=True, device_capability=(9, 0))
    assert "remedy: --kv-cache-dtype auto" in both


def test_batch_invariance_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    from sparsek_backend.vllm_backend.nsa.backend import NSABackend

    (reason,) = reasons(use_batch_invariant=True)
    assert "batch invariance" in reason
    assert "unset VLLM_BATCH_INVARIANT" in reason
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert reasons(use_batch_invariant=True) == []
    assert not NSABackend.supports_batch_invariance()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    (reason,) = reasons(use_batch_invariant=True, use_mm_prefix=True)
    assert "bidirectional prefixes" in reason
    assert "remedy: leave --attention-backend out" in reason


def test_the_backend_is_no_sparse_mla_backend() -> None:
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    assert not SparseKBackend.is_sparse()
    assert not SparseKBackend.is_mla()
    assert SparseKBackend.get_preferred_block_size(16) == 64
    assert SparseKBackend.get_preferred_block_size(128) == 128


def test_several_reasons_are_all_told() -> None:
    from sparsek_backend.vllm_backend.validate import refuse_if_invalid

    selection = {name: value for name, value in GOOD.items() if name != "device_capability"}
    with pytest.raises(ValueError, match=r"SPARSEK cannot serve.*head_size.*MLA") as caught:
        refuse_if_invalid({**selection, "head_size": 576, "use_mla": True})
    assert str(caught.value).count("remedy:") == 2


def test_pages_that_do_not_fit() -> None:
    from sparsek_backend.vllm_backend.settings import check_page_size

    with pytest.raises(ConfigError) as caught:
        check_page_size(resolve_config({"sel_block_size": 64}, {}), 48)
    for word in ("sel_block_size", "48", "--block-size 64"):
        assert word in str(caught.value)


@pytest.mark.parametrize("mode", ["block_topk", "infllm"])
@pytest.mark.parametrize("page_size", [16, 48, 64, 80, 96, 128, 192])
@pytest.mark.parametrize("size", [16, 32, 48, 64, 96, 128])
def test_remedies_of_pages_that_do_not_fit(size: int, page_size: int, mode: str) -> None:
    """Each of them, followed alone, lets the engine start."""
    from sparsek_backend.vllm_backend.settings import check_page_size

    def settings(size: int) -> Any:
        if mode == "infllm":
            return resolve_config({"mode": mode}, {}, {"block_size": size})
        return resolve_config({"sel_block_size": size}, {})

    try:
        check_page_size(settings(size), page_size)
    except ConfigError as error:
        found = re.search(r"--block-size (\d+)(?:, or set sel_block_size to (\d+))?", str(error))
        assert found is not None
        check_page_size(settings(size), int(found[1]))
        assert mode == "block_topk" or found[2] is None  # the model has blocks of one size
        if found[2] is not None:
            check_page_size(settings(int(found[2])), page_size)


@pytest.mark.parametrize("page_size", [64, 128, 192])
def test_pages_that_fit(page_size: int) -> None:
    from sparsek_backend.vllm_backend.settings import check_page_size

    check_page_size(resolve_config(None, {}), page_size)
    check_page_size(resolve_config({"mode": "sink_window"}, {}), 48)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def configure(model: Path, **options: Any) -> Any:
    """Everything that vLLM decides about an engine before it starts one."""
    from vllm.engine.arg_utils import EngineArgs

    backend = options.pop("attention_backend", "SPARSEK")
    options = {"load_format": "dummy", **options}
    args = EngineArgs(model=str(model), attention_backend=backend, **options)
    return args.create_engine_config()


def test_a_good_engine_is_configured(llama: Path) -> None:
    config = configure(llama, additional_config={"sparsek": {"top_k": 4}})
    assert config.attention_config.backend.name == "SPARSEK"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"additional_config": {"sparsek": {"topk": 4}}}, ("topk", "did you mean top_k")),
        ({"additional_config": {"sparsek": {"window_size": 0}}}, ("window_size", "got 0")),
        ({"block_size": 48}, ("sel_block_size", "48")),
        ({"kv_cache_dtype": "fp8"}, ("kv_cache_dtype", "CPU", "--kv-cache-dtype auto")),
        ({"additional_config": {"spasek": {"top_k": 4}}}, ("spasek", "the section sparsek")),
        ({"additional_config": {"top_k": 4}}, ("top_k", "outside of the sparsek section")),
        (
            {"additional_config": {"sparsek": {"dense_layers": [0, 99]}}},
            ("dense_layers (from --additional-config", "which has 2", "[0, 99]"),
        ),
        ({"additional_config": {"sparsek": {"dense_layers": 3}}}, ("which has 2", "got 3")),
        (
            {"additional_config": {"sparsek": {"sel_block_size": 96}}},
            ("sel_block_size", "KV page of 128", "--block-size 192, or set sel_block_size to 128"),
        ),
        (
            {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
            ("KV connector lmcache", "remedy: leave --kv-offloading-size out, or take one of"),
        ),
        (
            {"kv_cache_dtype_skip_layers": ["0"]},
            ("remedy: leave --kv-cache-dtype-skip-layers out, or mode sink_window or dense",),
        ),
    ],
    ids=[
        "unknown",
        "invalid",
        "page",
        "fp8",
        "section",
        "no-section",
        "layer",
        "layers",
        "default-page",
        "offloading",
        "skip-layers",
    ],
)
def test_settings_stop_the_start(
    llama: Path, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="SPARSEK") as caught:
        configure(llama, **options)
    for word in words:
        assert word in str(caught.value)


def test_every_layer_of_the_model_may_be_dense(llama: Path) -> None:
    for layers in (0, 2, [], [0, 1]):
        configure(llama, additional_config={"sparsek": {"dense_layers": layers}})


def test_drafts_without_a_model_add_no_layers(llama: Path) -> None:
    """vLLM says that the draft model of n-grams is the served one."""
    drafts = speculation("ngram", llama, llama)
    configure(llama, additional_config={"sparsek": {"dense_layers": 2}}, **drafts)
    with pytest.raises(ValueError, match=r"dense_layers .* which has 2, .* got \[3\]"):
        configure(llama, additional_config={"sparsek": {"dense_layers": [3]}}, **drafts)


def test_a_budget_that_nothing_selects_by_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.vllm_backend import validate

    said: list[str] = []
    monkeypatch.setattr(validate.logger, "warning_once", said.append)
    for settings in ({}, {"top_k": 8}, {"query_tile": 1}, {"query_tile": 1, "top_k": 8}):
        configure(llama, additional_config={"sparsek": settings})
    (line,) = set(said)
    assert re.search(r"top_k .* has no effect with query_tile 1 .* set decode_tokens", line)


def test_contexts_that_no_list_can_number_stop_the_start(llama: Path) -> None:
    """As of Llama 4 Scout, whose own limit is 10M tokens."""

    def start(length: int, mode: str) -> None:
        overrides = {"max_position_embeddings": 10 << 20}
        settings = {"sparsek": {"mode": mode}}
        configure(llama, hf_overrides=overrides, max_model_len=length, additional_config=settings)

    most = 4 << 20
    start(most, "block_topk")
    start(most + 1, "sink_window")
    words = rf"max_model_len of at most {most} .* got {most + 1}; remedy: --max-model-len {most}"
    with pytest.raises(ValueError, match=words):
        start(most + 1, "block_topk")


def test_settings_from_the_environment_stop_the_start(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEK_TOP_K", "-3")
    with pytest.raises(ValueError, match=r"top_k \(from SPARSEK_TOP_K\).*-3"):
        configure(llama)


def test_batch_invariance_stops_the_start_on_a_cpu(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r"SPARSEK cannot serve.*unset VLLM_BATCH_INVARIANT"):
        configure(llama)
    with pytest.raises(ValueError, match=r"query_tile \(from --additional-config.*got 16"):
        configure(llama, additional_config={"sparsek": {"query_tile": 16}})


def test_other_backends_ignore_our_settings(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEK_TOP_K", "-3")
    options = {"additional_config": {"sparsek": {"topk": 4}}}
    assert configure(llama, attention_backend=None, **options) is not None
    assert configure(llama, attention_backend="CPU_ATTN", **options) is not None


def test_half_downloaded_models_are_refused(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for path in llama.iterdir():
        tmp_path.joinpath(path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(64)}, weights)
    assert configure(tmp_path, load_format="auto") is not None
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"not complete: model.safetensors is cut off .*\d+ bytes"):
        configure(tmp_path, load_format="auto")
    assert configure(tmp_path, load_format="auto", attention_backend="CPU_ATTN") is not None


def test_weights_as_mistral_publishes_them(llama: Path, tmp_path: Path) -> None:
    """vLLM takes a folder without a config.json; it reads a JSON of another name there."""
    from sparsek_backend.models import IncompleteFolderError, verify_model

    weights = llama.joinpath("model.safetensors").read_bytes()
    tmp_path.joinpath("consolidated.safetensors").write_bytes(weights)
    with pytest.raises(IncompleteFolderError, match=r"config.json is missing"):
        verify_model(tmp_path)
    tmp_path.joinpath("params.json").write_text("{", encoding="utf-8")
    with pytest.raises(IncompleteFolderError, match=r"params.json is not valid JSON"):
        verify_model(tmp_path)
    tmp_path.joinpath("params.json").write_text("{}", encoding="utf-8")
    verify_model(tmp_path)
    tmp_path.joinpath("consolidated.safetensors").rename(tmp_path / "weights.pt")
    verify_model(tmp_path)  # which vLLM takes where there is nothing else


def _write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.joinpath("config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_odd_head_size_is_refused(llama: Path, tmp_path: Path) -> None:
    config = json.loads(llama.joinpath("config.json").read_text(encoding="utf-8"))
    _write_config(tmp_path, {**config, "head_dim": 20})
    with pytest.raises(ValueError, match=r"SPARSEK cannot serve.*head_size.*, got 20 \(remedy"):
        configure(tmp_path, skip_tokenizer_init=True)


def test_mla_models_are_refused(tmp_path: Path) -> None:
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        architectures=["DeepseekV2ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"SPARSEK cannot serve.*MLA not supported.*remedy"):
        configure(tmp_path, skip_tokenizer_init=True)


@pytest.mark.parametrize("kind", ["soft_cap", "alibi", "encoder"])
def test_what_sdpa_serves_is_refused_with_fp8_and_batch_invariance(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    from sparsek_backend.vllm_backend import validate

    config = configure(make_tiny_model(kind, tmp_path), skip_tokenizer_init=True)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    hopper = classmethod(lambda cls: DeviceCapability(9, 0))
    monkeypatch.setattr(type(current_platform), "get_device_capability", hopper)
    validate.check_engine(config)
    monkeypatch.setattr(config.cache_config, "cache_dtype", "fp8")
    with pytest.raises(ValueError, match=r"over an fp8 KV cache \(remedy: --kv-cache-dtype auto"):
        validate.check_engine(config)
    monkeypatch.setattr(config.cache_config, "cache_dtype", "auto")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r"with batch invariance \(remedy: unset"):
        validate.check_engine(config)


def test_hybrid_models_before_pages_declared_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.vllm_backend import compat

    model = make_tiny_model("short_conv", tmp_path)
    assert configure(model) is not None
    monkeypatch.setattr(compat, "declares_content", lambda: False)
    with pytest.raises(ValueError, match=r"SPARSEK cannot serve.*recurrent layers.*sink_window or"):
        configure(model)
    for mode in ("dense", "sink_window"):
        assert configure(model, additional_config={"sparsek": {"mode": mode}}) is not None


@pytest.mark.parametrize("kind", ["short_conv", "granite_hybrid"])
def test_drafts_for_recurrent_layers_stop_the_start_on_a_cpu(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    model = make_tiny_model(kind, tmp_path)
    drafts = speculation("ngram", model, tmp_path)
    words = r"SPARSEK cannot serve.*recurrent layers .* on a CPU.*leave --speculative-config out"
    with pytest.raises(ValueError, match=words):
        configure(model, skip_tokenizer_init=True, **drafts)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert configure(model, skip_tokenizer_init=True, **drafts) is not None


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from sparsek_backend.vllm_backend.validate import check_engine

    model = SimpleNamespace(
        architectures=[], is_encoder_decoder=True, hf_text_config=None, hf_config=None
    )
    engine = SimpleNamespace(additional_config={}, model_config=model)
    with pytest.raises(ValueError, match=r"cross-attention .*remedy: leave"):
        check_engine(engine)


def test_model_config_section_is_read(tmp_path: Path, llama: Path) -> None:
    from sparsek_backend.vllm_backend.settings import engine_config

    config = json.loads(llama.joinpath("config.json").read_text(encoding="utf-8"))
    section = {"block_size": 32, "window_size": 128, "topk": 9, "init_blocks": 1, "dense_len": 256}
    _write_config(tmp_path, {**config, "sparse_config": section})
    resolved = engine_config(configure(tmp_path, skip_tokenizer_init=True))
    found = resolved.config
    assert (found.sel_block_size, found.window_size, found.top_k) == (32, 128, 8)
    assert resolved.sources["top_k"] == "the model's config"


def test_implementation_refuses_what_it_cannot_mask() -> None:
    from sparsek_backend.vllm_backend.sparsek.impl import SparseKImpl

    with pytest.raises(NotImplementedError, match="encoder_decoder"):
        SparseKImpl(4, 64, 1.0, 4, attn_type="encoder_decoder")
    for name, value in (
        ("use_alibi_sqrt", True),
        ("chunk_lookback", 1),
        ("dual_chunk_attention_config", {"chunk_size": 4096}),
        ("a_keyword_of_a_later_vllm", None),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}=.* leave --attention-backend out"):
            SparseKImpl(4, 64, 1.0, 4, **{name: value})
    with pytest.raises(ValueError, match="expected 4 logits, got 3"):
        SparseKImpl(4, 64, 1.0, 4, sinks=torch.zeros(3))
