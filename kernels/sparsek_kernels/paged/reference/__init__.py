"""Oracles of paged attention: the rules of docs/selection.md, in float64.

Plain torch on contiguous sequences, readable before fast.  Nothing here is imported by a kernel
or by the CPU path, and nothing of theirs is imported here but the rule itself (``policy.py``).
"""

from sparsek_kernels.paged.reference.attend import (
    attend_reference,
    gather_sequence,
    paged_attention_reference,
    visible_reference,
)
from sparsek_kernels.paged.reference.infllm import (
    block_ranks_reference,
    kernel_shares_reference,
    select_infllm_reference,
)
from sparsek_kernels.paged.reference.seer import gate_scores_reference, select_seer_reference
from sparsek_kernels.paged.reference.select import (
    best,
    block_logits_reference,
    candidate_scores_reference,
    candidates_reference,
    exact_masses_reference,
    listed_reference,
    ranking_queries,
    sampled_queries,
    select_blocks_reference,
)
from sparsek_kernels.paged.reference.sketch import (
    hadamard_reference,
    means_reference,
    sketch_reference,
)

__all__ = [
    "attend_reference",
    "best",
    "block_logits_reference",
    "block_ranks_reference",
    "candidate_scores_reference",
    "candidates_reference",
    "exact_masses_reference",
    "gate_scores_reference",
    "gather_sequence",
    "hadamard_reference",
    "kernel_shares_reference",
    "listed_reference",
    "means_reference",
    "paged_attention_reference",
    "ranking_queries",
    "sampled_queries",
    "select_blocks_reference",
    "select_infllm_reference",
    "select_seer_reference",
    "sketch_reference",
    "visible_reference",
]
