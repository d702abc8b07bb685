"""The variants that are simulated, by sets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .decode import DecodeRule
from .prompts import PromptRule

DENSE = DecodeRule("dense")


@dataclass(frozen=True)
class Variant:
    """One rule for the prompt, one for the answer.

    Args:
        name: how it is called in results.
        decode: what the tokens of the answer attend.
        prompt: what the queries of the prompt attend.
    """

    name: str
    decode: DecodeRule = DENSE
    prompt: PromptRule = field(default_factory=PromptRule)

    def settings(self) -> dict[str, Any]:
        """Both rules; of a dense one its name alone."""
        rules = {"decode": self.decode, "prompt": self.prompt}
        return {
            key: "dense" if rule.scores == "dense" else asdict(rule) for key, rule in rules.items()
        }


def _decode() -> list[Variant]:
    old = DecodeRule("i4", cell=16, tail=False, best_vector=True)
    rules = {"0.2.0": replace(old, tokens=12288), "0.2.0 4096": old}
    for tokens in (12288, 4096, 2048):
        rules[f"window {tokens}"] = DecodeRule("none", tokens=0, window=512 + tokens, tail=False)
    for tokens in (4096, 3072, 2048, 1024):
        for scores in ("exact", "p4", "p4x2", "p2x2r", "p2dr", "p3x2dr", "p4x2dr"):
            if tokens != 3072 or scores != "p4x2dr":
                rules[f"{scores} {tokens}"] = DecodeRule(scores, tokens)
    for tokens in (4096, 2048):
        rules[f"m2 {tokens}"] = DecodeRule("m2", tokens)
        for scores in ("p2dr", "p3x2dr"):
            rule, name = DecodeRule(scores, tokens), f"{scores} {tokens}"
            rules[f"{name} half"] = replace(rule, pages=0.5)
            rules[f"{name} quarter"] = replace(rule, pages=0.25)
            rules[f"{name} variance"] = replace(rule, variance=True)
            rules[f"{name} half variance"] = replace(rule, pages=0.5, variance=True)
            rules[f"{name} window 256"] = replace(rule, window=256)
    rule = DecodeRule("p2dr", 2048)
    rules["p2dr 4096 cells of 8"] = replace(rule, tokens=4096, cell=8)
    rules["p2dr 2048 cells of 8"] = replace(rule, cell=8)
    rules["p2dr 4096 cells of 16"] = replace(rule, tokens=4096, cell=16)
    rules["p2dr 2048 cells of 2"] = replace(rule, cell=2)
    rules["p2dr 2048 values in 4 bits"] = replace(rule, value_bits=4)
    rules["p2dr 2048 values in 16 bits"] = replace(rule, value_bits=16)
    rules["p2dr 2048 no tail"] = replace(rule, tail=False)
    rules["exact 2048 no tail"] = DecodeRule("exact", 2048, tail=False)
    rules["exact 2048 half"] = DecodeRule("exact", 2048, pages=0.5)
    return [Variant(name, rule) for name, rule in rules.items()]


def _prompts() -> list[Variant]:
    old = PromptRule("m16")
    few = replace(old, blocks=32)
    small = replace(few, tile=32)
    rules = {
        "0.2.0": old,
        "0.2.0 last 64": replace(old, dense_last=64),
        "32 of 64": replace(few, candidates=64),
        "32 of 192": few,
        "32 of 192 tile 32": small,
        "32 of 192 anchors": replace(few, anchors=64),
        "32 of 192 tile 32 anchors": replace(small, anchors=64),
        "32 of 128 m4 tile 32": replace(small, scores="m4", candidates=128),
        "32 of 128 p2dr tile 32": replace(small, scores="p2dr", candidates=128),
        "32 of 128 page tile 32": replace(small, scores="page", candidates=128),
        "48 of 192 tile 32": replace(small, blocks=48),
        "48 of 192 p2dr tile 32 anchors": replace(
            small, scores="p2dr", blocks=48, anchors=64
        ),
        "96 of 192 mass .005 tile 32": replace(small, blocks=96, min_mass=0.005),
        "32 exact tile 32": replace(small, scores="exact"),
    }  # fmt: skip
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


SETS = {"decode": _decode(), "prompts": _prompts()}
