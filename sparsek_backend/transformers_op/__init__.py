"""SparseK as a Transformers attention implementation: ``attn_implementation="sparsek"``.

Importing this module registers it.  docs/drop_ins.md shows it in use.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "sparsek_backend.transformers_op needs Transformers 5: pip install 'sparsek-backend[eval]'"
    ) from error

from sparsek_backend.transformers_op.attention import sparsek_attention
from sparsek_backend.transformers_op.cache import SinkWindowCache
from sparsek_backend.transformers_op.layers import NAME, refuse_class
from sparsek_backend.transformers_op.mask import sparsek_mask
from sparsek_backend.transformers_op.policy import configure

__all__ = ["SinkWindowCache", "configure", "register", "sparsek_attention", "sparsek_mask"]


def register() -> None:
    """Make ``attn_implementation="sparsek"`` known to Transformers; idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, sparsek_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sparsek_mask)


def _refuse_at_load() -> None:
    """Let Transformers refuse models whose layers would not call SparseK, when it makes them."""
    check = PreTrainedModel.get_correct_attn_implementation

    @wraps(check)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention == NAME:
            refuse_class(type(self))
        return check(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = checked


register()
_refuse_at_load()
