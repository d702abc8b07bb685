"""What the layers of an engine share, and with whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsek_backend.patterns.prefill import PrefillPattern
from tests.vllm_backend.drafts import speculation
from tests.vllm_backend.engines import engine, generate, layers, requires_cpu_vllm
from tests.vllm_backend.gate_files import make_gates_folder
from tests.vllm_backend.layers import (
    SETTINGS,
    building,
    make_builder,
    make_config,
    make_layer,
    make_spec,
    make_step,
)
from tests.vllm_backend.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("registered")


def test_the_environment_is_read_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsek_backend.vllm_backend import engine as shared

    read = []
    settings = shared.engine_config
    monkeypatch.setattr(shared, "engine_config", lambda config: read.append(1) or settings(config))
    with building(make_config(tmp_path)) as config:
        for index in range(2):
            builder, _ = make_builder(make_layer(index), config)
        type(builder).get_cudagraph_support(config, None)
    assert len(read) == 1


def test_draft_models_belong_to_the_engine(tmp_path: Any) -> None:
    """Their configuration is a copy, and pages have one size: the target model's layers select."""
    from vllm.config.utils import replace

    from sparsek_backend.vllm_backend.engine import engine_of, latest_engine
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    with building(make_config(tmp_path)) as config:
        spec = make_layer().get_kv_cache_spec(config)
        copy = replace(config, model_config=config.model_config)
        assert copy is not config
        with building(copy):
            make_layer(1, per_layer_sliding_window=48)
        assert engine_of(copy) is engine_of(config) is latest_engine()
        assert SparseKBackend.customize_spec(spec).page_size_bytes > spec.page_size_bytes


def test_the_language_model_of_a_multimodal_one_is_no_draft(tmp_path: Any) -> None:
    """vLLM builds it with a copy of the served model's configuration, beside any speculation."""
    settings = {**SETTINGS, "dense_layers": [0]}
    options = {
        "additional_config": {"sparsek": settings},
        **speculation("ngram", tmp_path, tmp_path),
    }
    config = make_config(tmp_path, **options)
    with building(config.with_hf_config(config.model_config.hf_config)):
        layers = [make_layer(index) for index in range(2)]
        for layer in layers:
            make_builder(layer, config)
    assert [layer.impl.policy.selects_blocks for layer in layers] == [False, True]


def test_layers_of_drafts_count_on_from_the_served_models(tmp_path: Any) -> None:
    """Also of those MTP modules whose layers vLLM counts from 0, as Qwen3-Next's."""
    from sparsek_backend.vllm_backend.step import layer_index

    config = make_config(tmp_path)
    found = {"model.layers.1.self_attn.attn": 1, "model.layers.2.mtp_block.self_attn.attn": 2}
    found |= {f"mtp.layers.{index}.self_attn.attn": 2 + index for index in range(2)}
    assert {name: layer_index(config, 0, name) for name in found} == found
    assert layer_index(config, 2, "draft_model.model.layers.1.self_attn.attn") == 3


@pytest.mark.parametrize(
    ("method", "modules", "number", "shared"),
    [("mtp", 1, 2, True), ("mtp", 2, 2, False), ("mtp", 2, 1, True), ("eagle", 1, 2, True)]
    + [(method, 1, 2, False) for method in ("dflash", "draft_model")],
)
def test_drafts_that_attend_steps_of_the_served_model(
    method: str,
    modules: int,
    number: int,
    shared: bool,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts of one module, token by token, share steps in vLLM's second model runner."""
    from sparsek_backend.vllm_backend.compat import shares_steps_with_drafts

    model = tmp_path / "model"
    model.mkdir()
    drafts = speculation("eagle", model, tmp_path)["speculative_config"]
    drafts["num_speculative_tokens"] = number
    config = make_config(model, speculative_config=drafts)
    monkeypatch.setattr(config.speculative_config, "method", method)
    found = config.speculative_config.draft_model_config.hf_config
    monkeypatch.setattr(found, "num_nextn_predict_layers", modules, raising=False)
    for version in (0, 1):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(version))
        assert shares_steps_with_drafts(config) is (shared and version == 1)


@pytest.mark.parametrize("shared", [False, True])
def test_layers_of_a_draft_count_where_they_attend(
    shared: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of their own group, which vLLM completes later, and in those that are shared."""
    from sparsek_backend.vllm_backend import compat
    from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder

    monkeypatch.setattr(compat, "shares_steps_with_drafts", lambda _: shared)
    with building(make_config(tmp_path)) as config:
        layers = [make_layer(index) for index in range(4)]
        names = [layer.layer_name for layer in layers]
        spec, device = make_spec(layers[0], config), torch.device("cpu")
        own = names[2:3]
        both, drafts = (
            SparseKMetadataBuilder(spec, group, config, device) for group in (names, own)
        )
        own.append(names[3])
        found = [builder.build(0, make_step([90], [90], 4)) for builder in (both, drafts)]
    every = 90 * 91 // 2
    assert [step.context for step in found] == [((4 if shared else 2) * every, 0), (2 * every, 0)]


def test_a_group_that_is_completed_later_asks_for_prompts_by_all_of_its_layers(
    tmp_path: Any,
) -> None:
    """As a draft's, whose first layer may attend everything."""
    from sparsek_backend.vllm_backend.engine import engine_of
    from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder

    settings = {**SETTINGS, "dense_layers": [0]}
    with building(make_config(tmp_path, additional_config={"sparsek": settings})) as config:
        layers = [make_layer(index) for index in range(2)]
        spec, device = make_spec(layers[0], config), torch.device("cpu")
        names = [layer.layer_name for layer in layers]
        own = names[:1]
        drafts = SparseKMetadataBuilder(spec, own, config, device)
        SparseKMetadataBuilder(spec, names, config, device)
        own.append(names[1])
        engine_of(config).prompt_lengths = [100]
        assert drafts.build(0, make_step([90], [90], 4)).batch.prompt_left_host == (10,)


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.parametrize("mode", ["pattern", "infllm", "seer"])
def test_a_draft_model_needs_nothing_that_was_learned_for_the_served_one(
    mode: str, tmp_path: Any
) -> None:
    """Its layers count on from the served model's, whatever they call themselves."""
    kinds = {"pattern": "llama", "infllm": "minicpm", "seer": "qk_norm"}
    model = make_tiny_model(kinds[mode], tmp_path / "model")
    draft = make_tiny_model("mqa", tmp_path / "draft")
    settings: dict[str, Any] = {"mode": mode, "dense_layers": [0, 2, 3]}
    if mode == "pattern":
        entries = torch.tensor([[3, -4, 1, -9], [-6, -5, 7, 2]], dtype=torch.int32)
        PrefillPattern({0: entries, 1: entries}, 64).save(tmp_path / "pattern")
        settings["pattern"] = str(tmp_path / "pattern")
    if mode == "seer":
        settings["gates"] = str(make_gates_folder(tmp_path / "gates"))
    with engine(
        model,
        "SPARSEK",
        settings,
        max_model_len=320,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 2,
            "attention_backend": "SPARSEK",
        },
    ) as llm:
        selects = {layer.layer_name: layer.impl.policy.selects_blocks for layer in layers(llm)}
        (output,) = generate(llm, [range(3, 203)], together=True, max_tokens=4)
    names = [f"model.layers.{index}.self_attn.attn" for index in range(2)]
    drafts = {f"draft_model.{name}": False for name in names}
    assert selects == {names[0]: False, names[1]: True, **drafts}
    assert len(output.outputs[0].token_ids) == 4
