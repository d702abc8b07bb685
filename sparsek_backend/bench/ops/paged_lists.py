"""Ranked lists that prefills attend in place of the best-scoring blocks: of a file, or random."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_backend.bench.ops.paged_inputs import PagedInputs, Tile
from sparsek_backend.bench.registry import Case
from sparsek_backend.patterns.prefill import ENTRIES, PrefillPattern
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.vertical_slash import VerticalSlash, block_lists
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div
from sparsek_kernels.paged.reference import listed_reference

RANDOM = "random"
_LEARNED_TOKENS = 1 << 15
"""Random lists are as if learned from texts of at most this length."""


@dataclass(frozen=True, eq=False)
class Lists:
    """Ranked entries ``[Hkv, E]`` int32, and the indexers that follow them."""

    entries: torch.Tensor
    indexers: Indexers

    def wrong(
        self, chosen: torch.Tensor, inputs: PagedInputs, tile: Tile, policy: SelectionPolicy
    ) -> str:
        """Why a tile's blocks are not what its list says, or an empty string."""
        select = listed_reference(self.entries.tolist())
        k, _ = inputs.keys_of(tile.request, tile.head)
        of_heads = select(inputs.q, k, list(tile.positions), policy, inputs.softmax_scale)
        wanted = [] if of_heads is None else of_heads[tile.head]
        found = chosen.tolist()
        return "" if found == wanted else f"attends {found}, its list says {wanted}"


def make_lists(case: Case, inputs: PagedInputs) -> Lists | None:
    """The lists that a case names: none, random ones, or a layer's of a file.

    A file's heads are taken in turn where it has another number of them.

    Raises:
        ValueError: no such file or layer, or other blocks than the policy's.
    """
    source, policy = case.str_param("lists"), inputs.policy
    if not source:
        return None
    heads = inputs.k_cache.shape[1]
    if source == RANDOM:
        tokens = min(inputs.seq_lens[0], _LEARNED_TOKENS)
        blocks = ceil_div(tokens, policy.sel_block_size)
        entries = random_entries(heads, blocks, case.int_param("seed"))
    else:
        pattern, layer = PrefillPattern.load(source), case.int_param("layer")
        if pattern.block_size != policy.sel_block_size:
            raise ValueError(
                f"lists: expected blocks of {policy.sel_block_size}, got {pattern.block_size} in "
                f"{source}"
            )
        if layer not in pattern.entries:
            raise ValueError(
                f"layer: expected one of {sorted(pattern.entries)} of {source}, got {layer}"
            )
        entries = pattern.entries[layer][torch.arange(heads) % pattern.num_kv_heads]
    lists = block_lists(entries, policy).to(inputs.q.device)
    return Lists(entries, Indexers(VerticalSlash(lists)))


def random_entries(heads: int, blocks: int, seed: int) -> torch.Tensor:
    """``[heads, E]`` int32: distinct vertical blocks and slashes within ``blocks``, mixed."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(1 - blocks, blocks, dtype=torch.int32)
    order = torch.rand(heads, len(every), generator=generator).argsort(1)
    return every[order[:, :ENTRIES]]
