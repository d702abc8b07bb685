"""Tokenizers of model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsek_backend.eval.tokenizer import HubTokenizer


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system turn') }}", r"fails \(no system turn\); try --raw"),
        ("{% for m in messages %}{{ m.role", r"fails \(unexpected end"),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", "leaves a user's words out"),
    ],
)
def test_a_chat_template_that_does_not_serve_is_named(
    template: str, message: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    fast.chat_template = template
    fast.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        HubTokenizer(str(tmp_path)).frame()


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gpt2"])
def test_a_folder_without_a_tokenizer_is_refused(model_type: str, tmp_path: Path) -> None:
    """From a config alone, Transformers makes a tokenizer that encodes nothing."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 100}))
    with pytest.raises(ValueError, match="expected a folder with a tokenizer"):
        HubTokenizer(str(tmp_path))
