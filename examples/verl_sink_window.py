"""Sinks and a window for the models that verl trains, in place of its Ulysses attention.

    export VERL_USE_EXTERNAL_MODULES=verl_sink_window        # this folder is in PYTHONPATH
    export SPARSEK_NUM_SINK=64 SPARSEK_WINDOW_SIZE=4096
    python -m verl.trainer.main_ppo ... actor_rollout_ref.actor.ulysses_sequence_parallel_size=4

verl spreads each stream of packed sequences over the ranks of a group.  Its Ulysses attention then
exchanges all tokens by heads, so that heads bound the ranks.  Here tokens stay: each rank fetches
the sinks and the ``window - 1`` keys before its own, and any number of ranks will do.

``verl.models.transformers.monkey_patch.apply_monkey_patch`` puts its function
``_ulysses_flash_attention_forward`` into Transformers; ``install`` replaces that function.  Losses
and FSDP stay verl's: a weight's gradient is the share of the rank's tokens, as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek_backend.distributed import SequenceLayout, context_parallel_sink_flash_attention
from sparsek_kernels import sink_flash_attention

Group = Callable[[], dist.ProcessGroup | None]


class SinkWindowAttention:
    """What Transformers calls as ``_flash_attention_forward``.

    Args:
        num_sink: leading tokens of each sequence that every later token sees.
        window_size: latest tokens that a token sees, its own included.
        group: says which ranks share the stream; ``None`` where there is one.
    """

    def __init__(self, num_sink: int, window_size: int, group: Group) -> None:
        self._mask = {"num_sink": num_sink, "window_size": window_size}
        self._group = group
        self._edges: Any = WeakTensorKeyDictionary()  # of the position ids, which all layers share

    def edges(self, position_ids: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[int, ...]:
        """Offsets of the packed sequences in the whole stream."""
        if position_ids not in self._edges:
            parts = [position_ids]
            if group is not None:
                parts = [torch.empty_like(position_ids) for _ in range(group.size())]
                dist.all_gather(parts, position_ids.contiguous(), group=group)
            whole = torch.cat(parts, dim=-1).flatten()
            starts = (whole == 0).nonzero().flatten().tolist()
            self._edges[position_ids] = (*sorted({0, *starts}), len(whole))
        found: tuple[int, ...] = self._edges[position_ids]
        return found

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        query_length: int,
        *,
        position_ids: torch.Tensor | None = None,
        is_causal: bool = True,
        dropout: float = 0.0,
        softcap: float | None = None,
        softmax_scale: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attention ``[1, n, Hq, D]`` of this rank's tokens ``[1, n, H, D]``.

        Raises:
            NotImplementedError: padding, several rows, soft caps, dropout or no causality.
        """
        if attention_mask is not None or position_ids is None or query.shape[0] != 1:
            raise NotImplementedError(
                "position_ids: expected one packed stream without padding; set "
                "actor_rollout_ref.model.use_remove_padding=True"
            )
        if dropout or softcap or not is_causal:
            raise NotImplementedError(
                "dropout, softcap, is_causal: expected causal attention without the other two"
            )
        group = self._group()
        edges = self.edges(position_ids, group)
        options = {**self._mask, "sinks": s_aux, "softmax_scale": softmax_scale}
        if group is None:
            offsets = torch.tensor(edges, dtype=torch.int32, device=query.device)
            options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
            out: Any = sink_flash_attention(query, key, value, **options)
            return out
        mesh = DeviceMesh.from_group(group, query.device.type)
        layout = SequenceLayout(edges[-1], group.size(), "contiguous", edges)
        out = context_parallel_sink_flash_attention(
            query, key, value, mesh=mesh, layout=layout, **options
        )
        return out


def install() -> None:
    """Put sinks and the window of the environment into verl."""
    from verl.models.transformers import monkey_patch
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group

    monkey_patch._ulysses_flash_attention_forward = SinkWindowAttention(
        int(os.environ["SPARSEK_NUM_SINK"]),
        int(os.environ["SPARSEK_WINDOW_SIZE"]),
        get_ulysses_sequence_parallel_group,
    )


if "VERL_USE_EXTERNAL_MODULES" in os.environ:
    install()
