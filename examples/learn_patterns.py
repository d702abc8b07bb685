"""Block patterns learned from what a model attends: learn, save, load, attend, compare.

    pip install '.[eval,patterns]'
    python examples/learn_patterns.py --tokens 1024

Every layer of a Transformers model gets the blocks that add most to its output on some texts, and
reads another text with these alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsek_backend.models import fetch_model, fetch_texts
from sparsek_backend.patterns import ModelPatterns, attend_patterns, learn_model_patterns
from sparsek_backend.patterns.training import Pruning

LEARN, JUDGE = ("1861-Lincoln-1.txt", "1863-Lincoln-1.txt"), "1862-Lincoln-1.txt"


def main(arguments: list[str] | None = None) -> tuple[float, float, float]:
    """Return the share of the blocks that is kept, and the loss with all of them and with it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a Hugging Face folder; the small model by default")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    parser.add_argument("--sparsity", type=float, default=0.6, help="blocks to leave out")
    parser.add_argument("--out", type=Path, default=Path("patterns.safetensors"))
    options = parser.parse_args(arguments)
    folder, texts = options.model or fetch_model(), fetch_texts()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def read(name: str) -> torch.Tensor:
        ids = tokenizer((texts / name).read_text(), return_tensors="pt", verbose=False).input_ids
        return ids[:, : options.tokens].to(model.device)

    learned = learn_model_patterns(
        model, [read(name) for name in LEARN], block_size=64, sparsity=options.sparsity,
        heads="query", pruning=Pruning(pooled="model", by_distance=True), name=str(folder),
    )  # fmt: skip
    learned.save(options.out)
    patterns = ModelPatterns.load(options.out).patterns
    patterns = {layer: pattern.to(model.device) for layer, pattern in patterns.items()}

    ids = read(JUDGE)
    with torch.no_grad():
        dense = model(ids, labels=ids, use_cache=False).loss.item()
        with attend_patterns(model, patterns):
            sparse = model(ids, labels=ids, use_cache=False).loss.item()
    rows = next(iter(patterns.values())).shape[0]
    visible = (rows + 1) / (2 * rows)  # what is not in a query's future
    kept = sum(pattern.density for pattern in patterns.values()) / len(patterns) / visible
    print(f"{kept:.0%} of the blocks: loss {sparse:.3f}, with all of them {dense:.3f}")
    return kept, dense, sparse


if __name__ == "__main__":
    main()
