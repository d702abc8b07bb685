"""SparseK as a Transformers attention implementation: ``attn_implementation="sparsek"``.

Importing this module registers it.  docs/drop_ins.md shows it in use.
"""

from __future__ import annotations

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "sparsek_backend.transformers_op needs Transformers 5: pip install 'sparsek-backend[eval]'"
    ) from error

from sparsek_backend.transformers_op.attention import sparsek_attention
from sparsek_backend.transformers_op.cache import SinkWindowCache
from sparsek_backend.transformers_op.mask import sparsek_mask
from sparsek_backend.transformers_op.policy import configure

__all__ = ["SinkWindowCache", "configure", "register", "sparsek_attention", "sparsek_mask"]

NAME = "sparsek"


def register() -> None:
    """Make ``attn_implementation="sparsek"`` known to Transformers; idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, sparsek_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sparsek_mask)


register()
