"""An engine whose decoded tokens choose by records, held against the float64 oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.config import ConfigError, resolve_config
from sparsek_backend.vllm_backend.settings import check_page_size
from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_kernels.paged import PageRecords
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from tests.kernels.paged.records_oracle import checked_lists, decode_reference
from tests.vllm_backend.drafts import speculation
from tests.vllm_backend.engines import engine, generate, requires_cpu_vllm
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

SETTINGS = {"decode_tokens": 64, "num_sink": 64, "window_size": 64, "top_k": 2, "dense_below": 0}


@pytest.fixture
def together() -> set[int]:
    """How many tokens requests had that chose by records."""
    return set()


@pytest.fixture
def errors(together: set[int], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of each token that chooses by records, in torch, beside the oracle: C may draw others."""
    monkeypatch.setattr(native_decode, "supports", lambda *_: False)
    real, found = impl_module.attend_segment, []

    def held_against_oracle(of: PagedOperands, segment: Segment, index: Any) -> None:
        real(of, segment, index)
        if isinstance(index, PageRecords):
            select = checked_lists(index.select(of, segment).indices, 1e-4)
            batch, policy, scale = segment.batch, segment.policy, of.softmax_scale
            expected = decode_reference(
                of.q, of.k_cache, of.v_cache, batch, policy, scale, select=select
            )
            found.extend((of.out[: len(expected)].double() - expected).abs().amax((1, 2)).tolist())
            together.update(segment.batch.query_lens)

    monkeypatch.setattr(impl_module, "attend_segment", held_against_oracle)
    return found


OPTIONS: dict[str, Any] = {"block_size": 64, "max_model_len": 512, "skip_tokenizer_init": True}


def make_prompt(length: int = 441) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    drawn: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return drawn


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, 40),
        ({"query_tile": 1}, 540),
        ({"query_tile": 1, "sparse_phase": "prefill"}, 500),
    ],
    ids=["tiles", "tokens", "prompts"],
)
def test_an_engine_chooses_by_records(
    changes: dict[str, Any], least: int, tmp_path: Path, errors: list[float]
) -> None:
    """Through prompts in chunks, a record that is completed while decoding, and a prefix hit."""
    prompt, settings = make_prompt(), {**SETTINGS, **changes}
    model = make_tiny_model("llama", tmp_path)
    with engine(model, "SPARSEK", settings, max_num_batched_tokens=128, **OPTIONS) as llm:
        first = generate(llm, [prompt, prompt[:330]], together=True, max_tokens=12)
        hit = generate(llm, [prompt], together=True, max_tokens=12)
    assert hit[0].num_cached_tokens > 0
    assert hit[0].outputs[0].token_ids == first[0].outputs[0].token_ids
    assert len(errors) > least
    assert max(errors) < 1e-4


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.usefixtures("registered")
def test_prompts_by_records_know_no_chunks(tmp_path: Path) -> None:
    """Whole or in parts, alone or together, prompts have the same answers."""
    prompt, settings = make_prompt(), {**SETTINGS, "query_tile": 1}
    prompts, found = [prompt, prompt[:330], prompt[100:400]], []
    model = make_tiny_model("llama", tmp_path)
    for tokens, together in ((512, False), (128, True), (77, True)):
        with engine(model, "SPARSEK", settings, max_num_batched_tokens=tokens, **OPTIONS) as llm:
            given = generate(llm, prompts, together=together, max_tokens=12, logprobs=0)
        found.append([output.outputs[0] for output in given])
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert theirs.cumulative_logprob == pytest.approx(mine.cumulative_logprob, abs=1e-4)


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.usefixtures("registered")
def test_drafts_share_a_list_with_the_token_before_them(
    tmp_path: Path, errors: list[float], together: set[int]
) -> None:
    """Through records that drafts complete, and drafts that are taken back."""
    model = make_tiny_model("llama", tmp_path)
    options = {**OPTIONS, **speculation("ngram", model, tmp_path)}
    with engine(model, "SPARSEK", SETTINGS, max_num_batched_tokens=128, **options) as llm:
        generate(llm, [make_prompt(), make_prompt(373)], together=True, max_tokens=24)
    assert together >= {1, 3}
    # C rounds factors of scores to 16 bits: of two cells that nearly agree it may take the other.
    assert sum(error < 1e-4 for error in errors) >= 0.9 * len(errors)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"decode_tokens": 0}, "decode_tokens"),
        ({"decode_tokens": 64, "mode": "sink_window"}, "decode_tokens"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve_config(settings, {})


def test_tokens_go_before_what_a_model_was_trained_with() -> None:
    trained = {
        "kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64,
        "window_size": 2048, "topk": 64, "use_nope": False, "dense_len": 8192,
    }  # fmt: skip
    assert resolve_config({"decode_tokens": 2048}, {}, trained).config.decode_tokens == 2048
    assert resolve_config({}, {}, trained).config.decode_tokens == 63 * 64


def test_batch_invariant_prompts_choose_by_records_too() -> None:
    config = resolve_config({"decode_tokens": 64}, {}, batch_invariant=True).config
    policy = config.policy_for(0)
    assert policy.prefill == policy.decode
    assert policy.decode.alignment == 64


def test_pages_hold_whole_segments() -> None:
    resolved = resolve_config({"decode_tokens": 64}, {})
    check_page_size(resolved, 128)
    with pytest.raises(ConfigError, match="multiple of 64"):
        check_page_size(resolve_config({"decode_tokens": 64, "sel_block_size": 32}, {}), 32)
