"""A Llama-shaped language model with native sparse attention, to train here and to serve in vLLM.

``vllm serve FOLDER --attention-backend SPARSEK`` and ``from_pretrained`` read the folder that
``save_pretrained`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sparsek_backend.distributed import SequenceLayout
from sparsek_backend.extras import needing
from sparsek_backend.nn.cache import NSACache, unchanged_on_error
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.nn.native_sparse_attention import NativeSparseAttention
from sparsek_backend.transformers_hook import MODEL_TYPE
from sparsek_backend.whole_file import write_whole
from sparsek_kernels.checks import check_int

ARCHITECTURE = "NSALlamaForCausalLM"
"""Under this name vLLM finds the model class that serves such a folder."""
_FIXED = {"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0.0}
"""Fields of Llama's configs that have one value here."""


@dataclass(frozen=True)
class NSALlamaConfig:
    """Sizes, under the names that they have in Hugging Face's Llama configs.

    Args:
        vocab_size: tokens of the vocabulary.
        hidden_size: elements of a token.
        intermediate_size: width of the MLP.
        num_hidden_layers: layers.
        num_attention_heads: query heads.
        num_key_value_heads: KV heads.
        head_dim: elements of a head.
        max_position_embeddings: longest sequence to be served.
        rms_norm_eps: added to the mean square.
        tie_word_embeddings: whether the embedding is the output head too.
        attention_bias: whether the projections of the attention have biases.
        nsa: settings of the attention.

    Raises:
        TypeError: a field of a wrong type.
        ValueError: a size below 1, or fewer than 0 layers; 0 are embedding and head alone.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    nsa: NSAConfig = field(default_factory=NSAConfig)

    def __post_init__(self) -> None:
        kinds: dict[Any, Any] = {"bool": bool, "float": int | float, "NSAConfig": NSAConfig}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "int":
                check_int(item.name, value, 0 if item.name == "num_hidden_layers" else 1)
            elif not isinstance(value, kinds[item.type]):
                raise TypeError(f"{item.name}: expected {item.type}, got {type(value).__name__}")

    def to_dict(self) -> dict[str, Any]:
        """``config.json`` of a checkpoint."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "hidden_act": "silu",
            **asdict(self),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NSALlamaConfig:
        """Read ``config.json`` of a checkpoint; what is no size of this model is not looked at.

        Raises:
            TypeError: a size, ``nsa`` or a field of it has a wrong type.
            ValueError: another architecture, activation, dropout or MLP than this model's, a field
                that is missing, or one that is no part of ``nsa`` or out of range.
        """
        if values.get("architectures") != [ARCHITECTURE]:
            raise ValueError(
                f"architectures: expected {[ARCHITECTURE]}, got {values.get('architectures')}"
            )
        for name, fixed in _FIXED.items():
            if values.get(name, fixed) != fixed:
                raise ValueError(
                    f"{name}: expected {fixed!r}, which is all that this model has, got "
                    f"{values[name]!r}"
                )
        known = {item.name: item for item in fields(cls)}
        optional = {name for name, item in known.items() if item.default is not MISSING}
        missing = sorted(known.keys() - optional - values.keys())
        if missing:
            raise ValueError(
                f"{missing[0]}: expected this field of a checkpoint's config, got none"
            )
        given = {name: values[name] for name in known if name in values}
        return cls(**{**given, "nsa": NSAConfig.from_dict(values["nsa"])})


class _MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: NSALlamaConfig) -> None:
        super().__init__()
        wide, narrow = config.intermediate_size, config.hidden_size
        self.gate_proj = nn.Linear(narrow, wide, bias=False)
        self.up_proj = nn.Linear(narrow, wide, bias=False)
        self.down_proj = nn.Linear(wide, narrow, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.down_proj(
            nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        )
        return mixed


class NSALlamaDecoderLayer(nn.Module):
    """RMSNorm and attention, RMSNorm and MLP, each added to its input."""

    def __init__(self, config: NSALlamaConfig, mesh: DeviceMesh | None) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = NativeSparseAttention(
            size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config=config.nsa,
            bias=config.attention_bias,
            mesh=mesh,
        )
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = _MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        cache: NSACache | None,
        compressed_only: torch.Tensor | None,
        layout: SequenceLayout | None,
    ) -> torch.Tensor:
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, cache=cache, compressed_only=compressed_only, layout=layout)
        mixed: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class NSALlamaModel(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, config: NSALlamaConfig, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=config.hidden_size**-0.5)
        self.layers = nn.ModuleList(
            NSALlamaDecoderLayer(config, mesh) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # Transformers sets both under these names.
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Callable[..., Any] = partial(
            checkpoint, use_reentrant=False
        )

    def new_caches(self, batch: int, max_len: int) -> list[NSACache]:
        """Empty caches of all layers for ``batch`` sequences of up to ``max_len`` tokens."""
        layers = [x for x in self.modules() if isinstance(x, NativeSparseAttention)]
        return [layer.new_cache(batch, max_len) for layer in layers]

    def forward(
        self,
        tokens: torch.Tensor,
        caches: Sequence[NSACache] | None = None,
        compressed_only: torch.Tensor | None = None,
        layout: SequenceLayout | None = None,
    ) -> torch.Tensor:
        """Normed states ``[B, N, hidden]``; see :meth:`NSALlamaForCausalLM.forward`."""
        if caches is not None and len(caches) != len(self.layers):
            raise ValueError(
                f"caches: expected one for each of {len(self.layers)} layers, got {len(caches)}"
            )
        recompute = self.gradient_checkpointing and self.training and caches is None
        x = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            inputs = (x, None if caches is None else caches[index], compressed_only, layout)
            x = self._gradient_checkpointing_func(layer, *inputs) if recompute else layer(*inputs)
        normed: torch.Tensor = self.norm(x)
        return normed


class CausalLMOutput(NamedTuple):
    """What the model gives where it is given labels."""

    loss: torch.Tensor  # mean over the tokens that have a label, fp32
    logits: torch.Tensor  # ``[B, N, vocab]``, of the next tokens


class NSALlamaForCausalLM(nn.Module):
    """RMSNorm, native sparse attention, SwiGLU; names of parameters as in Llama checkpoints.

    Args:
        config: sizes.
        mesh: ranks that share each sequence (context parallelism); one dimension.
    """

    def __init__(self, config: NSALlamaConfig, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.model = NSALlamaModel(config, mesh)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def new_caches(self, batch: int, max_len: int) -> list[NSACache]:
        """Empty caches of all layers for ``batch`` sequences of up to ``max_len`` tokens."""
        return self.model.new_caches(batch, max_len)

    def gradient_checkpointing_enable(self) -> None:
        """Keep the input of each layer alone in training; backward passes compute the rest anew."""
        self.model.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep what backward passes need."""
        self.model.gradient_checkpointing = False

    def forward(
        self,
        input_ids: torch.Tensor,
        caches: Sequence[NSACache] | None = None,
        compressed_only: torch.Tensor | None = None,
        layout: SequenceLayout | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor | CausalLMOutput:
        """Logits of the next tokens, and the loss of ``labels`` where there are some.

        Args:
            input_ids: ``[B, N]`` tokens.
            caches: earlier tokens, a cache for every layer, to which these are appended; after any
                error they are as they were.
            compressed_only: ``[B]`` bool, for training: see :class:`NativeSparseAttention`.
            layout: with a ``mesh``, which rank holds which tokens: see the same.
            labels: ``[B, N]`` tokens, ``input_ids`` as a rule and -100 for those without a loss;
                they are shifted here.

        Returns:
            ``[B, N, vocab]``, or with ``labels`` loss and logits.

        Raises:
            ValueError: more or fewer caches than layers, labels of another shape, or labels with a
                ``mesh``; see also :class:`NativeSparseAttention`.
        """
        if labels is not None:
            self._check_labels(labels, input_ids)
        with unchanged_on_error(caches or ()):
            states = self.model(input_ids, caches, compressed_only, layout)
            logits: torch.Tensor = self.lm_head(states)
        if labels is None:
            return logits
        rows, due = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return CausalLMOutput(nn.functional.cross_entropy(rows, due), logits)

    def _check_labels(self, labels: torch.Tensor, input_ids: torch.Tensor) -> None:
        if self.mesh is not None:
            raise ValueError(
                "labels: expected None with a mesh, got a tensor; a rank lacks the tokens that "
                "follow its own: take the loss of the logits"
            )
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"labels: expected shape {list(input_ids.shape)}, as input_ids, "
                f"got {list(labels.shape)}"
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` into ``folder``, made if it is missing.

        The weights of a sharded model (``fully_shard``, ``tensor_parallel``) are gathered one after
        another: all ranks call this, rank 0 writes, and the folder is complete when it returns.

        Raises:
            ImportError: safetensors is not installed.
        """
        save_file = _safetensors().save_file
        sharded = is_sharded(self)
        writes = not sharded or dist.get_rank() == 0
        state = gathered(self, writes)
        if self.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        try:
            if writes:
                folder = Path(folder)
                folder.mkdir(parents=True, exist_ok=True)
                # As a whole: a loaded model's weights may still lie in the file before it.
                write_whole(
                    folder / "model.safetensors",
                    lambda beside: save_file(state, beside, metadata={"format": "pt"}),
                )
                dtype = str(self.lm_head.weight.dtype).removeprefix("torch.")
                values = json.dumps({**self.config.to_dict(), "dtype": dtype}, indent=2)
                write_whole(folder / "config.json", lambda beside: beside.write_text(values + "\n"))
        finally:
            if sharded:
                dist.barrier()

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, mesh: DeviceMesh | None = None
    ) -> NSALlamaForCausalLM:
        """The model of a folder that :meth:`save_pretrained` wrote, on the CPU, in its dtype.

        Args:
            folder: ``config.json`` and ``model.safetensors``.
            mesh: ranks that share each sequence, as for the model.

        Raises:
            ImportError: safetensors is not installed.
            TypeError: a field of the config has a wrong type.
            ValueError: a file is missing, the config is no such model's, or the weights do
                not fit the config.
        """
        folder = Path(folder)
        load_file = _safetensors().load_file
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise ValueError(f"folder: expected {name} in it, got {str(folder)!r} without one")
        try:
            values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"config.json: expected JSON, got {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"config.json: expected an object, got {type(values).__name__}")
        with torch.device("meta"):
            model = cls(NSALlamaConfig.from_dict(values), mesh)
        try:
            state = load_file(folder / "model.safetensors")
        except Exception as error:  # the library's own error type is no public name
            raise ValueError(f"model.safetensors: expected that format, got {error}") from error
        if model.config.tie_word_embeddings and "model.embed_tokens.weight" in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        try:
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise ValueError(f"model.safetensors: expected its config's, got {error}") from error
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model


def is_sharded(model: nn.Module) -> bool:
    """Whether several ranks hold parts of the weights (``fully_shard``, ``tensor_parallel``)."""
    return any(isinstance(x, DTensor) for x in model.parameters())


def gathered(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Whole weights on the CPU, branch by branch, of a model that may be sharded.

    All ranks that hold parts call this, for one tensor after another; those that do not ``keep``
    what they find return nothing.
    """
    attention = {
        _plain(name): x for name, x in model.named_modules() if isinstance(x, NativeSparseAttention)
    }
    state = {}
    for wrapped, x in model.state_dict().items():
        name, whole = _plain(wrapped), _whole(x.detach())
        path, _, parameter = name.partition(".self_attn.")
        layer = attention.get(f"{path}.self_attn")
        if layer is not None and layer.head_major:
            if parameter == "stacked_by_head":
                continue
            whole = layer.restacked(parameter, whole)
        if keep:
            state[name] = whole.cpu().contiguous()
    return state


def _plain(name: str) -> str:
    """A name without the wrappers of ``torch.compile`` and activation checkpointing."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module")
    return ".".join(x for x in name.split(".") if x not in wrappers)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded, for which every rank calls this."""
    if not isinstance(x, DTensor):
        return x
    shard: Any = x.to(x.device_mesh.device_type)  # offloaded shards go back first
    whole: torch.Tensor = shard.full_tensor()
    return whole


def _safetensors() -> Any:
    with needing("weights on disk need safetensors", extra="train"):
        import safetensors.torch
    return safetensors.torch
