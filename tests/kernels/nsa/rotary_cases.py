"""The rotary embedding in one kernel against fp64, there and back, however far heads lie apart."""

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
    return failed + _run_far_heads(device)


def _run_far_heads(device: str) -> int:
    """Heads more than 2^31 elements apart, of memory that is hardly touched."""
    judge = Judge("rotary of far heads")
    apart = (1 << 30) + 64
    memory = torch.empty(2 * apart + 128, dtype=torch.float16, device=device)
    x = memory.as_strided((1, 2, 3, 64), (0, 64, apart, 1)).copy_(torch.randn(1, 2, 3, 64))
    positions, freqs = torch.arange(2), rotary_frequencies(64, 10000.0)
    found = torch.empty(x.shape, dtype=x.dtype, device=device)
    rotate_into(found, x, positions.to(device), freqs.to(device), 1)
    plain, exact = (rotate(given, positions, freqs) for given in (x.cpu(), x.cpu().double()))
    judge.error("rotated", found.cpu(), plain, exact)
    return judge.failed
