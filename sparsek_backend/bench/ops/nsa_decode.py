"""A decode step of native sparse attention over pages, beside dense attention of the same pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sparsek_backend.bench.ops.paged_inputs import shuffled_pages
from sparsek_backend.bench.ops.peers import fa3_paged
from sparsek_backend.bench.oracle import compare
from sparsek_backend.bench.registry import HEADS, OURS, BenchOp, Case, GateResult, Outputs, Provider
from sparsek_kernels.nsa.api import nsa_compress, nsa_select
from sparsek_kernels.nsa.compress.mlp import PhiWeights
from sparsek_kernels.nsa.compress.rotary import rotary_frequencies, rotate
from sparsek_kernels.nsa.paged.api import compress_new_blocks, nsa_paged_attention
from sparsek_kernels.nsa.paged.cache import Compression, NSAPages
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.paged.api import paged_attention
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div

DEFAULTS = HEADS | {
    "num_heads": 64,
    "num_kv_heads": 4,
    "page_size": 64,
    "window_size": 512,
    "seed": 0,
}
SPEC = NSASpec()


@dataclass(frozen=True)
class Inputs:
    """A filled cache of one layer, and the tokens that are decoded."""

    q: torch.Tensor  # [T, Hq, D]
    pages: NSAPages  # keys, values and compressed rows, pages in random order
    batch: PagedBatch  # one query token for each request
    compression: Compression  # random weights of the learnable map, with a rotary embedding
    window_size: int  # tokens of the sliding branch

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def heads(self, x: torch.Tensor, head: int) -> torch.Tensor:
        """Query heads of one KV head: [..., Hq, D] to [..., G, D]."""
        return torch.unflatten(x, -2, (self.pages.k_slc.shape[1], -1))[..., head, :, :]

    def rows(self, cache: torch.Tensor, request: int, head: int, count: int) -> torch.Tensor:
        """First rows of one request and KV head: [count, D]."""
        used = self.batch.block_table[request, : ceil_div(count, cache.shape[2])].long()
        return cache[used, head].flatten(0, 1)[:count]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Random pages; their compressed rows come from the layer's own compression."""
    if set(case.spec.query_lens) != {1}:
        raise ValueError(f"spec: expected one query token a request, got {case.spec.text}")
    heads, dim, size = (case.int_param(n) for n in ("num_kv_heads", "head_dim", "page_size"))
    dtype, lengths = case.dtype(), case.spec.seq_lens
    generator = torch.Generator(device=device).manual_seed(case.int_param("seed"))

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(std)

    counts = [ceil_div(length, size) for length in lengths]
    cells = size // SPEC.cmp_stride
    token_size = 3 * heads * size * 2 * dim
    raw = draw(sum(counts), token_size + heads * cells * 2 * dim)
    tokens = raw[:, :token_size].unflatten(1, (3, heads, size, 2 * dim))
    tail = raw[:, token_size:].unflatten(1, (heads, cells, 2 * dim))
    views = [x for part in (*tokens.unbind(1), tail) for x in part.split(dim, dim=-1)]
    table = shuffled_pages(counts, max(counts), generator)
    block = SPEC.cmp_block_size

    def phi() -> PhiWeights:
        first = draw(block * dim, dim, std=(block * dim) ** -0.5)
        second = draw(dim, dim, std=4 * dim**-0.5)
        return PhiWeights(
            draw(block, dim, std=0.02), first, draw(dim, std=0.1), second, draw(dim, std=0.1)
        )

    inputs = Inputs(
        q=draw(len(lengths), case.int_param("num_heads"), dim),
        pages=NSAPages(*views),
        batch=batch_of_lengths(table, (1,) * len(lengths), lengths, decodes=len(lengths)),
        compression=Compression(phi(), phi(), rotary_frequencies(dim, 1e4, device=device)),
        window_size=case.int_param("window_size"),
    )
    for request, length in enumerate(lengths):  # as if each had been prefilled
        row = batch_of_lengths(table[request:], (length,), (length,))
        compress_new_blocks(inputs.pages, row, SPEC, inputs.compression)
    return inputs


def _expected(
    inputs: Inputs, request: int, head: int, chosen: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The three branches of one token and KV head in plain torch: [3, G, D]."""
    length = int(inputs.batch.seq_lens[request])
    q = inputs.heads(inputs.q[request], head).to(dtype)

    def rows(name: str, count: int) -> torch.Tensor:
        return inputs.rows(getattr(inputs.pages, name), request, head, count).to(dtype)

    hidden = SPEC.strides_per_cmp - 1
    within = torch.arange(SPEC.sel_block_size, device=q.device)
    token = (chosen[chosen >= 0].to(q.device)[:, None] * SPEC.sel_block_size + within).flatten()
    cells = SPEC.num_compressed(length) + hidden
    seen: dict[str, tuple[int, slice | torch.Tensor]] = {
        "cmp": (cells, slice(hidden, cells)),
        "slc": (length, token[token < length]),
        "swa": (length, slice(max(length - inputs.window_size, 0), length)),
    }
    found = []
    for branch, (count, which) in seen.items():
        k, v = (rows(f"{name}_{branch}", count)[which] for name in ("k", "v"))
        found.append(torch.softmax(q @ k.T * inputs.scale, dim=-1) @ v)
    return torch.stack(found)


def _chosen(inputs: Inputs, request: int, head: int) -> torch.Tensor:
    """Blocks that torch selects in fp64 from the stored compressed keys: [top_n]."""
    length = int(inputs.batch.seq_lens[request])
    q = inputs.heads(inputs.q[request], head)[None, None].double()
    hidden = SPEC.strides_per_cmp - 1
    keys = inputs.rows(inputs.pages.k_cmp, request, head, SPEC.num_compressed(length) + hidden)
    return nsa_select(q, keys[None, hidden:, None].double(), seq_len=length)[0, 0, 0]


def _last_compressed(
    inputs: Inputs, request: int, head: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Key and value of the block that the token completes, if it does: [D] each."""
    length = int(inputs.batch.seq_lens[request])
    start = length - SPEC.cmp_block_size
    if start < 0 or start % SPEC.cmp_stride:
        return None
    k, v = (
        inputs.rows(cache, request, head, length)[None, start:, None].to(dtype)
        for cache in (inputs.pages.k_raw, inputs.pages.v_raw)
    )
    made = inputs.compression
    phi_k, phi_v = (x and PhiWeights(*(y.to(dtype) for y in x)) for x in (made.phi_k, made.phi_v))
    key, value = nsa_compress(k, v, phi_k=phi_k, phi_v=phi_v)
    rope_freqs = made.rope_freqs
    if rope_freqs is not None:
        rope_freqs = rope_freqs.double() if dtype == torch.float64 else rope_freqs
        key = rotate(key, torch.tensor([start], device=key.device), rope_freqs)
    return key[0, 0, 0], value[0, 0, 0]


def _gate(inputs: Inputs, out: torch.Tensor) -> GateResult:
    """Compare a few tokens and KV heads: the row that is compressed, then the three branches."""
    verdict = GateResult(False, "no token was checked")
    heads, dtype = inputs.pages.k_slc.shape[1], inputs.q.dtype
    requests = sorted({0, len(inputs.batch.seq_lens) // 2, len(inputs.batch.seq_lens) - 1})
    for turn, request in enumerate(requests):
        head = turn % heads
        exact = _last_compressed(inputs, request, head, torch.float64)
        plain = _last_compressed(inputs, request, head, dtype)
        if exact is not None and plain is not None:
            cells = int(inputs.batch.seq_lens[request]) // SPEC.cmp_stride
            caches = (inputs.pages.k_cmp, inputs.pages.v_cmp)
            got = [inputs.rows(cache, request, head, cells)[-1] for cache in caches]
            verdict = compare(["k_cmp", "v_cmp"], got, list(exact), list(plain))
            if not verdict.passed:
                return verdict
        chosen = _chosen(inputs, request, head)
        expected, rounded = (
            _expected(inputs, request, head, chosen, kind) for kind in (torch.float64, dtype)
        )
        found = inputs.heads(out[request], head)
        names = ["compressed", "selected", "sliding"]
        verdict = compare(names, list(found), list(expected), list(rounded))
        if not verdict.passed:
            return GateResult(False, f"request {request} head {head}: {verdict.detail}")
    return verdict


def _ours(inputs: Inputs) -> Callable[[], Outputs]:
    out = inputs.q.new_empty((inputs.q.shape[0], 3, *inputs.q.shape[1:]))

    def call() -> Outputs:
        nsa_paged_attention(
            inputs.q, inputs.pages, inputs.batch, SPEC, inputs.compression,
            window_size=inputs.window_size, out=out,
        )  # fmt: skip
        return (out,)

    return call


def _dense(inputs: Inputs) -> Callable[[], Outputs]:
    out = torch.empty_like(inputs.q)

    k, v = inputs.pages.k_slc, inputs.pages.v_slc
    return lambda: (paged_attention(inputs.q, k, v, inputs.batch, SelectionPolicy(), out=out),)


def _gate_dense(inputs: Inputs, out: torch.Tensor) -> GateResult:
    pages = replace(inputs.pages, k_swa=inputs.pages.k_slc, v_swa=inputs.pages.v_slc)
    every = replace(inputs, pages=pages, window_size=inputs.batch.max_seq_len)
    none = torch.empty(0, dtype=torch.int64)
    exact, plain = (
        _expected(every, 0, 0, none, kind)[2] for kind in (torch.float64, inputs.q.dtype)
    )
    return compare(["out"], [inputs.heads(out[0], 0)], [exact], [plain])


def _cost(inputs: Inputs, dense: bool) -> tuple[float, float]:
    """FLOPs, and bytes of every row that is attended, of queries and of outputs."""
    heads, dim = inputs.pages.k_slc.shape[1], inputs.q.shape[2]
    width = inputs.q.element_size()
    lengths = inputs.batch.seq_lens_host or ()
    if dense:
        rows, scored = sum(lengths), 0
    else:
        scored = sum(SPEC.num_compressed(length) for length in lengths)
        budget = SPEC.top_n * SPEC.sel_block_size
        rows = scored + sum(
            min(length, budget) + min(length, inputs.window_size) for length in lengths
        )
    flops = dim * inputs.q.shape[1] * (4.0 * rows + 2.0 * scored)
    return flops, width * (2.0 * dim * heads * rows + (2.0 if dense else 4.0) * inputs.q.numel())


def _build(case: Case, device: torch.device) -> list[Provider]:
    inputs = make_inputs(case, device)
    pages, step = inputs.pages, (inputs.batch, slice(0, inputs.q.shape[0]))

    def provider(name: str, prepare: Callable[[], Callable[[], Outputs]], dense: bool) -> Provider:
        flops, num_bytes = _cost(inputs, dense)
        gate = _gate_dense if dense else _gate
        return Provider(
            name=name,
            prepare=prepare,
            gate=lambda outputs: gate(inputs, outputs[0]),
            flops=flops,
            bytes=num_bytes,
            note="dense" if dense else "",
            reads_only=True,
        )

    return [
        provider(OURS, lambda: _ours(inputs), False),
        provider("sparsek_dense", lambda: _dense(inputs), True),
        provider("fa3", lambda: fa3_paged(inputs.q, pages.k_slc, pages.v_slc, [step]), True),
    ]


OPS = (
    BenchOp(
        "nsa_decode", "one decode step of native sparse attention over pages", DEFAULTS, _build
    ),
)
