"""What the layers of an engine share, and with whom."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm_backend.layers import building, make_builder, make_config, make_layer

pytestmark = pytest.mark.usefixtures("registered")


def test_the_environment_is_read_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsek_backend.vllm_backend import engine

    read = []
    settings = engine.engine_config
    monkeypatch.setattr(engine, "engine_config", lambda config: read.append(1) or settings(config))
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
