"""Writing and scoring the sketch by kernels, in the interpreter or on a GPU."""

from __future__ import annotations

import oracle_check
import pytest
import torch
from problems import Problem, make_problem
from triton import knobs

from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.paged import write_kv
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.index.key_means.config import logits_config
from sparsek_kernels.paged.index.key_means.kernels.logits import decode_logits_kernel
from sparsek_kernels.paged.index.key_means.sketch import VECTOR_SIZE, read_vectors, rotation_size
from sparsek_kernels.paged.pages import summary_bytes
from sparsek_kernels.paged.reference import hadamard_reference
from sparsek_kernels.paged.scratch import overlap_options
from sparsek_kernels.paged.write import launch as write_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNKS = 2


@pytest.mark.parametrize(
    ("dim", "dtype"), [(32, torch.bfloat16), (80, torch.float32), (128, torch.bfloat16)]
)
def test_the_kernel_writes_what_the_torch_path_writes(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    keys = torch.randn(50, 3, dim).to(dtype)
    slots = torch.arange(50) + 32
    k_cache = torch.full((3, 3, 32, dim), float("nan"), dtype=dtype)
    summary = torch.full((3, 3, summary_bytes(32, dim)), 255, dtype=torch.uint8)
    written = []
    for device, write in (("cpu", write_kv), (DEVICE, write_launch.write_kv)):
        caches = [x.clone().to(device) for x in (k_cache, k_cache, summary)]
        for begin, end in ((0, 5), (5, 6), (6, 7), (7, 19), (19, 50)):
            new = keys[begin:end].to(device)
            write(new, new, *caches, slots[begin:end].to(device))
        written.append([x.cpu() for x in caches])
    for expected, found in zip(*written, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def block_logits(problem: Problem, sel_block: int) -> torch.Tensor:
    """Logits ``[tokens, Hq, blocks]`` of all queries by the kernel; NaN where it writes nothing."""
    q, batch = problem.q, problem.batch
    (num_heads, dim), (heads, page_size) = q.shape[1:], problem.k_cache.shape[1:3]
    blocks = -(-batch.max_seq_len // sel_block)
    tokens = batch.num_decodes * batch.decode_query_len
    out = torch.full((tokens, num_heads, blocks), float("nan"), device=q.device)
    config = logits_config(
        requests=batch.num_decodes,
        num_kv_heads=heads,
        group=num_heads // heads,
        head_dim=dim,
        queries=batch.decode_query_len,
        vectors=sel_block // VECTOR_SIZE,
        num_sms=4,
    )
    decode_logits_kernel[(CHUNKS, heads, batch.num_decodes)](
        out,
        q,
        problem.k_summary,
        batch.block_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        dim**-0.5 * LOG2E.value,
        batch.block_table.shape[1],
        0,
        0,
        *out.stride()[:2],
        *q.stride()[:2],
        *problem.k_summary.stride()[:2],
        batch.block_table.stride(0),
        GROUP=num_heads // heads,
        QUERY_LEN=batch.decode_query_len,
        HEAD_DIM=dim,
        ROTATION=rotation_size(dim),
        BLOCK_D=max(next_power_of_2(dim), 64),
        BLOCK_H=config.block_h,
        BLOCK_M=config.block_m,
        BLOCK_B=config.block_n,
        PAGE_SIZE=page_size,
        SEL_BLOCK=sel_block,
        VECTOR=VECTOR_SIZE,
        SINK_BLOCKS=0,
        REACH_BLOCKS=0,
        SCORED_BLOCKS=0,
        NUM_STAGES=config.num_stages,
        ASM=not knobs.runtime.interpret,
        SHARDED=False,
        num_warps=config.num_warps,
        **overlap_options(q.device),
    )
    return out


@pytest.mark.parametrize(
    ("dim", "dtype", "options", "sel_block"),
    [
        (64, torch.bfloat16, {"page_size": 64, "group": 4}, 16),
        (80, torch.float32, {"page_size": 48, "group": 3}, 48),
        (96, torch.bfloat16, {"page_size": 16, "group": 1}, 16),
        (128, torch.bfloat16, {"page_size": 64, "group": 4}, 16),
        (256, torch.float16, {"page_size": 32, "group": 2}, 32),
    ],
)
def test_logits_are_those_of_the_sketch(
    dim: int, dtype: torch.dtype, options: dict[str, int], sel_block: int
) -> None:
    """As the vectors and an exact query give them, but for the rounding of the query to int8."""
    lengths = [(2, 150), (1, 17), (2, 2)]
    problem = make_problem(
        lengths, num_decodes=3, dim=dim, dtype=dtype, device=DEVICE, seed=dim, **options
    )
    oracle_check.fill(problem, (1.0,), write=write_kv)
    found = block_logits(problem, sel_block).cpu().double()
    page_size = problem.k_cache.shape[2]
    rotation, scale = hadamard_reference(dim), dim**-0.5 * LOG2E.value
    kept = read_vectors(problem.k_summary.cpu(), page_size, dim).double()
    starts = problem.batch.cu_seqlens_q.tolist()
    for request, (count, length) in enumerate(lengths):
        pages = problem.batch.block_table[request].cpu().long()
        blocks = (length - 1) // sel_block
        vectors = kept[pages].transpose(1, 2).flatten(0, 1)[: blocks * sel_block // VECTOR_SIZE]
        for row in range(count):
            q = problem.q[starts[request] + row].cpu().double() @ rotation
            q = q.unflatten(0, (vectors.shape[1], -1))
            rounding = q.abs().amax(-1, keepdim=True) / 127 / 2
            logits = torch.einsum("hgd,nhd->hgn", q, vectors)
            error = rounding * vectors.abs().sum(-1).T[:, None]
            per_block = (*logits.shape[:2], blocks, sel_block // VECTOR_SIZE)
            best = (logits * scale).reshape(per_block).amax(-1).flatten(0, 1)
            limit = (error * scale).reshape(per_block).amax(-1).flatten(0, 1)
            token = request * problem.batch.decode_query_len + row
            assert ((found[token, :, :blocks] - best).abs() <= 1.001 * limit + 1e-5).all()
            assert found[token, :, blocks:].isnan().all()
