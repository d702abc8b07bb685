"""Train a natively sparse model in torchtitan, under FSDP2, context and tensor parallelism.

    torchrun --nproc-per-node 8 examples/torchtitan_nsa.py --module torchtitan_nsa --config small \\
        --parallelism.context_parallel_degree 4 --parallelism.tensor_parallel_degree 2

(torchtitan 0.3 and torch 2.14: ``pip install '.[torchtitan]'``.  With torchtitan 0.2.2, which an
older torch needs: ``--job.config_file examples/torchtitan_nsa.toml`` in place of module and
config.)  torchtitan is given ``NSALlamaForCausalLM`` and how its weights and tokens are spread.
After the last step ``dump_folder``/model is a folder for ``vllm serve``.

The task is made up: the second half of each sequence repeats the first.  For another one give
torchtitan a tokenizer and a data loader, such as its own for text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.train import Trainer, main

from sparsek_backend.distributed import SequenceLayout
from sparsek_backend.nn import NSAConfig, NSALlamaConfig, NSALlamaForCausalLM, tensor_parallel
from sparsek_backend.nn.llama import NSALlamaDecoderLayer

BEFORE_03 = Version(version("torchtitan")) < Version("0.3")
ORDERS = {"headtail": "zigzag", None: "contiguous"}
"""The order of tokens, by torchtitan's name of its load balancer."""

FLAVORS = {
    "small": NSALlamaConfig(256, 128, 384, 4, 8, 2, 16, nsa=NSAConfig()),
    "8b": NSALlamaConfig(128256, 4096, 14336, 32, 32, 2, 128, nsa=NSAConfig()),
}


@dataclass(kw_only=True)
class NSALlamaArgs:
    """A model's sizes, and which rank holds which tokens."""

    llama: NSALlamaConfig
    layout: SequenceLayout | None = None
    recompute: bool = False

    def update_from_config(self, config: Any) -> None:
        """Refuse what the model has no plan for, and lay the tokens out."""
        parallelism, recompute = config.parallelism, config.activation_checkpoint
        expected: dict[str, tuple[Any, list[Any]]] = {
            "parallelism.pipeline_parallel_degree": (parallelism.pipeline_parallel_degree, [1]),
            "parallelism.expert_parallel_degree": (parallelism.expert_parallel_degree, [1]),
            "compile.enable": (config.compile.enable, [False]),
        }
        if BEFORE_03:
            recompute = recompute.mode
            expected["model.converters"] = (config.model.converters, [[]])
        else:
            recompute = {type(None): "none", FullAC.Config: "full"}.get(type(recompute), recompute)
            expected["parallelism.spmd_backend"] = (parallelism.spmd_backend, ["partial_dtensor"])
            expected["training.disable_cuda_graphs"] = (config.training.disable_cuda_graphs, [True])
        expected["activation_checkpoint"] = (recompute, ["none", "full"])
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
                config.training.seq_len, parallelism.context_parallel_degree, ORDERS[balancer]
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

    def verify_module_protocol(self) -> None:
        """Pass: torchtitan 0.3 asks whether every module is of its own class."""

    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        """Logits of this rank's tokens; the layout gives their positions."""
        return super().forward(tokens, layout=self.layout)


def parallelize(
    model: NSALlama, parallel_dims: ParallelDims, training: Any, parallelism: Any, **_: Any
) -> NSALlama:
    """Context parallelism, tensor parallelism and FSDP2, in this order."""
    if parallel_dims.cp_enabled:
        for layer in model.model.layers:
            layer.self_attn.mesh = parallel_dims.get_mesh("cp")
    if parallel_dims.tp_enabled:
        tensor_parallel(model, parallel_dims.get_mesh("tp"))
    if parallel_dims.get_optional_mesh("fsdp") is None:  # 0.3 has one at one rank too
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
        "reshard_after_forward": parallelism.fsdp_reshard_after_forward != "never",
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

    def __init__(self, flavor: str, seq_len: int, local_batch_size: int, **given: Any) -> None:
        self.step, self.vocab_size = 0, FLAVORS[flavor].vocab_size
        self.rank, self.world = given["dp_rank"], given["dp_world_size"]
        self.size = (self.world * local_batch_size, seq_len // 2 + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.step)
            half = torch.randint(self.vocab_size, self.size, generator=generator)
            tokens = torch.cat([half, half[:, :-1]], 1).chunk(self.world)[self.rank]
            self.step += 1
            inputs = {"input": tokens[:, :-1]}
            if not BEFORE_03:
                inputs["positions"] = torch.arange(tokens.shape[1] - 1).expand_as(inputs["input"])
            yield inputs, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class FolderTrainer(Trainer):
    """torchtitan's trainer; after the last step it writes a folder for ``vllm serve``."""

    def train(self) -> None:
        super().train()
        folder = self.job_config.job.dump_folder if BEFORE_03 else self.config.dump_folder
        self.model_parts[0].save_pretrained(Path(folder) / "model")


# What follows tells torchtitan of the model: 0.2.2 reads the settings from a TOML file, 0.3 from
# a function of this module.
if BEFORE_03:
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

    register_train_spec(
        "nsa_llama",
        TrainSpec(
            model_cls=NSALlama,
            model_args={name: NSALlamaArgs(llama=llama) for name, llama in FLAVORS.items()},
            parallelize_fn=lambda model, parallel_dims, job: parallelize(
                model, parallel_dims, job.training, job.parallelism
            ),
            pipelining_fn=None,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=lambda job_config, **given: CopyTask(
                job_config.model.flavor, **vars(job_config.training), **given
            ),
            build_tokenizer_fn=None,
            build_loss_fn=build_cross_entropy_loss,
        ),
    )
else:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.protocols.model import BaseModel
    from torchtitan.protocols.model_spec import ModelSpec

    @dataclass(kw_only=True, slots=True)
    class ModelConfig(NSALlamaArgs, BaseModel.Config):
        def build(self) -> NSALlama:
            return NSALlama(self)

    @dataclass(kw_only=True, slots=True)
    class NoTokenizer(BaseTokenizer.Config):
        def build(self, **_: Any) -> None: ...

    @dataclass(kw_only=True, slots=True)
    class CopyTaskConfig(BaseDataLoader.Config):
        flavor: str

        def build(self, **given: Any) -> CopyTask:
            return CopyTask(self.flavor, **given)

    @dataclass(kw_only=True, slots=True)
    class JobConfig(Trainer.Config):
        def build(self) -> FolderTrainer:
            return FolderTrainer(self)

    def job(flavor: str) -> JobConfig:
        model = ModelConfig(llama=FLAVORS[flavor])
        return JobConfig(
            model_spec=ModelSpec("nsa_llama", flavor, model, parallelize, None, None, None),
            tokenizer=NoTokenizer(),
            dataloader=CopyTaskConfig(flavor=flavor),
            training=TrainingConfig(seq_len=16384, steps=100, disable_cuda_graphs=True),
            optimizer=default_adamw(lr=1e-3),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            activation_checkpoint=FullAC.Config(),
            loss=CrossEntropyLoss.Config(),
        )

    small, llama_8b = (partial(job, flavor) for flavor in FLAVORS)

if __name__ == "__main__":
    main(FolderTrainer) if BEFORE_03 else main()
