"""The mask that Transformers builds for SparseK: a rule, written out when somebody reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function, sdpa_mask

from sparsek_backend.transformers_op.visibility import Packing, Visibility, visibility_of

_aten = torch.ops.aten

_COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}
"""Layer types whose code extends an additive mask, which a boolean one would turn around."""


class LazyMask(torch.Tensor):
    """A ``[B, 1, N, M]`` bool mask that knows its rule.

    SparseK's attention function reads the rule and no mask is ever made.  Any other operation on
    the tensor makes the mask and works on that, so a model may do with it what it does with SDPA's.
    Adding it to scores masks them, as adding eager attention's mask does: some models have layers
    that do so whatever the implementation is.

    Args:
        rule: the keys that every query sees.
        shape: sequences, queries and keys.
        device: where the mask is, if it is made.
    """

    rule: Visibility
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, rule: Visibility, shape: tuple[int, int, int], device: torch.device
    ) -> LazyMask:
        """Make the tensor; it has no storage."""
        batch, num_q, num_k = shape
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(
            cls, (batch, 1, num_q, num_k), dtype=torch.bool, device=device
        )
        mask.rule = rule.to(mask.device)
        return mask

    def dense(self) -> torch.Tensor:
        """The mask written out."""
        batch, _, num_q, num_k = self.shape
        return self.rule.mask(batch, num_q, num_k, self.device)

    @cached_property
    def packing(self) -> Packing | None:
        """:meth:`Visibility.packing`, worked out once for all layers."""
        batch, _, num_q, num_k = self.shape
        return self.rule.packing(batch, num_q, num_k, self.device)

    @cached_property
    def has_holes(self) -> bool:
        """:attr:`Visibility.has_holes`, worked out once for all layers."""
        return self.rule.has_holes

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The shape and the rule."""
        return f"LazyMask({tuple(self.shape)}, {self.rule})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Carry the rule to copies; run everything else on the mask written out."""
        kwargs = kwargs or {}
        copies = func in (_aten.detach.default, _aten.alias.default, _aten.clone.default)
        moves = func is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool)
        if copies or moves:
            mask = args[0]
            batch, _, num_q, num_k = mask.shape
            return LazyMask(mask.rule, (batch, num_q, num_k), kwargs.get("device") or mask.device)
        if func in (_aten.add.Tensor, _aten.add_.Tensor):
            scores = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
            if scores:
                lowest = torch.finfo(scores[0].dtype).min
                args = tree_map_only(
                    LazyMask, lambda x: scores[0].new_zeros(()).where(x.dense(), lowest), args
                )
        args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs))
        return func(*args, **kwargs)


# A rule is made on the host, between compiled graphs.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def sparsek_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    cache_position: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The mask of one kind of layer, as a rule where kernels may serve it.

    Args:
        batch_size: sequences.
        q_length: new tokens.
        kv_length: keys, cached ones included.
        q_offset: position of the first new token.
        kv_offset: position of the first key.
        mask_function: Transformers' rule for one query and key.
        attention_mask: ``[batch_size, tokens]`` bool, False marks padding.
        allow_is_causal_skip: unused, because a rule is always returned instead of ``None``.
        allow_is_bidirectional_skip: unused for the same reason.
        config: the model's configuration, whose ``layer_types`` count.
        device: where the mask is; with ``cache_position``, its device.
        cache_position: positions of the new tokens, from Transformers that pass these instead of
            ``q_length`` and ``q_offset`` (before 5.5).
        kwargs: the rest of what Transformers passes to mask functions.

    Returns:
        ``[batch_size, 1, q_length, kv_length]`` bool: a :class:`LazyMask` for causal and
        bidirectional masks with padding, windows, chunks and packed texts; else SDPA's mask.

    Raises:
        NotImplementedError: padding, or a mask that is not plainly causal, over a cache that
            dropped keys; or a model that attends compressed keys beside its tokens.
    """
    compressed = _COMPRESSED.intersection(getattr(config, "layer_types", None) or ())
    if compressed:
        raise NotImplementedError(
            f"model: layers of {' and '.join(sorted(compressed))} put compressed keys beside the "
            "tokens, which attn_implementation='sparsek' does not support; use 'eager'"
        )
    queries = {"q_length": q_length, "q_offset": q_offset}
    if cache_position is not None:
        queries = {"cache_position": cache_position}
        q_length, q_offset = cache_position.shape[0], int(cache_position[0])
        device = cache_position.device
    elif q_length is None:
        raise TypeError("q_length: expected an integer where cache_position is not given")
    rule = visibility_of(mask_function, kv_length, kv_offset)
    padding = attention_mask
    if padding is not None and padding.dim() == 2 and bool(padding.all()):
        padding = None
    late = q_offset + q_length - kv_offset - kv_length  # how far the last query is past the keys
    if isinstance(late, int) and late > 0 and not (rule and not rule.causal):
        if rule is None or not rule.is_plain_causal or padding is not None:
            raise NotImplementedError(
                "attention_mask: a SinkWindowCache that has dropped keys serves batches without "
                "padding and plain causal masks only; use equally long sequences or a DynamicCache"
            )
        late = 0
    # A static cache has room for keys to come, so its last key is not the last query's.
    aligned = isinstance(late, int) and late == 0
    ordered = rule is not None and (rule.causal or rule.window_size is not None)
    known = padding is None or padding.dim() == 2
    if rule is not None and known and (aligned or not ordered):
        if padding is not None:
            padding = F.pad(padding, (0, max(kv_offset + kv_length - padding.shape[1], 0)))
            rule = replace(rule, real=padding[:, kv_offset : kv_offset + kv_length])
        return LazyMask(rule, (batch_size, q_length, kv_length), torch.device(device))
    # Without its own skip: SDPA reads "no mask" over a longer static cache as aligned to the left.
    full: torch.Tensor = sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        **queries,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device=device,
        **kwargs,
    )
    return full
