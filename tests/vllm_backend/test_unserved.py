"""Models whose attention is not served are refused while the engine is configured."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_backend import vllm_models
from tests.vllm_backend.test_startup import configure
from tests.vllm_backend.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("registered")

DUAL_CHUNKS = {"chunk_size": 4096, "local_size": 512, "original_max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def served(registered: None, llama: Path) -> Any:
    """The configuration of an engine that is served."""
    return configure(llama)


def with_config(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a model's config with some fields changed."""
    config = json.loads(model.joinpath("config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, **changes})
    folder.joinpath("config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["Qwen2ForCausalLM"], "dual_chunk_attention_config": DUAL_CHUNKS},
            r"dual_chunk_attention_config.*remedy: remove that section from the model's config",
        ),
        (
            {"architectures": ["MiMoV2FlashForCausalLM"], "v_head_dim": 64},
            r"values of another head size.*_DIFFKV.*remedy: leave --attention-backend out",
        ),
        (
            {"architectures": ["PanguProMoEV2ForCausalLM"], "param_sink_number": 128},
            r"param_sink_number.*remedy: leave --attention-backend out",
        ),
        (
            {"architectures": ["Rnj1ForCausalLM"], "layer_types": ["chunked_attention"] * 2},
            r"chunk_lookback.*remedy: leave --attention-backend out",
        ),
    ],
    ids=["Qwen2.5-1M", "MiMo-V2", "openPangu", "Rnj-1"],
)
def test_refused_by_the_config(
    changes: dict[str, Any], words: str, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.vllm_backend.validate import check_engine

    model = served.model_config
    for name, value in changes.items():
        owner = model.model_arch_config if name == "architectures" else model.hf_text_config
        monkeypatch.setattr(owner, name, value, raising=False)
    with pytest.raises(ValueError, match=f"SPARSEK cannot serve this model: .*{words}"):
        check_engine(served)


def test_qwen2_with_dual_chunks_stops_the_start(llama: Path, tmp_path: Path) -> None:
    changes = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    changes |= {"dual_chunk_attention_config": DUAL_CHUNKS}
    folder = with_config(llama, tmp_path, **changes)
    with pytest.raises(ValueError, match=r"SPARSEK cannot serve.*dual_chunk_attention_config"):
        configure(folder, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (["MiMoV2FlashForCausalLM"], {"head_dim": 64, "v_head_dim": 64}),
        (["PanguEmbeddedForCausalLM"], {"param_sink_number": 0}),
        (["Rnj1ForCausalLM"], {"layer_types": ["full_attention"]}),
        (["Qwen2ForCausalLM"], {"dual_chunk_attention_config": None}),
        (["Step1oForCausalLM"], {}),
    ],
)
def test_the_same_classes_without_it_are_served(names: list[str], config: dict[str, Any]) -> None:
    from sparsek_backend.vllm_backend.unserved import unserved_attention

    fields = SimpleNamespace(**config)
    model = SimpleNamespace(architectures=names, hf_text_config=fields, hf_config=fields)
    assert unserved_attention(model) == []


def test_refused_by_name(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of vLLM's classes: those of the installed version, and of a later one."""
    from sparsek_backend.vllm_backend.unserved import ARCHITECTURES
    from sparsek_backend.vllm_backend.validate import check_engine

    for beginning, what in ARCHITECTURES.items():
        names = [f"{beginning}CausalLM"]
        monkeypatch.setattr(served.model_config.model_arch_config, "architectures", names)
        with pytest.raises(ValueError, match="SPARSEK cannot serve this model") as caught:
            check_engine(served)
        assert f"{what} not supported (remedy: leave --attention-backend out)" in str(caught.value)
    names = set().union(*vllm_models.architectures(vllm_folder()).values())
    missing = {each for each in ARCHITECTURES if not any(name.startswith(each) for name in names)}
    assert missing <= {"Qwen4Exp", "Step5"}


def vllm_folder() -> Path:
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def test_no_other_model_of_vllms_goes_its_own_way() -> None:
    """Each is served, or refused by its config or its name."""
    found = vllm_models.special(vllm_folder())
    assert set(found) <= set(vllm_models.MODULES)
    assert found["mimo_v2"] == {"attn_backend", "head_size_v"}
    assert found["rnj1"] == {"chunk_lookback"}
    assert found["openpangu"] == {"StaticSinkAttention"}


def test_keywords_of_dicts_are_seen() -> None:
    source = """
options: dict = {"sinks": 1, "tilt": 2}
Attention(1, 2, 3.0, **options, **({"yaw": 3} if options else {}))
"""
    assert vllm_models.unknown(source, {"Attention"}) == {"tilt", "yaw"}
