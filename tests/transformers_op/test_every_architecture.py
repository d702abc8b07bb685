"""Every architecture of Transformers, shrunk: right beside eager, or refused with the reason.

A sample runs by default; ``EVERY_ARCHITECTURE=1`` runs all of them, and prints what came
of each.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed (the eval extra)")

from tests.transformers_op.architectures import architectures, make

import sparsek_backend.transformers_op as sparsek  # isort: skip
import transformers  # isort: skip

EVERY = os.environ.get("EVERY_ARCHITECTURE") == "1"
SAMPLE = {
    # model type: the kind of behaviour it stands for
    "bart": "encoder and decoder",
    "bert": "no causality",
    "bigbird_pegasus": "causal, and says it is not",
    "bloom": "no attention function",
    "data2vec-vision": "a class for each implementation, called later",
    "deepseek_v3": "latent attention",
    "deepseek_v32": "chooses tokens",
    "deepseek_v4": "compressed keys",
    "doge": "a mask of each layer",
    "falcon": "a class for each implementation",
    "gemma2": "soft cap",
    "git": "a class for each implementation, called later",
    "gpt2": "no rotary embedding",
    "gpt_neo": "a class for each implementation",
    "gpt_oss": "sinks and a window",
    "gptj": "interleaved",
    "inkling2_text": "sinks of each query",
    "llama": "causal",
    "llama4_text": "chunks",
    "llava": "text of a larger model",
    "m2m_100": "encoder and decoder in one configuration",
    "mamba": "no attention",
    "minimax_m3_vl": "chooses blocks",
    "mistral": "window in all layers",
    "modernbert": "window on both sides",
    "mpt": "reads its mask as another kind",
    "paligemma": "prefix",
    "qwen2_vl": "positions of three kinds",
    "qwen3_next": "linear attention in some layers",
    "t5": "position bias",
    "vit": "pictures",
    "whisper": "sound",
    "zamba2": "attention shared by layers",
}
LENGTH = 24
TOLERANCE = 1e-4
WINDOW: dict[str, Any] = {
    "mode": "sink_window", "num_sink": 1, "window_size": 3, "dense_below": 0,
}  # fmt: skip
outcomes: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _summary(request: pytest.FixtureRequest) -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    yield
    if EVERY:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(*(f"\n{count:5} {outcome}" for outcome, count in sorted(outcomes.items())))


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    """Inputs of a model: two padded rows of text, two pictures or two sounds."""
    generator, config = torch.Generator().manual_seed(1), model.config
    ids = torch.randint(3, 9, (2, LENGTH), generator=generator)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    name = "input_ids" if model.can_generate() else model.main_input_name
    if config.is_encoder_decoder:
        name, mask[0, -5:] = model.main_input_name, 0
        text = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    else:
        text, mask[0, :5] = {}, 0
    if name == "input_ids":
        return {name: ids, "attention_mask": mask, **text}
    if name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        shape: tuple[int, ...] = (2, config.num_channels, size, size)
    elif name == "input_features":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
    else:
        shape = (2, 4000)
    return {name: torch.randn(shape, generator=generator), **text}


def _output(model: Any, **inputs: Any) -> torch.Tensor:
    """The first output of the rows' real tokens."""
    found = model(**inputs, return_dict=True)
    out: torch.Tensor = next(
        found[name] for name in ("logits", "last_hidden_state", *found) if name in found
    )
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return out[mask.bool()] if mask is not None and out.shape[:2] == mask.shape else out


@torch.no_grad()
def _padded(model: Any) -> torch.Tensor:
    return _output(model, **_inputs(model))


@torch.no_grad()
def _packed(model: Any) -> torch.Tensor:
    ids, positions = _inputs(model)["input_ids"], torch.arange(LENGTH)[None] % 14
    return _output(model, input_ids=ids, position_ids=positions, use_cache=False)


@torch.no_grad()
def _generated(model: Any) -> torch.Tensor:
    """Logits of two tokens after a prompt."""
    options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    inputs = {k: v for k, v in _inputs(model).items() if not k.startswith("decoder")}
    new = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    return torch.stack(model.generate(**inputs, **options, **new).logits)


def _trained(model: Any, precision: torch.dtype = torch.float32) -> torch.Tensor:
    """The gradients of all parameters, without a cache."""
    model.zero_grad()
    ids = _inputs(model)["input_ids"]
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        out = _output(model, input_ids=ids, use_cache=False).float().flatten()
    out.dot(torch.linspace(-1, 1, len(out))).backward()
    grads = (x.grad for x in model.parameters())
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


RUNS: dict[str, Callable[[Any], torch.Tensor]] = {
    "packed texts": _packed, "generation": _generated, "training": _trained,
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(architectures() if EVERY else SAMPLE))
def test_right_beside_eager_or_refused(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    if model_type not in architectures():
        pytest.skip(f"this version of Transformers has no {model_type}")
    outcome = _outcome(model_type)
    outcomes[outcome] += 1
    if outcome.startswith("cannot") and EVERY:
        pytest.skip(outcome)
    assert not outcome.startswith("cannot"), "the sample is of architectures that can be made"


def _outcome(model_type: str) -> str:
    """What comes of an architecture, in words; fails where it is neither right nor refused."""
    try:
        eager = make(model_type, "eager")
    except Exception as error:
        return f"cannot be made here: {type(error).__name__}"
    try:
        wanted = _padded(eager)
    except Exception as error:
        return f"cannot run alone on text, pictures or sound: {type(error).__name__}"
    try:
        model = make(model_type, "sparsek")
        found = _padded(model)
    except NotImplementedError as error:
        return f"refused: {str(error).split(': ', 1)[1]}"
    scale = max(1.0, wanted.abs().max().item())
    assert (found - wanted).abs().max() < TOLERANCE * scale
    for name, run in RUNS.items():
        try:
            wanted = run(eager)
        except Exception:  # not for this model
            continue
        error = (run(model) - wanted).norm() / wanted.norm()
        assert error < TOLERANCE, f"{name}: {error}"
    _check_autocast(model, eager)
    try:
        sparsek.configure(model, **WINDOW)
    except NotImplementedError as error:
        reason = str(error).split("they have ")[-1].split(";")[0]
        return f"right, and settings refused: {reason.split(' with a ')[0].split(' has ')[-1]}"
    assert (_padded(model) - found).abs().max() > TOLERANCE, "configure had no effect"
    return "right, and settings heeded"


def _check_autocast(model: Any, eager: Any) -> None:
    """Gradients under autocast are as near to those in fp32 as eager attention's are."""
    try:
        exact, wanted = _trained(eager), _trained(eager, torch.bfloat16)
    except Exception:  # not for this model
        return
    error = (_trained(model, torch.bfloat16) - exact).norm()
    assert error < 2 * (wanted - exact).norm() + 0.01 * exact.norm(), "training under autocast"
