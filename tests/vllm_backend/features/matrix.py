"""What of vLLM a user may combine with SPARSEK: served or refused, and the tests that prove it.

``python -m tests.vllm_backend.features.matrix`` writes ``docs/features.md`` from these rows.
"""

from __future__ import annotations

from pathlib import Path

from tests.vllm_backend.features.row import REFUSED, SERVED, Row

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "features.md"
TESTS = "tests/vllm_backend"

INTRODUCTION = """# Features

What of vLLM works together with `--attention-backend SPARSEK`. Features with the same limit share a
row.

*Served* means that a test runs an engine, or a layer as vLLM builds it, with the feature and
compares. While the budget covers the context, tokens or log-probabilities equal a dense backend's.
While queries select blocks, tokens equal the tokens of an engine without the feature. *Refused*
means that the server does not start: its message names the feature, and the note says what to do
instead. *Where* is where the test runs; [matrix.py](../tests/vllm_backend/features/matrix.py) names
the tests of each feature, and makes this page (`python -m tests.vllm_backend.features.matrix`).

Attention layers may have MHA, GQA or MQA, head sizes of 32 to 256 (multiples of 8) and fp32, bf16
or fp16. A model's own sliding windows, chunks and learned sink logits are kept exactly, in every
mode. Layers whose class asks no backend, values of another head size than keys and anything else
that is not served stop the start, with the reason and the remedy.
"""


PARITY, SPARSE, GPU = "test_engine_parity.py", "test_engine_sparse.py", "test_gpu_engine.py"
START, UNSERVED, MASKS = "test_startup.py", "test_unserved.py", "test_masks.py"
NOT_SERVED, ON_GPU = "features/test_refused.py", "features/test_gpu_features.py"
RECORDS = "test_page_records.py"
SCHEDULING = "features/test_scheduling.py"
HYBRID = "features/test_hybrids.py::test_chunks_preemption_and_prefix_hits"
SDPA = "attended by PyTorch's SDPA, with one log line and a counter"
LEAVE = "leave `--attention-backend` out"


def _decoder(kind: str, fallback: str = "None") -> str:
    return f"test_engine_models.py::test_decoders[{kind}-{fallback}]"


def _hybrid_on_gpu(kind: str) -> tuple[str, ...]:
    return f"{ON_GPU}::test_models[{kind}]", f"{ON_GPU}::test_hybrids[{kind}]"


def _hybrid(feature: str, kind: str) -> Row:
    proofs = (f"{HYBRID}[{kind}-14]", *_hybrid_on_gpu(kind))
    return Row(feature, SERVED, proofs, "vLLM 0.29 or later")


def _speculation(feature: str, method: str) -> Row:
    on_gpu = [f"{ON_GPU}::test_speculation[{method}-{how}]" for how in ("eager", "graphs")]
    proofs = (f"{SCHEDULING}::test_speculation[{method}]", *on_gpu)
    return Row(feature, SERVED, proofs)


def _request(feature: str, name: str | None = None) -> Row:
    return Row(feature, SERVED, (f"features/test_requests.py::test_served[{name or feature}]",))


MATRIX: dict[str, tuple[Row, ...]] = {
    "Models": (
        Row(
            "Llama (grouped queries)",
            SERVED,
            (f"{PARITY}::test_eight_at_once", f"{GPU}::test_budget_over_context_equals_flash"),
        ),
        Row("one query head per KV head", SERVED, (_decoder("mha"),)),
        Row("one KV head", SERVED, (_decoder("mqa"),)),
        Row("head size that is no power of two", SERVED, (_decoder("head_dim_80"),)),
        Row("Qwen3 (normalised queries and keys)", SERVED, (_decoder("qk_norm"),)),
        Row("Qwen3-MoE", SERVED, (_decoder("moe"), f"{ON_GPU}::test_models[moe]")),
        Row("Mistral (sliding window)", SERVED, (_decoder("sliding"),)),
        Row("Gemma 3 (windows and full attention)", SERVED, (_decoder("hybrid"),)),
        Row(
            "Llama 4 (chunks and full attention)",
            SERVED,
            (_decoder("chunked"), f"{MASKS}::test_chunks_without_the_hybrid_kv_manager"),
            "with and without the hybrid KV manager",
        ),
        Row(
            "Gemma 3n (layers that share another's KV)",
            SERVED,
            (
                _decoder("shared_kv"),
                "test_layer.py::test_a_dense_layer_keeps_the_summaries_of_the_one_that_shares_its_pages",
                "test_engine_models.py::test_shared_pages_without_the_hybrid_kv_manager",
            ),
            "with and without the hybrid KV manager",
        ),
        Row("Gemma 2 (logit soft caps)", SERVED, (_decoder("soft_cap", "logits soft cap"),), SDPA),
        Row("BLOOM (ALiBi)", SERVED, (_decoder("alibi", "ALiBi"),), SDPA),
        Row(
            "gpt-oss (learned sinks and windows)",
            SERVED,
            ("test_layer.py::test_window_and_sinks_of_the_model", f"{ON_GPU}::test_models[sinks]"),
        ),
        Row(
            "MiniCPM4 (InfLLM-v2's `sparse_config`)",
            SERVED,
            (
                _decoder("minicpm"),
                "test_engine_models.py::test_minicpm_takes_its_own_selection",
            ),
            "as many blocks as the model was trained to attend, ranked by SPARSEK's rule",
        ),
        Row(
            "MiniCPM4, blocks ranked as it was trained (mode `infllm`)",
            SERVED,
            (
                "test_engine_models.py::test_minicpm_as_it_was_trained",
                "test_config.py::test_what_mode_infllm_needs",
                "features/test_gpu_infllm.py::test_choices_are_those_of_a_cpu",
                "features/test_gpu_infllm.py::test_within_the_budget",
                "features/test_gpu_infllm.py::test_chunks_and_graphs",
            ),
            "with and without `use_nope`",
        ),
        Row(
            "gates that choose blocks for decoded tokens (SeerAttention-R, mode `seer`)",
            SERVED,
            (
                "test_seer.py::test_an_engine_attends_what_the_oracle_chooses",
                "features/test_gpu_seer.py::test_choices_are_those_of_a_cpu",
            ),
            "prefills attend everything",
        ),
        Row(
            "natively sparse models (NSA)",
            SERVED,
            ("test_nsa.py::test_whole_prefill", "test_gpu_nsa.py::test_tokens_are_the_modules"),
        ),
        Row(
            "BERT, ModernBERT (encoder only, pooling)",
            SERVED,
            ("test_engine_models.py::test_encoder_only_models",),
            SDPA,
        ),
        Row(
            "embeddings of a decoder (pooling)",
            SERVED,
            ("test_engine_models.py::test_embeddings_of_a_decoder",),
        ),
        Row(
            "LFM2 (short convolutions and full attention)",
            SERVED,
            (
                f"{HYBRID}[short_conv-32]",
                "features/test_pages.py::test_a_token_takes_as_much_on_every_page",
                *_hybrid_on_gpu("short_conv"),
            ),
            "vLLM 0.29 or later",
        ),
        _hybrid("Granite 4 H (Mamba 2 and full attention)", "granite_hybrid"),
        _hybrid("Nemotron-H (Mamba 2, full attention and plain layers)", "nemotron_h"),
        _hybrid("Falcon-H1 (Mamba 2 and full attention in every layer)", "falcon_h1"),
        Row(
            "Qwen3-Next (linear attention and full attention)",
            SERVED,
            _hybrid_on_gpu("linear_attention"),
            "vLLM 0.29 or later",
        ),
        Row(
            "models with recurrent layers, before vLLM 0.29",
            REFUSED,
            (f"{START}::test_hybrid_models_before_pages_declared_their_content",),
            "a later vLLM, or mode `sink_window` or `dense`",
        ),
        Row(
            "Mamba (no attention)",
            SERVED,
            (f"{ON_GPU}::test_a_model_without_attention",),
            "SPARSEK has nothing to do: the flag changes nothing",
        ),
        Row("LLaVA (causal image tokens)", SERVED, (f"{ON_GPU}::test_images",)),
        Row(
            "bidirectional image tokens (Gemma 3 vision, PaliGemma)",
            SERVED,
            (f"{MASKS}::test_bidirectional_prefix_is_served_by_the_fallback",),
            SDPA,
        ),
        Row(
            "bidirectional image tokens within a window (Gemma 4)",
            SERVED,
            (f"{MASKS}::test_bidirectional_ranges_of_gemma_4",),
            f"{SDPA}; head sizes up to 256",
        ),
        Row(
            "Qwen2.5-1M (dual chunk attention)",
            REFUSED,
            (f"{UNSERVED}::test_qwen2_with_dual_chunks_stops_the_start",),
            "remove `dual_chunk_attention_config` from the model's `config.json`",
        ),
        Row(
            "models whose layers ask no backend (MiMo-V2, openPangu, Rnj-1, Step-1, HRM-Text, "
            "DiffusionGemma, MiniMax-M3, Qwen4-Exp, Step-5, Inkling, Voxtral Realtime)",
            REFUSED,
            (f"{UNSERVED}::test_refused_by_the_config", f"{UNSERVED}::test_refused_by_name"),
            LEAVE,
        ),
        Row("DeepSeek (MLA)", REFUSED, (f"{START}::test_mla_models_are_refused",), LEAVE),
        Row(
            "T5, Whisper (encoder-decoder)",
            REFUSED,
            (f"{NOT_SERVED}::test_encoder_decoder_models",),
            LEAVE,
        ),
    ),
    "Requests": (
        _request("several samples (`n`)", "n"),
        _request("beam search"),
        _request("structured output"),
        _request("prompt embeddings", "prompt embeds"),
        _request("LoRA"),
        _request("log-probabilities, of prompts too", "logprobs and prompt logprobs"),
        _request("penalties and stop tokens"),
        Row("streaming", SERVED, ("test_serve.py::test_streaming_equals_the_whole_answer",)),
        Row(
            "a prompt longer than the model allows",
            REFUSED,
            ("test_serve.py::test_a_request_that_is_too_long_gets_400_and_the_server_goes_on",),
            "status 400; the server goes on",
        ),
        Row(
            "malformed requests, ten times as many together as run together",
            REFUSED,
            ("test_chaos.py::test_a_storm_of_malformed_requests",),
            "status 4xx, as with any backend; the server goes on and holds no more memory",
        ),
    ),
    "Scheduling": (
        Row(
            "chunked prefill",
            SERVED,
            (f"{PARITY}::test_sequential_in_chunks", f"{SPARSE}::test_chunking"),
        ),
        Row(
            "prefix caching",
            SERVED,
            (f"{PARITY}::test_prefix_hits", f"{SPARSE}::test_prefix_hits"),
        ),
        Row(
            "preemption",
            SERVED,
            (f"{PARITY}::test_preemption", f"{SPARSE}::test_batch_composition_and_preemption"),
        ),
        Row(
            "asynchronous scheduling",
            SERVED,
            (
                f"{SCHEDULING}::test_async_scheduling",
                f"{ON_GPU}::test_options[asynchronous scheduling]",
            ),
        ),
        Row(
            "`VLLM_BATCH_INVARIANT`",
            SERVED,
            (
                "test_batch_invariant.py::test_one_call_serves_decodes_and_prefills",
                "test_batch_invariant.py::test_prompts_by_records_are_decoded_token_by_token",
            ),
            "on a GPU",
        ),
        Row(
            "`VLLM_BATCH_INVARIANT` on a CPU",
            REFUSED,
            (f"{START}::test_batch_invariance_stops_the_start_on_a_cpu",),
            "unset it",
        ),
        Row(
            "CUDA graphs: `NONE`, `PIECEWISE`, `FULL`, `FULL_DECODE_ONLY`, `FULL_AND_PIECEWISE`",
            SERVED,
            (f"{ON_GPU}::test_graphs",),
        ),
        Row("vLLM's first and second model runner", SERVED, (f"{ON_GPU}::test_model_runners",)),
        Row(
            "`--kv-sharing-fast-prefill`",
            SERVED,
            (f"{SCHEDULING}::test_fast_prefill_of_shared_caches",),
        ),
    ),
    "Speculative decoding": (
        _speculation("n-grams", "ngram"),
        _speculation("EAGLE", "eagle"),
        _speculation("EAGLE-3", "eagle3"),
        _speculation("draft model", "draft_model"),
        Row("MTP", SERVED, (f"{SCHEDULING}::test_mtp",)),
        Row(
            "adaptive verification",
            REFUSED,
            (f"{NOT_SERVED}::test_adaptive_verification",),
            "leave `enable_adaptive_verification` out",
        ),
    ),
    "KV cache": (
        Row(
            "`--kv-cache-dtype auto`, or the model's own",
            SERVED,
            (f"{NOT_SERVED}::test_every_kv_cache_dtype_of_vllm", f"{PARITY}::test_eight_at_once"),
        ),
        Row(
            "`--kv-cache-dtype fp8`, `fp8_e4m3`",
            SERVED,
            (
                f"{GPU}::test_fp8_cache_is_as_exact_as_flash",
                f"{GPU}::test_scheduling_of_fp8",
                f"{ON_GPU}::test_fp8_cache",
            ),
            "compute capability 8.9",
        ),
        Row(
            "fp8 KV cache on a CPU",
            REFUSED,
            (f"{START}::test_settings_stop_the_start[fp8]",),
            "`--kv-cache-dtype auto`",
        ),
        Row(
            "16-bit KV cache of another dtype than the model's",
            REFUSED,
            (f"{NOT_SERVED}::test_a_cache_of_another_dtype_than_the_model",),
            "`--kv-cache-dtype auto`",
        ),
        Row(
            "every other KV-cache dtype (fp8_e5m2, int8, int4, nvfp4, TurboQuant, UltraQuant)",
            REFUSED,
            (f"{NOT_SERVED}::test_every_kv_cache_dtype_of_vllm",),
            "`--kv-cache-dtype auto`",
        ),
        Row(
            "`--kv-cache-dtype-skip-layers`",
            REFUSED,
            (f"{START}::test_settings_stop_the_start[skip-layers]",),
            "leave it out, or mode `sink_window` or `dense`",
        ),
        Row(
            "decoded tokens by records of 64 tokens",
            SERVED,
            (
                f"{RECORDS}::test_an_engine_chooses_by_records[tiles]",
                f"{RECORDS}::test_drafts_share_a_list_with_the_token_before_them",
            ),
            "speculated tokens change what is selected",
        ),
        Row(
            "pages that are no multiple of 64 tokens, with block selection",
            REFUSED,
            ("test_config.py::test_who_needs_pages_of_whole_segments",),
            "`--block-size 64`, or mode `sink_window` or `dense`",
        ),
        Row(
            "prompts by records, token by token (`decode_tokens` with `query_tile` 1)",
            SERVED,
            (
                f"{RECORDS}::test_an_engine_chooses_by_records[tokens]",
                f"{RECORDS}::test_prompts_by_records_know_no_chunks",
            ),
        ),
        Row(
            "a page that vLLM copies",
            SERVED,
            ("features/test_pages.py::test_vllms_copy_of_a_block_carries_its_summary",),
            "block summaries are copied with K and V",
        ),
    ),
    "KV connectors (vLLM 0.29 or later)": (
        Row(
            "ExampleConnector (shared storage)",
            SERVED,
            ("features/test_connectors.py::test_pages_in_files",),
        ),
        Row(
            "OffloadingConnector, `--kv-offloading-size`",
            SERVED,
            (
                "features/test_connectors.py::test_offloaded_pages_are_whole",
                f"{ON_GPU}::test_connectors[OffloadingConnector]",
            ),
        ),
        Row(
            "SimpleCPUOffloadConnector",
            SERVED,
            (f"{ON_GPU}::test_connectors[SimpleCPUOffloadConnector]",),
        ),
        Row(
            "NixlConnector (prefill and decoding by two engines)",
            SERVED,
            (
                "features/test_nixl.py::test_pages_of_another_engine",
                f"{NOT_SERVED}::test_page_sizes_of_two_engines",
            ),
            "both with the page size that vLLM chooses; tested with one rank each, where the "
            "package `nixl` is installed",
        ),
        Row(
            "LMCache",
            REFUSED,
            (
                f"{NOT_SERVED}::test_every_other_kv_connector",
                f"{START}::test_settings_stop_the_start[offloading]",
            ),
            "take OffloadingConnector: LMCache (read: 0.5.6) stores K and V of each token, "
            "`[layers, 2, tokens, heads, head size]`, without what else a page holds",
        ),
        Row(
            "every other connector (Mooncake, MultiConnector, your own)",
            REFUSED,
            (f"{NOT_SERVED}::test_every_other_kv_connector",),
            "leave it out, or take one of the four above",
        ),
    ),
    "Parallelism": (
        Row(
            "tensor parallel",
            SERVED,
            (
                "test_tensor_parallel.py::test_tokens_of_two_ranks",
                f"{ON_GPU}::test_two_gpus[tensor parallel]",
            ),
        ),
        Row(
            "pipeline parallel",
            SERVED,
            (f"{ON_GPU}::test_two_gpus[pipeline parallel]",),
            "vLLM 0.32's CPU build fails, whatever the backend",
        ),
        Row(
            "expert parallel",
            SERVED,
            (f"{ON_GPU}::test_two_gpus[expert parallel]",),
            "vLLM 0.32's CPU build fails, whatever the backend",
        ),
        Row(
            "data parallel",
            SERVED,
            (
                "test_tensor_parallel.py::test_tokens_of_data_parallel_engines",
                f"{ON_GPU}::test_data_parallel",
            ),
        ),
        Row(
            "decode context parallel",
            SERVED,
            (
                "test_tensor_parallel.py::test_tokens_of_ranks_that_hold_the_context_between_them",
                f"{ON_GPU}::test_decode_context_parallel",
                f"{NOT_SERVED}::test_what_needs_all_keys_on_one_rank",
                f"{NOT_SERVED}::test_ranks_that_take_parts_of_pages_in_turn",
            ),
            "whole pages in turn: `--cp-kv-cache-interleave-size` of a page; piecewise CUDA "
            "graphs; vLLM 0.32 places a rank's tokens by a Triton kernel, which its CPU build "
            "lacks and the test replaces",
        ),
        Row(
            "Ray (`--distributed-executor-backend ray`)",
            SERVED,
            (f"{ON_GPU}::test_two_gpus[workers of Ray]",),
            "with the package ray; vLLM's CPU build refuses it",
        ),
        Row(
            "prefill context parallel",
            REFUSED,
            (f"{NOT_SERVED}::test_prefill_context_parallelism",),
            "`--prefill-context-parallel-size 1`",
        ),
    ),
    "Memory and weights": (
        Row("sleep mode", SERVED, (f"{ON_GPU}::test_sleep",)),
        Row("`--cpu-offload-gb`", SERVED, (f"{ON_GPU}::test_options[weights on the host]",)),
        Row("fp8 weights", SERVED, (f"{ON_GPU}::test_quantised_weights[fp8]",)),
        Row(
            "GPTQ weights",
            SERVED,
            (
                "test_engine_models.py::test_weights_in_4_bits",
                f"{ON_GPU}::test_quantised_weights[gptq]",
            ),
        ),
        Row("AWQ weights", SERVED, (f"{ON_GPU}::test_quantised_weights[awq]",)),
    ),
    "Hardware and versions": (
        Row(
            "vLLM 0.26.0 to 0.33.0",
            SERVED,
            ("test_vllm_api.py::test_the_installed_version",),
            "run: 0.26.0 and 0.33.0 on GPUs (with torch 2.11 and Triton 3.6), 0.32.0 on CPUs; of "
            "the others the sources are checked, and kernels compile with Triton 3.7 and 3.8",
        ),
        Row(
            "AMD GPUs (ROCm)",
            REFUSED,
            (f"{NOT_SERVED}::test_rocm",),
            "an NVIDIA GPU, or the CPU build of vLLM",
        ),
        Row(
            "NVIDIA GPUs before compute capability 8.0",
            REFUSED,
            (f"{START}::test_refused_with_a_remedy",),
            "a later one, or the CPU build of vLLM",
        ),
    ),
}


def proofs() -> set[str]:
    """Every test that a row names, from the repository's root."""
    rows = (row for group in MATRIX.values() for row in group)
    return {f"{TESTS}/{proof}" for row in rows for proof in row.proofs}


def render() -> str:
    """The page."""
    lines = ["| | feature | | where | note |", "|---|---|---|---|---|"]
    for name, rows in MATRIX.items():
        alike: dict[tuple[str, str, str], list[str]] = {}
        for row in rows:
            alike.setdefault((row.outcome, row.where, row.note), []).append(row.feature)
        names = [name, *[""] * (len(alike) - 1)]
        lines += [
            f"| {first} | {'; '.join(found)} | {' | '.join(key)} |"
            for first, (key, found) in zip(names, alike.items(), strict=True)
        ]
    return "\n".join((INTRODUCTION, *lines, ""))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
