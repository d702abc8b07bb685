"""One layer's pages, the maps that compress its keys and values, and the sizes that are served."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsek_kernels.checks import check_tensor
from sparsek_kernels.common.operators import make_contiguous
from sparsek_kernels.nsa.compress.mlp import PhiWeights
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.paged.policy import CELL_SIZE


@dataclass(frozen=True)
class NSAPages:
    """Views of one layer's cache, any strides with a contiguous last dimension.

    Args:
        k_raw: ``[pages, Hkv, page_size, D]`` keys that are compressed.
        v_raw: values that are compressed.
        k_slc: keys of the selected branch, rotated.
        v_slc: values of the selected branch.
        k_swa: keys of the sliding branch, rotated.
        v_swa: values of the sliding branch.
        k_cmp: ``[pages, Hkv, page_size / cmp_stride, D]`` compressed keys, rotated: row ``i``
            belongs to the block that ends in the page's stride ``i``.
        v_cmp: compressed values, in the same rows.
    """

    k_raw: torch.Tensor
    v_raw: torch.Tensor
    k_slc: torch.Tensor
    v_slc: torch.Tensor
    k_swa: torch.Tensor
    v_swa: torch.Tensor
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor

    @property
    def num_kv_heads(self) -> int:
        """KV heads of each branch."""
        return int(self.k_slc.shape[1])

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.k_slc.shape[2])

    def check(self) -> None:
        """Check that the views belong together."""
        shape, device = tuple(self.k_slc.shape), self.k_slc.device
        dtype = (self.k_slc.dtype,)
        for name in ("k_raw", "v_raw", "k_slc", "v_slc", "k_swa", "v_swa"):
            check_tensor(name, getattr(self, name), shape, dtype, device)
        rows = (shape[0], shape[1], self.k_cmp.shape[2], shape[3])
        for name in ("k_cmp", "v_cmp"):
            check_tensor(name, getattr(self, name), rows, dtype, device)


@dataclass(frozen=True)
class Compression:
    """How a layer makes compressed keys and values.

    Args:
        phi_k: the learnable map of keys; the block mean when ``None``.
        phi_v: the learnable map of values, as wide as that of keys; ``None`` with it.
        rope_freqs: ``[D / 2]`` fp32 of the rotary embedding; ``None`` leaves positions out.
        rotated_keys: the pages hold rotated keys (one K and V for all branches), which are
            rotated back before they are compressed.
    """

    phi_k: PhiWeights | None
    phi_v: PhiWeights | None
    rope_freqs: torch.Tensor | None
    rotated_keys: bool = False

    def __post_init__(self) -> None:
        widths = [None if x is None else x.w1.shape[1] for x in (self.phi_k, self.phi_v)]
        if widths[0] != widths[1]:
            raise ValueError(
                f"phi_v: expected a hidden layer as wide as that of phi_k, {widths[0]}, "
                f"got {widths[1]}"
            )
        # Such as the transpose of a linear layer's weight: kernels read rows side by side.
        for name in ("phi_k", "phi_v"):
            phi = getattr(self, name)
            if phi is not None:
                rows = PhiWeights(*(x.contiguous() for x in phi))
                object.__setattr__(self, name, rows)
        make_contiguous(self, "rope_freqs")

    @cached_property
    def constants(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``vec(position) W1 + b1`` of keys and of values, fp32 (arXiv 2502.11089, equation 7)."""
        key, value = (
            None if phi is None else (phi.position.reshape(1, -1) @ phi.w1 + phi.b1)[0].float()
            for phi in (self.phi_k, self.phi_v)
        )
        return key, value

    def keep_addresses(self, before: Compression) -> None:
        """Copy the constants to the addresses of an earlier compression's.

        Steps that a CUDA graph holds read them there.
        """
        for kept, new in zip(before.constants, self.constants, strict=True):
            if kept is not None and new is not None:
                with torch.inference_mode():  # whatever mode they were made in
                    kept.copy_(new)
        object.__setattr__(self, "constants", before.constants)


def check_paged_spec(spec: NSASpec, page_size: int) -> None:
    """Check that a layer can be served from pages of ``page_size`` tokens.

    Its sizes nest, and the forced blocks have the query's own and leave some to choose.
    """
    size = spec.sel_block_size
    if page_size % spec.cmp_stride:
        raise ValueError(
            f"cmp_stride: expected a divisor of the KV page of {page_size} tokens, "
            f"got {spec.cmp_stride}"
        )
    if size % CELL_SIZE or (page_size % size and size % page_size):
        raise ValueError(
            f"sel_block_size: expected a multiple of {CELL_SIZE} that divides the KV page of "
            f"{page_size} tokens or is a multiple of it, got {size}"
        )
    if spec.num_local_blocks < 1:
        raise ValueError(f"num_local_blocks: expected at least 1, got {spec.num_local_blocks}")
    if spec.top_n <= spec.num_init_blocks + spec.num_local_blocks:
        raise ValueError(
            f"top_n: expected more than the {spec.num_init_blocks + spec.num_local_blocks} forced "
            f"blocks, got {spec.top_n}"
        )
