"""Train a Transformers model with sparse attention under FSDP2, by Transformers' own Trainer.

    torchrun --nproc-per-node 8 examples/train_transformers_fsdp2.py RUN --model FOLDER
    torchrun --nproc-per-node 2 examples/train_transformers_fsdp2.py RUN --cpu  # a tiny model

Every query attends the sinks and a window (``--mode sink_window``), or chosen blocks as well
(``--mode block_topk``).  RUN/model is a folder for Transformers and ``vllm serve``; its config
keeps the settings.  The same command goes on from the last checkpoint in RUN.

Accelerate has no FSDP for CPUs: with ``--cpu`` every rank has all weights.

The task is made up: the second half of each sequence repeats the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from sparsek_backend.transformers_op import configure

VOCABULARY = 256


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; a tiny Llama without")
    parser.add_argument("--mode", choices=["sink_window", "block_topk"], default="sink_window")
    parser.add_argument("--window-size", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args(arguments)


def make_model(options: argparse.Namespace) -> PreTrainedModel:
    """The model, with SparseK's attention."""
    if options.model is not None:
        model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="sparsek")
    else:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=options.tokens,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sparsek")
    configure(model, mode=options.mode, window_size=options.window_size, dense_below=0)
    return model


class Copies(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences whose second half repeats the first; each is a function of its index."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        half = torch.randint(VOCABULARY, (self.tokens // 2,), generator=generator)
        row = torch.cat([half, half])
        return {"input_ids": row, "labels": row}


def train(options: argparse.Namespace) -> list[float]:
    """The losses of the steps of this run."""
    model = make_model(options)
    arguments = TrainingArguments(
        str(options.folder),
        max_steps=options.steps,
        save_steps=options.save_every,
        per_device_train_batch_size=1,
        learning_rate=options.learning_rate,
        bf16=not options.cpu,
        use_cpu=options.cpu,
        fsdp=not options.cpu,
        fsdp_config={"version": 2, "activation_checkpointing": True},
        ddp_find_unused_parameters=False,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Copies(options.tokens))
    last = get_last_checkpoint(str(options.folder)) if options.folder.exists() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(options.folder / "model"))
    if trainer.is_world_process_zero():
        print("trained", type(trainer.model_wrapped).__name__)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    train(parse())
