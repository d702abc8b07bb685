"""Making, changing, keeping and drawing a pattern."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_kernels import block_sparse_attention

TRIANGLE = torch.ones(4, 4).tril().bool()


def random_mask(*shape: int, density: float = 0.5, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def learned(*shape: int, seed: int = 0) -> BlockSparsePattern:
    """A pattern with random weights; row 1 lists nothing."""
    mask = random_mask(*shape, seed=seed)
    mask[:, 1] = False
    mass = torch.rand(*shape, generator=torch.Generator().manual_seed(seed + 1))
    return BlockSparsePattern.from_mask(mask, 32, mass=mass)


def test_dense_masks() -> None:
    mask = random_mask(3, 5, 7)
    pattern = BlockSparsePattern.from_mask(mask, 64)
    assert torch.equal(pattern.mask(), mask)
    assert pattern.density == pytest.approx(mask.float().mean().item())
    assert BlockSparsePattern.from_mask(mask[0].tolist(), 64).num_patterns == 1


def test_scipy_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    mask = random_mask(5, 7)
    dense = mask.repeat_interleave(32, 0).repeat_interleave(32, 1).numpy().astype("float32")
    pattern = BlockSparsePattern.from_scipy(sparse.bsr_matrix(dense, blocksize=(32, 32)))
    assert pattern.block_size == 32
    assert torch.equal(pattern.mask()[0], mask)
    for make in (sparse.csr_matrix, sparse.coo_array):
        pattern = BlockSparsePattern.from_scipy(make(mask.numpy()), 48)
        assert torch.equal(pattern.mask()[0], mask)
    other = random_mask(5, 7, seed=1)
    several = BlockSparsePattern.from_scipy(
        [sparse.csr_matrix(x.numpy()) for x in (mask, other)], 16
    )
    assert torch.equal(several.mask(), torch.stack([mask, other]))


def test_networkx_graphs() -> None:
    networkx = pytest.importorskip("networkx")
    path = BlockSparsePattern.from_graph(networkx.path_graph(4), 16)
    near = (
        torch.eye(4, dtype=torch.bool)
        | torch.ones(3).diag(1).bool()
        | torch.ones(3).diag(-1).bool()
    )
    assert torch.equal(path.mask()[0], near)
    arrows = networkx.DiGraph([(3, 0), (0, 1), (2, 1)])
    directed = BlockSparsePattern.from_graph(arrows, 16, self_loops=False)
    assert directed.mask()[0].nonzero().tolist() == [[0, 1], [2, 1], [3, 0]]


def test_edges_in_any_order() -> None:
    pattern = BlockSparsePattern.from_edges([(2, 1), (0, 0), (2, 0), (2, 1)], (3, 2), 16)
    assert pattern.mask()[0].nonzero().tolist() == [[0, 0], [2, 0], [2, 1]]
    tensor = BlockSparsePattern.from_edges(torch.tensor([[2, 1], [0, 0], [2, 0]]), (3, 2), 16)
    assert torch.equal(tensor.mask(), pattern.mask())
    assert BlockSparsePattern.from_edges([], (3, 2), 16).num_blocks == 0


def test_local_and_strided_by_hand() -> None:
    local = BlockSparsePattern.local((5, 5), 64, window=2, sinks=1)
    assert local.mask()[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 1, 1],
    ]
    strided = BlockSparsePattern.strided((5, 5), 64, stride=2)
    assert strided.mask()[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    last = BlockSparsePattern.local((2, 5), 64, window=2, sinks=1)
    assert torch.equal(last.mask(), local.mask()[:, 3:])


@given(
    size=st.tuples(st.integers(2, 8), st.integers(2, 8)),
    seed=st.integers(0, 50),
    share=st.floats(0, 1),
    sinks=st.integers(0, 2),
    window=st.integers(0, 2),
)
def test_pruning_keeps_the_heaviest_blocks_and_every_row(
    size: tuple[int, int], seed: int, share: float, sinks: int, window: int
) -> None:
    rows, cols = size
    pattern = learned(2, rows, cols, seed=seed)
    mask, mass = pattern.mask(), pattern.mass()
    row, col = torch.arange(rows)[:, None] + cols - rows, torch.arange(cols)[None]
    fixed = mask & ((col < sinks) | ((row - col).abs() < window))
    lone = mask & ~fixed.any(2, keepdim=True)
    fixed |= lone & (mass == mass.masked_fill(~lone, -1.0).amax(2, keepdim=True))
    least = int(fixed.sum((1, 2)).max())
    count = least + int(share * (rows * cols - least))
    if count == 0:
        return
    kept = pattern.prune(density=count / (rows * cols), sinks=sinks, window=window).mask()
    assert not (kept & ~mask).any()
    assert not (fixed & ~kept).any()
    assert torch.equal(kept.any(2), mask.any(2))
    for p in range(2):
        assert kept[p].sum() == min(count, int(mask[p].sum()))
        rest, dropped = mass[p][kept[p] & ~fixed[p]], mass[p][mask[p] & ~kept[p]]
        assert not rest.numel() or not dropped.numel() or rest.min() >= dropped.max()


def test_weights_keep_no_graph() -> None:
    mass = torch.ones(4, 4, requires_grad=True) * 2
    pattern = BlockSparsePattern.from_mask(TRIANGLE, 16, mass=mass)
    assert torch.equal(copy.deepcopy(pattern).mass()[0], 2.0 * TRIANGLE)


def test_pruning_carries_the_weights() -> None:
    pattern = learned(2, 6, 6)
    pruned = pattern.prune(density=0.4)
    assert torch.equal(pruned.mass(), pattern.mass() * pruned.mask())


def test_union() -> None:
    one, two = learned(2, 4, 5), learned(2, 4, 5, seed=3)
    both = one.union(two)
    assert torch.equal(both.mask(), one.mask() | two.mask())
    assert torch.equal(both.mass(), torch.maximum(one.mass(), two.mass()))
    local = BlockSparsePattern.local((4, 5), 32, window=1)
    assert torch.equal(one.union(local).mask(), one.mask() | local.mask())
    assert one.union(local).weights is None


@pytest.mark.parametrize("shape", [(3, 4), [3, 4]], ids=["tuple", "list"])
def test_cropped(shape: Any) -> None:
    whole = learned(2, 5, 7)
    found = whole.crop(shape)
    assert found.shape == (3, 4)
    assert torch.equal(found.mass(), whole.mass()[:, :3, :4])
    assert whole.crop((5, 7)) is whole


@pytest.mark.parametrize("pattern", [learned(3, 5, 7), BlockSparsePattern.from_mask(TRIANGLE, 16)])
def test_saved_and_loaded(pattern: BlockSparsePattern, tmp_path: Path) -> None:
    pattern.save(tmp_path / "p.safetensors")
    found = BlockSparsePattern.load(tmp_path / "p.safetensors")
    assert (found.block_size, found.shape) == (pattern.block_size, pattern.shape)
    assert torch.equal(found.mask(), pattern.mask())
    assert (found.weights is None) == (pattern.weights is None)
    if found.weights is not None:
        assert torch.equal(found.mass(), pattern.mass())


def test_an_interrupted_save_leaves_the_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.safetensors"
    learned(3, 5, 7).save(path)
    whole = path.read_bytes()

    def stops(tensors: Any, where: Path, header: Any) -> None:
        Path(where).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", stops)
    with pytest.raises(KeyboardInterrupt):
        BlockSparsePattern.local((4, 4), 16, window=1).save(path)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_one_file_may_be_written_twice_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    path, other = tmp_path / "p.safetensors", BlockSparsePattern.local((4, 4), 16, window=1)

    def meanwhile(tensors: Any, where: Path, header: Any) -> None:
        monkeypatch.setattr("safetensors.torch.save_file", save_file)
        save_file(tensors, where, header)
        other.save(path)  # as a process of the same number in another container does

    monkeypatch.setattr("safetensors.torch.save_file", meanwhile)
    learned(3, 5, 7).save(path)
    assert BlockSparsePattern.load(path).shape == (5, 7)
    assert list(tmp_path.iterdir()) == [path]


def test_a_saved_file_has_the_permissions_of_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    learned(1, 2, 2).save(tmp_path / "p.safetensors")
    modes = [(tmp_path / name).stat().st_mode for name in ("new", "p.safetensors")]
    assert modes[0] == modes[1]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path: expected a folder that exists"):
        learned(1, 2, 2).save(tmp_path / "none" / "p.safetensors")


def rewrite(path: Path, header: dict[str, str], **tensors: torch.Tensor) -> None:
    """Change header fields and tensors of a pattern file."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as file:
        fields = {**file.metadata(), **header}
    save_file({**load_file(path), **tensors}, path, fields)


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"version": "2"}, {}, "version: expected 1, got '2'"),
        ({"format": "other"}, {}, "format: expected 'sparsek.block_sparse_pattern'"),
        ({"block_size": "many"}, {}, "block_size: expected a number, got 'many'"),
        ({"num_cols": "\u0663"}, {}, "num_cols: expected a number, got '\u0663'"),
        ({"num_cols": "-1"}, {}, "num_cols: expected a number, got '-1'"),
        ({"num_cols": str(2**70)}, {}, "num_cols: expected a number, got '1180"),
        ({"num_cols": "9" * 5000}, {}, "num_cols: expected a number, got '999"),
        ({"num_cols": str(10**12)}, {}, "num_cols: expected at most 67108864 with 1 patterns"),
        ({"num_cols": "5"}, {}, "sha256: expected"),
        ({"note": "mine"}, {}, "note: expected no field of this name"),
        ({}, {"note": torch.ones(1)}, "note: expected no field of this name"),
        ({}, {"version": torch.ones(1)}, "version: expected no field of this name"),
        ({}, {"weights": torch.ones(10)}, "sha256: expected"),
        ({}, {"weights": torch.ones(10).half()}, "weights: expected a tensor of torch.float32"),
        ({}, {"col_indices": torch.ones(10)}, "col_indices: expected a tensor of torch.int32"),
        ({}, {"crow_indices": torch.arange(5)}, "crow_indices: expected a tensor of torch.int32"),
        ({}, {"crow_indices": torch.tensor(3).int()}, "crow_indices: expected shape"),
        ({"block_size": "20"}, {}, "block_size: expected a multiple of 16"),
        ({"num_rows": "5"}, {}, r"crow_indices: expected shape \[patterns, 6\]"),
        ({}, {"col_indices": torch.full((10,), 9, dtype=torch.int32)}, "col_indices: expected"),
        ({}, {"weights": torch.ones(3)}, "weights: expected shape"),
    ],
)
def test_a_changed_file_is_refused(
    header: dict[str, str], tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.safetensors"
    BlockSparsePattern.from_mask(TRIANGLE, 16).save(path)
    rewrite(path, header, **tensors)
    with pytest.raises(ValueError, match=message) as error:
        BlockSparsePattern.load(path)
    assert str(path) in str(error.value)


def test_a_file_without_a_digest_is_loaded(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path, pattern = tmp_path / "p.safetensors", learned(2, 4, 5)
    pattern.save(path)
    sizes = {"block_size": "32", "num_rows": "4", "num_cols": "5"}
    tensors = {name: getattr(pattern, name) for name in ("crow_indices", "col_indices", "weights")}
    save_file(tensors, path, {"format": "sparsek.block_sparse_pattern", "version": "1", **sizes})
    assert torch.equal(BlockSparsePattern.load(path).mass(), pattern.mass())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.5])
def test_weights_that_are_no_masses_are_refused(wrong: float, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path, pattern = tmp_path / "p.safetensors", learned(2, 4, 5)
    assert pattern.weights is not None
    weights = pattern.weights.clone()
    weights[3] = wrong
    with pytest.raises(ValueError, match="weights: expected finite numbers from 0 on"):
        replace(pattern, weights=weights)
    sizes = {"block_size": "32", "num_rows": "4", "num_cols": "5"}
    tensors = {**pattern.tensors(), "weights": weights}
    save_file(tensors, path, {"format": "sparsek.block_sparse_pattern", "version": "1", **sizes})
    with pytest.raises(ValueError, match="weights: expected finite numbers from 0 on") as error:
        BlockSparsePattern.load(path)
    assert str(path) in str(error.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "p.safetensors"
    learned(2, 4, 5).save(path)
    return path


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_damage_is_a_value_error_that_names_the_file(saved: Path, data: st.DataObject) -> None:
    whole = saved.read_bytes()
    start = data.draw(st.integers(0, len(whole)), "start")
    removed = data.draw(st.integers(0, 12) | st.just(len(whole)), "removed")
    added = data.draw(st.binary(max_size=12) | st.text("0123456789").map(str.encode), "added")
    path = saved.with_name("damaged.safetensors")
    path.write_bytes(whole[:start] + added + whole[start + removed :])
    pattern = learned(2, 4, 5)
    message = None
    try:
        pattern = BlockSparsePattern.load(path)
    except ValueError as error:
        message = str(error)
    assert message is None or str(path) in message
    assert torch.equal(pattern.mass(), learned(2, 4, 5).mass())


def test_a_damaged_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with pytest.raises(ValueError, match="does not exist"):
        BlockSparsePattern.load(path)
    with pytest.raises(ValueError, match="is no file"):
        BlockSparsePattern.load(tmp_path)
    BlockSparsePattern.from_mask(TRIANGLE, 16).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="path: expected a safetensors file"):
        BlockSparsePattern.load(path)


def test_moving_to_a_device() -> None:
    pattern = learned(1, 4, 4)
    assert pattern.to("cpu") is pattern


@pytest.mark.gpu
def test_moving_to_a_gpu() -> None:
    moved = learned(2, 4, 4).to("cuda")
    assert moved.device.type == moved.row_indices.device.type == "cuda"
    assert torch.equal(moved.to("cpu").mass(), learned(2, 4, 4).mass())


@pytest.mark.parametrize("count", [1, 6, 20])
def test_shown(count: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = learned(count, 6, 6).show()
    titles = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert titles[0].startswith("pattern 0: ")
    assert len(titles) == min(count, 16)
    figure.savefig(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
    chosen = learned(count, 6, 6).show([count - 1])
    assert chosen.axes[0].get_title().startswith(f"pattern {count - 1}: ")
    with pytest.raises(ValueError, match="shape: expected blocks to draw, got"):
        learned(count, 6, 6).crop((0, 6)).show()


def test_listed_blocks_show_and_others_do_not() -> None:
    pytest.importorskip("matplotlib")
    faint = BlockSparsePattern.from_mask(
        TRIANGLE, 16, mass=torch.full((4, 4), 1e-9).fill_diagonal_(1)
    )
    shades = faint.show().axes[0].images[0].get_array()
    assert torch.equal(torch.as_tensor(shades) > 0.1, TRIANGLE)


def test_said_in_short() -> None:
    assert repr(learned(2, 4, 4)).startswith("BlockSparsePattern(patterns=2, shape=(4, 4), block")


def test_executed() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 100, 2, 8) for _ in range(3))
    pattern = BlockSparsePattern.from_mask(TRIANGLE, 32)
    out = block_sparse_attention(q, k, v, pattern, causal=True)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("module", ["safetensors", "matplotlib.figure"])
def test_missing_packages_are_named(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    action = pattern_actions(tmp_path)[module]
    with pytest.raises(ImportError, match=r"pip install 'sparsek-backend\[patterns\]'"):
        action()


def pattern_actions(folder: Path) -> dict[str, Any]:
    pattern = learned(1, 4, 4)
    return {"safetensors": lambda: pattern.save(folder / "p"), "matplotlib.figure": pattern.show}


def indices(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a pattern without blocks."""
    return torch.zeros(1, rows + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)


make = BlockSparsePattern
REFUSED: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "mask: expected dtype torch.bool", lambda: make.from_mask(torch.ones(2, 2), 16)),
    (ValueError, r"mask: expected shape \[R, C\]", lambda: make.from_mask([True], 16)),
    (
        ValueError,
        "mass: expected the shape",
        lambda: make.from_mask(TRIANGLE, 16, mass=torch.ones(2)),
    ),
    (ValueError, "block_size: expected a multiple", lambda: make.from_mask(TRIANGLE, 8)),
    (TypeError, "matrix: expected a scipy sparse", lambda: make.from_scipy([[1]], 16)),
    (ValueError, "matrix: expected at least one", lambda: make.from_scipy([], 16)),
    (ValueError, "edges: expected pairs", lambda: make.from_edges([(0, 4)], (4, 4), 16)),
    (ValueError, "edges: expected pairs", lambda: make.from_edges([(-1, 0)], (4, 4), 16)),
    (ValueError, "edges: expected pairs", lambda: make.from_edges([(0, 1, 2)], (4, 4), 16)),
    (ValueError, "edges: expected pairs", lambda: make.from_edges([(0, 1), (2,)], (4, 4), 16)),
    (ValueError, "edges: expected pairs", lambda: make.from_edges([(0, 1.5)], (4, 4), 16)),
    (ValueError, "shape: expected", lambda: make.from_edges([], (4,), 16)),
    (TypeError, "graph: expected a networkx graph", lambda: make.from_graph({0: [1]}, 16)),
    (ValueError, "window: expected", lambda: make.local((4, 4), 16, window=0)),
    (TypeError, "sinks: expected an int", lambda: make.local((4, 4), 16, window=1, sinks=1.0)),
    (ValueError, "shape: expected", lambda: make.local((4, -4), 16, window=1)),
    (ValueError, "shape: expected", lambda: make.local((1, 10**12), 16, window=1)),
    (ValueError, "shape: expected", lambda: make(16, (1, 2**70), *indices(1), None)),
    (ValueError, "stride: expected", lambda: make.strided((4, 4), 16, stride=0)),
    (ValueError, "weights: expected a learned", lambda: make.from_mask(TRIANGLE, 16).mass()),
    (ValueError, "weights: expected", lambda: make.from_mask(TRIANGLE, 16).prune(density=0.5)),
    (ValueError, "density: expected", lambda: learned(1, 4, 4).prune(density=0.01)),
    (ValueError, "density: expected", lambda: learned(1, 4, 4).prune(density=1.5)),
    (ValueError, "density: expected", lambda: learned(1, 4, 4).prune(density=float("nan"))),
    (ValueError, "other: expected shape", lambda: learned(1, 4, 4).union(learned(1, 4, 5))),
    (
        ValueError,
        "other: expected block_size 32, got 16",
        lambda: learned(1, 4, 4).union(make.from_mask(TRIANGLE, 16)),
    ),
    (ValueError, "other: expected 1 or 2", lambda: learned(2, 4, 4).union(learned(3, 4, 4))),
    (ValueError, "patterns: expected", lambda: learned(1, 4, 4).show([1])),
]


@pytest.mark.parametrize(("error", "message", "action"), REFUSED, ids=[r[1] for r in REFUSED])
def test_refuses(error: type[Exception], message: str, action: Any) -> None:
    with pytest.raises(error, match=message):
        action()


def test_refuses_matrices_and_graphs() -> None:
    sparse, networkx = pytest.importorskip("scipy.sparse"), pytest.importorskip("networkx")
    tall = sparse.bsr_matrix(torch.ones(32, 32).numpy(), blocksize=(32, 16))
    with pytest.raises(ValueError, match="matrix: expected square blocks"):
        make.from_scipy(tall)
    square = sparse.bsr_matrix(torch.ones(32, 32).numpy(), blocksize=(32, 32))
    with pytest.raises(ValueError, match="matrix: expected blocks of 16"):
        make.from_scipy(square, 16)
    with pytest.raises(ValueError, match="block_size: expected an int for a matrix without"):
        make.from_scipy(sparse.csr_matrix(TRIANGLE.numpy()))
    with pytest.raises(ValueError, match="matrix: expected blocks of one shape"):
        make.from_scipy([sparse.csr_matrix(x.numpy()) for x in (TRIANGLE, TRIANGLE[:2])], 16)
    for columns in ([5, 0], [-1, 0]):
        outside = sparse.csr_matrix(([1.0, 1.0], columns, [0, 1, 2]), shape=(2, 3))
        with pytest.raises(ValueError, match="matrix: expected a valid one"):
            make.from_scipy(outside, 16)
    with pytest.raises(ValueError, match="graph: expected the nodes 0 to 1"):
        make.from_graph(networkx.Graph([(1, 2)]), 16)


@pytest.mark.parametrize("weights", [[1.0], torch.ones(10, dtype=torch.float64)])
def test_refuses_other_weights(weights: Any) -> None:
    p = make.from_mask(TRIANGLE, 16)
    with pytest.raises(TypeError, match="weights: expected a float32 tensor"):
        make(16, p.shape, p.crow_indices, p.col_indices, weights)
