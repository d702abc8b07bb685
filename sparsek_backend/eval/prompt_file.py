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
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sparsek_backend.eval.prompt import Prompt, Tokens, make_text
from sparsek_backend.eval.record import run_key
from sparsek_backend.malformed import expecting
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
        sizes = (
            len(x.ids) + max(x.max_tokens, len(x.target)) + (x.variant == "text")
            for x in self.prompts
        )
        return max(sizes, default=0)


def save_prompts(path: Path, prompts: PromptSet) -> None:
    """Write a prompt file."""
    data = _encode(prompts)
    data = gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data
    path.parent.mkdir(parents=True, exist_ok=True)
    # as a whole: another evaluation in the folder may be about to read the same prompts
    write_whole(path, lambda beside: beside.write_bytes(data))


def keep_prompts(stem: Path, prompts: PromptSet) -> Path:
    """The prompt file ``STEM.DIGEST.prompts.json.gz``, whose name no other prompts can take."""
    asked = [(prompt.name, prompt.digest) for prompt in prompts.prompts]
    digest = run_key({"details": prompts.details, "prompts": asked})
    path = stem.with_name(f"{stem.name}.{digest}.prompts.json.gz")
    save_prompts(path, prompts)
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


def load_prompts(path: Path) -> PromptSet:
    """Read a prompt file.

    Raises:
        ValueError: the file is no prompt file, or damaged; the message says where.
    """
    with expecting(f"prompts: expected a prompt file, {path} does not read"):
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(
            f"prompts: expected a file of `sparsek eval prompts` in format {FORMAT}, got {path}"
        )
    with expecting(f"prompts: {path} is damaged; make it again"):
        pieces = [tuple(piece) for piece in document["pieces"]]
        prompts = []
        for row in document["prompts"]:
            own = tuple(pieces[number] for number in row["pieces"])  # apart: they stay shared
            prompts.append(replace(_PROMPT.validate_python({**row, "pieces": ()}), pieces=own))
            if not prompts[-1].fits:
                raise ValueError(f"{prompts[-1].name} has {len(prompts[-1].ids)} tokens")
        texts = (tuple(text["ids"]) for text in document.get("texts", ()))
        prompts += [make_text(index, ids) for index, ids in enumerate(texts)]
    if not prompts:
        raise ValueError(f"prompts: expected some in {path}, it has none")
    return PromptSet(prompts, document.get("details", {}))
