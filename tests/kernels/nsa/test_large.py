"""NSA on tensors of more than 2**31 elements: offsets do not wrap."""

from __future__ import annotations

import pytest
import torch

from sparsek_kernels import nsa_attention
from sparsek_kernels.nsa.reference import nsa_reference  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
