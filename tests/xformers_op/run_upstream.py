"""Run xFormers' own attention tests with SparseK's operator pair in place of its operators.

    python tests/xformers_op/run_upstream.py PATH_TO_XFORMERS_CHECKOUT [pytest arguments]

The checkout supplies ``tests/test_mem_eff_attention.py`` (v0.0.35 is what SparseK is tested with),
which runs unmodified: the lists ``ALL_FW_OPS`` and ``ALL_BW_OPS`` of the installed xFormers are
replaced in place before it is collected.  Without ``-k`` the functions of ``FUNCTIONS`` run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = (
    "test_forward",
    "test_logsumexp",
    "test_backward",
    "test_lowlevel_api_shapes",
    "test_grad_checkpointing",
    "test_empty_tensors",
    "test_attn_bias",
    "test_window_size",
    "test_local_attn",
)
GPU_FUNCTIONS = (
    "test_forward_gqa",
    "test_custom_scale",
    "test_cuda_streams",
    "test_unsupported_stride_",
)


def _expression() -> str:
    """``-k`` expression of the listed functions, without others whose names contain theirs."""
    import torch

    wanted = FUNCTIONS + (GPU_FUNCTIONS if torch.cuda.is_available() else ())
    unwanted = ("test_forward_splitk", "test_logsumexp_mqa", "test_backward_gqa")
    return f"({' or '.join(wanted)}) and not ({' or '.join(unwanted)})"


def main(arguments: list[str]) -> int:
    """Collect and run; returns pytest's exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    checkout = Path(arguments[0]).resolve()
    file = checkout / "tests" / "test_mem_eff_attention.py"
    if not file.is_file():
        print(f"{file}: not found; expected a checkout of facebookresearch/xformers")
        return 2
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    from xformers.ops import fmha

    from sparsek_backend.xformers_op import BwOp, FwOp

    fmha.ALL_FW_OPS[:] = [FwOp]
    fmha.ALL_BW_OPS[:] = [BwOp]
    extra = arguments[1:]
    if "-k" not in extra:
        extra = ["-k", _expression(), *extra]
    return int(pytest.main([str(file), f"--rootdir={checkout}", "-p", "no:cacheprovider", *extra]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
