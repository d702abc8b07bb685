"""Prompts in a file: token ids, for machines that have the model and no tokenizer.

A JSON document, compressed where its name ends in ``.gz``.  The prompts of a file share pieces, so
each piece is written once:

    {"format": 1, "details": {...}, "pieces": [[1, 2], ...],
     "prompts": [{"task", "variant", "length", "index", "pieces": [0, 7, ...],
                  "answers": [{"text", "tokens": [[...], ...]}], "target": [...],
                  "max_tokens", "metric"}]}

Files of earlier versions have texts of their own, ``"texts": [{"name", "ids": [...]}]``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sparsek_backend.eval.prompt import Prompt, Tokens, make_text
from sparsek_backend.whole_file import write_whole

FORMAT = 1
_PROMPT = TypeAdapter(Prompt)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of an evaluation."""

    prompts: Sequence[Prompt] = ()
    # how they were made: model, seed, chat template
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request, its answer included; vLLM answers texts too."""
        sizes = [0]
        for prompt in self.prompts:
            answer = max(prompt.max_tokens, len(prompt.target)) + (prompt.variant == "text")
            sizes.append(len(prompt.ids) + answer)
        return max(sizes)


def save_prompts(path: Path, prompts: PromptSet) -> None:
    """Write a prompt file."""
    _write(path, _encode(prompts))


def keep_prompts(stem: Path, prompts: PromptSet) -> Path:
    """The prompt file ``STEM.DIGEST.prompts.json.gz``, whose name no other prompts can take."""
    data = _encode(prompts)
    digest = hashlib.sha256(data).hexdigest()[:12]
    path = stem.with_name(f"{stem.name}.{digest}.prompts.json.gz")
    _write(path, data)
    return path


def _encode(prompts: PromptSet) -> bytes:
    known: dict[Tokens, int] = {}
    rows = []
    for prompt in prompts.prompts:
        numbers = [known.setdefault(piece, len(known)) for piece in prompt.pieces]
        rows.append(asdict(replace(prompt, pieces=())) | {"pieces": numbers})
    document = {
        "format": FORMAT,
        "details": dict(prompts.details),
        "pieces": list(known),
        "prompts": rows,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _write(path: Path, data: bytes) -> None:
    data = gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data
    path.parent.mkdir(parents=True, exist_ok=True)
    # as a whole: another evaluation in the folder may be about to read the same prompts
    write_whole(path, lambda beside: beside.write_bytes(data))


def load_prompts(path: Path) -> PromptSet:
    """Read a prompt file.

    Raises:
        ValueError: the file is no prompt file, or damaged; the message says where.
    """
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(
            f"prompts: expected a prompt file, {path} does not read: {error}"
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(
            f"prompts: expected a file of `sparsek eval prompts` in format {FORMAT}, got {path}"
        )
    try:
        pieces = [tuple(piece) for piece in document["pieces"]]
        prompts = []
        for row in document["prompts"]:
            own = tuple(pieces[number] for number in row["pieces"])  # apart: they stay shared
            prompts.append(replace(_PROMPT.validate_python({**row, "pieces": ()}), pieces=own))
            if not prompts[-1].fits:
                raise ValueError(f"{prompts[-1].name} has {len(prompts[-1].ids)} tokens")
        texts = (tuple(text["ids"]) for text in document.get("texts", ()))
        prompts += [make_text(index, ids) for index, ids in enumerate(texts)]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"prompts: {path} is damaged ({reason}); make it again") from None
    if not prompts:
        raise ValueError(f"prompts: expected some in {path}, it has none")
    return PromptSet(prompts, document.get("details", {}))
