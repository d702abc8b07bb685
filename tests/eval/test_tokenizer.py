"""Tokenizers of model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsek_backend.eval.tokenizer import HubTokenizer


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gpt2"])
def test_a_folder_without_a_tokenizer_is_refused(model_type: str, tmp_path: Path) -> None:
    """From a config alone, Transformers makes a tokenizer that encodes nothing."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 100}))
    with pytest.raises(ValueError, match="expected a folder with a tokenizer"):
        HubTokenizer(str(tmp_path))
