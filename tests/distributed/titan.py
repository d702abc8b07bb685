"""torchtitan's trainer on CPU ranks: ``python -m tests.distributed.titan FOLDER``.

Trains the example on one rank, on two that share each sequence, and on two that share the heads,
each writing its model below FOLDER; prints the losses as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.processes import SECONDS


class Accelerator(ModuleType):
    """``torch.cpu``, and what else torchtitan asks of a device's module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, _: Any) -> str:
        return "CPU"

    def get_device_properties(self, _: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, _: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


with (
    mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
    mock.patch("torch._utils._get_device_module", Accelerator),
):
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import ConfigManager

    from examples import torchtitan_nsa

RUNS = {
    "alone": [],
    "context": ["--parallelism.context_parallel_degree", "2"],
    "tensor": ["--parallelism.tensor_parallel_degree", "2"],
}
OPTIONS = {
    "training.seq_len": 128, "training.local_batch_size": 2, "training.steps": 3,
    "metrics.log_freq": 1, "training.mixed_precision_param": "float32", "debug.seed": 0,
}  # fmt: skip
SETTINGS = (
    ["--job.config_file", torchtitan_nsa.__file__.replace(".py", ".toml"), "--job.dump_folder"]
    if torchtitan_nsa.BEFORE_03
    else ["--module", torchtitan_nsa.__name__, "--config", "small", "--dump_folder"]
)
"""Where a version of torchtitan finds the example's settings; then comes the folder of a run."""


def train(rank: int, world: int, folder: str, name: str) -> None:
    """One rank; the first one writes the losses to FOLDER/NAME.json."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    store = dist.FileStore(f"{folder}/{name}-store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS / 2)
    )
    output = Path(folder) / name
    given = [text for key, value in OPTIONS.items() for text in (f"--{key}", str(value))]
    config = ConfigManager().parse_args([*SETTINGS, str(output), *given, *RUNS[name]])
    losses: list[float] = []

    def log(_: Any, step: int, loss: float, *rest: Any, **__: Any) -> None:
        losses.append(loss)

    # gloo's barrier takes no device
    with (
        mock.patch.object(MetricsProcessor, "log", log),
        mock.patch.object(dist, "barrier"),
        mock.patch("time.sleep"),
    ):
        trainer = torchtitan_nsa.FolderTrainer(config)
        trainer.train()
        trainer.close()
    if rank == 0:
        output.with_suffix(".json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def main(folder: str) -> None:
    """Fork the ranks of each run in turn: torchtitan is imported once."""
    context = multiprocessing.get_context("fork")
    found = {}
    for name in RUNS:
        world = 1 if name == "alone" else 2
        ranks = [context.Process(target=train, args=(i, world, folder, name)) for i in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{name}: a rank failed")
        found[name] = json.loads(Path(folder, f"{name}.json").read_text())
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
