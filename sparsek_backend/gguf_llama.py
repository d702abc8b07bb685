"""Convert a llama-architecture GGUF file to a Hugging Face folder, once.

Transformers reads the configuration and dequantises the weights.  The tokenizer is rebuilt from the
GGUF metadata, so that special ids, the chat template and the pre-tokenizer are those that the file
states: Transformers' own reader knows one pre-tokenizer alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONTROL_TOKEN = 3  # GGUF's token_type of control tokens


def convert(gguf_path: Path, folder: Path) -> None:
    """Write ``model.safetensors`` (bf16), ``config.json`` and the tokenizer files into ``folder``.

    Args:
        gguf_path: a complete GGUF file of architecture ``llama`` with a byte-level BPE tokenizer.

    Raises:
        ValueError: the file is of another architecture, or its tokenizer is of another kind.
        ModuleNotFoundError: gguf, safetensors or transformers is not installed.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_path))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    _require(metadata, "general.architecture", "llama")
    _require(metadata, "tokenizer.ggml.model", "gpt2")
    _require(metadata, "tokenizer.ggml.pre", "smollm")

    _write_model(gguf_path, metadata, folder)
    _write_json(folder / "generation_config.json", _special_ids(metadata))
    _write_tokenizer(metadata, folder)


def _require(metadata: dict[str, Any], field: str, expected: str) -> None:
    if metadata.get(field) != expected:
        raise ValueError(
            f"GGUF field {field} must be {expected!r} to be converted, got {metadata.get(field)!r}"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_model(gguf_path: Path, metadata: dict[str, Any], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    settings = load_gguf_checkpoint(str(gguf_path))["config"]
    # Single precision stores 1e-5 as 9.9999997e-06: round to what was meant.
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")
    config = AutoConfig.for_model(**{**settings, **_special_ids(metadata)})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(gguf_path), return_tensors=True, model_to_load=model)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in tensors["tensors"].items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.rope_theta = float(metadata["llama.rope.freq_base"])  # where Transformers 4 looks for it
    config.save_pretrained(folder)


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
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
