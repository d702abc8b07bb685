"""What vLLM's models do with attention without asking a backend, found in a version's sources.

``python -m tests.vllm_backend.vllm_models FOLDER...`` prints, for each unpacked wheel, what SPARSEK
neither serves nor refuses.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparsek_backend.vllm_backend.unserved import ARCHITECTURES

KEYWORDS = {
    *("num_heads", "head_size", "scale", "num_kv_heads", "cache_config", "quant_config", "prefix"),
    *("alibi_slopes", "logits_soft_cap", "per_layer_sliding_window", "attn_type", "sinks"),
    *("kv_sharing_target_layer_name", "mm_prefix_clamp_sliding_window"),
    # Refused by a field of the config, whichever model it is:
    *("dual_chunk_attention_config", "layer_idx"),
}
LAYERS = {
    *("Attention", "EncoderOnlyAttention", "ChunkedLocalAttention", "MMEncoderAttention"),
    # Refused by what vLLM's ModelConfig says of the model:
    *("MLAAttention", "MultiHeadLatentAttentionWrapper", "RSWAAttention", "CrossAttention"),
}
MODULES: Mapping[str, str] = {
    "deepseek_v4": "MLA to vLLM's ModelConfig",
    "deepseek_v41": "MLA to vLLM's ModelConfig",
    "extract_hidden_states": "keeps hidden states and attends nothing",
    "kimi_k3": "MLA to vLLM's ModelConfig",
    "llama4": "served: a chunk is a request of its own",
    "mimo_v2": "refused by v_head_dim",
    "openpangu": "refused by param_sink_number",
    "rnj1": "refused by layer_types",
    "whisper_causal": "the encoder of Voxtral Realtime, which is refused",
}
"""Modules with something else, and why that is no gap."""

_ATTENTION = re.compile(r"Attention\b|AttentionLayerBase|AttentionWrapper|attn_cls|attention_cls")
_ARCHITECTURE = re.compile(r'"(\w+)":\s*\(\s*"([\w.]+)",\s*"\w+",?\s*\)')


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _keys(node: ast.AST) -> Iterator[str]:
    """The constant keys of an expression's dicts."""
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            yield from (str(key.value) for key in each.keys if isinstance(key, ast.Constant))


def _keywords(call: ast.Call, module: ast.Module) -> Iterator[str]:
    """The keywords of a call, also of dicts that are made in the call or assigned to a name."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
            continue
        yield from _keys(keyword.value)
        for each in ast.walk(module):
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                if _name(keyword.value) in {_name(target) for target in targets}:
                    yield from _keys(each.value)


def unknown(source: str, layers: set[str]) -> set[str]:
    """Keywords and layers of a module that are in none of the tables above.

    Args:
        layers: vLLM's classes of attention layers.
    """
    module = ast.parse(source)
    nodes = list(ast.walk(module))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    found = set()
    for each in classes:
        bases = {_name(base) for base in each.bases}
        is_layer = bool(bases & {"Attention", "AttentionLayerBase"})
        if is_layer and not each.name.endswith(("Cache", "State")):
            found.add(each.name)
    own = {each.name for each in classes}
    for node in nodes:
        name = _name(node.func) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or name in own:
            continue
        if name in layers - LAYERS:
            found.add(name)
        elif name in ("Attention", "attn_cls", "attention_cls"):
            given = set(_keywords(node, module))
            found |= given - KEYWORDS if name == "Attention" or "num_kv_heads" in given else set()
    return found


def architectures(vllm: Path) -> dict[str, set[str]]:
    """The names in vLLM's registry of each module's models."""
    text = (vllm / "model_executor/models/registry.py").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for name, path in _ARCHITECTURE.findall(text):
        found.setdefault(path.removeprefix("vllm.models.").partition(".")[0], set()).add(name)
    return found


def special(vllm: Path) -> dict[str, set[str]]:
    """What modules of vLLM's models (the folder ``vllm`` of a wheel) do beyond the tables.

    Modules whose models are all refused by name are left out.
    """
    layers = {
        node.name
        for path in (vllm / "model_executor/layers/attention").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    refused, names = tuple(ARCHITECTURES), architectures(vllm)
    result: dict[str, set[str]] = {}
    for root in (vllm / "model_executor/models", vllm / "models"):
        for path in sorted(root.rglob("*.py")):
            module = path.relative_to(root).parts[0].removesuffix(".py")
            models = names.get(module, set())
            if models and all(name.startswith(refused) for name in models):
                continue
            source = path.read_text(encoding="utf-8")
            found = unknown(source, layers) if _ATTENTION.search(source) else set()
            if found:
                result.setdefault(module, set()).update(found)
    return result


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        found = special(Path(folder))
        print(folder, {x: found[x] for x in found if x not in MODULES} or "complete")
