"""Training, measuring and resuming the demo's models."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from sparsek_backend.distributed import SequenceLayout
from sparsek_backend.nn.compression import CompressionMLP
from sparsek_backend.nn.demo.data import IGNORED, Batch, RecallTask, make_batch
from sparsek_backend.nn.demo.model import AttentionKind, ModelConfig, RecallModel, tokens_before
from sparsek_backend.nn.demo.ranks import Ranks
from sparsek_backend.whole_file import write_whole
from sparsek_kernels.checks import check_int

EVAL_STEP = 1 << 30
"""Batches of this step and later ones are never trained on."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Within it, torch takes the algorithms whose gradients repeat bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # filling new memory would only take time
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # a warning alone would leave them to chance
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = filled


@dataclass(frozen=True)
class DemoConfig:
    """A run of the demo; two runs with the same values give the same losses.

    Args:
        task: sizes of the task.
        model: sizes of the model.
        steps: optimiser steps.
        tokens_per_step: tokens of a batch; its sequences are as many as fit.
        min_length: tokens of a sequence at the start.
        max_length: tokens at the end; the length stays for a fifth of the steps, in which recall is
            learned, doubles at even intervals over three fifths, and stays.
        compressed_only: share of the training sequences in which sparse attention has its
            compressed branch alone.  Short sequences can be answered from the other two, and then
            nothing teaches that branch to find the blocks that long ones must select.
        learning_rate: peak, after a warm-up of a twentieth of the steps; cosine to a tenth.
        seed: of the weights and the data.
        save_every: steps from one checkpoint to the next.
        timed_tokens: tokens of a step that is timed, whatever the length of its sequences.
    """

    task: RecallTask = field(default_factory=RecallTask)
    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 1500
    tokens_per_step: int = 32768
    min_length: int = 128
    max_length: int = 8192
    compressed_only: float = 0.25
    learning_rate: float = 1.5e-3
    seed: int = 0
    save_every: int = 50
    timed_tokens: int = 65536

    def __post_init__(self) -> None:
        if self.min_length < self.task.min_length:
            raise ValueError(
                f"min_length: expected at least {self.task.min_length}, got {self.min_length}"
            )
        if self.max_length < self.min_length:
            raise ValueError(
                f"max_length: expected at least min_length={self.min_length}, got {self.max_length}"
            )
        if not 0.0 <= self.compressed_only < 1.0:
            raise ValueError(
                f"compressed_only: expected a share from 0 to below 1, got {self.compressed_only}"
            )
        for name in ("steps", "tokens_per_step", "save_every"):
            check_int(name, getattr(self, name), 1)

    def length_at(self, step: int) -> int:
        """Tokens of a sequence at a step."""
        doublings = math.ceil(math.log2(self.max_length / self.min_length))
        late = 5 * step - self.steps  # fifths of a step beyond a fifth
        stage = min(late * doublings // (3 * self.steps) + 1, doublings) if late >= 0 else 0
        return min(self.min_length << stage, self.max_length)

    def batch_at(self, step: int) -> int:
        """Sequences of a batch at a step."""
        return max(self.tokens_per_step // self.length_at(step), 1)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        warm = max(self.steps // 20, 1)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(self.steps - warm, 1)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass
class RunResult:
    """Losses, recall and step times of one model of the demo.

    Args:
        kind: its attention.
        losses: loss of every step.
        recall: by sequence length and then by distance bucket (its upper end), the share of
            questions answered right; bucket ``passkey`` holds the passkey's questions.
        resumed_at: step at which this process took over.
        step_ms: by sequence length, milliseconds of a forward and backward pass.
        overlap: of a sparse model, how much neighbouring tokens agree on their blocks; empty where
            no token has as many blocks as it may select.
    """

    kind: AttentionKind
    losses: list[float]
    recall: dict[int, dict[str, float]]
    resumed_at: int
    step_ms: dict[int, float] = field(default_factory=dict)
    overlap: dict[str, float] = field(default_factory=dict)


class _Inputs(NamedTuple):
    """A rank's part of a batch, and how many questions the whole batch asks."""

    tokens: torch.Tensor
    before: torch.Tensor
    targets: torch.Tensor
    asked: int
    compressed_only: torch.Tensor | None
    layout: SequenceLayout | None


class Trainer:
    """One model, its optimiser and its checkpoint.

    Args:
        config: the run.
        kind: the attention.
        folder: where the checkpoint lives, of any number of ranks.
        device: where to train; bf16 autocast on CUDA, fp32 on the CPU.
        ranks: those that train it together, all of which call what is called here; ``None`` for
            this process alone.

    Raises:
        ValueError: the folder holds a checkpoint of a different run or a damaged one, or the ranks
            cannot share its batches.
    """

    def __init__(
        self,
        config: DemoConfig,
        kind: AttentionKind,
        folder: Path,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.kind, self.device, self.ranks = config, kind, device, ranks
        self.path = folder / f"{kind}.pt"
        torch.manual_seed(config.seed)
        mesh = None if ranks is None else ranks.context
        self.model = RecallModel(config.model, config.task.vocab_size, kind, mesh).to(device)
        if ranks is not None:
            for step in range(config.steps):
                ranks.check(config.length_at(step), config.batch_at(step))
            ranks.shard_weights(self.model, self.model.blocks)
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.model), lr=config.learning_rate, betas=(0.9, 0.95),
            weight_decay=0.1,
        )  # fmt: skip
        self.losses: list[float] = []
        if self.path.exists():
            self._load()
        self.resumed_at = len(self.losses)

    def _load(self) -> None:
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            theirs = dict(saved["config"])
        except Exception as error:  # torch has no error of its own for files of other kinds
            raise ValueError(
                f"{self.path}: expected a checkpoint of this command, got {type(error).__name__}: "
                f"{error}"
            ) from error
        mine = asdict(self.config)
        changed = sorted(key for key in mine if theirs.get(key) != mine[key])
        if changed:
            raise ValueError(
                f"{self.path}: expected a checkpoint of the same run, but {', '.join(changed)} "
                "differ; choose another folder"
            )
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=self._whole,
        )
        self.losses = list(saved["losses"])

    @property
    def _whole(self) -> StateDictOptions:
        """Checkpoints are of whole tensors: any number of ranks goes on from them."""
        shared = self.ranks is not None
        return StateDictOptions(full_state_dict=shared, cpu_offload=shared)

    def _save(self) -> None:
        weights, moments = get_state_dict(self.model, self.optimizer, options=self._whole)
        if self.ranks is not None and not self.ranks.is_first:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        saved = {
            "config": asdict(self.config),
            "model": weights,
            "optimizer": moments,
            "losses": self.losses,
        }
        write_whole(self.path, lambda beside: torch.save(saved, beside))

    def alone(self) -> Trainer:
        """The weights of the last checkpoint, in this process without the others."""
        found = Trainer(self.config, self.kind, self.path.parent, self.device)
        found.resumed_at = self.resumed_at
        return found

    def logits(
        self, tokens: torch.Tensor, compressed_only: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[B, N]`` tokens on the device to ``[B, N, vocab]`` logits, autocast as in training."""
        with self._autocast():
            logits: torch.Tensor = self.model(tokens, compressed_only)
        return logits

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    def compressed_only(self, sequences: int) -> torch.Tensor | None:
        """Which sequences of the next step have the compressed branch alone, ``[sequences]`` bool.

        A function of the seed and the step; ``None`` where none has.
        """
        if self.kind != "nsa" or self.config.compressed_only == 0:
            return None
        generator = torch.Generator().manual_seed(self.config.seed * EVAL_STEP + len(self.losses))
        drawn = torch.rand(sequences, generator=generator) < self.config.compressed_only
        return drawn.to(self.device)

    def _inputs(self, batch: Batch, compressed_only: torch.Tensor | None = None) -> _Inputs:
        """This rank's part of a batch, on its device."""
        parts: tuple[torch.Tensor, ...] = (
            batch.tokens,
            tokens_before(batch.tokens),
            batch.targets,
        )
        layout = None
        if self.ranks is not None:
            layout = self.ranks.layout(batch.tokens.shape[1])
            parts = tuple(self.ranks.tokens(x) for x in parts)
            compressed_only = None if compressed_only is None else self.ranks.rows(compressed_only)
        tokens, before, targets = (x.to(self.device) for x in parts)
        asked = int((batch.targets != IGNORED).sum())
        return _Inputs(tokens, before, targets, asked, compressed_only, layout)

    def _loss(self, inputs: _Inputs) -> torch.Tensor:
        """The mean loss of a batch's questions; of several ranks, each has its share."""
        with self._autocast():
            logits = self.model(
                inputs.tokens, inputs.compressed_only, inputs.before, inputs.layout
            ).float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), inputs.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return losses / inputs.asked

    def step(self) -> float:
        """One optimiser step; its loss.

        Raises:
            FloatingPointError: the loss or a gradient is not finite; nothing is changed.
        """
        config, step = self.config, len(self.losses)
        batch = make_batch(
            config.task, config.batch_at(step), config.length_at(step), config.seed, step
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * config.rate_at(step)
        self.optimizer.zero_grad(set_to_none=True)
        with deterministic():
            inputs = self._inputs(batch, self.compressed_only(batch.tokens.shape[0]))
            loss = self._loss(inputs)
            # FSDP2 averages gradients over the ranks, whose shares add up.
            (loss if self.ranks is None else loss * self.ranks.world.size()).backward()
            loss = loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
                dist.all_reduce(loss)
            if not math.isfinite(float(loss + norm)):
                raise FloatingPointError(
                    f"{self.kind}: step {step} has a loss of {float(loss)} and gradients "
                    f"of norm {float(norm)}"
                )
            self.optimizer.step()
        self.losses.append(float(loss))
        done = len(self.losses)
        if done % config.save_every == 0 or done == config.steps:
            self._save()
        return self.losses[-1]

    def run(self, report: Callable[[int, float], None] | None = None) -> None:
        """Train up to the last step, reporting (steps done, loss) after each."""
        while len(self.losses) < self.config.steps:
            loss = self.step()
            if report is not None:
                report(len(self.losses), loss)

    @torch.no_grad()
    def recall(self, length: int, batches: int) -> dict[str, float]:
        """Share of right answers by distance bucket (``<=2^k`` tokens) and for the passkey."""
        config = self.config
        asked: dict[str, int] = defaultdict(int)
        right: dict[str, int] = defaultdict(int)
        count = max(config.tokens_per_step // length, 1)
        for index in range(batches):
            batch = make_batch(config.task, count, length, config.seed, EVAL_STEP + index)
            guess = self.logits(batch.tokens.to(self.device)).argmax(-1).cpu()
            live = batch.targets != IGNORED
            good = (guess == batch.targets)[live].tolist()
            for hit, far, key in zip(
                good, batch.distance[live].tolist(), batch.passkey[live].tolist(), strict=True
            ):
                names = [f"<={1 << max(far - 1, 0).bit_length()}", "all"]
                for name in [*names, "passkey"] if key else names:
                    asked[name] += 1
                    right[name] += hit
        return {name: right[name] / asked[name] for name in sorted(asked, key=_bucket_order)}

    def step_time(self, length: int) -> float:
        """Milliseconds of a forward and backward pass over ``timed_tokens`` tokens.

        They are cut into sequences of ``length`` tokens, one at least; median of five.
        """
        config = self.config
        count = max(config.timed_tokens // length, 1)
        batch = make_batch(config.task, count, length, config.seed, EVAL_STEP)
        inputs = self._inputs(batch)
        times = []
        for _ in range(7):  # two to warm up
            self._synchronize()
            start = time.perf_counter()
            self._loss(inputs).backward()
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e3)
            self.model.zero_grad(set_to_none=True)
        return statistics.median(times[2:])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Parameters by the share of the learning rate that they take.

    AdamW moves every weight by about its rate.  The first compression layer adds up the tokens of a
    block, so its output would move once for each of them.  Its rate is divided by their number (the
    rule of arXiv 2203.03466: rates fall with the fan-in).
    """
    shares: dict[float, list[torch.nn.Parameter]] = defaultdict(list)
    divided = {
        id(module.w1): 1 / module.position.shape[0]
        for module in model.modules()
        if isinstance(module, CompressionMLP)
    }
    for parameter in model.parameters():
        shares[divided.get(id(parameter), 1.0)].append(parameter)
    return [{"params": members, "share": share} for share, members in shares.items()]


def _bucket_order(name: str) -> tuple[int, int]:
    return (0, int(name[2:])) if name.startswith("<=") else (1, len(name))
