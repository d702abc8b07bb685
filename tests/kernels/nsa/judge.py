"""Verdicts on kernels, a printed line each."""

from __future__ import annotations

import torch


class Judge:
    """Collects verdicts: errors against fp64 at most twice those of torch in the same dtype."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.failed = 0

    def error(
        self, what: str, ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor
    ) -> None:
        live = exact.isfinite()
        same = torch.equal(live, ours.isfinite().to(live.device))
        ours, plain, exact = (x.double()[live] for x in (ours, plain, exact))
        size = float(exact.square().mean().sqrt()) if exact.numel() else 0.0
        floor = 2e-6 * (size + 1e-3)
        rms, bound = (
            float((x - exact).square().mean().sqrt()) if exact.numel() else 0.0
            for x in (ours, plain)
        )
        worst, limit = (
            float((x - exact).abs().max()) if exact.numel() else 0.0 for x in (ours, plain)
        )
        good = same and rms <= 2 * bound + floor and worst <= 3 * limit + 20 * floor
        self.say(good, what, f"rms {rms:.2e} (torch {bound:.2e}) max {worst:.2e} ({limit:.2e})")

    def say(self, good: bool, what: str, detail: str) -> None:
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {self.case:22} {what:24} {detail}", flush=True)
