"""Train a natively sparse model in torchtitan, under FSDP2, context and tensor parallelism.

    torchrun --nproc-per-node 8 examples/torchtitan_nsa.py \\
        --job.config_file examples/torchtitan_nsa.toml \\
        --parallelism.context_parallel_degree 4 --parallelism.tensor_parallel_degree 2

(torchtitan 0.2.2: ``pip install '.[torchtitan]'``.)  What torchtitan asks of a model,
its train spec, is registered as ``nsa_llama``: ``NSALlamaForCausalLM`` and how its weights and
tokens are spread.  After the last step ``dump_folder``/model is a folder for ``vllm serve``.

The task is made up: the second half of each sequence repeats the first.  For another one give the
spec a tokenizer and a data loader, such as torchtitan's own for text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.train import Trainer, main

from sparsek_backend.distributed import SequenceLayout
from sparsek_backend.nn import NSAConfig, NSALlamaConfig, NSALlamaForCausalLM, tensor_parallel
from sparsek_backend.nn.llama import NSALlamaDecoderLayer

ORDERS = {"headtail": "zigzag", None: "contiguous"}
"""The order of tokens, by torchtitan's name of its load balancer."""

FLAVORS = {
    "small": NSALlamaConfig(256, 128, 384, 4, 8, 2, 16, nsa=NSAConfig()),
    "8b": NSALlamaConfig(128256, 4096, 14336, 32, 32, 2, 128, nsa=NSAConfig()),
}


@dataclass
class NSALlamaArgs(BaseModelArgs):
    """A model's sizes, and which rank holds which tokens."""

    llama: NSALlamaConfig = field(default_factory=lambda: FLAVORS["small"])
    layout: SequenceLayout | None = None
    recompute: bool = False

    def update_from_config(self, job_config: JobConfig, **_: Any) -> None:
        """Refuse what the model has no plan for, and lay the tokens out."""
        parallelism, recompute = job_config.parallelism, job_config.activation_checkpoint.mode
        expected: dict[str, tuple[Any, list[Any]]] = {
            "parallelism.pipeline_parallel_degree": (parallelism.pipeline_parallel_degree, [1]),
            "parallelism.expert_parallel_degree": (parallelism.expert_parallel_degree, [1]),
            "activation_checkpoint.mode": (recompute, ["none", "full"]),
            "compile.enable": (job_config.compile.enable, [False]),
            "model.converters": (job_config.model.converters, [[]]),
        }
        balancer = parallelism.context_parallel_load_balancer
        if parallelism.context_parallel_degree > 1:
            expected["parallelism.context_parallel_load_balancer"] = (balancer, list(ORDERS))
        for name, (found, served) in expected.items():
            if found not in served:
                raise NotImplementedError(
                    f"{name}: expected {' or '.join(map(str, served))} for this model, got {found}"
                )
        self.recompute = recompute == "full"
        if parallelism.context_parallel_degree > 1:
            self.layout = SequenceLayout(
                job_config.training.seq_len, parallelism.context_parallel_degree, ORDERS[balancer]
            )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and FLOPs a token: of a forward and a backward pass."""
        llama, nsa = self.llama, self.llama.nsa
        count = sum(x.numel() for x in model.parameters())
        words = llama.vocab_size * llama.hidden_size
        seen = seq_len // 2
        attended = seen // nsa.cmp_stride + min(nsa.top_n * nsa.sel_block_size, seen)
        attended += min(nsa.window_size, seen)
        layer = 12 * llama.num_attention_heads * llama.head_dim * attended
        return count, 6 * (count - words) + llama.num_hidden_layers * layer


class NSALlama(NSALlamaForCausalLM):
    """The model as torchtitan calls it.  A row of a batch is one sequence."""

    def __init__(self, model_args: NSALlamaArgs) -> None:
        super().__init__(model_args.llama)
        self.layout = model_args.layout
        if model_args.recompute:
            self.gradient_checkpointing_enable()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fresh weights, the same for any number of ranks: made whole, then shared out.

        One layer after another, so that no rank holds the whole model.
        """
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        with torch.device(self.lm_head.weight.device):
            rest = NSALlamaForCausalLM(replace(self.config, num_hidden_layers=0))
            set_model_state_dict(self, rest.state_dict(), options=options)
            for layer in self.model.layers:
                fresh = NSALlamaDecoderLayer(self.config, None)
                state = fresh.state_dict()
                if layer.self_attn.head_major:
                    for name, x in fresh.self_attn.named_parameters():
                        state[f"self_attn.{name}"] = fresh.self_attn.restacked(name, x)
                set_model_state_dict(layer, state, options=options)
                for buffer in layer.buffers():
                    buffer.fill_(1.0)  # tensor parallelism's mark: weights stack head by head

    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        """Logits of this rank's tokens; the layout gives their positions."""
        return super().forward(tokens, layout=self.layout)


def parallelize(model: NSALlama, parallel_dims: ParallelDims, job_config: JobConfig) -> NSALlama:
    """Context parallelism, tensor parallelism and FSDP2, in this order."""
    training, reshard = job_config.training, job_config.parallelism.fsdp_reshard_after_forward
    if parallel_dims.cp_enabled:
        for layer in model.model.layers:
            layer.self_attn.mesh = parallel_dims.get_mesh("cp")
    if parallel_dims.tp_enabled:
        tensor_parallel(model, parallel_dims.get_mesh("tp"))
    if not parallel_dims.fsdp_enabled:
        if parallel_dims.dp_replicate_enabled:
            raise NotImplementedError(
                "parallelism.data_parallel_replicate_degree: expected sharded weights beside it, "
                "got data_parallel_shard_degree 1"
            )
        return model
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(names),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        ),
        "reshard_after_forward": reshard != "never",
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torchtitan divides the loss by the tokens of all ranks, so gradients add up.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum
    return model


class CopyTask(BaseDataLoader):
    """Sequences whose second half repeats the first."""

    def __init__(
        self, dp_world_size: int, dp_rank: int, tokenizer: None, job_config: JobConfig
    ) -> None:
        training = job_config.training
        self.step, self.vocab_size = 0, FLAVORS[job_config.model.flavor].vocab_size
        self.size = (dp_world_size * training.local_batch_size, training.seq_len // 2 + 1)
        self.rank, self.world = dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.step)
            half = torch.randint(self.vocab_size, self.size, generator=generator)
            tokens = torch.cat([half, half[:, :-1]], 1).chunk(self.world)[self.rank]
            self.step += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class FolderTrainer(Trainer):
    """torchtitan's trainer; after the last step it writes a folder for ``vllm serve``."""

    def train(self) -> None:
        super().train()
        self.model_parts[0].save_pretrained(Path(self.job_config.job.dump_folder) / "model")


register_train_spec(
    "nsa_llama",
    TrainSpec(
        model_cls=NSALlama,
        model_args={name: NSALlamaArgs(llama=llama) for name, llama in FLAVORS.items()},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=CopyTask,
        build_tokenizer_fn=None,
        build_loss_fn=build_cross_entropy_loss,
    ),
)

if __name__ == "__main__":
    main(FolderTrainer)
