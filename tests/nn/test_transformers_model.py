"""The model under Transformers: auto classes, generate, the Trainer, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import torch

from sparsek_backend.nn import NSALlamaConfig, NSALlamaForCausalLM
from tests import processes
from tests.nn.test_llama import NSA, make

transformers = pytest.importorskip("transformers")


def complete(model: NSALlamaForCausalLM, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy completions ``[B, count]`` without a cache."""
    tokens = prompts
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens[:, prompts.shape[1] :]


AUTO_CLASSES = """if True:
    import sys
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    def load(kind):
        try:
            found = kind.from_pretrained(sys.argv[1])
        except ValueError as error:
            return "nsa_llama" in str(error) or "NSALlamaHFConfig" in str(error)
        return type(found).__name__, type(found).__module__

    kinds = AutoConfig, AutoModel, AutoModelForCausalLM
    print([load(kind) for kind in kinds])
    import sparsek_backend
    print([load(kind) for kind in kinds])
"""


def test_auto_classes_know_the_model_once_sparsek_is_imported(tmp_path: Path) -> None:
    """In a process of its own: imports cannot be taken back.  Before it, a refusal by name."""
    model = make()
    config = replace(model.config, nsa=replace(NSA, shared_kv=True))
    NSALlamaForCausalLM(config).save_pretrained(tmp_path)
    done = processes.run(sys.executable, "-c", AUTO_CLASSES, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after, _ = done.stdout.split("\n")
    assert before == "[True, True, True]"
    assert after == str(
        [
            ("NSALlamaHFConfig", "sparsek_backend.transformers_config"),
            True,
            ("NSALlamaForCausalLM", "sparsek_backend.transformers_model"),
        ]
    )


IMPORTED_FIRST = """if True:
    import sparsek_backend
    from transformers import AutoConfig, AutoModelForCausalLM
    print(AutoConfig.for_model("nsa_llama").model_type)
"""


def test_auto_classes_load_after_sparsek() -> None:
    """Older versions write the names of all models into their docstrings, ours among them."""
    done = processes.run(sys.executable, "-c", IMPORTED_FIRST)
    assert (done.returncode, done.stdout) == (0, "nsa_llama\n"), done.stderr[-2000:]


@pytest.mark.parametrize("tied", [False, True])
def test_generate_continues_as_the_module_does(tied: bool, tmp_path: Path) -> None:
    plain = make(tied)
    plain.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    prompts = torch.randint(1, 64, (2, 37))
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(prompts, **options)
    assert torch.equal(found[:, 37:], complete(plain, prompts, 20))
    mask = torch.ones_like(prompts)  # as tokenizers give it
    kept = model.generate(prompts, attention_mask=mask, return_dict_in_generate=True, **options)
    assert torch.equal(kept.sequences, found)
    longer = torch.cat([found, prompts[:, :5]], dim=1)
    again = model.generate(longer, past_key_values=kept.past_key_values, **options)
    assert torch.equal(again, model.generate(longer, **options)), "goes on from its cache"
    found = model.generate(prompts, num_beams=3, **options)
    assert torch.equal(found, model.generate(prompts, num_beams=3, use_cache=False, **options))
    model.save_pretrained(tmp_path / "again")
    again = NSALlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config == plain.config
    assert torch.equal(again(prompts), plain(prompts))


def test_a_cache_may_have_the_name_of_later_versions(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(1, 64, (2, 37))
    with torch.no_grad():
        whole = model(ids).logits
        cache = model(ids[:, :30], use_cache=True).past_key_values
        asked = model.prepare_inputs_for_generation(ids, cache=cache)
        assert asked["input_ids"].shape == (2, 7)
        assert asked["past_key_values"] is cache
        torch.testing.assert_close(model(ids[:, 30:], cache=cache).logits, whole[:, 30:])


def test_fresh_weights_are_those_of_the_module() -> None:
    from sparsek_backend.transformers_model import NSALlamaHFConfig

    plain = make()
    values = {**plain.config.to_dict(), "nsa": replace(NSA, cmp_hidden_size=16).to_dict()}
    model = transformers.AutoModelForCausalLM.from_config(NSALlamaHFConfig(**values))
    phi = model.model.layers[0].self_attn.phi_k
    assert torch.equal(phi.w2[:8], torch.eye(8))  # compression starts as the mean of a block
    assert abs(model.model.embed_tokens.weight.std().item() - 32**-0.5) < 0.02


def test_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed; the Trainer needs it")
    make().save_pretrained(tmp_path / "start")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    calls: list[int] = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: calls.append(0))
    rows = torch.arange(50).add(torch.arange(8)[:, None]) % 8
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        tmp_path / "run", max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
        gradient_checkpointing=True, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    calls.clear()
    trainer.train()
    assert len(calls) == 2 * 4  # forward, and again in the backward pass
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    trainer.save_model(str(tmp_path / "end"))
    saved = NSALlamaForCausalLM.from_pretrained(tmp_path / "end")
    with torch.no_grad():
        torch.testing.assert_close(saved(rows), model.eval()(rows).logits)


def test_padding_behind_tokens_alone() -> None:
    from sparsek_backend.transformers_model import NSALlamaHFConfig

    model = transformers.AutoModelForCausalLM.from_config(
        NSALlamaHFConfig(**make().config.to_dict())
    )
    tokens = torch.randint(64, (2, 30))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 25:] = 0
    found = model(tokens, attention_mask=mask).logits
    places = torch.tensor([3, 29])
    assert torch.equal(model(tokens, mask, logits_to_keep=places).logits, found[:, places])
    assert torch.equal(model(tokens, mask, logits_to_keep=2).logits, found[:, -2:])
    assert torch.equal(found[1, :25], model(tokens).logits[1, :25])
    with pytest.raises(NotImplementedError, match="attention_mask: native sparse attention takes"):
        model(tokens, attention_mask=mask.flip(1))
    with pytest.raises(NotImplementedError, match="attention_mask: native sparse attention takes"):
        model(tokens, attention_mask=mask, use_cache=True)
    for name in ("inputs_embeds", "position_ids"):
        with pytest.raises(NotImplementedError, match=f"{name}: native sparse attention"):
            model(tokens, **{name: tokens})


def test_a_config_without_a_section_has_the_defaults_of_the_module(tmp_path: Path) -> None:
    from sparsek_backend.transformers_model import NSALlamaHFConfig

    plain = NSALlamaConfig(64, 32, 48, 2, 4, 2, 8)
    sizes = {f.name: getattr(plain, f.name) for f in fields(plain) if f.default is MISSING}
    del sizes["nsa"]
    model = transformers.AutoModelForCausalLM.from_config(NSALlamaHFConfig(**sizes))
    model.save_pretrained(tmp_path)
    assert NSALlamaForCausalLM.from_pretrained(tmp_path).config == plain


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_act", "gelu"), ("mlp_bias", True), ("attention_dropout", 0.1)]
)
def test_fields_of_llama_that_this_model_lacks_are_refused(name: str, value: object) -> None:
    from sparsek_backend.transformers_model import NSALlamaHFConfig

    config = NSALlamaHFConfig(**{**make().config.to_dict(), name: value})
    with pytest.raises(ValueError, match=f"{name}: expected .*, got {value!r}"):
        transformers.AutoModelForCausalLM.from_config(config)


def test_outputs_and_caches_that_it_has_not_are_refused(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(1, 64, (1, 20))
    options = {"max_new_tokens": 2, "return_dict_in_generate": True}
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(NotImplementedError, match=f"{name}: native sparse attention"):
            model(ids, **{name: True})
        with pytest.raises(NotImplementedError, match=f"{name}: native sparse attention"):
            model.generate(ids, **options, **{name: True})
        model(ids, **{name: False})
    with pytest.raises(TypeError, match=r"past_key_values: expected .*, got Dynamic"):
        model.generate(ids, **options, past_key_values=transformers.DynamicCache())
