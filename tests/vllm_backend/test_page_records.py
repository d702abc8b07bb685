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
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from tests.kernels.paged.records_oracle import decode_reference
from tests.vllm_backend.drafts import speculation
from tests.vllm_backend.engines import engine, generate, requires_cpu_vllm
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

SETTINGS = {"decode_tokens": 64, "num_sink": 64, "window_size": 64, "top_k": 2, "dense_below": 0}


def hold_against_oracle(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], set[int]]:
    """Errors of all decodes by records from now on, and how many tokens a request had."""
    real, errors, together = impl_module.attend_segment, list[float](), set[int]()

    def held_against_oracle(of: PagedOperands, segment: Segment, index: Any) -> None:
        real(of, segment, index)
        if isinstance(index, PageRecords):
            expected = decode_reference(
                of.q, of.k_cache, of.v_cache, segment.batch, segment.policy, of.softmax_scale
            )
            errors.append(float((of.out[: len(expected)].double() - expected).abs().max()))
            together.update(segment.batch.query_lens)

    monkeypatch.setattr(impl_module, "attend_segment", held_against_oracle)
    return errors, together


def draw_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.usefixtures("registered")
def test_an_engine_decodes_by_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through prompts in chunks, a record that is completed while decoding, and a prefix hit."""
    errors, _ = hold_against_oracle(monkeypatch)
    (prompt,) = draw_prompts(441)
    with engine(
        make_tiny_model("llama", tmp_path), "SPARSEK", SETTINGS, block_size=64,
        max_model_len=512, max_num_batched_tokens=128, skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        first = generate(llm, [prompt, prompt[:330]], together=True, max_tokens=12)
        hit = generate(llm, [prompt], together=True, max_tokens=12)
    assert hit[0].num_cached_tokens > 0
    assert hit[0].outputs[0].token_ids == first[0].outputs[0].token_ids
    assert len(errors) > 40
    assert max(errors) < 1e-4


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.usefixtures("registered")
def test_drafts_share_a_list_with_the_token_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through records that drafts complete, and drafts that are taken back."""
    errors, together = hold_against_oracle(monkeypatch)
    prompts = draw_prompts(441, 373)
    model = make_tiny_model("llama", tmp_path)
    with engine(
        model, "SPARSEK", SETTINGS, block_size=64, max_model_len=512, max_num_batched_tokens=128,
        skip_tokenizer_init=True, **speculation("ngram", model, tmp_path),
    ) as llm:  # fmt: skip
        generate(llm, prompts, together=True, max_tokens=24)
    assert together >= {1, 3}
    # C rounds factors of scores to 16 bits: of two cells that nearly agree it may take the other.
    assert sum(error < 1e-4 for error in errors) >= 0.9 * len(errors)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"decode_tokens": 64, "decode_top_k": 4}, "decode_tokens .* and decode_top_k"),
        ({"decode_tokens": 64, "query_tile": 1}, "query_tile"),
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
    config = resolve_config({"decode_tokens": 2048}, {}, trained).config
    assert (config.decode_tokens, config.decode_top_k) == (2048, None)


def test_batch_invariant_engines_refuse_records() -> None:
    with pytest.raises(ConfigError, match="decode_tokens"):
        resolve_config({"decode_tokens": 64}, {}, batch_invariant=True)


def test_pages_hold_whole_segments() -> None:
    resolved = resolve_config({"decode_tokens": 64}, {})
    check_page_size(resolved, 128)
    with pytest.raises(ConfigError, match="multiple of 64"):
        check_page_size(resolve_config({"decode_tokens": 64, "sel_block_size": 32}, {}), 32)
