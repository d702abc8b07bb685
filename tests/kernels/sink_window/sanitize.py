"""The smallest and an odd-sized case of each kernel, for ``compute-sanitizer``.

compute-sanitizer --tool memcheck python tests/kernels/sink_window/sanitize.py

``racecheck`` reports two things that are ordered by means it does not follow: the memory through
which Triton hands arguments to the warps of ``warp_specialize`` (between full barriers), and
``lse`` and ``delta`` of the backward kernel, which a warp writes before it arrives at the mbarrier
that the readers wait for.
"""

from __future__ import annotations

import dataclasses

import torch

from sparsek_kernels.sink_window.config import ProblemShape, TileConfig, select_config
from tests.kernels.sink_window.cases import Case, kernels, make

CASES = [
    Case(1, 1, 1, 1, 64, dtype=torch.bfloat16, window=1, num_sink=1, sinks=True),
    Case(161, 193, 2, 1, 64, 2, dtype=torch.bfloat16, window=67, num_sink=5, sinks=True),
    Case(heads=2, dim=64, dtype=torch.bfloat16, lens=((0, 0), (33, 70), (130, 65)), window=20),
]

SMALL = [
    Case(1, 129, 1, 1, 64, dtype=torch.bfloat16, causal=False),
    Case(77, 450, 4, 2, 64, 2, dtype=torch.float16, sinks=True),
]

if __name__ == "__main__":
    for case in CASES:
        long = ProblemShape(
            1, 65536, 65536, case.heads, case.kv_heads, case.dim, case.num_sink, case.window,
            True, len(case.lens) or None,
        )  # fmt: skip
        selected = select_config(long, case.dtype, 90)
        hopper = dataclasses.replace(selected, hopper_forward=TileConfig(128, 128, 4, 2))
        portable = dataclasses.replace(selected, hopper_forward=None, hopper_backward=None)
        tensors = make(case, "cuda")
        for config in (portable, hopper):
            kernels(case, tensors, config)
        torch.cuda.synchronize()
        print(f"ran {case}", flush=True)
    for case in SMALL:
        kernels(case, make(case, "cuda"))
        torch.cuda.synchronize()
        print(f"ran {case}", flush=True)
