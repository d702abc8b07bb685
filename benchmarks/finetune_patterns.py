"""Loss of a model that is fine-tuned while its patterns are pruned, against the dense model's.

    python benchmarks/finetune_patterns.py --json finetune_patterns.json     # SmolLM2 on a GPU
    python benchmarks/finetune_patterns.py --toy --json /tmp/toy.json        # seconds on a CPU

Both runs see the same batches.  Reported are the mean losses of the last tenth of the steps, losses
on held-out texts, and the largest rise of the loss in the steps after a pruning, over the mean of
the ten steps before it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.models import fetch_model, fetch_texts
from sparsek_backend.patterns import attend_patterns, learned_patterns
from sparsek_backend.patterns.training import (
    ImportanceOptions,
    PatternScheduler,
    Pruning,
    SparsitySchedule,
)


def load(options: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """The model, and ``[texts, tokens]`` ids; the last eighth of them is held out."""
    torch.manual_seed(0)
    if options.toy:
        config = LlamaConfig(
            vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        )  # fmt: skip
        start = torch.randint(97, (16, 1))
        return LlamaForCausalLM(config), (start + 7 * torch.arange(options.tokens)) % 97
    folder = options.model or fetch_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = []
    for path in sorted(fetch_texts().glob("*.txt")):
        ids = torch.tensor(tokenizer(path.read_text()).input_ids)
        parts.append(ids[: len(ids) // options.tokens * options.tokens].view(-1, options.tokens))
    texts = torch.cat(parts)
    return model, texts[torch.randperm(len(texts))]


def train(
    model: Any, texts: torch.Tensor, options: argparse.Namespace, *, sparse: bool
) -> dict[str, Any]:
    """Losses of a run, and what its scheduler did."""
    torch.manual_seed(0)
    model = model.to(options.device)
    held = texts[-max(len(texts) // 8, 1) :][: options.judge]
    texts = texts[: -max(len(texts) // 8, 1)]
    patterns = learned_patterns(
        model, options.tokens, options.block_size, heads="query",
        importance=ImportanceOptions(every=2),
    )  # fmt: skip
    schedule = SparsitySchedule(
        options.sparsity, begin=options.steps // 10,
        end=round(options.steps * options.prune_until), every=options.every,
    )  # fmt: skip
    rule = Pruning(
        pooled="model" if options.budget == "model" else True, by_distance=options.by_distance
    )
    scheduler = PatternScheduler(patterns.values(), schedule, rule)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses, pruned = [], []
    on_gpu = options.device.type == "cuda"
    cast = torch.autocast("cuda", torch.bfloat16, enabled=on_gpu)
    with attend_patterns(model, patterns) if sparse else nullcontext(), cast:
        model.train()
        for step in range(options.steps):
            rows = torch.arange(step * options.batch, (step + 1) * options.batch) % len(texts)
            ids = texts[rows].to(options.device)
            loss = model(ids, labels=ids, use_cache=False).loss
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            losses.append(loss.item())
            if sparse and scheduler.step(loss.item()):
                pruned.append(step + 1)
        model.eval()
        with torch.no_grad():
            judged = [
                model(ids, labels=ids, use_cache=False).loss.item()
                for ids in held.to(options.device)[:, None]
            ]
    last = losses[-max(options.steps // 10, 1) :]
    return {
        "loss": sum(last) / len(last),
        "held_out_loss": sum(judged) / len(judged),
        "worst_rise": max((rise(losses, step, options.every) for step in pruned), default=0.0),
        "sparsity": sum(p.sparsity for p in patterns.values()) / len(patterns) if sparse else 0.0,
        "reverts": scheduler.reverts,
        "losses": [round(x, 4) for x in losses],
    }


def rise(losses: list[float], step: int, every: int) -> float:
    """Of the loss from before a pruning to the worst step up to the next one, as a share."""
    before, after = losses[max(step - 10, 0) : step], losses[step : step + every]
    return max(after, default=-math.inf) / (sum(before) / len(before)) - 1.0


def main() -> int:
    """Train both and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a random model of two layers")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; SmolLM2 by default")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--judge", type=int, default=32, help="held-out texts")
    parser.add_argument("--every", type=int, default=10, help="steps between prunings")
    parser.add_argument("--sparsity", type=float, default=0.85)
    parser.add_argument("--prune-until", type=float, default=0.6, help="share of the steps")
    parser.add_argument(
        "--budget", choices=["layer", "model"], default="layer", help="shared by the heads"
    )
    parser.add_argument("--by-distance", action="store_true", help="one weight for a diagonal")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.steps = options.steps or (30 if options.toy else 200)
    options.tokens = options.tokens or (256 if options.toy else 2048)
    options.block_size = options.block_size or (16 if options.toy else 32)
    options.device = choose_device(options.device)
    machine = asdict(describe_machine(options.device, options.commit))
    model, texts = load(options)
    runs = {
        name: train(deepcopy(model), texts, options, sparse=name == "sparse")
        for name in ("dense", "sparse")
    }
    ratio = runs["sparse"]["held_out_loss"] / runs["dense"]["held_out_loss"]
    result = {
        "model": "toy" if options.toy else str(options.model or "SmolLM2-135M-Instruct"),
        "tokens": options.tokens,
        "block_size": options.block_size,
        "batch": options.batch,
        "steps": options.steps,
        "every": options.every,
        "lr": options.lr,
        "prune_until": options.prune_until,
        "budget": options.budget,
        "by_distance": options.by_distance,
        "held_out_ratio": ratio,
        **runs,
        "machine": machine,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, run in runs.items():
        print(name, {key: value for key, value in run.items() if key != "losses"})
    print(f"held-out loss, sparse over dense: {ratio:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
