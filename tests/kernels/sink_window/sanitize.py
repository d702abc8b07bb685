"""The smallest and an odd-sized case of each kernel, for ``compute-sanitizer``.

compute-sanitizer --tool memcheck python tests/kernels/sink_window/sanitize.py

``tests/kernels/sanitize.py`` says which reports of ``racecheck`` are explained.
"""

from __future__ import annotations

import dataclasses

import torch

from tests.kernels.sink_window.cases import Case, kernels, long_config, make

CASES = [
    Case(1, 1, 1, 1, 64, dtype=torch.bfloat16, window=1, num_sink=1, sinks=True),
    Case(161, 193, 2, 1, 64, 2, dtype=torch.bfloat16, window=67, num_sink=5, sinks=True),
    Case(heads=2, dim=64, dtype=torch.bfloat16, lens=((0, 0), (33, 70), (130, 65)), window=20),
    Case(161, 193, 4, 2, 128, 2, dtype=torch.bfloat16, window=67, sinks=True),
]

SMALL = [
    Case(1, 129, 1, 1, 64, dtype=torch.bfloat16, causal=False),
    Case(77, 450, 4, 2, 64, 2, dtype=torch.float16, sinks=True),
]

if __name__ == "__main__":
    for case in CASES:
        hopper = long_config(case, 90)
        portable = dataclasses.replace(hopper, hopper_forward=None, hopper_backward=None)
        tensors = make(case, "cuda")
        for config in (portable, hopper):
            kernels(case, tensors, config)
        torch.cuda.synchronize()
        print(f"ran {case}", flush=True)
    for case in SMALL:
        kernels(case, make(case, "cuda"))
        torch.cuda.synchronize()
        print(f"ran {case}", flush=True)
