"""Perplexity: the negative log-likelihood of real text, its second half apart, because only there
does a sparse budget leave much out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sparsek_backend.eval.prompt import Tokenizer, Tokens


def read_texts(folder: Path) -> list[tuple[str, str]]:
    """Every `*.txt` of a folder as (name, text), in the order of their names.

    Raises:
        ValueError: the folder is missing or has no text.
    """
    files = sorted(folder.glob("*.txt")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"texts: expected a folder with .txt files, got {str(folder)!r}")
    return [(file.stem, file.read_text(encoding="utf-8", errors="replace")) for file in files]


def pick_texts(
    texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, length: int, count: int
) -> list[tuple[str, Tokens]]:
    """The first `length` tokens of `count` texts that have as many, spread over the collection.

    Raises:
        ValueError: fewer than `count` texts are long enough.
    """
    likely = [entry for entry in texts if len(entry[1]) >= length]
    order = sorted(range(len(likely)), key=lambda i: (i * count % max(len(likely), 1), i))
    picked: list[tuple[str, Tokens]] = []
    longest = 0
    for index in order:
        name, text = likely[index]
        tokens = tokenizer.encode(text[: 12 * length])
        longest = max(longest, len(tokens))
        if len(tokens) >= length:
            picked.append((name, tokens[:length]))
        if len(picked) == count:
            return picked
    raise ValueError(
        f"texts: expected {count} texts of at least {length} tokens, found {len(picked)}"
        + (f" (the longest has {longest})" if longest else f" among {len(texts)} texts")
        + "; lower --text-length or --texts"
    )


def score_text(logprobs: Sequence[float]) -> dict[str, Any]:
    """Mean NLL (nats per token) of a text, whole and over its second half."""
    half = logprobs[(len(logprobs) + 1) // 2 - 1 :]
    return {"nll": -fmean(logprobs), "nll_second_half": -fmean(half)}
