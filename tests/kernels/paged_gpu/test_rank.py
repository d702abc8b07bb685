"""The second step of selection: candidates ranked by exact masses, against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hardware import simulated
from problems import Problem, make_problem

from sparsek_kernels.paged.index.problem import Selection, Step
from sparsek_kernels.paged.index.two_step import launch_probabilities
from sparsek_kernels.paged.policy import Growth, SelectionPolicy
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.reference import select_tile_reference
from sparsek_kernels.paged.sample_reference import list_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = SelectionPolicy(num_sink=4, window_size=40, top_k=3, sel_block_size=32, query_tile=32)
LARGE = SelectionPolicy(num_sink=64, window_size=512, top_k=8)


@dataclass(frozen=True)
class Case:
    """Requests whose prefill tiles rank random candidates."""

    lengths: list[tuple[int, int]]
    policy: SelectionPolicy
    options: dict[str, object] = field(default_factory=dict)
    k_scale: float = 1.0


def sized(size: int, **changes: int | Growth) -> SelectionPolicy:
    return replace(TILES, sel_block_size=size, top_k=2, **changes)


CASES = {
    "tile": Case([(100, 350), (31, 413), (64, 64)], TILES, {"page_size": 32, "group": 3}),
    "tile-fp8": Case(
        [(40, 301)], TILES, {"cache_dtype": torch.float8_e4m3fn, "page_size": 32}, 0.37
    ),
    "tile-of-chunks": Case([(7, 390), (45, 400), (2, 386)], sized(64, query_tile=64)),
    "tile-over-page": Case([(70, 460)], sized(64), {"page_size": 16, "dim": 64, "group": 4}),
    "tile-128": Case([(65, 901)], sized(128, query_tile=64), {"heads": 1, "page_size": 64}),
    "tile-48": Case([(70, 460)], sized(48, query_tile=24), {"page_size": 48}),
    "tile-16": Case([(70, 300)], sized(16, query_tile=100), {"dim": 40}),
    "tile-growing": Case([(300, 700)], sized(32, growth=Growth(128, 3, 512))),
    "tile-wide-group": Case([(40, 460)], sized(32, query_tile=64), {"heads": 1, "group": 12}),
}
PAGES = {"group": 4, "heads": 1, "page_size": 64}
WHOLE = {
    "pages": Case(
        [(300, 1100), (64, 900), (64, 64)], replace(LARGE, top_k=2), PAGES | {"group": 3}
    ),
    "long": Case([(5, 3300)], replace(LARGE, window_size=64, top_k=18), PAGES),
    "fp8": Case([(150, 1500)], LARGE, PAGES | {"cache_dtype": torch.float8_e4m3fn}, 0.37),
    "half-pages": Case(
        [(200, 1900)], replace(LARGE, sel_block_size=128, top_k=3), PAGES | {"page_size": 128}
    ),
    "channels": Case([(100, 1500)], replace(LARGE, top_k=3), PAGES | {"dim": 40}),
    "wide-tile": Case([(300, 1400)], replace(LARGE, top_k=2, query_tile=256), PAGES),
}
"""Lists of whole units: many rows of 16 bits, and blocks whose units of 64 keys lie in a page."""
REAL = {
    "tile": Case([(700, 4000), (65, 3000)], LARGE, {"group": 4}),
    "tile-32": Case([(300, 2500)], replace(LARGE, sel_block_size=32), {"page_size": 32}),
    "tile-128": Case([(300, 6500)], replace(LARGE, sel_block_size=128), {"group": 8, "dim": 64}),
    "tile-fp8": Case([(70, 8000)], LARGE, {"cache_dtype": torch.float8_e4m3fn, "group": 4}, 0.37),
    "tile-wide": Case([(300, 4500)], replace(LARGE, query_tile=256), {"group": 16, "dim": 64}),
}


def fill_keys(problem: Problem, k_scale: float) -> list[torch.Tensor]:
    """Write the keys alone; what they stand for in the cache, per request."""
    page_size = problem.k_cache.shape[2]
    bytes_wide = problem.k_cache.element_size() == 1
    stored = []
    for keys, slots in zip(problem.keys, problem.slots, strict=True):
        rows = (keys.float() / k_scale).to(problem.k_cache.dtype)
        target = problem.k_cache.view(torch.uint8) if bytes_wide else problem.k_cache
        target[slots // page_size, :, slots % page_size] = rows.view(target.dtype)
        stored.append(rows.float().cpu() * k_scale)
    return stored


def tiles_of(case: Case, problem: Problem) -> list[tuple[int, int, range]]:
    """Request, base and positions of every tile; no positions where there is no query."""
    rule, found = case.policy, []
    table = prefill_tiles(problem.batch, rule.query_tile, problem.q.shape[0])
    for request, base in table.tolist():
        new, length = case.lengths[request] if request >= 0 else (0, 0)
        there = range(max(base, length - new), min(base + rule.query_tile, length))
        found.append((request, base, there))
    return found


def draw_candidates(
    case: Case, tiles: list[tuple[int, int, range]], heads: int
) -> list[list[list[int]]]:
    """Random candidates of every tile and KV head with weights, as many as the rule lists or one
    fewer."""
    generator = torch.Generator().manual_seed(7)
    rule, drawn = case.policy, []
    for _, _, positions in tiles:
        lists: list[list[int]] = [[] for _ in range(heads)]
        if positions and not rule.sees_all(positions[0]):
            first, last = rule.candidate_range(positions[0])
            places = rule.places(positions[0])
            count = min(rule.listed_places(places), last - first)
            count -= len(drawn) % 2 if count > places + 1 else 0  # a place left over
            for row in lists:
                order = torch.randperm(last - first, generator=generator)[:count] + first
                steps = torch.randint(0, 90, (count,), generator=generator)
                steps *= last - first > places
                row += (order.sort().values + (steps << 21)).tolist()
        drawn.append(lists)
    return drawn


def reads_whole_units(call: Selection) -> bool:
    """Whether the masses of a call come from ``write_unit_masses``."""
    config, unit = launch_probabilities.list_config(call)
    in_a_page = call.k_cache.shape[2] % unit == 0
    return config.block_m >= 64 and unit == config.block_n and in_a_page


def check(case: Case, dtype: torch.dtype, tolerance: float, whole: bool = False) -> None:
    """Every tile's blocks are a sample of its candidates by exact scores, up to rounding.

    With ``whole`` the case must be one of whole units.
    """
    problem = make_problem(
        case.lengths,
        num_decodes=0,
        dtype=dtype,
        device=DEVICE,
        query_gain=1.5,
        **case.options,
    )
    for own, (new, _) in zip(problem.keys, case.lengths, strict=True):
        own[len(own) - new // 2 :] *= 4.0  # earlier queries would lose most of their mass to these
    rule, heads, scale = case.policy, problem.k_cache.shape[1], problem.q.shape[-1] ** -0.5
    keys = fill_keys(problem, case.k_scale)
    tiles = tiles_of(case, problem)
    drawn = draw_candidates(case, tiles, heads)
    table = prefill_tiles(problem.batch, rule.query_tile, problem.q.shape[0])
    out = torch.full(
        (table.shape[0], heads, rule.scored_blocks), -7, dtype=torch.int32, device=DEVICE
    )
    operands = problem.operands(problem.q, k_scale=case.k_scale)
    call = Selection(out, operands, problem.batch, rule, table)
    assert reads_whole_units(call) or not whole
    most = rule.listed_blocks
    padded = [[row + [-1] * (most - len(row)) for row in lists] for lists in drawn]
    given = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
    half = len(tiles) // 2
    for step in (Step(0, half), Step(half, len(tiles) - half)):  # scratch is used again
        if step.count:
            # A kernel that finds candidates comes before, and waits for the step that is ranked.
            launch_probabilities.rank_blocks(call, step, given[step.first :].clone())
    offsets, ranked = problem.batch.cu_seqlens_q.tolist(), 0
    for index, (request, base, positions) in enumerate(tiles):
        if not positions:
            continue
        new, length = case.lengths[request]
        token = offsets[request] + positions[0] - (length - new)
        found = out[index].tolist()
        if rule.sees_all(base):
            assert found == [[-1] * rule.scored_blocks] * heads
            continue
        want = select_tile_reference(
            problem.q[token : token + len(positions)].cpu(),
            keys[request],
            list(positions),
            rule,
            scale,
            drawn[index],
        )
        ranked += 1
        places = rule.places(base)
        for head, chosen in enumerate(found):
            assert not list_error(want, head, chosen[:places], tolerance), (index, head)
            assert chosen[places:] == [-1] * (rule.scored_blocks - places)
    assert ranked


@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name: str) -> None:
    check(CASES[name], torch.float32, 1e-4)


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_units_against_oracle(
    name: str, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle has the same 16-bit queries and keys, whose products float32 holds exactly.

    What differs is the order of float32 sums: of the products of a key, the keys of a list, the
    rows of a tile.  They are as long as with float32 inputs, and so the tolerance is the same.
    """
    monkeypatch.setattr(launch_probabilities, "listed_shares", lambda *_: shares)
    check(WHOLE[name], torch.float16, 1e-4, whole=True)


def test_one_of_these_lists_is_longer_than_what_is_looked_up_at_once() -> None:
    assert 32 < WHOLE["long"].policy.listed_blocks < 3300 // 64 - 6


@pytest.mark.parametrize(
    ("arch", "heads", "tiles"), [(90, 8, 64), (90, 1, 528), (90, 200, 3), (80, 8, 81)]
)
def test_steps_are_whole_waves_of_hoppers_programs(arch: int, heads: int, tiles: int) -> None:
    """Of 132 multiprocessors eight heads leave 16 for each; a program has two tiles."""
    problem = make_problem(
        [(64, 64)], heads=heads, group=4, dim=128, page_size=64, dtype=torch.float16
    )
    rule = SelectionPolicy(num_sink=64, window_size=512, top_k=96)
    table = prefill_tiles(problem.batch, rule.query_tile, problem.q.shape[0])
    out = torch.empty(table.shape[0], heads, rule.scored_blocks, dtype=torch.int32)
    call = Selection(out, problem.operands(problem.q), problem.batch, rule, table)
    with simulated(arch, 132):
        assert launch_probabilities.tiles_ranked(call, 1 << 24) == tiles


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", REAL)
def test_real_sizes(name: str, page_size: int) -> None:
    case = REAL[name]
    options = {"dim": 128, "page_size": page_size, "head_major": page_size == 64}
    check(replace(case, options=options | case.options), torch.bfloat16, 2e-2)
