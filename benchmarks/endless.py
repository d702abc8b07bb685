"""Stream a long text through a cache of constant size and print the perplexity as it goes.

    python benchmarks/endless.py --tokens 20000 --num-sink 4
    python benchmarks/endless.py --tokens 20000 --num-sink 0        # the control

Every token is scored by the model with the tokens before it that the cache still keeps, as in
endless generation.  ``--chunk 1`` feeds token by token, as generation does.
Reads SmolLM2 and the texts of ``sparsek_backend.models``.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsek_backend.models import fetch_model, fetch_texts
from sparsek_backend.transformers_op import SinkWindowCache, configure


def _tokens(tokenizer: object, count: int) -> torch.Tensor:
    """``[1, count]`` token ids: the longest texts, one after the other."""
    ids: list[int] = []
    for path in sorted(fetch_texts().glob("*.txt"), key=lambda path: -path.stat().st_size):
        ids += tokenizer(path.read_text()).input_ids  # type: ignore[operator]
        if len(ids) >= count:
            break
    return torch.tensor([ids[:count]])


def _memory_mib(device: str) -> float:
    """Memory in use: of the GPU's tensors, else of the process."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> int:
    """Stream, print a line per 2000 tokens, write a JSON summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--num-sink", type=int, default=4)
    parser.add_argument("--window-size", type=int, default=508)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--fixed-sinks", action="store_true", help="leave sinks where they were")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = fetch_model()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sparsek"
    )
    model = model.to(device).eval()
    configure(
        model,
        mode="sink_window",
        num_sink=arguments.num_sink,
        window_size=arguments.window_size,
        dense_below=0,
    )
    ids = _tokens(AutoTokenizer.from_pretrained(folder), arguments.tokens).to(device)
    cache = SinkWindowCache(model, move_sinks=not arguments.fixed_sinks)
    nll = torch.empty(ids.shape[1] - 1)  # in one piece: small ones between logits pin the heap
    seen = 0
    memory: list[float] = []
    held: list[int] = []
    previous: torch.Tensor | None = None
    with torch.no_grad():
        for part in ids.split(arguments.chunk, dim=1):
            logits = model(part, past_key_values=cache).logits[0].float()
            if previous is not None:
                logits, last = torch.cat([previous, logits]), logits[-1:]
                targets = part[0]
            else:
                last, targets = logits[-1:], part[0, 1:]
            loss = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
            nll[seen : seen + loss.numel()] = loss
            seen += loss.numel()
            previous = last.clone()  # not a view that keeps all logits
            held.append(cache.layers[0].keys.shape[2])
            memory.append(_memory_mib(device))
            if seen // 2000 > (seen - loss.numel()) // 2000:
                recent = nll[max(seen - 2000, 0) : seen].mean().item()
                print(f"{seen} tokens: perplexity {math.exp(recent):.2f}, cache {held[-1]}")
                sys.stdout.flush()
    early = memory[: -(-4000 // arguments.chunk)]
    first, rest = nll[:4000].mean().item(), nll[4000:].mean().item()
    summary = {
        "num_sink": arguments.num_sink,
        "window_size": arguments.window_size,
        "move_sinks": not arguments.fixed_sinks,
        "chunk": arguments.chunk,
        "tokens": int(ids.shape[1]),
        "perplexity_first_4000": round(math.exp(first), 3),
        "perplexity_after": round(math.exp(rest), 3),
        "ratio": round(math.exp(rest - first), 4),
        "perplexity_last_2000": round(math.exp(nll[-2000:].mean().item()), 3),
        "most_tokens_held": max(held),
        "most_memory_mib_first_4000": round(max(early), 1),
        "most_memory_mib_after": round(max(memory[len(early) :], default=0.0), 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    print(json.dumps(summary))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
