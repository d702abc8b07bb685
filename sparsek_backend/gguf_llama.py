"""Convert a llama-architecture GGUF file to a Hugging Face folder, once, without loading a model.

The weights are dequantised tensor by tensor and the tokenizer is rebuilt from the GGUF metadata, so
the result depends on no loader's defaults: special ids, the chat template and the pre-tokenizer are
those that the file states.

Layouts: a GGUF matrix is stored ``[out, in]`` as in Hugging Face's, but the rows of ``attn_q`` and
``attn_k`` are interleaved for rotary pairs ``(2i, 2i + 1)``, where Hugging Face rotates the halves
``(i, i + head_dim / 2)``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # GGUF's token_type of control tokens


def convert(gguf_path: Path, folder: Path) -> None:
    """Write ``model.safetensors`` (bf16), ``config.json`` and the tokenizer files into ``folder``.

    Args:
        gguf_path: a complete GGUF file of architecture ``llama`` with a byte-level BPE tokenizer.
        folder: an existing folder that receives the files.

    Raises:
        ValueError: the file is of another architecture, or its tokenizer is of another kind.
        ModuleNotFoundError: gguf, safetensors or tokenizers is not installed.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_path))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    _require(metadata, "general.architecture", "llama")
    _require(metadata, "tokenizer.ggml.model", "gpt2")
    _require(metadata, "tokenizer.ggml.pre", "smollm")

    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_weights(reader, metadata, folder / "model.safetensors")
    _write_json(folder / "config.json", _model_config(metadata, tied))
    _write_json(folder / "generation_config.json", _special_ids(metadata))
    _write_tokenizer(metadata, folder)


def _require(metadata: dict[str, Any], field: str, expected: str) -> None:
    if metadata.get(field) != expected:
        raise ValueError(
            f"GGUF field {field} must be {expected!r} to be converted, got {metadata.get(field)!r}"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(reader: Any, metadata: dict[str, Any], path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": int(metadata["llama.attention.head_count"]),
        "attn_k": int(metadata["llama.attention.head_count_kv"]),
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in _GLOBAL_NAMES:
            name = _GLOBAL_NAMES[tensor.name]
        else:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
            if kind in heads:
                values = _rotary_halves(values, heads[kind])
        weights[name] = torch.tensor(values).to(torch.bfloat16)
    save_file(weights, str(path), metadata={"format": "pt"})


def _rotary_halves(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of ``weight`` [num_heads * D, in] from rotary pairs to rotary halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
    }


def _model_config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    hidden_size = int(metadata["llama.embedding_length"])
    num_heads = int(metadata["llama.attention.head_count"])
    # Single precision stores 1e-5 as 9.9999997e-06: round to what was meant.
    rms_norm_eps = float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "head_dim": hidden_size // num_heads,
        "rms_norm_eps": rms_norm_eps,
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": int(metadata["llama.vocab_size"]),
        **_special_ids(metadata),
    }


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    ids = _special_ids(metadata)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(metadata["llama.context_length"]),
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[int(metadata["tokenizer.ggml.unknown_token_id"])],
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )
