"""Mode seer: SeerAttention-R's gates, from their folder to what a served model attends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sparsek_backend.config import ConfigError, resolve_config
from sparsek_backend.vllm_backend.gates import GateFile
from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.reference import (
    paged_attention_reference,
    select_seer_reference,
)
from tests.vllm_backend.engines import engine, generate, requires_cpu_vllm
from tests.vllm_backend.gate_files import BLOCK, gates_of, make_gates_folder, tensors
from tests.vllm_backend.layers import building, make_builder, make_config, make_layer
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

FIRST = "model.layers.0.self_attn.attn_gate.attngate_"


def resolve(folder: Path | None, **settings: Any) -> Any:
    if folder is not None:
        settings["gates"] = str(folder)
    return resolve_config({"mode": "seer", **settings}, {})


def test_the_budget_is_the_checkpoints(tmp_path: Path) -> None:
    resolved = resolve(make_gates_folder(tmp_path))
    assert resolved.scores_without_positions
    policy = resolved.config.policy_for(0)
    assert policy.prefill.is_dense
    assert policy.decode == SelectionPolicy(
        num_sink=BLOCK, window_size=1, top_k=2, sel_block_size=BLOCK, query_tile=1
    )
    assert policy.decode.budget_blocks == 4


def test_what_a_user_may_change(tmp_path: Path) -> None:
    folder = make_gates_folder(tmp_path, seerattn_start_layer=1, seerattn_token_budget=None)
    assert resolve(folder).config.decode_tokens == 4096 - 2 * BLOCK
    config = resolve(
        folder, decode_tokens=9 * BLOCK, window_size=100, num_sink=64, dense_below=50
    ).config
    assert not config.policy_for(0).selects_blocks
    policy = config.policy_for(1).decode
    assert (policy.top_k, policy.window_size, policy.sink_blocks) == (9, 100, 2)
    assert policy.dense_below == 50


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seerattn_gate_block_size": None}, "gate_block_size: field required"),
        (
            {"seerattn_gate_block_size": 16},
            "gate_block_size: expected greater than or equal to 32, got 16",
        ),
        ({"seerattn_gate_block_size": 40}, "expected a multiple of 16, got 40"),
        ({"seerattn_token_budget": True}, "token_budget: expected a valid integer, got True"),
        ({"seerattn_start_layer": -1}, "start_layer: expected greater than or equal to 0, got -1"),
        (
            {"seerattn_k_seq_pooling_type": "Kavg"},
            "k_seq_pooling_type: expected 'Kmaxminavg', got 'Kavg'",
        ),
        (
            {"seerattn_q_head_pooling_type": "Qavg"},
            "q_head_pooling_type: expected 'Qproj', got 'Qavg'",
        ),
        ({"seerattn_use_rope": False}, "use_rope: expected True, got False"),
    ],
    ids=["no gates", "small", "odd", "budget", "layer", "keys", "queries", "rope"],
)
def test_gates_of_another_kind(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = make_gates_folder(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"mode seer: .*config.json: .*{words}.*; remedy: set"):
        resolve(folder)


def test_folders_without_gates(tmp_path: Path) -> None:
    for folder in (None, tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"setting gates: .*attn_gate_weights.pth, got"):
            resolve(folder)
    for name in ("~nobody-of-this-name/gates", "a" * 300):
        with pytest.raises(ConfigError, match=r"setting gates: got '.*; remedy: set gates"):
            resolve_config({"mode": "seer", "gates": name}, {})
    (tmp_path / "attn_gate_weights.pth").touch()
    with pytest.raises(ConfigError, match=r"config.json: .*No such file.*; remedy: set gates"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mode seer: .*config.json"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", ["top_k", "sel_block_size", "query_tile"])
def test_settings_that_the_gates_decide(name: str, tmp_path: Path) -> None:
    folder = make_gates_folder(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} .* has no effect in mode 'seer'"):
        resolve(folder, **{name: 64})


def test_gates_belong_to_their_mode(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gates .* has no effect in mode 'block_topk'"):
        resolve_config({"gates": str(make_gates_folder(tmp_path))}, {})


def test_it_is_not_batch_invariant(tmp_path: Path) -> None:
    folder = str(make_gates_folder(tmp_path))
    with pytest.raises(ConfigError, match="mode seer is not served with VLLM_BATCH_INVARIANT"):
        resolve_config({"mode": "seer", "gates": folder}, {}, batch_invariant=True)


@pytest.fixture
def served(tmp_path: Path, registered: None) -> Any:
    """Check an engine of a tiny model with gates in a folder of their own."""
    from vllm.engine.arg_utils import EngineArgs

    from sparsek_backend.vllm_backend import validate

    model = make_tiny_model("qk_norm", tmp_path / "model")

    def check(weights: Any = None, change: Any = None, **options: Any) -> None:
        folder = make_gates_folder(tmp_path / "gates", weights)
        settings = {"mode": "seer", "gates": str(folder), **options.pop("settings", {})}
        config = EngineArgs(
            model=str(model),
            attention_backend="SPARSEK",
            additional_config={"sparsek": settings},
            dtype="float32",
            **options,
        ).create_engine_config()
        if change is not None:
            change(config)
        validate.check_engine(config)

    return check


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("linear_q", None, r"expected shape \[2, 2, 32, 32\] in .*, got none"),
        ("linear_q", torch.ones(2, 4, 32, 32), r"\[2, 2, 32, 32\].*got shape \[2, 4, 32, 32\]"),
        ("linear_k", torch.ones(2, 64, 32), r"expected shape \[2, 96, 32\].*got shape \[2, 64, 32"),
        ("knorm", torch.ones(64), r"expected shape \[32\].*got shape \[64\]"),
        ("qnorm", None, r"expected shape \[32\].*got none"),
    ],
    ids=["missing", "group", "pooling", "norm", "no norm"],
)
def test_weights_that_do_not_fit(
    name: str, tensor: torch.Tensor | None, words: str, served: Any
) -> None:
    weights = tensors()
    del weights[f"{FIRST}{name}.weight"]
    if tensor is not None:
        weights[f"{FIRST}{name}.weight"] = tensor
    with pytest.raises(ValueError, match=rf"mode seer: {FIRST}{name}.weight: .*{words}"):
        served(weights)
    served(weights, settings={"dense_layers": [0]})  # which then needs no gates


def test_gates_in_safetensors(tmp_path: Path) -> None:
    folder = make_gates_folder(tmp_path)
    save_file(tensors(), folder / "attn_gate_weights.safetensors")
    (folder / "attn_gate_weights.pth").unlink()
    selection = resolve(folder).seer
    file = GateFile(selection.weights, 2, 2, 32, selection.use_qk_norm)
    found = file.layer(1, slice(0, 2), True, torch.device("cpu"))
    for mine, wanted in zip(found.tensors, gates_of(1).tensors, strict=True):
        assert mine is not None
        assert wanted is not None
        assert torch.equal(mine, wanted)


def test_a_damaged_file(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", lambda weights, path: path.write_bytes(b"not a file"))
    with pytest.raises(ValueError, match=r"attn_gate_weights.pth does not read as gates"):
        served()


def test_what_it_does_not_go_with(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served()
    with pytest.raises(ValueError, match=r"KV pages of a multiple .* of 32 tokens, got 16"):
        served(block_size=16)

    def four_ranks(config: Any) -> None:
        monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 4)

    with pytest.raises(ValueError, match=r"expected a tensor_parallel_size of at most 2, .*got 4"):
        served(change=four_ranks)

    def shared_context(config: Any) -> None:
        monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 1)
        monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 2)

    with pytest.raises(ValueError, match="mode seer not supported with decode context parallelism"):
        served(change=shared_context)


@pytest.fixture
def tiny(tmp_path: Path, registered: None) -> Any:
    """The configuration of an engine whose model's folder has the gates."""
    make_gates_folder(tmp_path / "gates")
    settings = {"mode": "seer", "gates": str(tmp_path / "gates")}
    return make_config(tmp_path / "model", additional_config={"sparsek": settings})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_the_gates_of_its_heads(
    rank: int, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.vllm_backend import compat

    monkeypatch.setattr(compat, "tensor_rank", lambda: (rank, 2))
    with building(tiny):
        layer = make_layer(1)
        layer.impl.num_kv_heads, layer.impl.num_heads = 1, 2
        make_builder(layer, tiny)
        found, every = layer.impl.own.indexers.decode.gates, gates_of(1)
        assert torch.equal(found.query, every.query[rank : rank + 1])
        assert torch.equal(found.key, every.key[rank : rank + 1])
        assert found.key_norm is not None
        assert torch.equal(found.key_norm, every.key_norm)


def test_a_layer_that_shares_pages(tiny: Any) -> None:
    with building(tiny):
        owner = make_layer(0)
        sharer = make_layer(1, kv_sharing_target_layer_name=owner.layer_name)
        make_builder(owner, tiny)
        with pytest.raises(NotImplementedError, match="layer 1 shares another's KV cache"):
            make_builder(sharer, tiny)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (290, 33, 150)
    ]


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.usefixtures("registered")
def test_an_engine_attends_what_the_oracle_chooses(
    prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, a batch and prefix hits; the gates lie in the model's own folder."""
    real, errors, sparse = impl_module.attend_segment, [], []

    def held_against_oracle(of: PagedOperands, segment: Segment, index: Any) -> None:
        real(of, segment, index)
        batch, wanted = segment.batch, None
        if index is not None:
            wanted = gates_of(0 if torch.equal(index.gates.query, gates_of(0).query) else 1)
            assert torch.equal(index.gates.key, wanted.key)

        def select(q: Any, k: Any, positions: Any, rule: Any, scale: float) -> Any:
            found = select_seer_reference(q, k, positions, rule, wanted, batch.rotation)
            sparse.append(found is not None)
            return found

        policy = StepPolicy(segment.policy, segment.policy)
        expected = paged_attention_reference(
            of.q, of.k_cache, of.v_cache, batch, policy,
            softmax_scale=of.softmax_scale, select=select,
        )  # fmt: skip
        rows = slice(batch.cu_seqlens_q[0], batch.cu_seqlens_q[-1])
        errors.append(float((of.out.double() - expected)[rows].abs().max()))

    monkeypatch.setattr(impl_module, "attend_segment", held_against_oracle)
    model = make_gates_folder(make_tiny_model("qk_norm", tmp_path))
    with engine(
        model,
        "SPARSEK",
        {"mode": "seer"},
        max_model_len=320,
        max_num_batched_tokens=128,
        block_size=64,
        skip_tokenizer_init=True,
    ) as llm:
        together = generate(llm, prompts, together=True, max_tokens=5)
        again = generate(llm, prompts[:1], together=False, max_tokens=5)
    assert again[0].outputs[0].token_ids == together[0].outputs[0].token_ids
    assert again[0].num_cached_tokens == 256
    assert sum(sparse) == 2 * 4 * 3  # layers, decoded tokens, requests longer than the budget
    assert max(errors) < 1e-4


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.usefixtures("registered")
def test_a_covering_budget_equals_dense(prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_gates_folder(make_tiny_model("qk_norm", tmp_path))
    options: dict[str, Any] = {
        "max_model_len": 320,
        "max_num_batched_tokens": 128,
        "skip_tokenizer_init": True,
    }
    found = []
    for settings in ({"mode": "seer", "decode_tokens": 16 * BLOCK}, {"mode": "dense"}):
        with engine(model, "SPARSEK", settings, **options) as llm:
            outputs = generate(llm, prompts, together=True, max_tokens=8)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
