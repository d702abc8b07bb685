"""Small random models of every kind of attention, as Hugging Face folders.

Weights are larger than a trained model's initialisation, so that a wrong mask changes the logits
far beyond rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
HEAD_DIM = 32
COMMON = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DECODER = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
IMAGE_TOKEN, IMAGE_SIZE, PATCH_SIZE = VOCABULARY - 1, 64, 8
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 1}
"""Layers of Mamba 2, as Granite and Falcon name their sizes."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

SPARSE_CONFIG = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "init_blocks": 1,
    "block_size": 32,
    "window_size": 64,
    "topk": 4,
    "dense_len": 128,
    "use_nope": False,
}
"""InfLLM-v2's section, as MiniCPM4 and 4.1 have it, for short sequences."""
_ARCHITECTURES = {"minicpm": "MiniCPMForCausalLM"}
"""Models whose weights have Llama's names, and which only vLLM knows."""


def _configs() -> dict[str, Any]:
    from transformers import (
        BertConfig,
        BloomConfig,
        CLIPVisionConfig,
        FalconH1Config,
        Gemma2Config,
        Gemma3nTextConfig,
        Gemma3TextConfig,
        Glm4MoeConfig,
        GptOssConfig,
        GraniteMoeHybridConfig,
        Lfm2Config,
        Llama4TextConfig,
        LlamaConfig,
        LlavaConfig,
        MambaConfig,
        MistralConfig,
        ModernBertConfig,
        NemotronHConfig,
        Qwen3Config,
        Qwen3MoeConfig,
        Qwen3NextConfig,
    )

    return {
        "llama": LlamaConfig(**COMMON, **DECODER),
        "minicpm": LlamaConfig(
            **COMMON,
            **DECODER,
            scale_emb=2.0,
            scale_depth=1.4,
            dim_model_base=64,
            sparse_config=SPARSE_CONFIG,
        ),
        "mha": LlamaConfig(**COMMON, **{**DECODER, "num_key_value_heads": 4}),
        "mqa": LlamaConfig(**COMMON, **{**DECODER, "num_key_value_heads": 1}),
        "head_dim_80": LlamaConfig(**COMMON, **{**DECODER, "head_dim": 80}),
        "sliding": MistralConfig(**COMMON, **DECODER, sliding_window=48),
        "hybrid": Gemma3TextConfig(
            **COMMON,
            **{**DECODER, "num_hidden_layers": 3},
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=HEAD_DIM,
        ),
        "chunked": Llama4TextConfig(  # without experts
            **COMMON,
            **DECODER,
            intermediate_size_mlp=128,
            interleave_moe_layer_step=3,
            attention_chunk_size=128,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
        ),
        "shared_kv": Gemma3nTextConfig(
            **COMMON,
            **{**DECODER, "num_hidden_layers": 4},
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=32,
            laurel_rank=16,
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        "soft_cap": Gemma2Config(
            **COMMON,
            **DECODER,
            sliding_window=48,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=30.0,
            query_pre_attn_scalar=HEAD_DIM,
        ),
        "qk_norm": Qwen3Config(**COMMON, **DECODER),
        "moe": Qwen3MoeConfig(**COMMON, **DECODER, **EXPERTS),
        "mtp": Glm4MoeConfig(
            **COMMON,
            **{**DECODER, "num_hidden_layers": 3, "tie_word_embeddings": False},
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            num_nextn_predict_layers=1,
        ),
        "sinks": GptOssConfig(  # which vLLM does not tie
            **COMMON,
            **{**DECODER, "tie_word_embeddings": False},
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "short_conv": Lfm2Config(
            **COMMON,
            **DECODER,
            layer_types=["conv", "full_attention"],
            conv_dim=128,
            conv_L_cache=3,
            block_dim=128,
            block_ff_dim=128,
            block_multiple_of=32,
            block_norm_eps=1e-5,
            block_auto_adjust_ff_dim=False,
            block_ffn_dim_multiplier=1.0,
        ),
        "linear_attention": Qwen3NextConfig(  # which vLLM does not tie
            **{**COMMON, "initializer_range": 0.05},
            **{**DECODER, "num_hidden_layers": 4, "tie_word_embeddings": False},
            **EXPERTS,
            shared_expert_intermediate_size=64,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
        "granite_hybrid": GraniteMoeHybridConfig(
            **COMMON,
            **{name: value for name, value in DECODER.items() if name != "head_dim"},
            **MAMBA,
            layer_types=["mamba", "attention"],
            shared_intermediate_size=128,
            num_local_experts=0,
            num_experts_per_tok=0,
            position_embedding_type="nope",
        ),
        "falcon_h1": FalconH1Config(**COMMON, **DECODER, **MAMBA, mamba_d_ssm=256),
        "nemotron_h": NemotronHConfig(
            **COMMON,
            **{**DECODER, "num_hidden_layers": 3},
            hybrid_override_pattern="M*-",
            mamba_num_heads=8,
            mamba_head_dim=32,
            ssm_state_size=64,
            n_groups=1,
        ),
        "no_attention": MambaConfig(**COMMON, hidden_size=128, num_hidden_layers=2),
        "images": LlavaConfig(
            text_config=LlamaConfig(**COMMON, **DECODER),
            vision_config=CLIPVisionConfig(
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=IMAGE_SIZE,
                patch_size=PATCH_SIZE,
                projection_dim=64,
            ),
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        ),
        "alibi": BloomConfig(**COMMON, hidden_size=128, n_layer=2, n_head=4),
        "encoder": BertConfig(
            **COMMON,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
        ),
        "sliding_encoder": ModernBertConfig(
            **COMMON,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=512,
            local_attention=32,
            global_attn_every_n_layers=3,
            cls_token_id=1,
            sep_token_id=2,
        ),
    }


def make_tiny_model(name: str, folder: Path) -> Path:
    """Write a random model of the named kind into ``folder`` and return it."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    config = _configs()[name]
    kind = AutoModel if "encoder" in name else AutoModelForCausalLM
    kind = AutoModelForImageTextToText if name == "images" else kind
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    model = kind.from_config(config).float()
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if name == "images":
        _name_vision_weights(folder)
        _write_processor(folder)
    if name in _ARCHITECTURES:
        _change_config(folder, architectures=[_ARCHITECTURES[name]])
    if name == "mtp":
        _predict_with_last_layer(folder)
    return folder


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**written, **changes}), encoding="utf-8")


def _name_vision_weights(folder: Path) -> None:
    """Name the vision tower's weights as LLaVA's checkpoints do; some Transformers do not."""
    from safetensors.torch import load_file, save_file

    path, tower = folder / "model.safetensors", "vision_tower."
    weights = {
        name.replace(tower, f"{tower}vision_model.").replace(
            "vision_model." * 2, "vision_model."
        ): each
        for name, each in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def _predict_with_last_layer(folder: Path) -> None:
    """Make the last of three layers the one that predicts a token more (MTP)."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    size, layer = DECODER["hidden_size"], "model.layers.2"
    weights[f"{layer}.eh_proj.weight"] = torch.cat([torch.eye(size)] * 2, 1) / 2
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{layer}.{norm}.weight"] = torch.ones(size)
    weights[f"{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    _change_config(folder, num_hidden_layers=2)


GROUP, LEVELS, MIDDLE = 32, 16, 8
"""Inputs that share a scale, and the 4-bit levels of a quantised weight."""
_PACKING = {"gptq": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 2, 4, 6, 1, 3, 5, 7)}
"""Which of eight neighbours lies in each 4 bits of a word, from the lowest."""
_CONFIGS = {
    "gptq": {"quant_method": "gptq", "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm"},
}


def _packed(levels: Any, method: str) -> Any:
    """Eight levels of the last dimension in each 32-bit word."""
    import torch

    order = torch.tensor(_PACKING[method])
    eights = levels.unflatten(-1, (-1, 8))[..., order].to(torch.int64)
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def _quantised(weight: Any, method: str) -> dict[str, Any]:
    """A linear layer's weight ``[out, in]`` in 4 bits, under the names of GPTQ or AWQ."""
    import torch

    inputs = weight.shape[1]
    groups = weight.T.float().unflatten(0, (-1, GROUP))  # [in / GROUP, GROUP, out]
    scales = (groups.abs().amax(1) / (MIDDLE - 0.5)).half()
    levels = (groups / scales.float().unsqueeze(1)).round() + MIDDLE
    levels = levels.clamp(0, LEVELS - 1).flatten(0, 1)  # [in, out]
    if method == "awq":
        zeros = _packed(torch.full(scales.shape, MIDDLE), method)
        return {"qweight": _packed(levels, method), "qzeros": zeros, "scales": scales}
    zeros = _packed(torch.full(scales.shape, MIDDLE - 1), method)  # one less, by convention
    words = _packed(levels.T.contiguous(), method).T.contiguous()
    index = torch.arange(inputs, dtype=torch.int32) // GROUP
    return {"qweight": words, "qzeros": zeros, "scales": scales, "g_idx": index}


def quantise(folder: Path, method: str) -> Path:
    """Turn a written model's linear layers into 4 bits, ``gptq`` or ``awq``, and return it."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {}
    for name, weight in load_file(path).items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            parts = _quantised(weight, method)
            weights |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        else:
            weights[name] = weight
    save_file(weights, path, metadata={"format": "pt"})
    config = {**_CONFIGS[method], "bits": 4, "group_size": GROUP}
    _change_config(folder, quantization_config=config)
    return folder


def _write_processor(folder: Path) -> None:
    """What turns an image into pixels, and its token into one for each patch."""
    from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [str(IMAGE_TOKEN)]})
    LlavaProcessor(
        CLIPImageProcessor(size=size, crop_size=size),
        tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        image_token=str(IMAGE_TOKEN),
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of numbers: some engines insist on having one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2}
    words |= {str(index): index for index in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
