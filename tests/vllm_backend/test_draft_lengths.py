"""Lengths of requests on the host, where a draft's tokens are in those of the device alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsek_backend.vllm_backend.settings import lacking_tokens
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.vllm_backend.layers import (
    building,
    keys_and_values,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_spec,
    make_step,
    run,
)

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def current(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with building(make_config(tmp_path_factory.mktemp("llama"))) as config:
        yield config


def test_queries_that_a_draft_model_adds_are_in_lengths_of_the_device_alone(current: Any) -> None:
    """On a GPU: vLLM's lengths on the host are of the requests before them."""
    from sparsek_backend.vllm_backend.sparsek import metadata as metadata_module

    layer = make_layer()
    builder, spec = make_builder(layer, current)
    builder.on_host, builder.lacking = False, 1
    cache = make_cache(spec, 32)
    run(layer, builder, cache, make_step([90], [90], 32), seed=1)
    step = make_step([91, 65], [1, 65], 32)
    step.seq_lens_cpu_upper_bound = step.seq_lens - 1
    metadata, q, _, _, output = run(layer, builder, cache, step)
    assert metadata.seq_lens == (91, 65)
    assert metadata.batch.seq_lens_host is None
    caches = (*keys_and_values(cache), metadata.batch)
    wanted = paged_attention_reference(q, *caches, layer.impl.policy)
    torch.testing.assert_close(output.double(), wanted, atol=1e-5, rtol=1e-5)
    builder.context_ranks = object()  # which have to know
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata_module, "shard_step", lambda batch, *_: batch)
        assert builder.build(0, step).shards.seq_lens_host == (91, 65)


def test_drafts_behind_a_prompt_have_bounds_of_lengths(current: Any) -> None:
    """On a GPU, where another backend takes drafts for prompts and so orders the requests."""
    builder, _ = make_builder(make_layer(), current)
    builder.on_host, builder.reorder_batch_threshold = False, 3
    for counts, known in (([3, 40, 50], True), ([3, 40, 0], True), ([40, 3, 50], False)):
        step = make_step([90, 80, 70], counts, 32)
        step.seq_lens_cpu_upper_bound = step.seq_lens.clone()
        lengths = builder.build(0, step).batch.seq_lens_host
        assert lengths == ((90, 80, 70) if known else None)


@pytest.mark.parametrize(
    ("method", "parallel", "added"), [("draft_model", False, 1), ("eagle", False, 0), ("", True, 4)]
)
def test_drafts_alone_have_queries_that_are_added(method: str, parallel: bool, added: int) -> None:
    served = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2))
    drafts = {"method": method, "parallel_drafting": parallel, "num_speculative_tokens": 4}
    speculative = SimpleNamespace(target_model_config=served, **drafts)
    config = SimpleNamespace(model_config=served, speculative_config=speculative)
    assert [lacking_tokens(config, layer) for layer in (0, 1, 2, 3)] == [0, 0, added, added]
    assert lacking_tokens(SimpleNamespace(model_config=served, speculative_config=None), 2) == 0


def test_a_builder_asks_for_the_first_of_its_layers(
    current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts share the pages of a model's layers, vLLM builds one step for all of them."""
    from sparsek_backend.vllm_backend import step
    from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder

    monkeypatch.setattr(step, "lacking_tokens", lambda _config, layer: layer)
    layers = [make_layer(index) for index in (1, 0)]
    names = [layer.layer_name for layer in layers]
    assert make_builder(layers[0], current)[0].lacking == 1
    spec, device = make_spec(layers[0], current), torch.device("cpu")
    both = SparseKMetadataBuilder(spec, names, current, device)
    assert both.lacking == 0
