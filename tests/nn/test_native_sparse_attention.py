"""The NSA layer on the CPU: oracle, packing, cache, compilation, autocast, checkpointing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sparsek_backend.nn import NativeSparseAttention, NSAConfig
from sparsek_backend.nn.rotary import rotate
from sparsek_kernels import nsa_compress
from tests.kernels.nsa import reference as ref

SMALL = {"cmp_block_size": 8, "cmp_stride": 4, "sel_block_size": 8, "top_n": 4, "window_size": 10}


def layer(
    dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (4, 2), **options: object
) -> NativeSparseAttention:
    torch.manual_seed(0)
    config = NSAConfig.from_dict({**SMALL, **options})
    return NativeSparseAttention(24, *heads, 8, config=config, dtype=dtype)


def tokens(count: int, batch: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, count, 24, generator=torch.Generator().manual_seed(1)).to(dtype)


def oracle(module: NativeSparseAttention, x: torch.Tensor) -> torch.Tensor:
    """The layer written out over the oracle's pieces, one sequence."""
    config, n = module.config, x.shape[1]
    at = torch.arange(n)
    q = rotate(module.q_proj(x).view(n, 4, 8)[None], at, 10000.0)[0]
    parts = 1 if config.shared_kv else 3
    keys = module.k_proj(x).view(n, parts, 2, 8).unbind(1)
    values = module.v_proj(x).view(n, parts, 2, 8).unbind(1)
    keys, values = (list(t) * 3 if parts == 1 else t for t in (keys, values))
    phis = [None, None]
    if module.phi_k is not None and module.phi_v is not None:
        phis = [
            lambda t, p=p: ref.phi_reference(t, p.position, p.w1, p.b1, p.w2, p.b2)
            for p in (module.phi_k, module.phi_v)
        ]
    k_cmp = ref.compress_reference(keys[0], 8, 4, phis[0])
    v_cmp = ref.compress_reference(values[0], 8, 4, phis[1])
    k_cmp = rotate(k_cmp[None], torch.arange(len(k_cmp)) * 4, 10000.0)[0]
    k_slc, k_swa = (rotate(k[None], at, 10000.0)[0] for k in keys[1:])
    scale = 8**-0.5
    seen = ref.compressed_mask(n, n, len(k_cmp), 8, 4)
    o_cmp, _, probs = ref.masked_attention(q, k_cmp, v_cmp, seen, scale)
    scores = ref.block_scores(probs.detach(), -(-n // 8), 2, 8, 4, 8)
    chosen = ref.select_reference(scores, n, 8, config.top_n, 1, 2)
    mask = ref.selected_mask(chosen, n, 8, 2)
    o_slc = ref.masked_attention(q, k_slc, values[1], mask, scale)[0]
    window = ref.sliding_mask(n, n, config.window_size)
    o_swa = ref.masked_attention(q, k_swa, values[2], window, scale)[0]
    hidden = torch.nn.functional.silu(module.gate_in(x[0]))
    gates = torch.sigmoid(module.gate_out(hidden)).view(n, 3, 4, 1)
    out = gates[:, 0] * o_cmp + gates[:, 1] * o_slc + gates[:, 2] * o_swa
    return module.o_proj(out.flatten(1))[None]


@pytest.mark.parametrize("shared", [False, True], ids=["own-kv", "shared-kv"])
@pytest.mark.parametrize("compression", ["mlp", "mean"])
@pytest.mark.parametrize("count", [5, 61])
def test_layer_is_the_paper(shared: bool, compression: str, count: int) -> None:
    module = layer(shared_kv=shared, compression=compression)
    x = tokens(count)
    ours, theirs = module(x), oracle(module, x)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    named = dict(module.named_parameters())
    found = torch.autograd.grad(ours, list(named.values()), upstream, allow_unused=True)
    wanted = torch.autograd.grad(theirs, list(named.values()), upstream, allow_unused=True)
    for name, have, need in zip(named, found, wanted, strict=True):
        zero = torch.zeros_like(named[name])
        have, need = (zero if g is None else g for g in (have, need))
        torch.testing.assert_close(have, need, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("edges", [[0, 29], [0, 5, 5, 6, 31]], ids=["one", "packed"])
@pytest.mark.parametrize("heads", [(2, 2), (2, 1), (4, 1), (7, 1), (16, 2), (16, 1)], ids=str)
def test_gradcheck(heads: tuple[int, int], edges: list[int]) -> None:
    module = layer(heads=heads)
    cu_seqlens = torch.tensor(edges, dtype=torch.int32) if len(edges) > 2 else None
    x = tokens(edges[-1])
    names, parameters = zip(*module.named_parameters(), strict=True)

    def run(hidden: torch.Tensor, *changed: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, changed, strict=True))
        out: torch.Tensor = torch.func.functional_call(
            module, given, (hidden,), {"cu_seqlens": cu_seqlens}
        )
        return out

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *parameters), fast_mode=True)


def test_packed_sequences_do_not_meet() -> None:
    module = layer()
    x = tokens(70)
    edges = [0, 1, 30, 30, 37, 70]
    packed = module(x, cu_seqlens=torch.tensor(edges, dtype=torch.int32))
    for lo, hi in pairwise(edges):
        if hi > lo:
            torch.testing.assert_close(packed[:, lo:hi], module(x[:, lo:hi]))


@pytest.mark.parametrize("shared", [False, True], ids=["own-kv", "shared-kv"])
@pytest.mark.parametrize("steps", [[40, 1, 1, 1, 5, 1], [1] * 20, [3, 46]], ids=str)
def test_decoding_equals_prefill(shared: bool, steps: list[int]) -> None:
    module = layer(shared_kv=shared)
    x = tokens(sum(steps), batch=2)
    cache = module.new_cache(2, sum(steps))
    with torch.no_grad():
        parts = [module(part, cache=cache) for part in x.split(steps, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), module(x))
        with pytest.raises(ValueError, match="cache: expected at most"):
            module(x[:, :1], cache=cache)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 9), "cache: expected at most 30 tokens, got 22 \\+ 9"),
        ((2, 90), "cache: expected at most 30 tokens, got 22 \\+ 90"),
        ((1, 8), "cache: expected a batch of 2, got 1"),
    ],
    ids=str,
)
def test_a_cache_that_refuses_tokens_is_as_it_was(shape: tuple[int, int], message: str) -> None:
    module, x = layer(), tokens(30, batch=2)
    cache = module.new_cache(2, 30)
    with torch.no_grad():
        module(x[:, :22], cache=cache)
        with pytest.raises(ValueError, match=message):
            module(tokens(shape[1], batch=shape[0]), cache=cache)
        torch.testing.assert_close(module(x[:, 22:], cache=cache), module(x)[:, 22:])


@pytest.mark.parametrize("shared", [False, True], ids=["own-kv", "shared-kv"])
@pytest.mark.parametrize("inside", [False, True], ids=["cache-before", "cache-within"])
def test_decoding_under_autocast(inside: bool, shared: bool) -> None:
    module, x = layer(torch.float32, shared_kv=shared), tokens(48, 2, torch.float32)
    cache = module.new_cache(2, 48)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if inside:
            cache = module.new_cache(2, 48)
        parts = [module(part, cache=cache) for part in x.split([40, 1, 1, 6], dim=1)]
        whole = module(x)
    assert cache.dtype == (torch.bfloat16 if inside else torch.float32)
    found = torch.cat(parts, 1)
    assert found.dtype == whole.dtype == torch.bfloat16
    exact = module(x)
    assert (found - exact).norm() <= 2 * (whole - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cache_of_another_dtype(dtype: torch.dtype) -> None:
    module, x = layer(torch.float32), tokens(48, 2, torch.float32)
    cache = module.new_cache(2, 48, dtype=dtype)
    with torch.no_grad():
        parts = [module(part, cache=cache) for part in x.split([40, 1, 7], dim=1)]
        found, expected = torch.cat(parts, 1), module(x)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("step", ["nsa_compress", "nsa_attention"])
def test_a_failed_step_leaves_the_cache_as_it_was(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = layer(), tokens(30, batch=2)
    cache = module.new_cache(2, 30)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("out of memory")

    with torch.no_grad():
        module(x[:, :21], cache=cache)
        with monkeypatch.context() as patch:
            patch.setattr(f"sparsek_backend.nn.native_sparse_attention.{step}", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                module(x[:, 21:], cache=cache)
        assert cache.length == 21
        torch.testing.assert_close(module(x[:, 21:], cache=cache), module(x)[:, 21:])


def test_sequences_with_the_compressed_branch_alone() -> None:
    module = layer()
    x = tokens(48)
    edges = torch.tensor([0, 20, 48], dtype=torch.int32)
    shut = torch.tensor([False, True])
    found = module(x, cu_seqlens=edges, compressed_only=shut)
    parts = x[:, :20], x[:, 20:]
    apart = [module(y, compressed_only=s[None]) for y, s in zip(parts, shut, strict=True)]
    torch.testing.assert_close(found, torch.cat(apart, 1))
    torch.testing.assert_close(found[:, :20], module(parts[0]))
    with torch.no_grad():
        module.v_proj.weight[2 * 8 :] += 1.0  # values of the selected and the sliding branch
    torch.testing.assert_close(module(parts[1], compressed_only=shut[1:]), apart[1])
    assert not torch.allclose(module(parts[0]), apart[0])
    for wrong in (shut, shut[:1].int(), shut[:1].to("meta")):
        with pytest.raises(ValueError, match=r"compressed_only: expected bool of shape \[1\].*cpu"):
            module(x, compressed_only=wrong)


@pytest.mark.parametrize("shut", [False, True], ids=["all-branches", "compressed-only"])
@pytest.mark.parametrize("edges", [[0, 20], [0], [0, 30, 20, 48], [0, 60], [1, 48]], ids=str)
def test_offsets_that_do_not_fit_the_tokens(edges: list[int], shut: bool) -> None:
    module, x = layer(), tokens(48)
    given = torch.ones(len(edges) - 1, dtype=torch.bool) if shut else None
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        module(x, cu_seqlens=torch.tensor(edges, dtype=torch.int32), compressed_only=given)
    with pytest.raises(ValueError, match="hidden_states: expected batch size 1 with cu_seqlens"):
        module(tokens(48, 2), cu_seqlens=torch.tensor([0, 48], dtype=torch.int32))


def test_compiled_layer() -> None:
    module = layer(torch.float32)
    x = tokens(40, dtype=torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected = module(x)
    torch.testing.assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    found = module.k_proj.weight.grad
    module.zero_grad()
    expected.sum().backward()
    torch.testing.assert_close(found, module.k_proj.weight.grad)


def test_a_compiled_layer_takes_texts_shorter_than_a_compressed_block() -> None:
    """After longer ones, whose length inductor has made a symbol."""
    module = layer(torch.float32)
    compiled = torch.compile(module, fullgraph=True)
    with torch.no_grad():
        for count in (40, 57, 3):
            x = tokens(count, dtype=torch.float32)
            torch.testing.assert_close(compiled(x), module(x))
            packed = {"cu_seqlens": torch.tensor([0, count - 1, count], dtype=torch.int32)}
            torch.testing.assert_close(compiled(x, **packed), module(x, **packed))


def test_autocast_trains_in_bf16() -> None:
    module = layer(torch.float32)
    x = tokens(40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all(), name
    error = (out.float() - module(x)).norm() / out.float().norm()
    assert error < 0.05


def test_checkpointing_gives_the_same_gradients() -> None:
    module = layer()
    x = tokens(40).requires_grad_()
    (plain,) = torch.autograd.grad(module(x).sum(), x)
    again = checkpoint(module, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), x)[0], plain)


@pytest.mark.parametrize("hidden", [16, 24])
def test_a_wide_compression_starts_as_the_mean(hidden: int) -> None:
    phi = layer(cmp_hidden_size=hidden).phi_k
    assert phi is not None
    x = torch.randn(2, 40, 2, 8, dtype=torch.float64)
    found = nsa_compress(x, x, phi_k=phi.weights(x.dtype), cmp_block_size=8, cmp_stride=4)[0]
    mean = nsa_compress(x + phi.position.mean(0), x, cmp_block_size=8, cmp_stride=4)[0]
    torch.testing.assert_close(found, mean)


def test_state_dict_is_stable() -> None:
    module = layer()
    names = {
        *("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
        *("gate_in.weight", "gate_in.bias", "gate_out.weight", "gate_out.bias"),
        *(f"phi_{x}.{y}" for x in "kv" for y in ("position", "w1", "b1", "w2", "b2")),
    }
    assert set(module.state_dict()) == names
    assert module.k_proj.weight.shape == (3 * 2 * 8, 24)
    other = layer(shared_kv=False)
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(tokens(20)), module(tokens(20)))
    assert NSAConfig.from_dict(module.config.to_dict()) == module.config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cmp_stride": 3}, "cmp_block_size: expected a multiple of cmp_stride=3"),
        ({"sel_block_size": 10}, "sel_block_size: expected a multiple"),
        ({"top_n": 2}, "top_n: expected at least the 3 forced blocks"),
        ({"window_size": 0}, "window_size: expected an integer >= 1"),
        ({"compression": "max"}, "compression: expected 'mlp' or 'mean'"),
        ({"blocks": 1}, "nsa: expected fields of"),
        ({"rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_bad_config(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NSAConfig.from_dict({**SMALL, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_kv": "false"}, "shared_kv: expected a bool, got 'false'"),
        ({"rope_theta": "1e4"}, "rope_theta: expected a number or None, got '1e4'"),
        ({"window_size": 1.5}, "window_size: expected an int, got float"),
    ],
)
def test_a_field_of_a_wrong_type(options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        NSAConfig.from_dict({**SMALL, **options})


def test_bad_module_arguments() -> None:
    with pytest.raises(ValueError, match="num_heads: expected a multiple of num_kv_heads=3"):
        NativeSparseAttention(24, 4, 3)
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of num_heads"):
        NativeSparseAttention(25, 4, 2)
    with pytest.raises(ValueError, match="head_dim: expected an even size"):
        NativeSparseAttention(24, 4, 2, 7)
    for sizes, name in (
        ((24, 0, 1), "num_heads"),
        ((24, -2, 1), "num_heads"),
        ((0, 1, 1), "hidden"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*: expected an integer >= 1"):
            NativeSparseAttention(*sizes)
    with pytest.raises(TypeError, match="config: expected an NSAConfig or None, got dict"):
        NativeSparseAttention(24, 4, 2, config=SMALL)
    module = layer()
    with pytest.raises(ValueError, match="hidden_states: expected shape"):
        module(torch.zeros(3, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match="cache: expected None with cu_seqlens"):
        module(
            tokens(4),
            cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
            cache=module.new_cache(1, 4),
        )
