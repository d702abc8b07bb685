"""attn_implementation="sparsek" against SDPA with the mask written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import spy_on_guards
from tests.transformers_op.tiny import configure, logits, make_model, tokens, visible
from tests.vllm_backend.gate_files import make_gates_folder

import sparsek_backend.transformers_op as sparsek  # isort: skip
from sparsek_backend.config import ConfigError, SparsityConfig  # isort: skip
from sparsek_backend.transformers_op import sequences, tiles, topk  # isort: skip
from sparsek_kernels.fallback import fallback_counts  # isort: skip
from sparsek_kernels.paged.plan import first_sparse, split_queries  # isort: skip
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy  # isort: skip
from sparsek_kernels.paged.reference import attend_reference, logs_reference  # isort: skip
from sparsek_kernels.paged.sample import CELL_BITS  # isort: skip

TOLERANCE = 1e-5
SPARSE: dict[str, Any] = {
    "mode": "block_topk",
    "dense_below": 0,
    "num_sink": 64,
    "window_size": 64,
    "top_k": 1,
    "decode_tokens": 64,
}
SAMPLED = SPARSE | {"top_k": 3, "sel_block_size": 16}
"""Tiles draw two blocks beside sinks and window."""


def _worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "dense"},
        SPARSE | {"top_k": 8},
        {"mode": "sink_window", "num_sink": 4, "window_size": 400, "dense_below": 0},
        {"mode": "sink_window", "num_sink": 4, "window_size": 16, "dense_below": 512},
    ],
    ids=["defaults", "dense", "topk", "window", "dense-below"],
)
def test_budget_that_covers_the_context_equals_sdpa(settings: dict[str, Any]) -> None:
    model, ids = make_model(), tokens(2, 300)
    wanted = logits(model, "sdpa", ids)
    configure(model, **settings)
    assert _worst(logits(model, "sparsek", ids), wanted) < TOLERANCE


@pytest.mark.parametrize("dense_below", [0, 64, 100, 128])
def test_sink_window_is_exact(dense_below: int) -> None:
    model, ids = make_model(), tokens(2, 200)
    mask = visible(200, 4, 32, dense_below).expand(2, -1, -1, -1)
    wanted = logits(model, "sdpa", ids, attention_mask=mask)
    configure(model, mode="sink_window", num_sink=4, window_size=32, dense_below=dense_below)
    assert _worst(logits(model, "sparsek", ids), wanted) < TOLERANCE
    assert _worst(logits(model, "sdpa", ids), wanted) > 100 * TOLERANCE


def test_dense_layers_stay_dense() -> None:
    model, ids = make_model(), tokens(1, 300)
    dense = logits(model, "sdpa", ids)
    configure(model, **SPARSE, dense_layers=2)
    assert _worst(logits(model, "sparsek", ids), dense) < TOLERANCE
    configure(model, **SPARSE, dense_layers=1)
    assert _worst(logits(model, "sparsek", ids), dense) > 100 * TOLERANCE


@pytest.mark.parametrize("settings", [SPARSE, SAMPLED], ids=["window", "sample"])
@pytest.mark.parametrize("dense_last", [0, 10, 64, 400])
@pytest.mark.parametrize("query_tile", [16, 64])
def test_training_attends_what_inference_attends(
    query_tile: int, dense_last: int, settings: dict[str, Any]
) -> None:
    model, ids = make_model(), tokens(2, 300)
    configure(model, **settings, query_tile=query_tile, dense_last=dense_last)
    without = logits(model, "sparsek", ids)
    with_gradient = model(ids).logits
    assert with_gradient.requires_grad
    assert _worst(with_gradient, without) < TOLERANCE
    dense = _worst(without, logits(model, "sdpa", ids))
    if dense_last > 300:
        assert dense < TOLERANCE
    else:
        assert dense > 100 * TOLERANCE


@pytest.mark.parametrize("gradient", [True, False])
def test_a_part_of_the_sequence_is_its_dense_end(gradient: bool) -> None:
    policy = SelectionPolicy(num_sink=16, window_size=16, top_k=1, dense_last=999, last_part=3)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, heads, 16, requires_grad=gradient) for heads in (6, 2, 2))
    found, sparse, dense = (
        sequences.attend(q, k, v, topk.AttentionRule(StepPolicy.of(rule), 0.25, None))
        for rule in (policy, replace(policy, dense_last=0), SelectionPolicy())
    )
    assert _worst(found[:, :200], sparse[:, :200]) < TOLERANCE
    assert _worst(found[:, 200:], dense[:, 200:]) < TOLERANCE
    assert _worst(found[:, 190:200], dense[:, 190:200]) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "settings",
    [
        SPARSE,
        {"mode": "sink_window", "num_sink": 4, "window_size": 32, "dense_below": 64},
    ],
    ids=["topk", "window"],
)
def test_gradients_equal_those_of_the_mask(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    of_tokens = ("mode", "decode_tokens")
    policy = SelectionPolicy(**{k: v for k, v in settings.items() if k not in of_tokens})
    q = torch.randn(1, 200, 6, 16, dtype=torch.float32, requires_grad=True)
    k, v = (torch.randn(1, 200, 2, 16, requires_grad=True) for _ in range(2))
    sinks = torch.randn(6, requires_grad=True)
    scale = 0.25
    out = sequences.attend(q, k, v, topk.AttentionRule(StepPolicy.of(policy), scale, sinks))
    seen = visible(200, 4, 32, 64)[0].expand(2, -1, -1)
    if policy.selects_blocks:
        first = first_sparse(policy, 0, 200)
        chosen = topk.block_indices(q[:, first:], k, v, policy, scale)[0]  # [N, Hkv, S]
        seen = torch.ones(2, 200, 200, dtype=torch.bool).tril()
        for row in range(first, 200):
            for head in range(2):
                blocks = chosen[row - first, head].tolist()
                assert len({b for b in blocks if b >= 0}) == sum(b >= 0 for b in blocks)
                inside = torch.isin(torch.arange(200) // 64, torch.tensor(blocks))
                seen[head, row] &= inside
    scores = torch.einsum("nhgd,mhd->hgnm", q[0].unflatten(1, (2, 3)), k[0]) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    column = sinks.view(2, 3, 1, 1).expand(-1, -1, 200, 1)
    probs = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    wanted = torch.einsum("hgnm,mhd->nhgd", probs, v[0]).flatten(1, 2)[None]
    assert _worst(out, wanted) < TOLERANCE
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v, sinks), upstream)
    wanted_grads = torch.autograd.grad(wanted, (q, k, v, sinks), upstream)
    for grad, want in zip(grads, wanted_grads, strict=True):
        assert _worst(grad, want) < 1e-4


def _lists_and_logs(
    q: torch.Tensor, k: torch.Tensor, policy: SelectionPolicy, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence's lists, and logs ``[N, Hkv, M]`` float64 of how much its keys count."""
    num_q, num_k = q.shape[1], k.shape[1]
    first, last = split_queries(policy, num_q, num_k)
    entries = topk.select_entries(q[:, first:], k, k, policy, scale)[0]
    lists, start = iter(entries.tolist()), num_k - num_q
    logs = torch.ones(num_q, num_k).tril(start).double().log()
    logs = logs[:, None].repeat(1, k.shape[2], 1)
    positions = list(range(start + first, start + last))
    given = (q[0, first:last], k[0], positions, policy, scale)
    logs[first:last] = logs_reference(*given, lambda *_: next(lists))
    return entries, logs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("elements", [1, 1 << 17, 1 << 25])
@pytest.mark.parametrize(("num_q", "query_tile"), [(300, 64), (300, 48), (130, 16), (77, 112)])
def test_gradients_are_those_of_keys_with_weights(
    num_q: int,
    query_tile: int,
    elements: int,
    sinks: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "_MOST_ELEMENTS", elements)
    policy = SelectionPolicy(
        num_sink=16, window_size=32, top_k=4, sel_block_size=16, query_tile=query_tile, dense_last=9
    )
    torch.manual_seed(0)
    shapes = (2, num_q, 6, 16), (2, 300, 2, 16), (2, 300, 2, 16)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    logits = torch.randn(6).to(dtype).requires_grad_() if sinks else None
    rule = topk.AttentionRule(StepPolicy.of(policy), 0.5, logits)
    found = sequences.attend(q, k, v, rule)
    assert found.dtype == dtype
    with torch.no_grad():
        without = sequences.attend(q, k, v, rule)
    parts = []
    for row in range(2):
        mine = q[row : row + 1], k[row : row + 1]
        with torch.no_grad():
            entries, logs = _lists_and_logs(*mine, policy, 0.5)
        assert (entries >> CELL_BITS).max() > 16, "some blocks count for more than one"
        given = (q[row], k[row], v[row], logs > -torch.inf, 0.5, logits, logs)
        parts.append(attend_reference(*given))
    wanted = torch.stack(parts)
    near = TOLERANCE if dtype == torch.float32 else 0.02
    assert _worst(found, without) < near
    assert _worst(found, wanted) < near
    upstream = torch.randn_like(found)
    inputs = (q, k, v) if logits is None else (q, k, v, logits)
    grads = torch.autograd.grad(found, inputs, upstream)
    wanted_grads = torch.autograd.grad(wanted, inputs, upstream.double())
    for grad, want in zip(grads, wanted_grads, strict=True):
        assert _worst(grad, want) < near * max(want.abs().max().item(), 1.0)


def test_a_single_query_with_gradients_attends_as_a_prompt_does() -> None:
    """Choosing by records has no gradient; a prompt's last queries attend everything."""
    policy = SparsityConfig(**SPARSE).policy_for(0)
    q, k, v = (torch.randn(1, count, heads, 16) for count, heads in ((1, 6), (500, 2), (500, 2)))
    rule = topk.AttentionRule(policy, 0.25, None)
    sparse, dense = sequences.attend(q, k, v, rule), sequences.attend(q, k, v, rule.dense())
    assert _worst(sparse, dense) > 100 * TOLERANCE
    q.requires_grad_()
    found = sequences.attend(q, k, v, rule)
    assert _worst(found, dense) < TOLERANCE
    (gradient,) = torch.autograd.grad(found.sum(), q)
    (wanted,) = torch.autograd.grad(sequences.attend(q, k, v, rule.dense()).sum(), q)
    assert _worst(gradient, wanted) < TOLERANCE
    of_tokens = topk.AttentionRule(StepPolicy(policy.decode, policy.decode), 0.25, None)
    with pytest.raises(NotImplementedError, match="query_tile: gradients are not served"):
        sequences.attend(q, k, v, of_tokens)


def test_generation_selects_per_token() -> None:
    model, ids = make_model(), tokens(2, 300)
    configure(model, **SPARSE, query_tile=1)
    model.set_attn_implementation("sparsek")
    long = model.generate(ids, max_new_tokens=12, do_sample=False)
    # with one query per tile, the cached steps equal one pass over the whole text
    with torch.no_grad():
        again = model(long[:, :-1]).logits[:, 299:].argmax(-1)
    assert torch.equal(again, long[:, 300:])


def test_drafts_change_nothing_where_queries_select_by_themselves() -> None:
    model, ids = make_model(), tokens(1, 150).repeat(1, 2)
    configure(
        model, mode="block_topk", num_sink=16, window_size=16, decode_tokens=16, query_tile=1,
        dense_below=0,
    )  # fmt: skip
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, prompt_lookup_num_tokens=3), plain)


def test_pages_are_made_and_read_on_the_device_of_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = make_model(), tokens(1, 500)
    configure(model, **SPARSE)
    names = ("pages_of", "paged_attention", "select_blocks")
    guarded = spy_on_guards(monkeypatch, topk, *names)
    model.generate(ids, max_new_tokens=2, do_sample=False)
    model(ids, labels=ids).loss.backward()
    assert set(guarded) == {True}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["dense", "sink_window", "block_topk"])
def test_padding_changes_nothing(side: str, mode: str) -> None:
    model, ids = make_model(), tokens(2, 260)
    settings = {
        "dense": {"mode": "dense"},
        "sink_window": {
            "mode": "sink_window",
            "num_sink": 4,
            "window_size": 32,
            "dense_below": 0,
        },
        "block_topk": SPARSE,
    }[mode]
    configure(model, **settings)
    alone = logits(model, "sparsek", ids[:1, :200])
    mask = torch.ones(2, 260, dtype=torch.long)
    row = torch.zeros(1, 260, dtype=torch.long)
    real = slice(60, 260) if side == "left" else slice(0, 200)
    row[:, real] = ids[:1, :200]
    mask[0] = 0
    mask[0, real] = 1
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    batch = torch.cat([row, ids[1:]])
    found = logits(model, "sparsek", batch, attention_mask=mask, position_ids=position)
    assert _worst(found[:1, real], alone) < TOLERANCE
    assert _worst(found[1:], logits(model, "sparsek", ids[1:])) < TOLERANCE


def test_padded_generation_equals_sdpa() -> None:
    model, ids = make_model(), tokens(2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :25] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    model.set_attn_implementation("sdpa")
    wanted = model.generate(ids, **arguments)
    model.set_attn_implementation("sparsek")
    assert torch.equal(model.generate(ids, **arguments), wanted)


def test_packed_sequences_do_not_mix() -> None:
    model, ids = make_model(), tokens(1, 150)
    position = torch.cat([torch.arange(50), torch.arange(100)])[None]
    configure(model, mode="sink_window", num_sink=4, window_size=32, dense_below=0)
    before = dict(fallback_counts())
    found = logits(model, "sparsek", ids, position_ids=position, use_cache=False)
    parts = [logits(model, "sparsek", ids[:, :50]), logits(model, "sparsek", ids[:, 50:])]
    assert _worst(found, torch.cat(parts, dim=1)) < TOLERANCE
    assert fallback_counts() == before, "packed sequences run on the kernels"


def test_custom_masks_are_served_exactly_and_counted() -> None:
    model, ids = make_model(), tokens(2, 60)
    mask = torch.rand(2, 1, 60, 60) > 0.5
    mask |= torch.eye(60, dtype=torch.bool)
    reason = "a custom mask in Transformers"
    before = fallback_counts().get(reason, 0)
    wanted = logits(model, "sdpa", ids, attention_mask=mask)
    assert _worst(logits(model, "sparsek", ids, attention_mask=mask), wanted) < TOLERANCE
    assert fallback_counts()[reason] == before + 2


def test_static_cache_is_served_exactly() -> None:
    model, ids = make_model(), tokens(2, 60)
    arguments = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    model.set_attn_implementation("sdpa")
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("sparsek")
    assert torch.equal(model.generate(ids, disable_compile=True, **arguments), wanted)


class _Layer(torch.nn.Module):
    """What the attention function reads of a layer."""

    def __init__(self, config: Any, *, causal: bool = True) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, 0, causal


def _call(layer: _Layer, **arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    q = torch.randn(2, 6, 40, 16)
    k, v = (torch.randn(2, 2, 40, 16) for _ in range(2))
    out, weights = sparsek.sparsek_attention(layer, q, k, v, None, **arguments)
    assert weights is None
    return out, [q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)]


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    scores = q @ k.mT / 4
    cap = options.get("softcap")
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if options.get("causal", True):
        scores = scores.masked_fill(~visible(40, 0, options.get("window", 40))[0], float("-inf"))
    sinks = options.get("sinks")
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(2, -1, 40, 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = scores.softmax(-1)[..., :40]
    return (probs @ v).transpose(1, 2)


def test_options_of_the_attention_function() -> None:
    config = make_model().config
    layer, full = _Layer(config), _Layer(config, causal=False)
    sinks = torch.randn(6)
    cases: list[tuple[_Layer, dict[str, Any], dict[str, Any]]] = [
        (layer, {"s_aux": sinks}, {"sinks": sinks}),
        (layer, {"sliding_window": 7}, {"window": 7}),
        (layer, {"sliding_window": 7, "s_aux": sinks}, {"window": 7, "sinks": sinks}),
        (full, {}, {"causal": False}),
        (layer, {"is_causal": False}, {"causal": False}),
        (layer, {"softcap": 2.0}, {"softcap": 2.0}),
    ]
    for module, arguments, options in cases:
        out, tensors = _call(module, **arguments)
        assert _worst(out, _eager(*tensors, **options)) < TOLERANCE, arguments


def test_dropout_keeps_the_mean() -> None:
    layer = _Layer(make_model().config)
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 40, 16), torch.randn(2, 2, 40, 16)
    out, _ = sparsek.sparsek_attention(layer, q, k, torch.ones(2, 2, 40, 16), None, dropout=0.3)
    assert abs(out.mean().item() - 1.0) < 0.05
    assert out.std().item() > 0.01


def test_value_head_dim_may_differ() -> None:
    layer = _Layer(make_model().config)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 40, 16), torch.randn(2, 6, 40, 16), torch.randn(2, 6, 40, 8)
    out, _ = sparsek.sparsek_attention(layer, q, k, v, None)
    assert _worst(out, _eager(q, k, v)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cache", "continuous batching"),
        ("read_index", "continuous batching"),
        ("indices", "chooses its own keys"),
        ("block_indices", "chooses its own keys"),
        ("sinks", "sinks of each query"),
        ("novelty", "does not know whether"),
    ],
)
def test_keywords_that_change_what_is_attended_are_refused(name: str, words: str) -> None:
    layer = _Layer(make_model().config)
    with pytest.raises(NotImplementedError, match=f"^{name}: .*{words}"):
        _call(layer, **{name: torch.ones(1)})
    assert torch.equal(_call(layer, **{name: None})[0], _call(layer, output_attentions=True)[0])


def test_layers_that_do_not_say_whether_they_are_causal_are_refused() -> None:
    """Without a mask, SDPA's function takes them for causal and eager attention does not."""
    layer = _Layer(make_model().config)
    del layer.is_causal
    with pytest.raises(NotImplementedError, match=r"^is_causal: expected _Layer or its mask"):
        _call(layer)
    assert torch.equal(_call(layer, is_causal=True)[0], _call(_Layer(layer.config))[0])


def test_training_under_autocast_without_a_cache() -> None:
    """Rotary embeddings leave queries and keys in fp32, beside values in bf16."""
    model, ids = make_model(), tokens(2, 60)
    grads = []
    for implementation in ("eager", "sparsek"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append(torch.cat([x.grad.flatten() for x in model.parameters()]))
    assert (grads[1] - grads[0]).norm() < 0.02 * grads[0].norm()


def test_settings_are_checked_and_kept(tmp_path: Any) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="did you mean top_k"):
        configure(model, topk=3)
    with pytest.raises(TypeError, match="model"):
        sparsek.configure(torch.nn.Linear(2, 2), mode="dense")
    assert configure(model, **SPARSE).top_k == 1
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="sparsek")
    ids = tokens(1, 300)
    assert _worst(logits(again, "sparsek", ids), logits(model, "sparsek", ids)) < TOLERANCE
    configure(model)
    assert _worst(logits(model, "sparsek", ids), logits(model, "sdpa", ids)) < TOLERANCE


def test_settings_that_transformers_would_ignore_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"sparse_phase .*: 'prefill' is served in vLLM alone"):
        configure(model, **SPARSE, sparse_phase="prefill")
    with pytest.raises(ConfigError, match=r"mode .*: 'pattern' is served in vLLM alone"):
        configure(model, mode="pattern", pattern="a file")
    folder = str(make_gates_folder(tmp_path))
    with pytest.raises(ConfigError, match=r"mode .*: 'seer' is served in vLLM alone"):
        configure(model, mode="seer", gates=folder)
    monkeypatch.setattr(model.config, "sparse_config", {"use_nope": True}, raising=False)
    with pytest.raises(ConfigError, match="'infllm' with use_nope"):
        configure(model, mode="infllm")
    assert configure(model, **SPARSE, sparse_phase="decode").sparse_phase == "decode"


def test_environment_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEK_MODE", "sink_window")
    monkeypatch.setenv("SPARSEK_WINDOW_SIZE", "16")
    monkeypatch.setenv("SPARSEK_NUM_SINK", "2")
    monkeypatch.setenv("SPARSEK_DENSE_BELOW", "0")
    model, ids = make_model(), tokens(1, 100)
    wanted = logits(model, "sdpa", ids, attention_mask=visible(100, 2, 16))
    assert _worst(logits(model, "sparsek", ids), wanted) < TOLERANCE


@pytest.mark.parametrize("fault", ["window", "scale"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sequences.sink_flash_attention

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if fault == "window" and kwargs["window_size"] is not None:
            kwargs["window_size"] += 1
        if fault == "scale":
            kwargs["softmax_scale"] *= 1.05
        return real(*args, **kwargs)

    monkeypatch.setattr(sequences, "sink_flash_attention", faulty)
    with pytest.raises(AssertionError):
        test_sink_window_is_exact(64)
