"""The rotary embedding in one kernel against fp64, there and back."""

from __future__ import annotations

import torch

from sparsek_kernels.nsa.compress.launch_rotary import rotate_into
from sparsek_kernels.nsa.compress.rotary import rotary_frequencies, rotate
from tests.kernels.nsa.judge import Judge


def run_rotary(device: str) -> int:
    """Check sizes that fill no tile, strides, positions for all sequences and for each."""
    failed = 0
    for dtype in (torch.float32, torch.float16):
        for tokens, heads, dim in ((37, 3, 24), (5, 70, 128), (1, 1, 2)):
            torch.manual_seed(tokens)
            judge = Judge(f"rotary {tokens} {heads} {dim} {str(dtype)[6:]}")
            x = torch.randn(2, heads, tokens, 2 * dim).to(dtype)[..., ::2].transpose(1, 2)
            for positions in (torch.arange(tokens) * 17, torch.randint(-9, 9999, (2, tokens))):
                freqs = rotary_frequencies(dim, 10000.0)
                for sign in (1, -1):
                    plain = rotate(x, sign * positions, freqs)
                    exact = rotate(x.double(), sign * positions, freqs.double())
                    given = [t.to(device) for t in (x, positions, freqs)]
                    found = torch.empty(x.shape, dtype=dtype, device=device)
                    rotate_into(found, *given, sign)
                    judge.error(f"rotated by {sign}", found.cpu(), plain, exact)
            failed += judge.failed
    return failed
