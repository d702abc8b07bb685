"""Training, measuring and resuming one of the demo's models, on one rank or several."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sparsek_backend.distributed import SequenceLayout, shard
from sparsek_backend.train_demo.model import SIZES, make_model
from sparsek_backend.train_demo.task import NONE, SHORTEST, UNSEEN, make_batch
from sparsek_backend.whole_file import write_whole
from sparsek_kernels import nsa_attention

TOKENS_PER_STEP = 2048


@dataclass(frozen=True)
class DemoConfig:
    """A run of the demo; two runs with the same values give the same losses."""

    steps: int = 250  # optimiser steps
    max_length: int = 512  # tokens of the longest sequences, at least ``SHORTEST``
    # share of the training sequences in which sparse attention has its compressed branch alone.
    # Short ones can be answered from the other two, and then nothing teaches that branch to find
    # the blocks that long ones must select.
    compressed_only: float = 0.5
    seed: int = 0  # of the weights and the data
    save_every: int = 50  # steps from one checkpoint to the next

    @property
    def lengths(self) -> list[int]:
        """Tokens of a sequence, stage by stage; in the first a query can select all blocks."""
        doublings = math.ceil(math.log2(self.max_length / SHORTEST))
        return [*(SHORTEST << stage for stage in range(doublings)), self.max_length]

    def length_at(self, step: int) -> int:
        return self.lengths[step * len(self.lengths) // self.steps]

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: a warm-up, then a cosine to a tenth."""
        falling = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
        return 1e-2 * min((step + 1) / max(self.steps // 20, 1), falling)


class Trainer:
    """One model, its optimiser and its checkpoint.

    Args:
        kind: the attention, ``nsa`` or ``dense``.
        folder: where the checkpoint lives, of any number of ranks; made if it is missing.
        device: where to train; bf16 autocast on CUDA, fp32 on the CPU.
        mesh: ranks that share the tokens of each sequence, and the weights; one dimension.

    Raises:
        ValueError: the folder holds a checkpoint of a different run or a damaged one, or the ranks
            cannot share its batches.
    """

    def __init__(
        self,
        config: DemoConfig,
        kind: str,
        folder: Path,
        device: torch.device,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.config, self.kind, self.device, self.mesh = config, kind, device, mesh
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{kind}.pt"
        torch.manual_seed(config.seed)
        self.model = make_model(kind, mesh).to(device)
        self.layouts: dict[int, SequenceLayout] = {}
        if mesh is not None:
            self.layouts = {x: SequenceLayout(x, mesh.size(), "zigzag") for x in config.lengths}
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.losses: list[float] = []
        self.recalls: list[float] = []
        # Whole tensors, so that any number of ranks goes on from them.
        self._options = dcp.StateDictOptions(full_state_dict=mesh is not None, cpu_offload=True)
        if self.path.exists():
            self._load()
        self.resumed_at = len(self.losses)

    def _load(self) -> None:
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            theirs, mine = saved["config"], asdict(self.config)
        except Exception as error:  # torch has no error of its own for files of other kinds
            raise ValueError(f"{self.path}: expected a checkpoint of this command") from error
        if theirs != mine:
            raise ValueError(
                f"{self.path}: expected a checkpoint of {mine}, got one of {theirs}; choose "
                "another folder"
            )
        states: Any = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        dcp.set_state_dict(self.model, self.optimizer, **states, options=self._options)
        self.losses, self.recalls = list(saved["losses"]), list(saved["recalls"])

    def _save(self) -> None:
        both = dcp.get_state_dict(self.model, self.optimizer, options=self._options)
        saved = {
            **{"config": asdict(self.config), "model": both[0], "optimizer": both[1]},
            **{"losses": self.losses, "recalls": self.recalls},
        }
        if self.mesh is None or self.mesh.get_rank() == 0:
            write_whole(self.path, lambda beside: torch.save(saved, beside))

    def _logits(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        """fp32, autocast as in training."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            logits: torch.Tensor = self.model(tokens, **options)
        return logits.float()

    def step(self) -> tuple[float, float]:
        """One optimiser step: the loss, and the share of right answers with all branches before it.

        Raises:
            RuntimeError: a gradient is not finite; nothing is changed.
        """
        config, step = self.config, len(self.losses)
        length = config.length_at(step)
        batch = make_batch(max(TOKENS_PER_STEP // length, 1), length, config.seed, step)
        tokens, answers, asks = batch.tokens, batch.answers, batch.answers != NONE
        draws = torch.Generator().manual_seed(config.seed * UNSEEN + step)
        share = config.compressed_only if self.kind == "nsa" else 0.0
        shut = torch.rand(len(tokens), generator=draws) < share
        asked, counted = int(asks.sum()), int(asks[~shut].sum())
        layout = self.layouts.get(length)
        if self.mesh is not None and layout is not None:
            tokens, answers = (shard(x, self.mesh, layout) for x in (tokens, answers))
        tokens, answers, shut = (x.to(self.device) for x in (tokens, answers, shut))
        logits = self._logits(tokens, compressed_only=shut, layout=layout)
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), answers.flatten(), ignore_index=NONE, reduction="sum"
        )
        right = (logits.argmax(-1) == answers)[~shut].sum()
        self.optimizer.zero_grad()
        # FSDP2 averages gradients over the ranks, whose shares add up.
        (losses * (1 if self.mesh is None else self.mesh.size()) / asked).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        found = torch.stack([losses.detach() / asked, right])
        if self.mesh is not None:
            dist.all_reduce(found)
        loss, recall = float(found[0]), float(found[1]) / counted if counted else self.recalls[-1]
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate_at(step)
        self.optimizer.step()
        self.losses.append(loss)
        self.recalls.append(recall)
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            self._save()
        return loss, recall

    @torch.no_grad()
    def recall(self, length: int, compressed_only: bool = False) -> float:
        """Share of right answers in unseen sequences of a length."""
        batch = make_batch(max((1 << 14) // length, 1), length, self.config.seed, UNSEEN)
        tokens = batch.tokens.to(self.device)
        shut = torch.full_like(tokens[:, 0], compressed_only, dtype=torch.bool)
        guess = self._logits(tokens, compressed_only=shut).argmax(-1).cpu()
        return float((guess == batch.answers)[batch.answers != NONE].double().mean())

    @torch.no_grad()
    def selections(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks that tokens of unseen sequences select, ``[8, N, blocks]`` bool, and need.

        The latter, ``[8, N]``, are -1 where nothing is asked.  Of a sparse model's last layer.
        """
        layer: Any = self.model.model.layers[-1].self_attn
        batch = make_batch(8, length, self.config.seed, UNSEEN)
        inputs: dict[str, Any] = {}
        hook = layer.register_forward_pre_hook(
            lambda _, given: inputs.update(layer.attention_inputs(*given))
        )
        self._logits(batch.tokens.to(self.device))
        hook.remove()
        _, indices = nsa_attention(**inputs, return_block_indices=True)
        size = SIZES.nsa.sel_block_size
        chosen = torch.zeros(8, length, -(-length // size) + 1, dtype=torch.bool)
        chosen.scatter_(2, indices.flatten(2).long().cpu() + 1, True)  # column 0 takes the -1
        return chosen[..., 1:], (batch.told // size).masked_fill(batch.told == NONE, -1)
