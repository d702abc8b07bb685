"""What of vLLM a user may combine with SPARSEK: served or refused, and the tests that prove it.

``python -m tests.vllm_backend.features.matrix`` writes ``docs/features.md`` from these rows.
"""

from __future__ import annotations

from pathlib import Path

from tests.vllm_backend.features.row import Row, refused, served

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
    on_gpu = _hybrid_on_gpu(kind)
    return served(feature, f"{HYBRID}[{kind}-14]", *on_gpu, note="vLLM 0.29 or later")


def _speculation(feature: str, method: str) -> Row:
    on_gpu = [f"{ON_GPU}::test_speculation[{method}-{how}]" for how in ("eager", "graphs")]
    return served(feature, f"{SCHEDULING}::test_speculation[{method}]", *on_gpu)


def _request(feature: str, name: str | None = None) -> Row:
    return served(feature, f"features/test_requests.py::test_served[{name or feature}]")


MATRIX: dict[str, tuple[Row, ...]] = {
    "Models": (
        served(
            "Llama (grouped queries)",
            f"{PARITY}::test_eight_at_once",
            f"{GPU}::test_budget_over_context_equals_flash",
        ),
        served("one query head per KV head", _decoder("mha")),
        served("one KV head", _decoder("mqa")),
        served("head size that is no power of two", _decoder("head_dim_80")),
        served("Qwen3 (normalised queries and keys)", _decoder("qk_norm")),
        served("Qwen3-MoE", _decoder("moe"), f"{ON_GPU}::test_models[moe]"),
        served("Mistral (sliding window)", _decoder("sliding")),
        served("Gemma 3 (windows and full attention)", _decoder("hybrid")),
        served(
            "Llama 4 (chunks and full attention)",
            _decoder("chunked"),
            f"{MASKS}::test_chunks_without_the_hybrid_kv_manager",
            note="with and without the hybrid KV manager",
        ),
        served(
            "Gemma 3n (layers that share another's KV)",
            _decoder("shared_kv"),
            "test_layer.py::test_a_dense_layer_keeps_the_summaries_of_the_one_that_shares_its_pages",
            "test_engine_models.py::test_shared_pages_without_the_hybrid_kv_manager",
            note="with and without the hybrid KV manager",
        ),
        served("Gemma 2 (logit soft caps)", _decoder("soft_cap", "logits soft cap"), note=SDPA),
        served("BLOOM (ALiBi)", _decoder("alibi", "ALiBi"), note=SDPA),
        served(
            "gpt-oss (learned sinks and windows)",
            "test_layer.py::test_window_and_sinks_of_the_model",
            f"{ON_GPU}::test_models[sinks]",
        ),
        served(
            "MiniCPM4 (InfLLM-v2's `sparse_config`)",
            _decoder("minicpm"),
            "test_engine_models.py::test_minicpm_takes_its_own_selection",
            note="as many blocks as the model was trained to attend, ranked by SPARSEK's rule",
        ),
        served(
            "MiniCPM4, blocks ranked as it was trained (mode `infllm`)",
            "test_engine_models.py::test_minicpm_as_it_was_trained",
            "test_config.py::test_what_mode_infllm_needs",
            "features/test_gpu_infllm.py::test_choices_are_those_of_a_cpu",
            "features/test_gpu_infllm.py::test_within_the_budget",
            "features/test_gpu_infllm.py::test_chunks_and_graphs",
            note="with and without `use_nope`",
        ),
        served(
            "gates that choose blocks for decoded tokens (SeerAttention-R, mode `seer`)",
            "test_seer.py::test_an_engine_attends_what_the_oracle_chooses",
            "features/test_gpu_seer.py::test_choices_are_those_of_a_cpu",
            note="prefills attend everything",
        ),
        served(
            "natively sparse models (NSA)",
            "test_nsa.py::test_whole_prefill",
            "test_gpu_nsa.py::test_tokens_are_the_modules",
        ),
        served(
            "BERT, ModernBERT (encoder only, pooling)",
            "test_engine_models.py::test_encoder_only_models",
            note=SDPA,
        ),
        served(
            "embeddings of a decoder (pooling)",
            "test_engine_models.py::test_embeddings_of_a_decoder",
        ),
        served(
            "LFM2 (short convolutions and full attention)",
            f"{HYBRID}[short_conv-32]",
            "features/test_pages.py::test_a_token_takes_as_much_on_every_page",
            *_hybrid_on_gpu("short_conv"),
            note="vLLM 0.29 or later",
        ),
        _hybrid("Granite 4 H (Mamba 2 and full attention)", "granite_hybrid"),
        _hybrid("Nemotron-H (Mamba 2, full attention and plain layers)", "nemotron_h"),
        _hybrid("Falcon-H1 (Mamba 2 and full attention in every layer)", "falcon_h1"),
        served(
            "Qwen3-Next (linear attention and full attention)",
            *_hybrid_on_gpu("linear_attention"),
            note="vLLM 0.29 or later",
        ),
        refused(
            "models with recurrent layers, before vLLM 0.29",
            f"{START}::test_hybrid_models_before_pages_declared_their_content",
            note="a later vLLM, or mode `sink_window` or `dense`",
        ),
        served(
            "Mamba (no attention)",
            f"{ON_GPU}::test_a_model_without_attention",
            note="SPARSEK has nothing to do: the flag changes nothing",
        ),
        served("LLaVA (causal image tokens)", f"{ON_GPU}::test_images"),
        served(
            "bidirectional image tokens (Gemma 3 vision, PaliGemma)",
            f"{MASKS}::test_bidirectional_prefix_is_served_by_the_fallback",
            note=SDPA,
        ),
        served(
            "bidirectional image tokens within a window (Gemma 4)",
            f"{MASKS}::test_bidirectional_ranges_of_gemma_4",
            note=f"{SDPA}; head sizes up to 256",
        ),
        refused(
            "Qwen2.5-1M (dual chunk attention)",
            f"{UNSERVED}::test_qwen2_with_dual_chunks_stops_the_start",
            note="remove `dual_chunk_attention_config` from the model's `config.json`",
        ),
        refused(
            "models whose layers ask no backend (MiMo-V2, openPangu, Rnj-1, Step-1, HRM-Text, "
            "DiffusionGemma, MiniMax-M3, Qwen4-Exp, Step-5, Inkling, Voxtral Realtime)",
            f"{UNSERVED}::test_refused_by_the_config",
            f"{UNSERVED}::test_refused_by_name",
            note=LEAVE,
        ),
        refused("DeepSeek (MLA)", f"{START}::test_mla_models_are_refused", note=LEAVE),
        refused(
            "T5, Whisper (encoder-decoder)",
            f"{NOT_SERVED}::test_encoder_decoder_models",
            note=LEAVE,
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
        served("streaming", "test_serve.py::test_streaming_equals_the_whole_answer"),
        refused(
            "a prompt longer than the model allows",
            "test_serve.py::test_a_request_that_is_too_long_gets_400_and_the_server_goes_on",
            note="status 400; the server goes on",
        ),
        refused(
            "malformed requests, ten times as many together as run together",
            "test_chaos.py::test_a_storm_of_malformed_requests",
            note="status 4xx, as with any backend; the server goes on and holds no more memory",
        ),
    ),
    "Scheduling": (
        served(
            "chunked prefill", f"{PARITY}::test_sequential_in_chunks", f"{SPARSE}::test_chunking"
        ),
        served("prefix caching", f"{PARITY}::test_prefix_hits", f"{SPARSE}::test_prefix_hits"),
        served(
            "preemption",
            f"{PARITY}::test_preemption",
            f"{SPARSE}::test_batch_composition_and_preemption",
        ),
        served(
            "asynchronous scheduling",
            f"{SCHEDULING}::test_async_scheduling",
            f"{ON_GPU}::test_options[asynchronous scheduling]",
        ),
        served(
            "`VLLM_BATCH_INVARIANT`",
            "test_batch_invariant.py::test_one_call_serves_decodes_and_prefills",
            "test_batch_invariant.py::test_prompts_by_records_are_decoded_token_by_token",
            note="on a GPU",
        ),
        refused(
            "`VLLM_BATCH_INVARIANT` on a CPU",
            f"{START}::test_batch_invariance_stops_the_start_on_a_cpu",
            note="unset it",
        ),
        served(
            "CUDA graphs: `NONE`, `PIECEWISE`, `FULL`, `FULL_DECODE_ONLY`, `FULL_AND_PIECEWISE`",
            f"{ON_GPU}::test_graphs",
        ),
        served("vLLM's first and second model runner", f"{ON_GPU}::test_model_runners"),
        served("`--kv-sharing-fast-prefill`", f"{SCHEDULING}::test_fast_prefill_of_shared_caches"),
    ),
    "Speculative decoding": (
        _speculation("n-grams", "ngram"),
        _speculation("EAGLE", "eagle"),
        _speculation("EAGLE-3", "eagle3"),
        _speculation("draft model", "draft_model"),
        served("MTP", f"{SCHEDULING}::test_mtp"),
        refused(
            "drafts for models with recurrent layers, on a CPU",
            f"{START}::test_drafts_for_recurrent_layers_stop_the_start_on_a_cpu",
            note="leave `--speculative-config` out: vLLM 0.32's CPU build then fails (`'function' "
            "object is not subscriptable`) or, without prefix caching, answers otherwise than "
            "without drafts, whatever the backend",
        ),
        refused(
            "adaptive verification",
            f"{NOT_SERVED}::test_adaptive_verification",
            note="leave `enable_adaptive_verification` out",
        ),
    ),
    "KV cache": (
        served(
            "`--kv-cache-dtype auto`, or the model's own",
            f"{NOT_SERVED}::test_every_kv_cache_dtype_of_vllm",
            f"{PARITY}::test_eight_at_once",
        ),
        served(
            "`--kv-cache-dtype fp8`, `fp8_e4m3`",
            f"{GPU}::test_fp8_cache_is_as_exact_as_flash",
            f"{GPU}::test_scheduling_of_fp8",
            f"{ON_GPU}::test_fp8_cache",
            note="compute capability 8.9",
        ),
        refused(
            "fp8 KV cache on a CPU",
            f"{START}::test_settings_stop_the_start[fp8]",
            note="`--kv-cache-dtype auto`",
        ),
        refused(
            "16-bit KV cache of another dtype than the model's",
            f"{NOT_SERVED}::test_a_cache_of_another_dtype_than_the_model",
            note="`--kv-cache-dtype auto`",
        ),
        refused(
            "every other KV-cache dtype (fp8_e5m2, int8, int4, nvfp4, TurboQuant, UltraQuant)",
            f"{NOT_SERVED}::test_every_kv_cache_dtype_of_vllm",
            note="`--kv-cache-dtype auto`",
        ),
        refused(
            "`--kv-cache-dtype-skip-layers`",
            f"{START}::test_settings_stop_the_start[skip-layers]",
            note="leave it out, or mode `sink_window` or `dense`",
        ),
        served(
            "decoded tokens by records of 64 tokens",
            f"{RECORDS}::test_an_engine_chooses_by_records[tiles]",
            f"{RECORDS}::test_drafts_share_a_list_with_the_token_before_them",
            note="speculated tokens change what is selected",
        ),
        refused(
            "pages that are no multiple of 64 tokens, with block selection",
            "test_config.py::test_who_needs_pages_of_whole_segments",
            note="`--block-size 64`, or mode `sink_window` or `dense`",
        ),
        served(
            "prompts by records, token by token (`decode_tokens` with `query_tile` 1)",
            f"{RECORDS}::test_an_engine_chooses_by_records[tokens]",
            f"{RECORDS}::test_prompts_by_records_know_no_chunks",
        ),
        served(
            "a page that vLLM copies",
            "features/test_pages.py::test_vllms_copy_of_a_block_carries_its_summary",
            note="block summaries are copied with K and V",
        ),
    ),
    "KV connectors (vLLM 0.29 or later)": (
        served(
            "ExampleConnector (shared storage)", "features/test_connectors.py::test_pages_in_files"
        ),
        served(
            "OffloadingConnector, `--kv-offloading-size`",
            "features/test_connectors.py::test_offloaded_pages_are_whole",
            f"{ON_GPU}::test_connectors[OffloadingConnector]",
        ),
        served(
            "SimpleCPUOffloadConnector", f"{ON_GPU}::test_connectors[SimpleCPUOffloadConnector]"
        ),
        served(
            "NixlConnector (prefill and decoding by two engines)",
            "features/test_nixl.py::test_pages_of_another_engine",
            f"{NOT_SERVED}::test_page_sizes_of_two_engines",
            note="both with the same settings and the page size that vLLM chooses; tested with one "
            "rank each, where the package `nixl` is installed",
        ),
        refused(
            "LMCache",
            f"{NOT_SERVED}::test_every_other_kv_connector",
            f"{START}::test_settings_stop_the_start[offloading]",
            note="take OffloadingConnector: LMCache (read: 0.5.6) stores K and V of each token, "
            "`[layers, 2, tokens, heads, head size]`, without what else a page holds",
        ),
        refused(
            "every other connector (Mooncake, MultiConnector, your own)",
            f"{NOT_SERVED}::test_every_other_kv_connector",
            note="leave it out, or take one of the four above",
        ),
    ),
    "Parallelism": (
        served(
            "tensor parallel",
            "test_tensor_parallel.py::test_tokens_of_two_ranks",
            f"{ON_GPU}::test_two_gpus[tensor parallel]",
        ),
        served(
            "pipeline parallel",
            f"{ON_GPU}::test_two_gpus[pipeline parallel]",
            note="vLLM 0.32's CPU build fails, whatever the backend",
        ),
        served(
            "expert parallel",
            f"{ON_GPU}::test_two_gpus[expert parallel]",
            f"{ON_GPU}::test_two_gpus[expert parallel, all keys attended]",
            note="with vLLM 0.33 one prompt of four gets another token on two GPUs than on one "
            "where blocks are selected, with tensor parallelism alone too, and none where all keys "
            "are attended; rounding in vLLM's kernels for experts would do that, which is not "
            "proven; vLLM 0.32's CPU build fails, whatever the backend",
        ),
        served(
            "data parallel",
            "test_tensor_parallel.py::test_tokens_of_data_parallel_engines",
            f"{ON_GPU}::test_data_parallel",
        ),
        served(
            "decode context parallel",
            "test_tensor_parallel.py::test_tokens_of_ranks_that_hold_the_context_between_them",
            f"{ON_GPU}::test_decode_context_parallel",
            f"{NOT_SERVED}::test_what_needs_all_keys_on_one_rank",
            f"{NOT_SERVED}::test_ranks_that_take_parts_of_pages_in_turn",
            note="whole pages in turn: `--cp-kv-cache-interleave-size` of a page; piecewise CUDA "
            "graphs; vLLM 0.32 places a rank's tokens by a Triton kernel, which its CPU build "
            "lacks and the test replaces",
        ),
        served(
            "Ray (`--distributed-executor-backend ray`)",
            f"{ON_GPU}::test_two_gpus[workers of Ray]",
            note="with the package ray; vLLM's CPU build refuses it",
        ),
        refused(
            "prefill context parallel",
            f"{NOT_SERVED}::test_prefill_context_parallelism",
            note="`--prefill-context-parallel-size 1`",
        ),
    ),
    "Memory and weights": (
        served("sleep mode", f"{ON_GPU}::test_sleep"),
        served("`--cpu-offload-gb`", f"{ON_GPU}::test_options[weights on the host]"),
        served("fp8 weights", f"{ON_GPU}::test_quantised_weights[fp8]"),
        served(
            "GPTQ weights",
            "test_engine_models.py::test_weights_in_4_bits",
            f"{ON_GPU}::test_quantised_weights[gptq]",
        ),
        served("AWQ weights", f"{ON_GPU}::test_quantised_weights[awq]"),
    ),
    "Hardware and versions": (
        served(
            "vLLM 0.26.0 to 0.33.0",
            "test_vllm_api.py::test_the_installed_version",
            note="run: on GPUs 0.26.0 (torch 2.11, Triton 3.6) and 0.33.0 (the same, and torch "
            "2.14, Triton 3.8), on CPUs 0.32.0; of the others the sources are checked, and kernels "
            "compile with Triton 3.7 too",
        ),
        refused(
            "AMD GPUs (ROCm)",
            f"{NOT_SERVED}::test_rocm",
            note="an NVIDIA GPU, or the CPU build of vLLM",
        ),
        refused(
            "NVIDIA GPUs before compute capability 8.0",
            f"{START}::test_refused_with_a_remedy",
            note="a later one, or the CPU build of vLLM",
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
