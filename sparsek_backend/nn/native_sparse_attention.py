"""Native sparse attention as a layer: projections, rotary embedding, compression, gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed import Compression, SequenceLayout, context_parallel_nsa_attention
from sparsek_backend.distributed.layouts import check_layout, check_shard
from sparsek_backend.distributed.mesh import channel_of
from sparsek_backend.nn.cache import NSACache, unchanged_on_error
from sparsek_backend.nn.compression import CompressionMLP
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.nn.rotary import rotate
from sparsek_kernels import nsa_attention, nsa_compress
from sparsek_kernels.checks import check_int
from sparsek_kernels.nsa.checks import check_sequences
from sparsek_kernels.nsa.compress.mlp import PhiWeights
from sparsek_kernels.nsa.sequences import compressed_cu_seqlens


class NativeSparseAttention(nn.Module):
    """Causal self-attention whose cost grows with the budget, not with the context.

    Compressed keys are made from unrotated keys and rotated by the position of their first token.
    Works under ``torch.compile``, autocast, activation checkpointing and ``fully_shard``.

    State: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (``weight``, and ``bias`` with ``bias=
    True``), ``gate_in``, ``gate_out`` (``weight`` and ``bias``) and, with ``compression="mlp"``,
    ``phi_k`` and ``phi_v`` (:class:`CompressionMLP`).  Without ``shared_kv``, ``k_proj`` and
    ``v_proj`` stack the compressed, selected and sliding branch, in this order.  ``gate_out``
    stacks the gates of all heads, branch by branch in the same order.  Tensor parallelism
    (:class:`KVHeadParallel`) stacks head by head instead, which ``head_major`` tells.

    Args:
        hidden_size: elements of a token.
        num_heads: query heads.
        num_kv_heads: KV heads, a divisor of ``num_heads``.
        head_dim: elements of a head, even with a rotary embedding; ``hidden_size // num_heads``
            when ``None``.
        config: everything else, :class:`NSAConfig`.
        bias: whether the four projections have biases.
        mesh: ranks that share each sequence (context parallelism); one dimension.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a size below 1, or sizes that do not fit together; the message names the
            argument.

    Source:
        arXiv 2502.11089.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int | None = None,
        *,
        config: NSAConfig | None = None,
        bias: bool = False,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in {**sizes, "head_dim": 1 if head_dim is None else head_dim}.items():
            check_int(name, size, 1)
        if not isinstance(config, NSAConfig | None):
            raise TypeError(f"config: expected an NSAConfig or None, got {type(config).__name__}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_heads}"
            )
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"hidden_size: expected a multiple of num_heads={num_heads} without head_dim, "
                    f"got {hidden_size}"
                )
            head_dim = hidden_size // num_heads
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; pass mesh['name']")
        self.config, self.mesh = config or NSAConfig(), mesh
        if self.config.rope_theta is not None and head_dim % 2:
            raise ValueError(
                f"head_dim: expected an even size with a rotary embedding, got {head_dim}"
            )
        self.hidden_size, self.head_dim = hidden_size, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.num_branches = self.config.num_branches

        def linear(wide: int, narrow: int, with_bias: bool) -> nn.Linear:
            return nn.Linear(wide, narrow, bias=with_bias, device=device, dtype=dtype)

        kv_size = self.num_branches * num_kv_heads * head_dim
        self.q_proj = linear(hidden_size, num_heads * head_dim, bias)
        self.k_proj = linear(hidden_size, kv_size, bias)
        self.v_proj = linear(hidden_size, kv_size, bias)
        self.o_proj = linear(num_heads * head_dim, hidden_size, bias)
        gate_size = self.config.gate_hidden_size or max(hidden_size // 8, 16)
        self.gate_in = linear(hidden_size, gate_size, True)
        self.gate_out = linear(gate_size, 3 * num_heads, True)
        self.phi_k: CompressionMLP | None = None
        self.phi_v: CompressionMLP | None = None
        if self.config.compression == "mlp":
            size, hidden = self.config.cmp_block_size, self.config.cmp_hidden_size or head_dim
            self.phi_k = CompressionMLP(size, head_dim, hidden, device, dtype)
            self.phi_v = CompressionMLP(size, head_dim, hidden, device, dtype)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, config={self.config}"
        )

    def new_cache(
        self,
        batch: int,
        max_len: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> NSACache:
        """An empty cache for ``batch`` sequences of up to ``max_len`` tokens.

        Attention over a cache runs in the cache's dtype.  The default is the dtype of the keys: the
        weights' dtype, or autocast's where this is called under autocast.
        """
        weight = self.q_proj.weight
        kind = weight.device.type
        if dtype is None and weight.dtype != torch.float64 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return NSACache(
            self.config.spec,
            batch,
            max_len,
            self.num_kv_heads,
            self.head_dim,
            self.config.shared_kv,
            device or weight.device,
            dtype or weight.dtype,
        )

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        theta = self.config.rope_theta
        return x if theta is None else rotate(x, positions, theta)

    def _by_branch(self, x: torch.Tensor, branches: int, heads: int) -> tuple[torch.Tensor, int]:
        """``[B, N, branches * heads * D]`` as ``[B, N, branches, heads, D]``, and its dimension 2.

        ``[B, N, heads, branches, D]`` and 3 where parameters stack head by head.
        """
        if self.head_major:
            return x.unflatten(-1, (heads, branches, -1)), 3
        return x.unflatten(-1, (branches, heads, -1)), 2

    def _branches(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Keys or values of the three branches, ``[B, N, Hkv, D]`` each."""
        if self.num_branches == 1:
            return [x.unflatten(-1, (self.num_kv_heads, -1))] * 3
        split, dim = self._by_branch(x, self.num_branches, self.num_kv_heads)
        return list(split.unbind(dim))

    @property
    def head_major(self) -> bool:
        """Whether parameters stack head by head; a buffer tells, so that state dicts do too."""
        return "stacked_by_head" in self._buffers

    def restacked(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A whole parameter, turned from branch by branch to head by head, or back.

        Parameters that stack no branches stay as they are.
        """
        layer = name.split(".")[0]
        if layer not in ("k_proj", "v_proj", "gate_out"):
            return x
        gates = layer == "gate_out"
        branches, size = (3, 1) if gates else (self.num_branches, self.head_dim)
        shape = (-1, branches, size) if self.head_major else (branches, -1, size)
        turned: torch.Tensor = x.unflatten(0, shape).transpose(0, 1).flatten(0, 2)
        return turned

    def _phi(self, dtype: torch.dtype) -> list[PhiWeights | None]:
        """Weights of the maps of keys and of values, where they are learnable."""
        return [None if x is None else x.weights(dtype) for x in (self.phi_k, self.phi_v)]

    def _compress(
        self, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, first_block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed keys, rotated, and values of unrotated tokens."""
        size, stride = self.config.cmp_block_size, self.config.cmp_stride
        phi_k, phi_v = self._phi(k.dtype)
        k_cmp, v_cmp = nsa_compress(
            k,
            v,
            phi_k=phi_k,
            phi_v=phi_v,
            cmp_block_size=size,
            cmp_stride=stride,
            cu_seqlens=cu_seqlens,
        )
        first, count = first_block * stride, k_cmp.shape[1]
        positions = torch.arange(first, first + count * stride, stride, device=k.device)
        if cu_seqlens is not None:
            offsets = compressed_cu_seqlens(cu_seqlens, size, stride)
            block = torch.arange(count, dtype=torch.int32, device=k.device)
            seq = torch.searchsorted(offsets[1:], block, right=True)
            positions = positions - offsets[seq.clamp(max=offsets.shape[0] - 2)] * stride
        return self._rotate(k_cmp, positions), v_cmp

    def _check_hidden_states(self, hidden_states: torch.Tensor) -> None:
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.hidden_size:
            raise ValueError(
                f"hidden_states: expected shape [B, N, {self.hidden_size}], "
                f"got {list(hidden_states.shape)}"
            )

    def _check_compressed_only(
        self, compressed_only: torch.Tensor | None, count: int, device: torch.device
    ) -> None:
        if compressed_only is None:
            return
        due = (torch.bool, (count,), device)
        if (compressed_only.dtype, compressed_only.shape, compressed_only.device) != due:
            raise ValueError(
                f"compressed_only: expected bool of shape [{count}], one a sequence, on "
                f"{device}, got {compressed_only.dtype} of shape "
                f"{list(compressed_only.shape)} on {compressed_only.device}"
            )

    def _check_inputs(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        cache: NSACache | None,
        compressed_only: torch.Tensor | None,
    ) -> None:
        self._check_hidden_states(hidden_states)
        count, num_tokens, _ = hidden_states.shape
        if cu_seqlens is not None:
            if cache is not None:
                raise ValueError("cache: expected None with cu_seqlens, got a cache")
            if count != 1:
                raise ValueError(
                    f"hidden_states: expected batch size 1 with cu_seqlens, got {count}"
                )
            check_sequences(cu_seqlens, num_tokens, hidden_states.device)
            count = cu_seqlens.shape[0] - 1
        self._check_compressed_only(compressed_only, count, hidden_states.device)

    def _project(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, shut: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Queries, keys and values of each branch, and gates; first branch's keys unrotated.

        ``shut`` are the tokens that have the compressed branch alone.
        """
        q = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        q = self._rotate(q, positions)
        k_cmp, k_slc, k_swa = self._branches(self.k_proj(hidden_states))
        values = self._branches(self.v_proj(hidden_states))
        k_slc = self._rotate(k_slc, positions)
        k_swa = k_slc if self.config.shared_kv else self._rotate(k_swa, positions)
        hidden = nn.functional.silu(self.gate_in(hidden_states))
        gates, dim = self._by_branch(torch.sigmoid(self.gate_out(hidden)), 3, self.num_heads)
        # One copy lays the gates of a branch side by side, as kernels read them.
        g_cmp, g_slc, g_swa = gates.movedim(dim, 0).squeeze(-1).contiguous().unbind()
        if shut is not None:
            g_slc, g_swa = g_slc.masked_fill(shut, 0.0), g_swa.masked_fill(shut, 0.0)
        return q, [k_cmp, k_slc, k_swa], values, [g_cmp, g_slc, g_swa]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _agree_on_layout(
        self,
        mesh: DeviceMesh,
        layout: SequenceLayout | None,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        cache: NSACache | None,
        compressed_only: torch.Tensor | None,
    ) -> SequenceLayout:
        """The layout of a call, once all ranks have checked their arguments."""
        with channel_of(mesh).agreed() as facts:
            if cu_seqlens is not None or cache is not None:
                name = "cache" if cu_seqlens is None else "cu_seqlens"
                raise ValueError(f"{name}: expected None with a mesh; sequences are in the layout")
            self._check_hidden_states(hidden_states)
            facts["hidden_states"] = tuple(hidden_states.shape)
            if layout is None:
                layout = SequenceLayout(hidden_states.shape[1] * mesh.size(), mesh.size())
            check_layout(layout, mesh)
            check_shard("hidden_states", hidden_states, layout)
            num_sequences = len(layout.edges) - 1 if layout.packed else hidden_states.shape[0]
            self._check_compressed_only(compressed_only, num_sequences, hidden_states.device)
            facts["compressed_only"] = compressed_only is None
        return layout

    def _attend_with_others(
        self,
        hidden_states: torch.Tensor,
        layout: SequenceLayout,
        compressed_only: torch.Tensor | None,
        mesh: DeviceMesh,
    ) -> torch.Tensor:
        """Attention of this rank's tokens, ``[B, n, Hq, D]``, over all ranks' tokens."""
        rank, device = mesh.get_local_rank(), hidden_states.device
        shut = None if compressed_only is None else compressed_only[:, None, None]
        if shut is not None and layout.packed:
            shut = shut[layout.sequence_ids(rank, device)].transpose(0, 1)
        positions = layout.position_ids(rank, device)
        q, keys, values, gates = self._project(hidden_states, positions, shut)
        phi_k, phi_v = self._phi(q.dtype)
        out: torch.Tensor = context_parallel_nsa_attention(
            q,
            keys[1],
            values[1],
            (gates[0], gates[1], gates[2]),
            mesh=mesh,
            layout=layout,
            compression=Compression(keys[0], values[0], phi_k, phi_v, self._rotate),
            sliding=None if self.config.shared_kv else (keys[2], values[2]),
            spec=self.config.spec,
            window_size=self.config.window_size,
        )
        return out

    def attention_inputs(
        self,
        hidden_states: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cache: NSACache | None = None,
        compressed_only: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Everything that :func:`sparsek_kernels.nsa_attention` is called with.

        Args:
            hidden_states: see :meth:`forward`, as the others; a cache is appended to.

        Returns:
            Keyword arguments: queries, the keys and values of the branches, gates and sizes.

        Raises:
            ValueError: see :meth:`forward`.
        """
        self._check_inputs(hidden_states, cu_seqlens, cache, compressed_only)
        num_tokens = hidden_states.shape[1]
        positions = torch.arange(num_tokens, device=hidden_states.device)
        shut = None if compressed_only is None else compressed_only[:, None, None]
        if cu_seqlens is not None:
            seq = torch.searchsorted(cu_seqlens[1:], positions.int(), right=True)
            positions = positions - cu_seqlens[seq]
            shut = None if shut is None else shut[seq].transpose(0, 1)
        if cache is not None:
            positions = positions + cache.length
        q, keys, values, gates = self._project(hidden_states, positions, shut)
        (_, k_slc, k_swa), (_, v_slc, v_swa) = keys, values
        g_cmp, g_slc, g_swa = gates
        if cache is None:
            k_cmp, v_cmp = self._compress(keys[0], values[0], cu_seqlens, 0)
        else:
            q = q.to(cache.dtype)
            with unchanged_on_error([cache]):
                cache.append_tokens((k_slc, v_slc), (k_swa, v_swa))  # first: it may refuse
                tokens = cache.take_pending(keys[0], values[0])
                cache.append_compressed(*self._compress(*tokens, None, cache.compressed_length))
            k_cmp, v_cmp = cache.compressed[:, :, : cache.compressed_length]
            k_slc, v_slc = cache.selected[:, :, : cache.length]
            first_seen = max(cache.length - num_tokens - self.config.window_size + 1, 0)
            k_swa, v_swa = cache.sliding[:, :, first_seen : cache.length]
        return {
            **{"q": q, "k": k_slc, "v": v_slc},
            **{"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa},
            **{"k_cmp": k_cmp, "v_cmp": v_cmp, "k_swa": k_swa, "v_swa": v_swa},
            **vars(self.config.spec),
            "window_size": self.config.window_size,
            "cu_seqlens": cu_seqlens,
        }

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cache: NSACache | None = None,
        compressed_only: torch.Tensor | None = None,
        layout: SequenceLayout | None = None,
    ) -> torch.Tensor:
        """Attend.

        With a ``mesh`` all its ranks call this, and its backward pass, in the same order.

        Args:
            hidden_states: ``[B, N, hidden_size]``.
            cu_seqlens: ``[sequences + 1]`` int32 offsets of packed sequences (B = 1); positions
                start anew in each.
            cache: earlier tokens of the same sequences, to which these N are appended; without
                ``cu_seqlens`` and without gradients.
            compressed_only: ``[B]`` bool, or one for each packed sequence: sequences that have the
                compressed branch alone.  It learns to find the blocks of long sequences as far as
                it is needed, and short ones can be answered from the other two branches: train
                with a share of them shut.
            layout: with a ``mesh``, which rank holds which tokens, packed sequences included; one
                sequence in contiguous shards when ``None``.  ``hidden_states`` are this rank's.

        Returns:
            ``[B, N, hidden_size]``.

        Raises:
            TypeError: ``cu_seqlens`` is no int32 tensor.
            ValueError: a wrong shape, offsets that do not ascend from 0 to N, ``cache`` with
                ``cu_seqlens``, or a cache of another batch or without room; with a ``mesh``, on
                every rank, also ``cu_seqlens``, a cache, or arguments that differ among ranks.
            RuntimeError: a rank of the mesh failed, or did not answer within its group's timeout.

        After any error the cache is as it was.
        """
        if self.mesh is not None:
            given = (hidden_states, cu_seqlens, cache, compressed_only)
            layout = self._agree_on_layout(self.mesh, layout, *given)
            shared = self._attend_with_others(hidden_states, layout, compressed_only, self.mesh)
            return self._project_out(shared)
        if layout is not None:
            raise ValueError("layout: expected None without a mesh, got a layout")
        with unchanged_on_error(() if cache is None else (cache,)):
            inputs = self.attention_inputs(
                hidden_states, cu_seqlens=cu_seqlens, cache=cache, compressed_only=compressed_only
            )
            out = nsa_attention(**inputs)
            if not isinstance(out, torch.Tensor):
                raise TypeError(f"nsa_attention: expected a tensor, got {type(out).__name__}")
            if cache is not None:
                out = out.to(hidden_states.dtype)
            return self._project_out(out)

    def _project_out(self, out: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.o_proj(out.flatten(2))
        return projected
