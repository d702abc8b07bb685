"""A :class:`NativeSparseAttention` layer served from pages, to be compared with itself."""

from __future__ import annotations

import torch

from sparsek_backend.nn import NativeSparseAttention, NSAConfig
from sparsek_backend.nn.rotary import rotate
from sparsek_kernels import PagedBatch, write_kv
from sparsek_kernels.nsa.compress.mlp import PhiWeights
from sparsek_kernels.nsa.compress.rotary import rotary_frequencies
from sparsek_kernels.nsa.paged.api import nsa_paged_attention
from sparsek_kernels.nsa.paged.cache import Compression, NSAPages

NO_PAGE = 1 << 30
"""Entry of a block table past a sequence's last page, which nothing may follow."""


def column_major(x: torch.Tensor) -> torch.Tensor:
    """A matrix as the transpose of a linear layer's weight has it; vectors as they are."""
    return x.mT.contiguous().mT if x.dim() == 2 else x


class PagedLayer:
    """Pages of one layer, filled with NaN, and steps of some sequences through them.

    Args:
        layer: the layer whose weights are used.
        page_size: tokens of a page.
        num_pages: pages of the pool.
        order: pages in the order in which they are handed out; ascending when ``None``.
    """

    def __init__(
        self,
        layer: NativeSparseAttention,
        page_size: int,
        num_pages: int,
        order: list[int] | None = None,
    ) -> None:
        self.layer, self.page_size = layer, page_size
        self.free = list(range(num_pages)) if order is None else list(order)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        weight, config = layer.q_proj.weight, layer.config
        self.dtype, self.device = weight.dtype, weight.device
        heads, dim = layer.num_kv_heads, layer.head_dim
        # As vLLM lays pages out: all heads' K and V side by side, compressed rows behind them.
        cells = page_size // config.cmp_stride
        rows = heads * (layer.num_branches * page_size + cells)
        raw = torch.full((num_pages, rows * 2 * dim), float("nan"), dtype=self.dtype)
        raw = raw.to(self.device)
        tokens = raw[:, : heads * layer.num_branches * page_size * 2 * dim]
        tokens = tokens.unflatten(1, (layer.num_branches, heads, page_size, 2 * dim))
        tail = raw[:, heads * layer.num_branches * page_size * 2 * dim :]
        tail = tail.unflatten(1, (heads, cells, 2 * dim))
        self.tokens = tokens.flatten(1, 2)
        views = [x for i in range(layer.num_branches) for x in tokens[:, i].split(dim, dim=-1)]
        views = views * 3 if layer.num_branches == 1 else views
        self.pages = NSAPages(*views, *tail.split(dim, dim=-1))
        rope_freqs = None
        if config.rope_theta is not None:
            rope_freqs = rotary_frequencies(dim, config.rope_theta, device=self.device)
        phis = (None if x is None else x.weights(self.dtype) for x in (layer.phi_k, layer.phi_v))
        self.compression = Compression(
            *(None if phi is None else PhiWeights(*map(column_major, phi)) for phi in phis),
            rope_freqs,
            rotated_keys=config.shared_kv,
        )

    def share(self, old: str, new: str, pages: int) -> None:
        """Let a new sequence begin with the first pages of another one."""
        self.tables[new] = self.tables[old][:pages]
        self.lengths[new] = pages * self.page_size

    def step(
        self, hidden: dict[str, torch.Tensor], decode_query_len: int = 1
    ) -> list[torch.Tensor]:
        """Append the tokens ``[n, hidden]`` of each sequence; returns what the layer returns.

        Sequences with at most ``decode_query_len`` tokens come first, as in an engine.
        """
        decodes = [x.shape[0] for x in hidden.values() if x.shape[0] <= decode_query_len]
        counts = [x.shape[0] for x in hidden.values()]
        assert counts[: len(decodes)] == decodes
        slots, positions = [], []
        for name, tokens in hidden.items():
            start = self.lengths.get(name, 0)
            self.lengths[name] = start + tokens.shape[0]
            table = self.tables.setdefault(name, [])
            while len(table) * self.page_size < self.lengths[name]:
                table.append(self.free.pop(0))
            place = torch.arange(start, self.lengths[name])
            pages = torch.tensor(table, dtype=torch.int64)[place // self.page_size]
            slots.append(pages * self.page_size + place % self.page_size)
            positions.append(place)
        lengths = [self.lengths[name] for name in hidden]
        width = max(len(self.tables[name]) for name in hidden) + 1
        table = torch.full((len(hidden), width), NO_PAGE, dtype=torch.int32)
        for row, name in enumerate(hidden):
            table[row, : len(self.tables[name])] = torch.tensor(self.tables[name])
        batch = PagedBatch(
            block_table=table.to(self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            cu_seqlens_q=torch.tensor([0, *counts], device=self.device).cumsum(0).int(),
            num_decodes=len(decodes),
            num_decode_tokens=sum(decodes),
            decode_query_len=decode_query_len,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            seq_lens_host=tuple(lengths),
            query_lens_host=tuple(counts),
        )
        out = self._attend(
            torch.cat(list(hidden.values())),
            torch.cat(positions).to(self.device),
            torch.cat(slots).to(self.device),
            batch,
        )
        return list(out.split(counts))

    def _attend(
        self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        layer, config = self.layer, self.layer.config

        def turn(heads: torch.Tensor) -> torch.Tensor:
            if config.rope_theta is None:
                return heads
            return rotate(heads[None], positions, config.rope_theta)[0]

        q = turn(layer.q_proj(x).unflatten(-1, (layer.num_heads, layer.head_dim)))
        k = layer.k_proj(x).unflatten(-1, (-1, layer.head_dim))
        v = layer.v_proj(x).unflatten(-1, (-1, layer.head_dim))
        raw = 0 if config.shared_kv else layer.num_kv_heads
        k = torch.cat([k[:, :raw], turn(k[:, raw:])], dim=1)
        cache = self.tokens.split(layer.head_dim, dim=-1)
        write_kv(k, v, *cache, None, slots)
        out = self.attend(q, batch)
        hidden = torch.nn.functional.silu(layer.gate_in(x))
        gates = torch.sigmoid(layer.gate_out(hidden)).unflatten(-1, (3, layer.num_heads, 1))
        return layer.o_proj((out * gates).sum(1).flatten(1))

    def attend(self, q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """The three branches of the step's tokens ``q [T, Hq, D]``."""
        config = self.layer.config
        out = torch.full((q.shape[0], 3, *q.shape[1:]), float("nan")).to(q)
        window = config.window_size
        for part in self.parts(batch):
            nsa_paged_attention(
                q, self.pages, part, config.spec, self.compression, window_size=window, out=out
            )
        return out

    def parts(self, batch: PagedBatch) -> list[PagedBatch]:
        """The batches that are attended one after another."""
        return [batch]


SMALL = NSAConfig(
    cmp_block_size=8,
    cmp_stride=4,
    sel_block_size=16,
    top_n=5,
    num_init_blocks=1,
    num_local_blocks=2,
    window_size=20,
)
"""Block sizes at which a few hundred tokens select: of 16 blocks, 2 by score."""


def make_layer(
    config: NSAConfig = SMALL,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> NativeSparseAttention:
    """A layer whose weights are large enough that attention is far from uniform."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    layer = NativeSparseAttention(32, *heads, dim, config=config)
    for name, weight in layer.named_parameters():
        if name.endswith("_proj.weight"):
            torch.nn.init.normal_(weight, std=0.25)
    torch.random.set_rng_state(state)
    return layer.to(device, dtype).requires_grad_(False)


def make_tokens(length: int, layer: NativeSparseAttention, seed: int = 0) -> torch.Tensor:
    """Random tokens ``[length, hidden]`` in the layer's dtype."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(length, layer.hidden_size, generator=generator)
    return drawn.to(layer.q_proj.weight)
