"""What the plugin overrides and calls in vLLM, checked in a version's sources without importing it.

``python -m tests.vllm_backend.vllm_api FOLDER...`` prints what each unpacked wheel lacks, and what
it may pass to a method of ours that does not take it.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from pathlib import Path

Names = tuple[str, ...]

LAYER: Names = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
CACHES: Names = ("layer", "key", "value", "kv_cache", "slot_mapping")

FUNCTIONS: dict[str, dict[str, Names]] = {
    "v1/attention/backend.py": {
        "AttentionBackend.get_name": (),
        "AttentionBackend.get_impl_cls": (),
        "AttentionBackend.get_builder_cls": (),
        "AttentionBackend.get_preferred_block_size": ("default_block_size",),
        "AttentionBackend.get_supported_kernel_block_sizes": (),
        "AttentionBackend.supports_head_size": ("head_size",),
        "AttentionBackend.supports_attn_type": ("attn_type",),
        "AttentionBackend.supports_compute_capability": ("capability",),
        "AttentionBackend.supports_sink": (),
        "AttentionBackend.supports_mm_prefix": (),
        "AttentionBackend.supports_kv_connector": (),
        "AttentionBackend.supports_batch_invariance": (),
        "AttentionBackend.is_sparse": (),
        "AttentionBackend.supports_combination": (
            *("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink"),
            *("use_sparse", "use_mm_prefix", "device_capability"),
        ),
        "AttentionBackend.validate_configuration": (
            *("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink"),
            *("use_sparse", "use_mm_prefix", "use_per_head_quant_scales", "device_capability"),
            *("attn_type", "use_non_causal", "use_batch_invariant", "use_kv_connector", "use_pcp"),
        ),
        "AttentionMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata"),
        "AttentionMetadataBuilder.build_for_cudagraph_capture": ("common_attn_metadata",),
        "AttentionMetadataBuilder.get_cudagraph_support": ("vllm_config", "kv_cache_spec"),
        "AttentionMetadataBuilder._init_reorder_batch_threshold": (
            "reorder_batch_threshold",
            "supports_spec_as_decode",
        ),
        "AttentionImpl.forward": (*LAYER, "output_scale", "output_block_scale"),
    },
    "v1/attention/backends/triton_attn.py": {"TritonAttentionImpl.do_kv_cache_update": CACHES},
    "v1/attention/backends/utils.py": {"split_decodes_and_prefills": ("decode_threshold",)},
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner._build_attention_metadata": ()},
    "v1/worker/gpu/model_runner.py": {
        "GPUModelRunner.prepare_attn": ("input_batch",),
        "GPUModelRunner.prepare_dummy_attn": ("input_batch",),
    },
    "v1/attention/backends/registry.py": {"register_backend": ("backend", "class_path")},
    "model_executor/layers/attention/attention.py": {
        "Attention.get_kv_cache_spec": ("vllm_config",),
        "Attention.__init__": (
            *("num_heads", "head_size", "scale", "num_kv_heads", "cache_config", "prefix"),
            "attn_backend",
        ),
    },
    "model_executor/models/llama.py": {
        "LlamaModel.__init__": ("vllm_config", "prefix", "layer_type"),
        "LlamaModel.forward": ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
        "LlamaDecoderLayer.forward": ("positions", "hidden_states", "residual"),
        "LlamaMLP.__init__": ("hidden_size", "intermediate_size", "hidden_act", "prefix"),
    },
    "model_executor/models/utils.py": {"extract_layer_index": (), "maybe_prefix": ()},
    "config/compilation.py": {"CUDAGraphMode.has_full_cudagraphs": ()},
    "config/speculative.py": {"SpeculativeConfig.uses_draft_model": ()},
    "config/vllm.py": {
        "VllmConfig.use_v2_model_runner": (),
        "get_current_vllm_config": (),
        "get_current_vllm_config_or_none": (),
        "get_layers_from_vllm_config": ("vllm_config", "layer_type", "layer_names"),
    },
    "platforms/cpu.py": {
        "CpuPlatform.get_attn_backend_cls": ("selected_backend", "attn_selector_config"),
        "CpuPlatform.check_and_update_config": ("vllm_config",),
    },
    "distributed/parallel_state.py": {
        "model_parallel_is_initialized": (),
        "get_dcp_group": (),
        "get_tensor_model_parallel_rank": (),
    },
}
"""Functions by file, with the parameters that are passed to them or that ours take by name."""

FIELDS: dict[str, dict[str, Names]] = {
    "v1/attention/backend.py": {
        "CommonAttentionMetadata": (
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "causal"),
            *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor"),
            *("slot_mapping", "seq_lens_cpu_upper_bound", "mm_req_doc_ranges"),
        ),
        "AttentionCGSupport": ("NEVER", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE"),
        "AttentionType": ("DECODER", "ENCODER_ONLY"),
        "AttentionImplBase": ("dcp_world_size",),
    },
    "v1/worker/gpu/input_batch.py": {"InputBatch": ("idx_mapping_np",)},
    "v1/kv_cache_interface.py": {
        "KVCacheSpec": ("block_size",),
        "AttentionSpec": ("num_kv_heads", "head_size", "dtype", "page_size_padded"),
        "SlidingWindowSpec": ("sliding_window",),
        "ChunkedLocalAttentionSpec": ("attention_chunk_size",),
    },
    "config/scheduler.py": {"SchedulerConfig": ("disable_hybrid_kv_cache_manager",)},
    "config/speculative.py": {
        "SpeculativeConfig": (
            *("target_model_config", "draft_model_config", "method", "num_speculative_tokens"),
        )
    },
}
"""Fields of classes by file."""

ATTRIBUTES: dict[str, dict[str, Names]] = {
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner": ("vllm_config", "input_batch")},
    "v1/worker/gpu_input_batch.py": {"InputBatch": ("num_prompt_tokens",)},
    "v1/worker/gpu/model_runner.py": {"GPUModelRunner": ("vllm_config", "req_states")},
    "v1/worker/gpu/states.py": {"RequestState": ("prompt_len",)},
    "v1/worker/gpu/buffer_utils.py": {"UvaBackedTensor": ("np",)},
}
"""What methods of classes assign to ``self``, by file."""

GENERATIONS: tuple[tuple[str, str, Names], ...] = (
    (
        "v1/attention/backend.py",
        "AttentionBackend.get_kv_cache_shape",
        ("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str"),
    ),
    ("v1/attention/backend.py", "AttentionBackend.supported_kv_cache_layouts", ()),
)
"""How a version learns a cache's shape: one of these, told apart by the second."""


OURS = Path(__file__).resolve().parents[2] / "sparsek_backend" / "vllm_backend"
OVERRIDING: dict[str, tuple[tuple[str, str], ...]] = {
    "AttentionBackend": (
        ("compat.py", "HeadMajorLayout"),
        ("layout.py", "HeadMajorPages"),
        ("sparsek/backend.py", "SparseKBackend"),
        ("nsa/backend.py", "NSABackend"),
    ),
    "AttentionImplBase": (("sparsek/impl.py", "SparseKImpl"), ("nsa/impl.py", "NSAImpl")),
    "AttentionImpl": (("sparsek/impl.py", "SparseKImpl"), ("nsa/impl.py", "NSAImpl")),
    "AttentionMetadataBuilder": (
        ("step.py", "StepBuilder"),
        ("sparsek/metadata.py", "SparseKMetadataBuilder"),
        ("nsa/metadata.py", "NSAMetadataBuilder"),
    ),
}
"""Our classes with methods of vLLM's, by file, for each class of ``v1/attention/backend.py``."""


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(path: Path, name: str) -> ast.AST | None:
    node: ast.AST | None = _tree(path) if path.is_file() else None
    for part in name.split("."):
        if node is None:
            return None
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inside = ast.walk(node) if isinstance(node, ast.Module) else ast.iter_child_nodes(node)
        node = next((one for one in inside if isinstance(one, kinds) and one.name == part), None)
    return node


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _takes(function: ast.AST, names: Names) -> bool:
    if not isinstance(function, ast.FunctionDef):
        return False
    return function.args.kwarg is not None or set(names) <= set(_parameters(function))


def _has(owner: ast.AST, names: Names) -> bool:
    if not isinstance(owner, ast.ClassDef):
        return False
    targets = [one.target for one in owner.body if isinstance(one, ast.AnnAssign)]
    targets += [
        target for one in owner.body if isinstance(one, ast.Assign) for target in one.targets
    ]
    return set(names) <= {one.id for one in targets if isinstance(one, ast.Name)}


def _assigns(owner: ast.AST, names: Names) -> bool:
    stores = (one for one in ast.walk(owner) if isinstance(one, ast.Attribute))
    return set(names) <= {one.attr for one in stores if isinstance(one.ctx, ast.Store)}


def lacking(vllm: Path) -> list[str]:
    """What a version's sources (the folder ``vllm`` of its wheel) lack of what the plugin needs."""
    found = []
    for table, fits in ((FUNCTIONS, _takes), (FIELDS, _has), (ATTRIBUTES, _assigns)):
        for file, entries in table.items():
            for name, names in entries.items():
                node = _find(vllm / file, name)
                if node is None or not fits(node, names):
                    found.append(f"{file}: {name}({', '.join(names)})")
    ways = [(_find(vllm / file, name), names) for file, name, names in GENERATIONS]
    if not any(node is not None and _takes(node, names) for node, names in ways):
        found.append(" or ".join(name for _, name, _ in GENERATIONS))
    if ways[1][0] is not None:
        spec = _find(vllm / "v1/kv_cache_interface.py", "AttentionSpec")
        if spec is None or not _has(spec, ("state_content_bytes",)):
            found.append("AttentionSpec.state_content_bytes")
    return found


def passed_in_vain(vllm: Path) -> list[str]:
    """What a version's methods take that those of ours in their place do not."""
    found = []
    for base, classes in OVERRIDING.items():
        theirs = _find(vllm / "v1/attention/backend.py", base) or ast.Module([], [])
        methods = [one for one in ast.iter_child_nodes(theirs) if isinstance(one, ast.FunctionDef)]
        for file, name in classes:
            for method in methods:
                own = _find(OURS / file, f"{name}.{method.name}")
                names = tuple(_parameters(method))
                if own is not None and not method.name.startswith("__") and not _takes(own, names):
                    found.append(f"{name}.{method.name}({', '.join(names)})")
    return found


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        gaps = lacking(folder) + [f"passes {one}" for one in passed_in_vain(folder)]
        print(folder, gaps or "complete")
