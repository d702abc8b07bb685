"""A KV cache that keeps sinks and a window: bounded memory, however long the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from sparsek_backend.transformers_op.policy import layers_of, settings_of, text_config

_PROBE = 37
"""Position at which a layer's keys are compared with its keys at position 0."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """How a layer's keys turn with their position.

    Args:
        module: where the frequencies are; ``None`` where keys do not turn.
        name: of the buffer ``[rotary_dim / 2]``, which some models change as texts grow.
        interleaved: whether a frequency turns dimensions ``2i`` and ``2i + 1`` (GPT-J, GLM, Cohere)
            instead of ``i`` and ``i + rotary_dim / 2`` (Llama).
    """

    module: torch.nn.Module | None = None
    name: str = ""
    interleaved: bool = False

    @property
    def inv_freq(self) -> torch.Tensor | None:
        """The frequencies now."""
        return None if self.module is None else self.module.get_buffer(self.name)

    def __deepcopy__(self, memo: object) -> Rotary:
        """Copies of a cache follow the model."""
        return self


_STILL = Rotary()


class SinkWindowLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's first ``num_sink`` and last ``window_size - 1`` keys and values.

    ``update`` returns sinks, window and the new tokens, so that attention over them with the
    same ``num_sink`` and ``window_size`` is exactly attention over the whole text.

    With ``rotary``, sinks follow the window: their rotary position is moved forward by as many
    tokens as were dropped, so that no query sees a key farther away than the cache is long
    (Xiao et al., arXiv 2309.17453, section 3.2: positions within the cache).

    Args:
        num_sink: leading tokens to keep.
        window_size: latest tokens that a query sees, its own included.
        rotary: how keys turn; by default they stay as they are.
    """

    is_croppable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, num_sink: int, window_size: int, rotary: Rotary = _STILL) -> None:
        super().__init__()
        self.num_sink = num_sink
        self.window_size = window_size
        self.rotary = rotary
        self.cumulative_length = 0
        self._sink_keys: torch.Tensor | None = None  # as they came

    @property
    def held(self) -> int:
        """Tokens in the cache now."""
        return min(self.cumulative_length, self.num_sink + self.window_size - 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B, H, N, D]`` states; returns what the new tokens attend."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        self.cumulative_length += key_states.shape[-2]
        if self._sink_keys is None or self._sink_keys.shape[-2] < self.num_sink:
            self._sink_keys = keys[..., : self.num_sink, :].clone()
        excess = keys.shape[-2] - (self.num_sink + self.window_size - 1)
        if excess <= 0:
            self.keys, self.values = keys, values
            return keys, values
        first = self.num_sink + excess
        dropped = self.cumulative_length - self.num_sink - self.window_size + 1
        sinks = self._moved(dropped)
        self.keys = torch.cat([sinks, keys[..., first:, :]], dim=-2)
        self.values = torch.cat([values[..., : self.num_sink, :], values[..., first:, :]], dim=-2)
        return keys, values

    def _moved(self, distance: int) -> torch.Tensor:
        """The sinks' keys, ``distance`` positions later."""
        keys = self._sink_keys
        if keys is None:
            raise RuntimeError("SinkWindowLayer: expected update() before its keys are moved")
        inv_freq = self.rotary.inv_freq
        if inv_freq is None or distance == 0:
            return keys
        return rotate(keys, distance, inv_freq, self.rotary.interleaved)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next ``update`` returns for ``query_length`` tokens, and offset 0."""
        return self.held + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen so far: what the position of the next token is counted from."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Most tokens that the layer holds."""
        return self.num_sink + self.window_size - 1

    def get_max_cache_shape(self) -> int:
        """:meth:`get_max_length` by its name before Transformers 5.16."""
        return self.get_max_length()

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = torch.empty(0)
        self.is_initialized = False
        self.cumulative_length = 0
        self._sink_keys = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Follow the beams."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        if self._sink_keys is not None:
            self._sink_keys = self._sink_keys.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of ``indices``."""
        super().batch_select_indices(indices)
        self._select(indices)

    def _select(self, indices: torch.Tensor) -> None:
        if self._sink_keys is not None:
            self._sink_keys = self._sink_keys[indices.to(self._sink_keys.device)]

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: dropped keys cannot come back."""
        if tokens_to_remove:
            raise NotImplementedError(
                "SinkWindowCache: tokens cannot be taken back (speculative and contrastive "
                "decoding need that); use a DynamicCache"
            )


class SinkWindowCache(Cache):  # type: ignore[misc]
    """``past_key_values`` of constant size for a model in sink-window mode.

    Args:
        model: a Transformers model with ``attn_implementation="sparsek"``, configured with
            ``mode="sink_window", dense_below=0`` and no dense layers: its ``num_sink`` and
            ``window_size`` are the cache's.
        move_sinks: let the sinks follow the window (see :class:`SinkWindowLayer`), which texts
            longer than the model's training context need.  How a layer turns its keys is measured
            with two passes over one token; layers that do not turn them keep their sinks as they
            are.

    Raises:
        NotImplementedError: the model's layers call no attention function of Transformers.
        ValueError: the model has another ``attn_implementation``, is in another mode, has layers
            that attend more than the cache keeps, or turns keys in a way that is not known here.
    """

    def __init__(self, model: torch.nn.Module, *, move_sinks: bool = True) -> None:
        config = text_config(model.config)
        settings = settings_of(config)
        if settings.mode != "sink_window":
            raise ValueError(
                f"model: expected mode 'sink_window', got {settings.mode!r}; call "
                "configure(model, mode='sink_window', num_sink=..., window_size=..., dense_below=0)"
            )
        layers = config.num_hidden_layers
        if settings.dense_below or any(settings.is_dense_layer(i) for i in range(layers)):
            raise ValueError(
                "model: expected dense_below=0 and no dense layers with a bounded cache, got "
                f"dense_below={settings.dense_below}, dense_layers={settings.dense_layers}"
            )
        types = set(getattr(config, "layer_types", None) or ["full_attention"])
        types |= {reason for reason in layers_of(model).values() if reason is not None}
        if types != {"full_attention"}:
            raise ValueError(f"model: expected full_attention layers only, got {sorted(types)}")
        rotaries = _rotaries(model) if move_sinks else [_STILL] * layers
        super().__init__(
            layers=[
                SinkWindowLayer(settings.num_sink, settings.window_size, rotary)
                for rotary in rotaries
            ]
        )


def rotate(
    keys: torch.Tensor, distance: int, inv_freq: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Keys ``[..., D]`` with rotary embedding, moved forward by ``distance`` positions."""
    angle = distance * inv_freq.to(device=keys.device, dtype=torch.float32).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    width = 2 * len(angle)
    pairs = keys[..., :width].float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    moved = [first * cos - second * sin, second * cos + first * sin]
    turned = torch.stack(moved, dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat([turned.to(keys.dtype), keys[..., width:]], dim=-1)


@torch.no_grad()
def _rotaries(model: torch.nn.Module) -> list[Rotary]:
    """Every layer's rotary embedding, found by trying them.

    One token alone attends itself wherever it stands, so its keys at two positions differ by the
    rotary embedding and nothing else, and its values do not differ.
    """
    held = []
    training = [module for module in model.modules() if module.training]
    model.eval()  # dropout would change states, and activation checkpointing takes no cache
    try:
        for position in (0, _PROBE):
            cache, embeddings = DynamicCache(), cast(Any, model).get_input_embeddings().weight
            ids = torch.full((1, 1), embeddings.shape[0] // 2, device=embeddings.device)
            model(ids, position_ids=torch.full_like(ids, position), past_key_values=cache)
            held.append(cache.layers)
    finally:
        for module in training:
            module.training = True
    known = [_STILL]
    for path, _ in model.named_buffers():
        owner, _, name = path.rpartition(".")
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
            module = model.get_submodule(owner)
            known += [Rotary(module, name), Rotary(module, name, interleaved=True)]
    found = []
    for index, (before, after) in enumerate(zip(*held, strict=True)):
        fits = [x for x in known if _turns(before.keys, after.keys, x)]
        if not fits or not _turns(before.values, after.values, _STILL):
            raise ValueError(
                f"move_sinks: expected cached keys turned by a rotary embedding of the model, got "
                f"others in layer {index}; pass move_sinks=False"
            )
        found.append(fits[0])
    return found


def _turns(before: torch.Tensor, after: torch.Tensor, rotary: Rotary) -> bool:
    """Whether a rotary embedding turns states of position 0 into states of position ``_PROBE``."""
    inv_freq = rotary.inv_freq
    if inv_freq is not None:
        if 2 * len(inv_freq) > before.shape[-1]:
            return False
        before = rotate(before, _PROBE, inv_freq, rotary.interleaved)
    error = (before.float() - after.float()).norm()
    tolerance = max(4 * torch.finfo(before.dtype).eps, 1e-4)
    return bool(error <= tolerance * after.float().norm())
