"""What a soak saw, and whether it passed: see ``soak.py``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from random_llama import Answer, compare

TIES = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.05}
"""Log-probability gap within which two tokens are a tie."""
PARTED_SHARE = 0.02
"""Answers that may part at a tie."""
MEMORY_SLACK = 64 << 20
"""Bytes by which device memory may grow after the first tenth of the run."""


@dataclass
class Totals:
    """What the clients saw."""

    finished: int = 0
    aborted: int = 0
    equal: int = 0
    identical: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    distance: float = 0.0
    gaps: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0


def bits(answer: Answer) -> tuple[list[int], list[float], list[list[float]]]:
    """All of an answer that is decided: its tokens, their log-probabilities, the best five.

    Without the names of those five: which of two equally likely tokens is fifth, is open.
    """
    return answer.tokens, answer.logprobs, [sorted(place.values()) for place in answer.known]


def flatness(memory: list[dict[str, float]], seconds: float) -> dict[str, dict[str, float]]:
    """For each kind of memory: after a tenth of the run, at the end, and the most."""
    settled = [sample for sample in memory if sample["seconds"] >= seconds / 10] or memory[-1:]
    return {
        kind: {
            "first": settled[0][kind],
            "last": settled[-1][kind],
            "most": max(sample[kind] for sample in settled),
        }
        for kind in settled[0]
        if kind != "seconds"
    }


def verdict(
    totals: Totals,
    arguments: argparse.Namespace,
    memory: dict[str, dict[str, float]],
    seen: dict[str, float],
    compiled: list[str],
) -> list[str]:
    """Every reason why the run failed."""
    tie = TIES[arguments.dtype]
    reasons = [f"a request failed: {error}" for error in totals.errors[:3]]
    worst = max(totals.gaps, default=0.0)
    parted = f"{len(totals.gaps)} of {totals.finished} answers part from their solo runs"
    if arguments.batch_invariant:
        if totals.identical != totals.finished:
            reasons.append(
                f"{totals.identical} of {totals.finished} answers are bit for bit those of their "
                f"solo runs; log-probabilities differ by up to {totals.distance:.4g}; {parted}"
            )
    else:
        if worst > tie:
            reasons.append(f"an answer parts from its solo run at a gap of {worst:.4g}, over {tie}")
        if len(totals.gaps) > PARTED_SHARE * max(totals.finished, 1):
            reasons.append(parted)
        if totals.distance > tie:
            reasons.append(f"log-probabilities differ by up to {totals.distance:.4g}, over {tie}")
    if not totals.finished or not totals.aborted:
        reasons.append(f"{totals.finished} requests finished and {totals.aborted} were aborted")
    for kind in ("allocated", "reserved"):
        if kind in memory and memory[kind]["most"] > memory[kind]["first"] + MEMORY_SLACK:
            reasons.append(f"{kind} device memory grew: {memory[kind]}")
    if seen.get("kv_cache_usage_at_end", 0.0) > 0.01:
        reasons.append(f"KV pages are still held: {seen['kv_cache_usage_at_end']:.3f} of the cache")
    if ours := sorted({name for name in compiled if name.startswith("sparsek")}):
        reasons.append(f"compiled for a request: {', '.join(ours)}")
    if arguments.speculate and not seen.get("drafted"):
        reasons.append("speculation drafted no token")
    return reasons


def compare_backends(ours: Path, theirs: Path) -> int:
    """Print how the solo answers of two runs differ; return the exit status."""
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in (ours, theirs))
    if first["prompts"] != second["prompts"] or first["dtype"] != second["dtype"]:
        print("error: the two runs had other prompts or another dtype", file=sys.stderr)
        return 1
    pairs = zip(first["answers"], second["answers"], strict=True)
    found = [compare(Answer.from_json(x), Answer.from_json(y)) for x, y in pairs]
    gaps = [one.gap for one in found if one.gap is not None]
    tie = TIES[first["dtype"]]
    result = {
        "answers": len(found),
        "equal": len(found) - len(gaps),
        "widest_gap": max(gaps, default=0.0),
        "tie": tie,
        "distance": max(one.distance for one in found),
    }
    print(json.dumps(result))
    return int(result["widest_gap"] > tie)
