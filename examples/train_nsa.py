"""A language model with native sparse attention: train it, save it, load it, let it write.

    pip install '.[eval]'
    python examples/train_nsa.py --steps 300

It takes minutes on a CPU.  Tokens are bytes, so no tokenizer is needed.  The text is a file of
yours, or a speech that is fetched.  `vllm serve FOLDER --attention-backend SPARSEK
--skip-tokenizer-init` serves the result.  Without a tokenizer, ask with token ids:

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{
        "model": "FOLDER", "prompt": [72, 101, 108, 108, 111], "return_token_ids": true}'
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sparsek_backend.models import fetch_texts
from sparsek_backend.nn import NSAConfig, NSALlamaConfig, NSALlamaForCausalLM

# Small enough for a CPU: a token attends 4 blocks of 16 tokens, compressed blocks, and 32 tokens.
ATTENTION = NSAConfig(
    cmp_block_size=16, cmp_stride=8, sel_block_size=16, top_n=4, num_local_blocks=1, window_size=32
)
SIZES = NSALlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=4096,
    nsa=ATTENTION,
)


def batches(text: bytes, batch: int, length: int, steps: int) -> list[torch.Tensor]:
    """Cut random pieces, `[batch, length + 1]` a step, out of a text."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - length - 1, (steps, batch), generator=generator)
    return [torch.stack([data[s : s + length + 1] for s in row]) for row in starts]


def train(model: NSALlamaForCausalLM, pieces: list[torch.Tensor]) -> list[float]:
    """Train on every piece once, and return the losses in nats per byte."""
    device = model.lm_head.weight.device
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step, piece in enumerate(pieces):
        piece = piece.to(device)
        # In a quarter of the sequences the compressed branch is alone: it must learn to find the
        # blocks that the other branch selects by its scores.
        alone = (torch.rand(len(piece), generator=generator) < 0.25).to(device)
        loss, _ = model(input_ids=piece, labels=piece, compressed_only=alone)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == len(pieces) - 1:
            print(f"step {step:4d}: loss {losses[-1]:.3f}", flush=True)
    return losses


@torch.no_grad()
def write(model: NSALlamaForCausalLM, start: bytes, count: int) -> bytes:
    """Continue a text greedily, one byte a step, with a cache."""
    device = model.lm_head.weight.device
    caches = model.new_caches(1, len(start) + count)
    tokens, written = torch.tensor([list(start)], device=device), bytearray()
    for _ in range(count):
        tokens = model(tokens, caches)[:, -1:].argmax(-1)
        written.append(int(tokens))
    return bytes(written)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, save, load and write; return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, help="a text file; a speech by default")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--out", type=Path, default=Path("nsa-model"), help="folder for the model")
    options = parser.parse_args(arguments)
    path = options.text or fetch_texts() / "1862-Lincoln-1.txt"
    text = path.read_bytes()
    if len(text) < options.length + 2:
        parser.error(f"--text: expected at least {options.length + 2} bytes, got {len(text)}")

    torch.manual_seed(0)
    model = NSALlamaForCausalLM(SIZES).to("cuda" if torch.cuda.is_available() else "cpu")
    losses = train(model, batches(text, options.batch, options.length, options.steps))
    model.save_pretrained(options.out)
    loaded = NSALlamaForCausalLM.from_pretrained(options.out).to(model.lm_head.weight.device)
    start = text[: options.length]
    print(f"saved {options.out}; loaded, it continues the text with:")
    print(write(loaded, start, 120).decode(errors="replace"))
    return losses


if __name__ == "__main__":
    main()
