"""Native sparse attention of some queries of a rank, once what they attend has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple, cast

import torch

from sparsek_backend.distributed.calls import on_device
from sparsek_backend.distributed.nsa_plan import Group
from sparsek_backend.distributed.rows import take_rows
from sparsek_kernels import nsa_attention
from sparsek_kernels.nsa.spec import NSASpec

Pair = tuple[torch.Tensor, ...]  # keys and values


class NSASettings(NamedTuple):
    """Mask and scale."""

    spec: NSASpec
    window_size: int
    softmax_scale: float


@dataclass(frozen=True, eq=False)
class NSACall:
    """The queries of a group and what they attend, but for the keys of tokens."""

    settings: NSASettings  # mask and scale
    q: torch.Tensor  # the group's queries
    gates: tuple[torch.Tensor, ...]  # of the compressed, selected and sliding branch
    compressed: Pair  # compressed keys and values
    cu_seqlens: torch.Tensor | None  # offsets, where the group has several sequences

    @classmethod
    def of(
        cls,
        settings: NSASettings,
        group: Group,
        q: torch.Tensor,
        gates: tuple[torch.Tensor, ...],
        compressed: Pair,
    ) -> NSACall:
        """The call of a group, from all of the rank's queries and gates."""
        rows, *gates_of_rows = (take_rows(x, group.rows) for x in (q, *gates))
        offsets = group.cu_seqlens
        if offsets is not None:
            bound = rows.shape[1] // settings.spec.cmp_stride
            compressed = tuple(_padded(x, bound) for x in compressed)
        return cls(
            settings,
            rows,
            tuple(gates_of_rows),
            compressed,
            None if offsets is None else on_device(offsets, q.device),
        )

    def attend(self, keys: Pair, nearest: Pair) -> torch.Tensor:
        """The output, for K and V of all tokens before each query, and the window's."""
        out = nsa_attention(
            self.q,
            *keys,
            *self.gates,
            k_cmp=self.compressed[0],
            v_cmp=self.compressed[1],
            k_swa=nearest[0],
            v_swa=nearest[1],
            **asdict(self.settings.spec),
            window_size=self.settings.window_size,
            softmax_scale=self.settings.softmax_scale,
            cu_seqlens=self.cu_seqlens,
        )
        return cast(torch.Tensor, out)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows behind compressed blocks, up to the bound that packed calls have."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1]))
