"""Two checkouts of this repository against each other on one GPU: did a change cost speed?

    python benchmarks/compare_trees.py OLD NEW --csv trees.csv
    python benchmarks/compare_trees.py OLD NEW --only attention nsa
    python benchmarks/compare_trees.py OLD NEW --toy --only decode prefill learned   # on a CPU

Each round times every operation in a process of the old checkout, then in one of the new; the row
of an operation has the median over the rounds and the ratio new over old.  Both must give the same
numbers: results must agree closely, chosen blocks bit for bit.  A difference is an error.

Paged attention may be called in two ways: a checkout without ``StepPolicy`` has one policy for both
phases, which names the ranking.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

OURS = Path(__file__).resolve()
TOY = 64
"""By how much contexts are shorter with ``--toy``."""
Call = Callable[[], Any]
Operations = dict[str, tuple[Call, str]]
"""Name of every operation, what runs it, and how it is timed: in a CUDA graph, from call to call,
or as the host's time (``graph``, ``calls``, ``host``)."""


@dataclass
class Machine:
    """Where tensors are, and whether sizes are a toy's."""

    device: str = "cuda"
    toy: bool = False

    def tokens(self, count: int) -> int:
        """Tokens of a context or a chunk."""
        return count // TOY if self.toy else count


MACHINE = Machine()


def draw(*shape: int) -> Any:
    """A bf16 tensor of normal values."""
    import torch

    return torch.randn(shape, device=MACHINE.device, dtype=torch.bfloat16)


def both_passes(name: str, call: Callable[..., Any], *inputs: Any) -> Operations:
    """Forward and backward pass of ``call``."""
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    upstream = torch.randn_like(out)
    return {
        f"{name} forward": (lambda: call(*inputs), "graph"),
        f"{name} backward": (
            lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True),
            "calls",
        ),
    }


def attention() -> Operations:
    """Causal and sink-window attention, and the eager call of a small problem."""
    from sparsek_kernels import sink_flash_attention

    q, k, v = draw(1, 16384, 32, 128), draw(1, 16384, 8, 128), draw(1, 16384, 8, 128)
    small = [draw(1, 512, 8, 64) for _ in range(3)]
    return {
        **both_passes("causal 16k", sink_flash_attention, q, k, v),
        **both_passes(
            "sinks and window 16k",
            partial(sink_flash_attention, num_sink=4, window_size=1024),
            *(q, k, v),
        ),
        "small, eager": (lambda: sink_flash_attention(*small), "host"),
    }


def nsa() -> Operations:
    """Native sparse attention."""
    import torch

    from sparsek_kernels import nsa_attention

    found: Operations = {}
    for heads, kv_heads, tokens in ((64, 4, 65536), (32, 8, 32768), (64, 4, 8192)):
        sizes = (heads, kv_heads, kv_heads)
        tensors = [draw(1, tokens, n, 128) for n in sizes]
        gates = [torch.rand(1, tokens, heads, device="cuda", dtype=torch.bfloat16) for _ in "csw"]
        name = f"nsa {heads}/{kv_heads} {tokens // 1024}k"
        timed = "graph" if tokens < 32768 else "calls"
        found[f"{name} forward"] = (partial(nsa_attention, *tensors, *gates), timed)
    tensors = [draw(1, 16384, n, 128) for n in (64, 4, 4)]
    gates = [torch.rand(1, 16384, 64, device="cuda", dtype=torch.bfloat16) for _ in "csw"]
    return found | both_passes("nsa 64/4 16k", nsa_attention, *tensors, *gates)


@dataclass(frozen=True)
class Pages:
    """A layer's pages, and which of them each request has."""

    keys: Any
    values: Any
    summary: Any
    table: Any


def make_pages(requests: int, length: int, *, summarised: bool = True) -> Pages:
    """Pages of random keys and values, for ``length`` tokens of each request."""
    import torch

    from sparsek_kernels.paged import summary_bytes, write_kv

    device = MACHINE.device
    pages = requests * -(-length // 64)
    cache = draw(pages, 64, 8, 256).transpose(1, 2)
    keys, values = cache[..., :128], cache[..., 128:]
    summary = torch.zeros(pages, 8, summary_bytes(64, 128), device=device, dtype=torch.uint8)
    for slots in torch.arange(pages * 64, device=device).split(1 << 16) if summarised else ():
        page, row = slots // 64, slots % 64
        new = cache[page, :, row]
        write_kv(new[..., :128], new[..., 128:], keys, values, summary, slots)
    table = torch.randperm(pages, device=device).int().view(requests, -1)
    return Pages(keys, values, summary, table)


def step(
    pages: Pages, counts: list[int], lengths: list[int], decodes: int, rotation: Any = None
) -> Any:
    """A step of requests with so many new tokens, and so many in all."""
    import torch

    from sparsek_kernels.paged import PagedBatch

    def integers(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=MACHINE.device)

    return PagedBatch(
        block_table=pages.table[: len(counts)],
        seq_lens=integers(lengths),
        cu_seqlens_q=integers([sum(counts[:i]) for i in range(len(counts) + 1)]),
        num_decodes=decodes,
        num_decode_tokens=decodes,
        decode_query_len=1,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        seq_lens_host=tuple(lengths),
        query_lens_host=tuple(counts),
        rotation=rotation,
    )


def sizes(**changes: int) -> dict[str, int]:
    """Fields of a policy."""
    few = {"window_size": 64, "top_k": 2} if MACHINE.toy else {"window_size": 512, "top_k": 32}
    return {"num_sink": 64, **few, **changes}


def rule(fields: dict[str, int], indexer: str = "", source: Any = None) -> tuple[Any, Any]:
    """A policy whose decoded tokens have twice the budget, and the options that go with it.

    Args:
        fields: of the policy; of both phases for the indexers ``infllm`` and ``seer``.
        indexer: these, or ``pattern``, or the default of both phases.
        source: gates of ``seer``, entries of ``pattern``.
    """
    from sparsek_kernels import paged
    from sparsek_kernels.paged import SelectionPolicy, block_lists

    single = indexer in ("infllm", "seer")
    policy, own = SelectionPolicy(**fields), 2 * fields["top_k"]
    lists = block_lists(source, policy).to(MACHINE.device) if indexer == "pattern" else None
    if not hasattr(paged, "StepPolicy"):
        fields = {**fields, **({"ranking": indexer} if single else {"decode_top_k": own or None})}
        given = {"gates": source} if indexer == "seer" else {}
        return SelectionPolicy(**fields), given if lists is None else {"lists": lists}
    if single:
        index = paged.InfLLM() if indexer == "infllm" else paged.Seer(source)
        indexers = paged.Indexers(index, index)
        return paged.StepPolicy(policy, policy), {"indexers": indexers}
    options = {}
    if lists is not None:
        by_token = (getattr(paged, "KeyMeans", None) or paged.PageRecords)()
        options["indexers"] = paged.Indexers(paged.VerticalSlash(lists), by_token)
    if hasattr(paged, "KeyMeans"):
        return paged.StepPolicy(policy, policy.per_token(own)), options
    return paged.StepPolicy(policy, policy.by_records(own * policy.sel_block_size)), options


def keep(pages: Pages, whole: Any, policy: Any, options: dict[str, Any]) -> None:
    """Write what a learned indexer keeps in the pages of whole sequences."""
    from sparsek_kernels import paged

    if "indexers" in options:
        index = options["indexers"].decode
        takes_values = "v_cache" in inspect.signature(paged.write_index).parameters
        caches = (pages.keys, pages.values) if takes_values else (pages.keys,)
        paged.write_index(*caches, pages.summary, whole, policy.decode, index)
    elif "gates" in options:
        paged.write_gate_keys(pages.keys, pages.summary, whole, policy, options["gates"])
    elif MACHINE.device != "cpu":  # where means are not kept
        paged.write_means(pages.keys, pages.summary, whole)


def both_calls(
    name: str, pages: Pages, batch: Any, policy: Any, options: dict[str, Any], timed: str
) -> Operations:
    """The chosen blocks of a step, and its attention."""
    from sparsek_kernels.paged import paged_attention, select_blocks

    q = draw(sum(batch.query_lens), 32, 128)
    given = {"k_summary": pages.summary, **options}
    select = partial(select_blocks, q, pages.keys, batch, policy, **given)
    attend = partial(paged_attention, q, pages.keys, pages.values, batch, policy, **given)
    return {f"{name} indices": (select, timed), name: (attend, timed)}


def layer(pages: Pages, batch: Any, policy: Any) -> Call:
    """One layer of a step as servers call it; every call but the first replays its launches."""
    from sparsek_kernels import paged

    count = sum(batch.query_lens)
    q, out = draw(count, 32, 128), draw(count, 32, 128)
    if not hasattr(paged, "StepPolicy"):
        tensors = (q, pages.keys, pages.values)
        options = {"k_summary": pages.summary, "out": out}
        return partial(paged.paged_attention, *tensors, batch, policy, **options)
    from sparsek_kernels.paged.api import default_indexers
    from sparsek_kernels.paged.operands import PagedOperands
    from sparsek_kernels.paged.plan import plan_step

    indexers = default_indexers(policy)

    def call() -> Any:
        operands = PagedOperands(q, pages.keys, pages.values, out, 128**-0.5, pages.summary)
        for segment in plan_step(batch, policy):
            mine = operands.of_rows(segment.rows)
            paged.attend_segment(mine, segment, indexers.of(segment))
        return out

    return call


def decode() -> Operations:
    """Single tokens over a paged cache, and the host's time for a layer that is replayed."""
    found: Operations = {}
    for requests, context in ((32, 65536), (32, 8192), (4, 131072), (1, 131072)):
        length = MACHINE.tokens(context)
        pages = make_pages(requests, length)
        batch = step(pages, [1] * requests, [length] * requests, requests)
        name = f"decode {requests} x {context // 1024}k"
        found |= both_calls(name, pages, batch, *rule(sizes()), "graph")
    pages = make_pages(4, 1024)
    for kind, fields in (("indexed", sizes(top_k=4)), ("window", sizes(top_k=0))):
        policy, _ = rule(fields)
        batch = step(pages, [1] * 4, [1024] * 4, 4)
        found[f"replayed layer, {kind}"] = (layer(pages, batch, policy), "host")
    return found


def prefill() -> Operations:
    """Chunks of prompts over a paged cache, alone, by a pattern, and beside decodes."""
    import torch

    found: Operations = {}
    chunk, length = MACHINE.tokens(16384), MACHINE.tokens(131072)
    pages = make_pages(1, length)
    batch = step(pages, [chunk], [length], 0)
    fields = sizes()
    found |= both_calls("prefill 16k at 128k", pages, batch, *rule(fields), "calls")
    last = rule(sizes(dense_last=64))
    found |= both_calls("prefill 16k at 128k, dense last", pages, batch, *last, "calls")
    entries = torch.stack([torch.randperm(96)[:48] - 48 for _ in range(8)])
    pattern = rule(fields, "pattern", entries)
    found |= both_calls("prefill 16k at 128k, pattern", pages, batch, *pattern, "calls")
    length, room = MACHINE.tokens(32768), MACHINE.tokens(34816)
    pages = make_pages(12, room)
    fields = sizes(dense_below=MACHINE.tokens(4096), dense_last=MACHINE.tokens(1024) // 16)
    short = MACHINE.tokens(1024)
    counts = [1] * 10 + [short, short]
    lengths = [room - 1 - i for i in range(10)] + [length, short]
    batch = step(pages, counts, lengths, 10)
    return found | both_calls("mixed 10 + 2k", pages, batch, *rule(fields), "calls")


def learned() -> Operations:
    """Single tokens by InfLLM-v2's scores and by SeerAttention-R's gates."""
    import torch

    from sparsek_kernels.paged import Gates

    found: Operations = {}
    requests, length = 8, MACHINE.tokens(32768)

    def weights(*shape: int) -> Any:
        return torch.randn(shape, device=MACHINE.device) * (shape[-2] * 4) ** -0.5

    norms = [1.0 + torch.rand(128, device=MACHINE.device) for _ in range(2)]
    gates = Gates(weights(8, 4, 128, 128), weights(8, 3 * 128, 128), *norms)
    angles = torch.arange(length)[:, None] * 1e4 ** -(torch.arange(64) / 64)
    rotation = torch.cat([angles.cos(), angles.sin()], 1).float().to(MACHINE.device)
    for indexer, source in (("infllm", None), ("seer", gates)):
        policy, options = rule(sizes(query_tile=1), indexer, source)
        pages = make_pages(requests, length, summarised=False)
        whole = step(pages, [length] * requests, [length] * requests, 0, rotation)
        keep(pages, whole, policy, options)
        batch = step(pages, [1] * requests, [length] * requests, requests, rotation)
        name = f"{indexer} decode {requests} x 32k"
        found |= both_calls(name, pages, batch, policy, options, "graph")
    return found


FAMILIES: dict[str, Callable[[], Operations]] = {
    "attention": attention,
    "nsa": nsa,
    "decode": decode,
    "prefill": prefill,
    "learned": learned,
}


def host_milliseconds(call: Call, calls: int = 50) -> float:
    """Best of the host's time of a call, over runs that the GPU does not hold up."""
    import torch

    found = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begin) / calls * 1e3)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return min(found)


def milliseconds(call: Call, timed: str) -> float:
    """Time of one call; ``timed`` is of :data:`Operations`."""
    import torch
    import triton

    if MACHINE.device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    found: float
    if timed == "host":
        return host_milliseconds(call)
    if timed == "graph":
        with torch.cuda.stream(torch.cuda.Stream()):
            found = triton.testing.do_bench_cudagraph(call, rep=60, return_mode="median")
    else:
        found = triton.testing.do_bench(call, warmup=20, rep=150, return_mode="median")
    return found


def measure(families: list[str]) -> dict[str, tuple[float, float, int]]:
    """Milliseconds of every operation in this tree, and its result's mean and checksum."""
    import torch

    rows = {}
    for family in families:
        torch.manual_seed(0)
        for name, (call, timed) in FAMILIES[family]().items():
            result = call()
            parts = result if isinstance(result, tuple | list) else (result,)
            mean, checksum = 0.0, 0
            for x in parts:
                if x is not None and x.numel():
                    mean += float(x.double().abs().mean())
                    plain = x.detach().contiguous().flatten().view(torch.uint8)
                    checksum = zlib.crc32(plain.cpu().numpy(), checksum)
            rows[name] = (milliseconds(call, timed), mean, checksum)
    return rows


def compared(name: str, runs: dict[str, list[Any]]) -> tuple[float, float, bool, bool]:
    """An operation's median times, whether its results agree as they must, and bit for bit."""
    old, new = (median(run[name][0] for run in runs[x]) for x in ("old", "new"))
    found = [run[name] for x in runs.values() for run in x]
    means, checksums = {mean for _, mean, _ in found}, {checksum for *_, checksum in found}
    same_bits = len(checksums) == 1
    close = max(means) - min(means) <= 1e-4 * max(means)
    return old, new, same_bits if name.endswith(" indices") else close, same_bits


def commit_of(tree: Path) -> str:
    """The commit of a checkout, ``unknown`` where it has no git."""
    done = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Run the comparison; 1 where results differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--toy", action="store_true", help="small contexts, on a CPU if need be")
    parser.add_argument("--csv", type=Path)
    parser.add_argument(
        "--commits", nargs=2, metavar=("OLD", "NEW"), help="recorded where there is no git"
    )
    args = parser.parse_args()
    if args.old is None:
        import torch

        MACHINE.toy = args.toy
        MACHINE.device = "cuda" if torch.cuda.is_available() else "cpu"
        print(json.dumps(measure(args.only)))
        return 0
    runs: dict[str, list[Any]] = {"old": [], "new": []}
    for turn in range(args.rounds):
        for name, tree in (("old", args.old), ("new", args.new)):
            paths = [str(tree), str(tree / "kernels"), os.environ.get("PYTHONPATH", "")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            done = subprocess.run(
                [sys.executable, str(OURS), *["--toy"][: args.toy], "--only", *args.only],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return 1
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {turn + 1} of {args.rounds}: {name} done", flush=True)
    failed = 0
    rows = []
    for operation in runs["old"][0]:
        old, new, good, same_bits = compared(operation, runs)
        failed += not good
        rows.append([operation, f"{old:.5g}", f"{new:.5g}", f"{new / old:.4f}", good, same_bits])
        verdict = "" if same_bits else "other bits" if good else "DIFFERS"
        print(f"{operation:40} {old:9.4f} -> {new:9.4f} ms  {new / old:.3f}  {verdict}")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            names = ["operation", "old_ms", "new_ms", "new_over_old", "same_result", "same_bits"]
            writer.writerow([*names, "old_commit", "new_commit"])
            commits = args.commits or (commit_of(args.old), commit_of(args.new))
            writer.writerows([*row, *commits] for row in rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
