"""The lines that tell a user what was decided, one for each group of layers."""

from __future__ import annotations

from collections.abc import Sequence

from sparsek_backend.config import SparsityConfig
from sparsek_backend.infllm import InfLLMSelection
from sparsek_backend.nn.config import NSAConfig
from sparsek_kernels.paged.policy import (
    CELL,
    CELL_SIZE,
    LAST_TOKENS,
    SEGMENT,
    SelectionPolicy,
    StepPolicy,
)

EAGER_NORMS = (
    "SPARSEK: VLLM_BATCH_INVARIANT with enforce_eager: vLLM's own RMSNorm kernel may round by "
    "the number of tokens of a step (vllm issue 48271); leave --enforce-eager out"
)
"""Said where the rest of the engine may break the promise that attention keeps."""

NO_PROMPT_LENGTHS = (
    "SPARSEK: vLLM does not say how long the prompts of a step are (an unknown version, or "
    "micro-batches): dense_last counts from the end of every chunk of a prompt, which costs time, "
    f"and is {LAST_TOKENS} where it is not set"
)
"""Said once where the ends of chunks are attended as if they were ends of prompts."""


def describe_layers(
    indices: Sequence[int],
    policy: StepPolicy,
    fallback_reason: str | None,
    page_size: int,
    device_type: str,
    flash_version: int | None = None,
    *,
    mode: str = "block_topk",
    summary_share: float = 0.0,
    fp8_cache: bool = False,
    batch_invariant: bool = False,
) -> str:
    """Return the log line of layers that share what they attend.

    Args:
        fallback_reason: why they use the SDPA fallback, or ``None``.
        flash_version: vLLM's FlashAttention that serves dense prefills, or ``None``.
        summary_share: bytes of the summaries over bytes of K and V.
        fp8_cache: whether K and V are stored as fp8.
        batch_invariant: whether results depend on nothing but the request.
    """
    path = "CPU path" if device_type == "cpu" else "Triton kernels"
    if flash_version is not None:
        path += f", FlashAttention {flash_version} for dense prefills"
    if fallback_reason is not None:
        path = f"SDPA fallback ({fallback_reason})"
    prefill, decode = policy.prefill, policy.decode
    main = prefill if prefill.selects_blocks else decode
    parts = [_describe_policy(main, mode)]
    if prefill.selects_blocks and decode.selects_blocks:
        if decode.alignment and not prefill.alignment:
            parts.append(f"decoded tokens choose {decode.top_k * decode.sel_block_size} by records")
        elif decode.top_k != prefill.top_k:
            parts[0] += f" ({decode.top_k} for decoded tokens)"
        if mode == "pattern":
            parts.append("prefills by a learned pattern")
    elif prefill.selects_blocks:
        parts.append("decoded tokens dense")
    elif decode.selects_blocks:
        parts.append("prefills dense")
    if main.dense_below and not main.is_dense:
        parts.append(f"dense below {main.dense_below}")
    if prefill.dense_last:
        fewest = f"{LAST_TOKENS} to " if prefill.last_part else ""
        parts.append(f"last {fewest}{prefill.dense_last} tokens of a prompt dense")
    if policy.selects_blocks:
        parts.append(f"{100 * summary_share:.1f} % summaries")
    parts.append(f"pages of {page_size}{' in fp8' if fp8_cache else ''}")
    parts.append(path)
    if batch_invariant:
        parts.append("batch-invariant, selection per query")
    return f"SPARSEK layers {format_ranges(indices)}: {', '.join(parts)}"


def describe_nsa_layers(
    indices: Sequence[int],
    config: NSAConfig,
    page_size: int,
    device_type: str,
    compressed_share: float,
) -> str:
    """Return the log line of natively sparse layers.

    Args:
        compressed_share: bytes of compressed keys and values over bytes of K and V.
    """
    path = "CPU path" if device_type == "cpu" else "Triton kernels"
    shared = ", one K and V for all branches" if config.shared_kv else ""
    return (
        f"SPARSEK layers {format_ranges(indices)}: nsa, {config.compression} of "
        f"{config.cmp_block_size} tokens every {config.cmp_stride} + {config.top_n} blocks of "
        f"{config.sel_block_size} ({config.num_init_blocks} initial, {config.num_local_blocks} "
        f"local) + window {config.window_size}{shared}, {100 * compressed_share:.1f} % compressed, "
        f"pages of {page_size}, {path}"
    )


def describe_model_selection(model: InfLLMSelection, config: SparsityConfig) -> str:
    """Return the log line that says how the model's own selection and the one served differ."""
    scored = f"means of {model.kernel_size} tokens every {model.kernel_stride}"
    if model.use_nope:
        scored += ", without positions"
    chosen = f"single tokens choose {CELL} tokens each by records of {SEGMENT}"
    if config.query_tile > 1:
        chosen = (
            f"every {config.query_tile} queries of a prefill choose blocks by means of "
            f"{CELL_SIZE} rotated keys and then by attention to keys of those drawn; {chosen}"
        )
    return (
        f"SPARSEK follows the model's sparse_config (InfLLM-v2): {model.init_blocks} initial, "
        f"{model.local_blocks} + 1 local, {model.total_blocks} blocks of {model.block_size} in "
        f"all. Here {chosen}; the model was trained with {scored}, per query"
    )


def _describe_policy(policy: SelectionPolicy, mode: str) -> str:
    if policy.is_dense:
        return "dense"
    if not policy.selects_blocks:
        if policy.is_band:
            whose = "a" if mode == "sink_window" else "the model's"  # both may have one
            return f"{whose} sliding window of {policy.window_size}"
        return f"sink_window, {policy.num_sink} sink tokens + window {policy.window_size}"
    if policy.alignment:
        return (
            f"{mode}, {policy.sink_blocks * policy.sel_block_size} sink tokens + window "
            f"{policy.window_size} + {policy.top_k * policy.sel_block_size} tokens per KV head by "
            f"records of {policy.alignment}"
        )
    sinks, blocks = policy.sink_blocks, f"{policy.top_k}"
    if policy.growth is not None:
        blocks += f" to {policy.at(policy.growth.end).top_k}"
    return (
        f"{mode}, {sinks} sink block{'' if sinks == 1 else 's'} + window "
        f"{policy.window_size} + {blocks} blocks of {policy.sel_block_size} per KV head"
    )


def format_ranges(indices: Sequence[int]) -> str:
    """Write sorted integers as ranges: ``[0, 1, 2, 5]`` becomes ``0-2,5``."""
    ordered = sorted(set(indices))
    runs: list[list[int]] = []
    for index in ordered:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
