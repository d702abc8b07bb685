"""Real texts, of which the second half is read: only there does a sparse budget leave much out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsek_backend.eval.prompt import Prompt, Tokenizer, Tokens


def read_texts(folder: Path) -> list[str]:
    """Every `*.txt` of a folder, in the order of their names.

    Raises:
        ValueError: the folder is missing or has no text.
    """
    files = sorted(folder.glob("*.txt")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"texts: expected a folder with .txt files, got {str(folder)!r}")
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def pick_texts(
    texts: Sequence[str], tokenizer: Tokenizer, *, length: int, count: int
) -> list[Prompt]:
    """The first `length` tokens of `count` texts that have as many, spread over the collection.

    Raises:
        ValueError: fewer than `count` texts are long enough.
    """
    likely = [text for text in texts if len(text) >= length]
    order = sorted(range(len(likely)), key=lambda i: (i * count % max(len(likely), 1), i))
    picked: list[Prompt] = []
    longest = 0
    for index in order:
        tokens = tokenizer.encode(likely[index][: 12 * length])
        longest = max(longest, len(tokens))
        if len(tokens) >= length:
            picked.append(make_text(len(picked), tokens[:length]))
        if len(picked) == count:
            return picked
    raise ValueError(
        f"texts: expected {count} texts of at least {length} tokens, found {len(picked)}"
        + (f" (the longest has {longest})" if longest else f" among {len(texts)} texts")
        + "; lower --text-length or --texts"
    )


def make_text(index: int, tokens: Tokens) -> Prompt:
    """A text as a prompt that asks nothing: what is measured is its second half."""
    half = len(tokens) // 2
    read, target = tokens[:half], tokens[half:]
    return Prompt("text", "text", len(tokens), index, (read,), (), target, max_tokens=0)
