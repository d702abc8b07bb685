"""How large files, folders of kernels and signatures may get."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("sparsek_backend", "kernels", "tests", "benchmarks", "deploy", "examples")
LINES, MODULES, PARAMETERS = 500, 12, 12

FLAT = {
    # public functions, and oracles that are called as these are
    "nsa_attention",
    "nsa_reference",
    "paged_attention",
    "block_sparse_attention_reference",
    # signatures that Transformers dictates
    "sparsek_attention",
    # a problem of the tests, in keywords with defaults
    "make_problem",
}
"""Functions that may have more than 12 parameters, beside operators and kernels."""


def sources() -> Iterator[Path]:
    """Every Python file of the repository."""
    for folder in FOLDERS:
        yield from (ROOT / folder).rglob("*.py")


def is_flat(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a ``torch.library`` operator or device code."""
    decorators = {ast.unparse(x).partition("(")[0] for x in function.decorator_list}
    return not decorators.isdisjoint({"torch.library.custom_op", "triton.jit", "gluon.jit"})


def long_signatures() -> Iterator[tuple[str, str]]:
    """File and name of every function with more than 12 parameters, ``self`` not counted."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_flat(node):
                continue
            args = node.args
            named = [x.arg for x in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            stars = (args.vararg is not None) + (args.kwarg is not None)
            if len([x for x in named if x not in ("self", "cls")]) + stars > PARAMETERS:
                yield str(path.relative_to(ROOT)), node.name


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert len(lengths) > 600
    assert {str(path): count for path, count in lengths.items() if count > LINES} == {}


def test_no_folder_of_kernels_is_full() -> None:
    package = ROOT / "kernels" / "sparsek_kernels"
    folders = [package, *(path for path in package.rglob("*") if path.is_dir())]
    modules = {path: [x for x in path.glob("*.py") if x.name != "__init__.py"] for path in folders}
    assert {str(path): len(found) for path, found in modules.items() if len(found) > MODULES} == {}


def test_no_signature_is_long_but_the_flat_ones() -> None:
    assert [found for found in long_signatures() if found[1] not in FLAT] == []


def test_every_flat_signature_is_still_long() -> None:
    """An exception that is no longer needed goes."""
    assert FLAT - {name for _, name in long_signatures()} == set()


def test_device_code_lies_in_folders_of_kernels() -> None:
    for path in (ROOT / "kernels" / "sparsek_kernels").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "kernels":
            assert "import torch" not in text, path
        else:
            assert "@triton.jit" not in text, path
            assert "@gluon.jit" not in text, path
