"""Transformers' `generate` past the model's context, in memory that stays constant.

    pip install '.[eval]'
    python examples/endless_generate.py --tokens 400

The cache keeps the first tokens and a window of the latest ones (StreamingLLM, arXiv 2309.17453).
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsek_backend.models import fetch_model
from sparsek_backend.transformers_op import SinkWindowCache, configure


def main(arguments: list[str] | None = None) -> int:
    """Generate, and return how many tokens the cache held at the end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a Hugging Face folder; the small model by default")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--window-size", type=int, default=124)
    options = parser.parse_args(arguments)
    folder = options.model or fetch_model()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sparsek"
    ).to(device)
    configure(model, mode="sink_window", num_sink=4, window_size=options.window_size, dense_below=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("Once upon a time", return_tensors="pt").to(device)
    cache = SinkWindowCache(model)
    output = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=options.tokens,
        min_new_tokens=options.tokens,
        do_sample=False,
        repetition_penalty=1.2,
    )
    held = int(cache.layers[0].keys.shape[2])
    print(tokenizer.decode(output[0], skip_special_tokens=True))
    print(f"\n{output.shape[1]} tokens; the cache holds {held}")
    return held


if __name__ == "__main__":
    main()
