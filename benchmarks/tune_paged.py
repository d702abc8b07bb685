"""Offline sweeps of the paged kernels' launch configurations, and their times part by part.

    python benchmarks/tune_paged.py decode [--sweep]
    python benchmarks/tune_paged.py prefill [--sweep] [--portable]

Winners go into the ``config.py`` beside each launcher; nothing is tuned at run time.  Calls are
timed in a CUDA graph that chains several copies over different sequences, so that each reads cold
memory as the layers of a model do.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from sparsek_kernels.paged.attend import launch as attend_launch  # noqa: E402
from sparsek_kernels.paged.batch import PagedBatch  # noqa: E402
from sparsek_kernels.paged.chosen import Chosen  # noqa: E402
from sparsek_kernels.paged.config import TileConfig  # noqa: E402
from sparsek_kernels.paged.index import launch as index_launch  # noqa: E402
from sparsek_kernels.paged.index.cell_means import launch as cell_means_launch  # noqa: E402
from sparsek_kernels.paged.index.cell_means import launch_scores  # noqa: E402
from sparsek_kernels.paged.index.page_records import launch as records_launch  # noqa: E402
from sparsek_kernels.paged.operands import PagedOperands  # noqa: E402
from sparsek_kernels.paged.pages import summary_bytes  # noqa: E402
from sparsek_kernels.paged.plan import Segment  # noqa: E402
from sparsek_kernels.paged.policy import SelectionPolicy  # noqa: E402

POLICY = SelectionPolicy(num_sink=64, window_size=512, top_k=32)
DECODED = POLICY.by_records(2048)
HEADS, GROUP, DIM, PAGE = 8, 4, 128, 64
READ_TBS = 4.59
"""Of scores, for powers of two, and of values."""


def make_cache(pages: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head-major pages with their summaries in the tail, random values."""
    body = HEADS * PAGE * 2 * DIM
    each = summary_bytes(PAGE, DIM)
    tail = HEADS * each // 2
    buffer = torch.empty(pages, body + tail, device="cuda", dtype=torch.bfloat16)
    step = max(1, 2**28 // (body + tail))
    for first in range(0, pages, step):
        buffer[first : first + step].normal_()
    buffer[:, body:] *= 0.25
    kv = buffer.as_strided((pages, HEADS, PAGE, 2 * DIM), (body + tail, PAGE * 2 * DIM, 2 * DIM, 1))
    summary = buffer[:, body:].view(torch.uint8).unflatten(1, (HEADS, each))
    return kv[..., :DIM], kv[..., DIM:], summary


def make_batch(
    pages: int, lengths: list[tuple[int, int]], num_decodes: int, max_seq_len: int, seed: int
) -> tuple[torch.Tensor, PagedBatch]:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    width = -(-max_seq_len // PAGE)
    table = torch.zeros(len(lengths), width, dtype=torch.int32, device="cuda")
    order = torch.randperm(pages, generator=gen, device="cuda").to(torch.int32)
    taken = 0
    for row, (_, n) in enumerate(lengths):
        count = -(-n // PAGE)
        if taken + count > pages:
            taken = 0
        table[row, :count] = order[taken : taken + count]
        taken += count
    total = sum(t for t, _ in lengths)
    q = torch.randn(total, HEADS * GROUP, DIM, generator=gen, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, *[t for t, _ in lengths]], device="cuda").cumsum(0).to(torch.int32)
    batch = PagedBatch(
        block_table=table,
        seq_lens=torch.tensor([n for _, n in lengths], dtype=torch.int32, device="cuda"),
        cu_seqlens_q=cu,
        num_decodes=num_decodes,
        num_decode_tokens=sum(t for t, _ in lengths[:num_decodes]),
        decode_query_len=max([1, *[t for t, _ in lengths[:num_decodes]]]),
        max_query_len=max(t for t, _ in lengths),
        max_seq_len=max_seq_len,
    )
    return q, batch


def time_graph(calls: list[Callable[[], object]], repeats: int = 30) -> float:
    """Microseconds per call of a graph that runs ``calls`` one after another (median)."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    graph.replay()
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(samples)


@contextmanager
def patched(name: str, value: TileConfig | tuple[int, int] | None) -> Iterator[None]:
    """Make the launcher take ``value`` from the selector ``name``."""
    module = next(m for m in (attend_launch, launch_scores, index_launch) if hasattr(m, name))
    stand_in = getattr(module, name) if value is None else lambda *_, **__: value
    with mock.patch.object(module, name, stand_in):
        yield


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Prefills leave the kernels written for Hopper alone."""
    with ExitStack() as stack:
        for module, name in (
            (attend_launch, "prefill_config"),
            (launch_scores, "score_config"),
        ):
            configure = getattr(module, name)

            def portable(configure: Any = configure, **shape: Any) -> TileConfig:
                return replace(configure(**shape), hopper=False)

            stack.enter_context(mock.patch.object(module, name, portable))
        yield


DECODES = {
    "32x64k": (32, 65536, 65536),
    "32x8k": (32, 8192, 8192),
    "4x128k": (4, 131072, 131072),
    "1x128k": (1, 131072, 131072),
    "4x2k of 128k": (4, 2048, 131072),
    "4x8k of 128k": (4, 8192, 131072),
    "32x2k of 128k": (32, 2048, 131072),
}
"""Requests, their context, and the longest context that a captured graph must serve."""


def decode_floor(requests: int, length: int) -> float:
    """Microseconds to read the selected tokens and the records at the measured rate."""
    selected = DECODED.attended_tokens(length - 1) * 2 * DIM * 2
    records = 0 if DECODED.sees_all(length - 1) else length // PAGE * summary_bytes(PAGE, DIM)
    return requests * HEADS * (selected + records) / READ_TBS / 1e6


def choose_and_attend(index: Any, operands: PagedOperands, segment: Segment) -> None:
    """Both halves; ``index`` is the launcher that chooses."""
    found = index.select(operands, segment)
    chosen = found if isinstance(found, Chosen) else Chosen(found)
    attend_launch.attend_segment(operands, segment, chosen)


def decode_calls(
    cache: tuple[torch.Tensor, ...], requests: int, length: int, max_len: int, copies: int
) -> tuple[list[Callable[[], object]], list[Callable[[], object]], list[Callable[[], object]]]:
    k_cache, v_cache, summary = cache
    pages = k_cache.shape[0]
    everything, select, attend = [], [], []
    for copy in range(copies):
        q, batch = make_batch(pages, [(1, length)] * requests, requests, max_len, copy)
        out = torch.empty_like(q)
        operands = PagedOperands(q, k_cache, v_cache, out, DIM**-0.5, summary)
        segment = Segment(batch, DECODED)
        choose = functools.partial(records_launch.select, operands, segment)
        selected = choose()
        everything.append(functools.partial(choose_and_attend, records_launch, operands, segment))
        select.append(choose)
        attend.append(functools.partial(attend_launch.attend_segment, operands, segment, selected))
    return everything, select, attend


def time_cold(call: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of one graph replay after the L2 cache was filled with other, clean data."""
    flush = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    samples = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        flush.amax()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(samples)


DECODE_SWEEP = [
    TileConfig(4, 1, 16, n, s, w, stages, registers)
    for s, (n, w, stages, registers) in itertools.product(
        (1, 2, 3, 12, 16, 20),
        ((64, 4, 2, 128), (64, 2, 2, 0), (64, 4, 2, 0)),
    )
]


def run_decode(sweep: bool, tiny: bool = False, pick: tuple[int, int] = (0, 1)) -> None:
    cache = make_cache(256 if tiny else 32 * 1024 + 64)
    for name, (requests, length, max_len) in DECODES.items():
        if tiny:
            if (name in ("32x8k", "4x128k") and sweep) or max_len > length:
                continue
            q, batch = make_batch(256, [(1, 8192)] * requests, requests, length, 0)
            out = torch.empty_like(q)
            swept = DECODE_SWEEP[pick[0] :: pick[1]] if name == "32x64k" else [None]
            for config in swept:
                with patched("decode_config", config):
                    operands = PagedOperands(q, *cache[:2], out, 0.1, cache[2])
                    segment = Segment(batch, DECODED)
                    choose_and_attend(records_launch, operands, segment)
            continue
        floor = decode_floor(requests, length)
        if name == "32x64k":
            nothing = torch.zeros(1, device="cuda")
            print(f"empty call, cold: {time_cold(nothing.zero_):.1f} us", flush=True)
        copies = 4 if requests == 32 else 16
        everything, select, attend = decode_calls(cache, requests, length, max_len, copies)
        print(
            f"{name}: all {time_graph(everything):.1f} us (cold, one replay "
            f"{time_cold(everything[0]):.1f}), select {time_graph(select):.1f}, "
            f"attend {time_graph(attend):.1f}, floor {floor:.1f}",
            flush=True,
        )
        if not sweep:
            continue
        rows = []
        for config in DECODE_SWEEP:
            if (config.splits < 6) == (requests == 32):
                with patched("decode_config", config):
                    rows.append((time_graph(attend, 7), config))
        for micros, config in sorted(rows, key=lambda r: r[0])[:7]:
            print(
                f"   {name} decode_config {micros:8.1f} us  n={config.block_n} "
                f"splits={config.splits} warps={config.num_warps} stages={config.num_stages} "
                f"registers={config.max_registers}",
                flush=True,
            )


def run_peer() -> None:
    """FlashAttention 3 as vLLM ships it, on the same caches, timed in the same two ways."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    cache = make_cache(32 * 1024 + 64)
    views = [part.transpose(1, 2) for part in cache[:2]]
    shapes = {name: ([(1, length)] * n, most) for name, (n, length, most) in DECODES.items()}
    shapes["16k of 128k"] = ([(16384, 131072)], 131072)
    for name, (lengths, max_len) in shapes.items():
        decodes = len(lengths) if lengths[0][0] == 1 else 0
        calls = []
        for copy in range(4 if decodes else 1):
            q, batch = make_batch(cache[0].shape[0], lengths, decodes, max_len, copy)
            calls.append(
                lambda q=q, b=batch: flash_attn_varlen_func(
                    q,
                    *views,
                    max_seqlen_q=b.max_query_len,
                    cu_seqlens_q=b.cu_seqlens_q,
                    max_seqlen_k=b.max_seq_len,
                    seqused_k=b.seq_lens,
                    block_table=b.block_table,
                    causal=True,
                    fa_version=3,
                )
            )
        print(
            f"FA3 {name}: {time_graph(calls, 7):.1f} us (cold, one replay "
            f"{time_cold(calls[0], 7):.1f})",
            flush=True,
        )


def run_prefill(sweep: bool, tiny: bool = False, pick: tuple[int, int] = (0, 1)) -> None:
    chunk, length = 16384, 131072
    cache = make_cache(64 if tiny else 2048)
    pages = cache[0].shape[0]
    scores: list[TileConfig | None] = [None]
    attends: list[TileConfig | None] = [None]
    if sweep:
        scores += [
            TileConfig(4, m // 4, m, n, 1, w, s)
            for m, n, w, s in ((64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 4), (32, 64, 4, 3))
        ]
        scores.append(TileConfig(4, 16, 64, 64, 1, 4, 3, hopper=True))
        attends += [
            TileConfig(h, 64, 64 * h, n, 1, w, s, r)
            for h, n, w, s, r in ((4, 64, 16, 2, 0), (2, 64, 8, 2, 128))
        ]  # fmt: skip
        attends.append(TileConfig(2, 64, 128, 128, 1, 4, 3, hopper=True))
    scores, attends = scores[pick[0] :: pick[1]], attends[pick[0] :: pick[1]]
    lengths = [4096] if tiny else [length]
    if not tiny and not sweep:
        lengths = list(range(chunk, length + 1, chunk))
    total = {"all": 0.0, "select": 0.0, "attend": 0.0}
    for now in lengths:
        new = min(chunk, now)
        q, batch = make_batch(pages, [(new, now)], 0, now if not tiny else length, 0)
        out = torch.empty_like(q)

        operands = PagedOperands(q, *cache[:2], out, DIM**-0.5, cache[2])
        segment = Segment(batch, POLICY)
        select = functools.partial(cell_means_launch.select, operands, segment)
        attend = functools.partial(attend_launch.attend_segment, operands, segment, select())
        everything = functools.partial(choose_and_attend, cell_means_launch, operands, segment)
        for kind, fn, options in (
            ("score_config", select, scores),
            ("prefill_config", attend, attends),
        ):
            for config in options:
                with patched(kind, config):
                    try:
                        if tiny:
                            fn()
                            torch.cuda.synchronize()
                            continue
                        micros = time_graph([fn], 5)
                    except Exception as error:  # a configuration that does not fit is a result
                        print(f"   {kind} {config}: {type(error).__name__} {str(error)[:80]}")
                        continue
                    if sweep:
                        print(f"   {kind} {micros / 1e3:7.3f} ms {config}", flush=True)
                    else:
                        total["select" if fn is select else "attend"] += micros / 1e3
        if not sweep and not tiny:
            micros = time_graph([everything], 5)
            total["all"] += micros / 1e3
            print(f"prefill to {now}: {micros / 1e3:.2f} ms", flush=True)
    if not tiny and not sweep:
        print("prefill of 128k in 16k chunks, ms per layer:", total, flush=True)


def _compile(job: tuple[str, int, int]) -> None:
    kind, index, count = job
    fn = run_decode if kind == "decode" else run_prefill
    fn(True, tiny=True, pick=(index, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=("decode", "prefill", "peer"))
    parser.add_argument("--sweep", action="store_true", help="time every candidate")
    parser.add_argument("--processes", type=int, default=14, help="that compile; 1: as they come")
    parser.add_argument("--portable", action="store_true", help="no kernels written for Hopper")
    args = parser.parse_args()
    begin = time.time()
    if args.processes > 1:
        kinds = [kind for kind in args.what if kind != "peer"]
        jobs = [(kind, i, args.processes) for kind in kinds for i in range(args.processes)]
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            pool.map(_compile, jobs, chunksize=1)
        print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    for kind in args.what:
        if kind == "peer":
            run_peer()
            continue
        fn = run_decode if kind == "decode" else run_prefill
        if kind == "prefill" or not args.sweep:
            with portable_kernels() if args.portable else nullcontext():
                fn(False)
        if args.sweep:
            fn(True)
    print(f"{time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
