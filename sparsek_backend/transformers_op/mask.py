"""The mask that Transformers builds for SparseK: a rule, written out when somebody reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function, eager_mask

from sparsek_backend.transformers_op.visibility import Packing, Visibility, visibility_of

_aten = torch.ops.aten
_COPIES = (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default)


_LATE = (
    "attention_mask: a SinkWindowCache that has dropped keys serves batches without padding and "
    "plain causal masks only; use equally long sequences or a DynamicCache"
)


class LazyMask(torch.Tensor):
    """The ``[B, 1, N, M]`` mask of eager attention, that knows its rule.

    SparseK's attention function reads the rule and no mask is ever made.  Any other operation on
    the tensor makes the mask and works on that: 0 where a key is seen, else the lowest number.
    Every model takes eager's mask, whatever it does with it.
    """

    _rule: Visibility
    _refused: str | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        rule: Visibility,
        shape: tuple[int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        refused: str | None = None,
    ) -> LazyMask:
        """Make the tensor; it has no storage.  ``refused`` says why no layer may use it."""
        batch, num_q, num_k = shape
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(
            cls, (batch, 1, num_q, num_k), dtype=dtype, device=device
        )
        mask._rule, mask._refused = rule.to(mask.device), refused
        return mask

    @property
    def rule(self) -> Visibility:
        """Which keys are seen.

        Raises:
            NotImplementedError: the mask is refused.
        """
        if self._refused is not None:
            raise NotImplementedError(self._refused)
        return self._rule

    def seen(self) -> torch.Tensor:
        """The rule written out: ``[B, 1, N, M]`` bool."""
        batch, _, num_q, num_k = self.shape
        return self.rule.mask(batch, num_q, num_k, self.device)

    @cached_property
    def written(self) -> torch.Tensor:
        """The mask written out."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(self.seen(), zero, torch.finfo(self.dtype).min)

    @property
    def holds(self) -> bool:
        """Whether the mask is the rule's: nobody can have changed what was written out."""
        return "written" not in vars(self) or (not self.is_inference() and self._version == 0)

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
        return f"LazyMask({tuple(self.shape)}, {self._rule})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Carry the rule to copies; run everything else on the mask written out."""
        kwargs = kwargs or {}
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        if func in _COPIES and (dtype is None or dtype.is_floating_point) and args[0].holds:
            mask = args[0]
            batch, _, num_q, num_k = mask.shape
            shape = batch, num_q, num_k
            return LazyMask(mask.rule, shape, device or mask.device, dtype or mask.dtype)
        args, kwargs = tree_map_only(LazyMask, lambda mask: mask.written, (args, kwargs))
        return func(*args, **kwargs)


# A rule is made on the host, between compiled graphs.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def sparsek_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
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
        dtype: of the model's inputs.
        device: where the mask is.
        kwargs: the rest of what Transformers passes to mask functions.

    Returns:
        ``[batch_size, 1, q_length, kv_length]``: a :class:`LazyMask` for causal and bidirectional
        masks with padding, windows, chunks and packed texts; else eager attention's mask.

        Layers that use one over a cache that dropped keys raise a NotImplementedError if there is
        padding or it is not plainly causal.
    """
    rule = visibility_of(mask_function, kv_length, kv_offset)
    padding = attention_mask
    if padding is not None and padding.dim() == 2 and bool(padding.all()):
        padding = None
    late = q_offset + q_length - kv_offset - kv_length  # how far the last query is past the keys
    if isinstance(late, int) and late > 0 and not (rule and not rule.causal):
        if rule is None or not rule.is_plain_causal or padding is not None:
            # Some models make masks that no layer of theirs uses.
            shape = batch_size, q_length, kv_length
            return LazyMask(rule or Visibility(), shape, torch.device(device), dtype, _LATE)
        late = 0
    # A static cache has room for keys to come, so its last key is not the last query's.
    aligned = isinstance(late, int) and late == 0
    ordered = rule is not None and (rule.causal or rule.window_size is not None)
    known = padding is None or padding.dim() == 2
    if rule is not None and known and (aligned or not ordered):
        if padding is not None:
            padding = F.pad(padding, (0, max(kv_offset + kv_length - padding.shape[1], 0)))
            rule = replace(rule, real=padding[:, kv_offset : kv_offset + kv_length])
        return LazyMask(rule, (batch_size, q_length, kv_length), torch.device(device), dtype)
    full: torch.Tensor = eager_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        dtype=dtype,
        device=device,
        **kwargs,
    )
    return full
