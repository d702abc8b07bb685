"""The paged kernels for Hopper, on steps small enough for the oracle; needs such a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import oracle_check
import pytest
import torch
from problems import Problem, make_problem, phases

from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.cell_means import launch as cell_means_launch
from sparsek_kernels.paged.index.cell_means import launch_scores
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.reference import select_tile_reference
from sparsek_kernels.paged.sample_reference import list_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

TOP_K = SelectionPolicy(num_sink=64, window_size=192, top_k=4)
ALL = {"attend_hopper", "_score_sm90"}
STEP = [(1, 1500), (1, 65), (200, 1300), (63, 63), (130, 901), (0, 700), (1000, 1000)]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches of each Hopper kernel; steps with few tiles take them too."""
    counts: Counter[str] = Counter()
    for module, selector in (
        (attend_launch, "prefill_config"),
        (launch_scores, "score_config"),
    ):
        configure = getattr(module, selector)
        monkeypatch.setattr(
            module,
            selector,
            lambda configure=configure, **s: replace(configure(**s), splits=1, hopper=True),
        )
    for module, launcher in (
        (attend_launch, "attend_hopper"),
        (launch_scores, "_score_sm90"),
    ):
        start = getattr(module, launcher)
        monkeypatch.setattr(
            module,
            launcher,
            lambda *a, start=start, name=launcher: (counts.update([name]), start(*a)),
        )
    return counts


def step(**options: object) -> Problem:
    defaults = {"page_size": 64, "dim": 128, "group": 4, "dtype": torch.bfloat16}
    return make_problem(STEP, num_decodes=2, device="cuda", **(defaults | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dim", "page_size", "dtype", "head_major"),
    [
        (128, 64, torch.bfloat16, False),
        (128, 64, torch.bfloat16, True),
        (128, 128, torch.float16, True),
        (64, 64, torch.float16, False),
        (64, 128, torch.bfloat16, True),
    ],
    ids=str,
)
def test_layouts(
    dim: int, page_size: int, dtype: torch.dtype, head_major: bool, ran: Counter[str]
) -> None:
    problem = step(dim=dim, page_size=page_size, dtype=dtype, head_major=head_major)
    oracle_check.check(problem, TOP_K)
    assert set(ran) == ALL


@pytest.mark.parametrize("group", [2, 3, 4, 7, 8, 16])
def test_groups(group: int, ran: Counter[str]) -> None:
    oracle_check.check(step(group=group), TOP_K)
    assert set(ran) == ALL


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_lists_of_odd_and_even_length(top_k: int, ran: Counter[str]) -> None:
    oracle_check.check(step(), replace(TOP_K, top_k=top_k, num_sink=0))
    assert ran["attend_hopper"] == 1


@pytest.mark.parametrize("query_tile", [128, 256])
def test_tiles_of_several_chunks(query_tile: int, ran: Counter[str]) -> None:
    oracle_check.check(step(), replace(TOP_K, query_tile=query_tile, top_k=6))
    assert set(ran) == ALL


@pytest.mark.parametrize("dim", [64, 128])
def test_many_short_items_for_each_program(dim: int, ran: Counter[str]) -> None:
    """Lists of one to five blocks, odd and even ones in turn, whole tiles and parts of them."""
    lengths = [(64, 64 * (1 + i % 5)) if i % 3 else (1 + i % 70, 70 + i) for i in range(240)]
    problem = make_problem(
        lengths, heads=4, group=3, dim=dim, page_size=64, dtype=torch.bfloat16, device="cuda"
    )
    oracle_check.check(problem, replace(TOP_K, window_size=65, top_k=1))
    assert ran["attend_hopper"] == 1


def test_learned_sinks(ran: Counter[str]) -> None:
    oracle_check.check(step(), TOP_K, torch.randn(8, device="cuda"))
    assert ran["attend_hopper"] == 1


def test_dense_below(ran: Counter[str]) -> None:
    oracle_check.check(step(), replace(TOP_K, dense_below=640))
    assert ran["attend_hopper"] == 1


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"dim": 96}, TOP_K),
        ({"dtype": torch.float32}, TOP_K),
        ({}, replace(TOP_K, sel_block_size=128, window_size=128)),
        ({}, replace(TOP_K, query_tile=16)),
    ],
    ids=["dim 96", "fp32", "large blocks", "tiles of 16"],
)
def test_the_rest_is_left_to_the_portable_kernels(
    options: dict[str, object], policy: SelectionPolicy, ran: Counter[str]
) -> None:
    oracle_check.check(step(**options), policy)
    assert not ran


@pytest.mark.parametrize("query_tile", [16, 32])
def test_small_tiles_are_attended_by_the_portable_kernel(
    query_tile: int, ran: Counter[str]
) -> None:
    oracle_check.check(step(), replace(TOP_K, query_tile=query_tile))
    assert ran == Counter()


def test_small_pages_are_attended_by_the_portable_kernel(ran: Counter[str]) -> None:
    oracle_check.check(step(page_size=32), TOP_K)
    assert set(ran) == {"_score_sm90"}


def test_a_step_of_many_tiles(ran: Counter[str]) -> None:
    """Enough of them that nothing would be split; held against the portable kernels."""
    problem = make_problem(
        [(1, 900), (3000, 9000), (1500, 4097)],
        num_decodes=1,
        heads=8,
        group=4,
        dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=16)
    oracle_check.fill(problem)
    prefills = phases(problem.batch, policy)[1]

    def run(selected: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Selection, and the output over it (or over ``selected``), of the prefills."""
        out = torch.zeros_like(problem.q)
        chosen = cell_means_launch.select(problem.operands(out), prefills)
        given = chosen if selected is None else selected
        attend_launch.attend_segment(problem.operands(out), prefills, Chosen(given))
        return chosen, out

    chosen, out = run()
    assert set(ran) == ALL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_scores, "scores_fit", lambda *_: False)
        patch.setattr(attend_launch, "attend_fits", lambda *_: False)
        _, expected = run(chosen)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    tiles = prefill_tiles(prefills.batch, 64, problem.q.shape[0]).tolist()
    for row in (10, 46, 60):
        request, base = tiles[row]
        new, length = (3000, 9000) if request == 0 else (1500, 4097)
        positions = list(range(max(base, length - new), min(base + 64, length)))
        first = prefills.batch.first_row + (3000 if request else 0) + positions[0] - (length - new)
        q, k = problem.q[first : first + len(positions)].cpu(), problem.keys[1 + request].cpu()
        choice = select_tile_reference(q, k, positions, policy, 128**-0.5)
        wrong = [list_error(choice, h, x, 0.1) for h, x in enumerate(chosen[row].tolist())]
        assert not any(wrong), (row, wrong)
