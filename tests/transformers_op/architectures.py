"""Every architecture of the installed Transformers, shrunk to some thousand parameters."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import torch

import transformers  # isort: skip
from transformers.models.auto import modeling_auto  # isort: skip
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # isort: skip

VOCABULARY = 97
MOST_PARAMETERS = 3_000_000
KINDS = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL",
)

SIZES: list[tuple[str, int]] = [
    # a field's whole name, its value where the default is a number; the first that fits counts
    (r"codebook_size", 64),
    (r".*vocab_size.*|.*vocab|n_vocab|num_codes.*|.*num_embeddings", VOCABULARY),
    (r"num_nextn_predict_layers|num_mtp.*|mtp_num.*|num_kv_shared_layers", 0),
    (r"(n|num)_?(shared|dense|zero|null|hash)_?experts?.*|first_k_dense_replace", 1),
    (r".*dense_layers.*|num_.*hash.*layers|moe_layer_start_index", 1),
    (r".*experts_per_tok(en)?|.*num_selected_experts|.*router_top_?k|moe_top_?k|top_k_experts", 2),
    (r".*(n|num)_(local_|routed_|total_)?experts|moe_num_.*", 4),
    (r"n_group|topk_group|num_expert_group.*|expert_groups?|mamba_n_groups|n_groups", 1),
    (r".*key_value_heads|.*kv_heads|.*num_key_value.*|n_head_kv|num_query_groups", 2),
    (r".*heads|.*n_head|.*nhead", 4),
    (r".*lora_rank|.*low_rank.*|.*_rank|index_head_dim|mamba_(d_head|head_dim)", 16),
    (r".*head_dim|.*head_size|kv_channels|d_kv|d_head", 8),
    (r"(moe|expert|shared_expert).*(intermediate|inner|ffn).*", 16),
    (r".*(hidden_size|d_model|width|embed_dim.*|embedding_(size|dim)|hidden_dim.*|_dim)", 32),
    (r".*(intermediate|inner|ffn|feed_?forward|mlp).*(size|dim|hidden)|d_ff|n_inner|d_inner", 32),
    (r"n_embd|dim|embed_size|projection_size|output_size|.*_hidden|depth_dim", 32),
    (r".*layers|n_layer|.*num_blocks|.*depth|num_hidden_layers.*|.*num_layers.*", 2),
    (r".*sliding_window(_size)?|local_attention|(attention_|local_|attn_)?window_size", 6),
    (r"attention_chunk_size|index_topk|chunk_size|mamba_chunk_size|patch_size", 8),
    (r"index_block_size", 4),
    (r"index_topk_blocks|mamba_expand|expand", 2),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|.*max_.*positions?", 256),
    (r"image_size|input_size", 32),
    (r".*d_state|state_size|ssm_state_size", 8),
]
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
PARTS: dict[str, dict[str, Any]] = {
    # model type: fields that fit none of the rules above
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 1),
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": None,
        "hidden_size_per_layer_input": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {
        **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen2_vl_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (4, 6),
        "attn_layers": ["local", "lsh"],
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def architectures() -> dict[str, str]:
    """The most complete class of every model type, one that generates text if there is one."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for model_type, name in getattr(modeling_auto, f"{kind}_MAPPING_NAMES", {}).items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return found


def make(model_type: str, implementation: str) -> Any:
    """A random model whose outputs depend on what its layers attend; the same in every call.

    Raises:
        Exception: of any kind, where the rules above do not fit.
    """
    cls = getattr(transformers, architectures()[model_type])
    config_class = CONFIG_MAPPING[model_type]
    if isinstance(cls.config_class, type) and not issubclass(config_class, cls.config_class):
        config_class = cls.config_class
    with torch.device("meta"):
        count = sum(x.numel() for x in cls(config_class(**_fields(config_class))).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    made = config_class(**_fields(config_class))
    model = cls._from_config(made, attn_implementation=implementation).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2 and weight.is_floating_point():
                weight.normal_(0, weight[0].numel() ** -0.5)
    return model


def _fields(cls: Any) -> dict[str, Any]:
    """Arguments of a configuration that make a small model."""
    default, fields = cls(), {}
    tokens = iter(range(10, VOCABULARY))
    for name in _names(cls):
        value = _value(default, name)
        if name in cls.sub_configs:
            part = cls.sub_configs[name] if value is None else type(value)
            if value is not None and hasattr(part, "model_type"):
                fields[name] = _fields(part) | {"model_type": part.model_type}
        elif name in TOKENS or (type(value) is int and re.fullmatch(r".*_(id|index)", name)):
            fields[name] = TOKENS[name] if name in TOKENS else next(tokens)
        elif type(value) is int or name in ("num_key_value_heads", "head_dim"):
            rules = (size for rule, size in SIZES if re.fullmatch(rule, name))
            fields.update((name, size) for size in rules if name not in fields)
    kinds = getattr(cls, "attribute_map", {}).get("layer_types", "layer_types")
    types = _value(default, "layer_types")
    if types and kinds in fields.keys() | set(_names(cls)):
        each = list(dict.fromkeys(types))
        fields[kinds] = each if len(each) > 1 else each * 2
        layers = {"num_hidden_layers", "n_layer", "num_layers"} & fields.keys()
        fields.update(dict.fromkeys(layers, len(fields[kinds])))
    rope = _value(default, "rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        half, count = (fields.get("head_dim") or 8) // 2, len(rope["mrope_section"])
        section = [half - half // count * (count - 1)] + [half // count] * (count - 1)
        fields["rope_parameters"] = rope | {"mrope_section": section}
    if "qk_rope_head_dim" in fields:  # latent attention works the other widths out
        for name in ("head_dim", "qk_head_dim", "attention_head_dim"):
            fields.pop(name, None)
        fields["num_key_value_heads"] = 4
    return fields | PARTS.get(getattr(cls, "model_type", ""), {})


def _names(cls: Any) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(inspect.signature(cls.__init__).parameters)


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a value for each layer
        return 1
