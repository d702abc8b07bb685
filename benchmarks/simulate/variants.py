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
    old = DecodeRule("i4", cell=16, tail=False, best_vector=True, shares="pages")
    rules = {"0.2.0": replace(old, tokens=12288), "0.2.0 4096": old}
    for tokens in (12288, 4096):
        rules[f"window {tokens}"] = DecodeRule("none", tokens=0, window=512 + tokens, tail=False)
    for tokens in (4096, 3072, 2048):
        for scores in ("exact", "p4", "p4x2", "p2x2r", "p2dr", "p3x2dr"):
            rules[f"{scores} {tokens}"] = DecodeRule(scores, tokens)
    rules["exact 1024"] = DecodeRule("exact", 1024)
    for tokens in (4096, 3072, 2048, 1024):
        for scores in ("p2dr", "p3x2dr"):
            rule, name = DecodeRule(scores, tokens, variance="page"), f"{scores} {tokens} variance"
            rules[name] = rule
            if tokens in (4096, 2048):
                rules[f"{name} by vector"] = replace(rule, variance="vector")
                rules[f"{name} in the sum"] = replace(rule, variance_counts="sum")
                rules[f"{name} cells of 2"] = replace(rule, cell=2)
                rules[f"{name} half"] = replace(rule, pages=0.5)
                rules[f"{name} quarter"] = replace(rule, pages=0.25)
    for tokens in (4096, 2048):
        for scores in ("p4dr", "p4x2dr", "p2x1dr", "m2"):
            rules[f"{scores} {tokens} variance"] = DecodeRule(scores, tokens, variance="page")
        rule, name = DecodeRule("p2dr", tokens, variance="page"), f"p2dr {tokens} variance"
        rules[f"{name} window 256"] = replace(rule, window=256)
        rules[f"{name} no tail"] = replace(rule, tail=False)
        rules[f"{name} in the tail"] = replace(rule, variance_counts="tail")
    for share, word in ((0.5, "half"), (0.25, "quarter")):
        rules[f"p2dr 2048 variance {word} by cells"] = replace(rule, pages=share, level1="cells")
        rules[f"p2dr 2048 variance {word} by p4x16dr"] = replace(
            rule, pages=share, level1="p4x16dr"
        )
    rules["p2dr 2048 variance three quarters"] = replace(rule, pages=0.75)
    rules["p2dr 2048 variance half no stand-in"] = replace(rule, pages=0.5, stand_in=False)
    rules["p2dr 2048 variance cells of 8"] = replace(rule, cell=8)
    rules["p2dr 2048 variance cells of 16"] = replace(rule, cell=16)
    rules["p2dr 2048 variance values in 4 bits"] = replace(rule, value_bits=4)
    return [Variant(name, rule) for name, rule in rules.items()]


def _samples() -> list[Variant]:
    """A tail, or a sample, for what is not certain to be attended."""
    rules = {
        f"p2dr {tokens} tail": DecodeRule("p2dr", tokens, cell=2, variance="page")
        for tokens in (3072, 2048, 1024)
    }
    pairs, single = DecodeRule("p2dr", cell=2, variance="page", sampled=1.0), {"variance": ""}
    sketches = {
        "p2dr": (pairs, (4096, 3072, 2048, 1536, 1024)),
        "p3x2dr": (replace(pairs, scores="p3x2dr"), (3072, 2048, 1024)),
        "p2x1dr": (replace(pairs, scores="p2x1dr", **single), (3072, 2048, 1536, 1024)),
        "p2x1dr cells of 1": (replace(pairs, scores="p2x1dr", cell=1, **single), (2048, 1024)),
        "exact": (replace(pairs, scores="exact", **single), (2048, 1024)),
    }
    for name, (rule, budgets) in sketches.items():
        for tokens in budgets:
            rules[f"{name} {tokens} sampled"] = replace(rule, tokens=tokens)
    return [Variant(name, rule) for name, rule in rules.items()]


def _prompts() -> list[Variant]:
    old = PromptRule("m16")
    few = replace(old, blocks=32)
    small = replace(few, tile=32)
    rules = {
        "0.2.0": old,
        "0.2.0 last 64": replace(old, dense_last=64),
        "32 of 192": few,
        "32 of 192 tile 32": small,
        "32 of 192 anchors": replace(few, anchors=64),
        "32 of 192 tile 32 anchors": replace(small, anchors=64),
        "32 of 192 p2dr tile 32": replace(small, scores="p2dr"),
        "32 of 192 page tile 32": replace(small, scores="page"),
        "48 of 192 tile 32 anchors": replace(small, blocks=48, anchors=64),
        "96 of 192 mass .005 tile 32": replace(small, blocks=96, min_mass=0.005),
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _budgets() -> list[Variant]:
    """How many blocks, by what, with and without dense last rows."""
    old = PromptRule("m16")
    named = PromptRule("p2dr", tile=32, rank_rows=16, variance=True)
    one_step = replace(named, scores="all", ranks="p2dr")
    rules = {
        "96 of 192 m16 tile 64": old,
        "96 of 192 m16 tile 64 last 64": replace(old, dense_last=64),
        "48 of 192 m16": replace(old, blocks=48),
        "32 by p2dr": replace(one_step, blocks=32),
        "64 by p2dr": replace(one_step, blocks=64),
        "64 by p2dr last 64": replace(one_step, blocks=64, dense_last=64),
        "64 of 192 page by p2dr": replace(one_step, scores="page", blocks=64),
        "32 of 192 p2dr": replace(named, blocks=32),
        "64 by exact": replace(one_step, ranks="exact", blocks=64),
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _ranks() -> list[Variant]:
    """What names candidates and what ranks them, at the cost of 64 blocks of 128 or below."""
    named = PromptRule("page", blocks=64, candidates=128, tile=32, rank_rows=16, variance=True)
    two_sketches = replace(named, ranks="p2dr", candidates=192)
    one_step = replace(named, scores="all", ranks="p2dr")
    rules = {
        "64 of 128 m16": replace(named, scores="m16", variance=False),
        "64 of 128 page": named,
        "64 of 192 page 8 rows": replace(named, candidates=192, rank_rows=8),
        "64 of 96 p2dr": replace(named, scores="p2dr", candidates=96),
        "64 of 128 p2dr largest": replace(named, scores="p2dr", name_by="largest"),
        "80 of 192 page by p2dr": replace(two_sketches, blocks=80),
        "96 of 192 page by p2dr": replace(two_sketches, blocks=96),
        "64 of 384 page by p2dr": replace(two_sketches, candidates=384),
        "96 by p2dr mass .005": replace(one_step, blocks=96, min_mass=0.005),
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _details() -> list[Variant]:
    """What may be added to 64 blocks by p2dr, or taken from them."""
    base = PromptRule("all", blocks=64, tile=32, ranks="p2dr", rank_rows=16, variance=True)
    changes: dict[str, dict[str, Any]] = {
        "sum": {"rank_by": "sum"},
        "8 rows": {"rank_rows": 8},
        "no variance": {"variance": False},
        "tile 64": {"tile": 64, "rank_rows": 32},
        "tile 16": {"tile": 16, "rank_rows": 8},
        "growth .5": {"growth": 0.5},
        "growth -.5": {"growth": -0.5},
        "anchors 64": {"anchors": 64},
        "anchors 128": {"anchors": 128},
        "tail page": {"tail": "page"},
        "tail p2dr": {"tail": "p2dr"},
        "window 256": {"window": 256},
    }
    return [Variant(f"64 by p2dr {name}", prompt=replace(base, **x)) for name, x in changes.items()]


def _corrections() -> list[Variant]:
    """What may correct the best blocks: rows that attend everything, keys that stand in, more."""
    base = PromptRule("m16", dense_last=64)
    rules = {
        "96 of 192": base,
        "96 of 192 anchors": replace(base, anchors=64),
        "96 of 192 tail": replace(base, tail="variance"),
        "96 of 192 tail of means": replace(base, tail="page"),
        "96 of 192 tail anchors": replace(base, tail="variance", anchors=64),
        "64 of 192 anchors": replace(base, blocks=64, anchors=64),
        "64 of 192 tail": replace(base, blocks=64, tail="variance"),
        "64 of 192 tail anchors": replace(base, blocks=64, tail="variance", anchors=64),
        "128 of 256": replace(base, blocks=128, candidates=256),
        "128 of 256 tail": replace(base, blocks=128, candidates=256, tail="variance"),
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _spared() -> list[Variant]:
    """What the second step may spare, what it may choose more of, and which layers lose."""
    base = PromptRule("m16", dense_last=64)
    rules = {
        "96 of 192": base,
        "96 of 192 16 rows": replace(base, rank_rows=16),
        "96 of 192 8 rows": replace(base, rank_rows=8),
        "96 of 144": replace(base, candidates=144),
        "128 of 160": replace(base, blocks=128, candidates=160),
        "128 of 192": replace(base, blocks=128),
        "128 of 192 16 rows": replace(base, blocks=128, rank_rows=16),
        "128 of 256": replace(base, blocks=128, candidates=256),
        "160 of 192": replace(base, blocks=160),
        "96 of 192 last 1024": replace(base, dense_last=1024),
        **{f"96 of 192 quarter {i} dense": replace(base, dense_quarters=(i,)) for i in range(4)},
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _drawn() -> list[Variant]:
    """Blocks that are drawn by their masses, in place of the largest; how many, and of what."""
    base = PromptRule("m16", dense_last=1024)
    drawn = replace(base, draws=True)
    most = replace(base, blocks=192)
    rules = {
        "96 of 192": base,
        "96 of 192 drawn": drawn,
        "96 of 192 drawn by squares": replace(drawn, rank_by="squares"),
        "96 of 192 drawn twice": replace(drawn, draws_candidates=True),
        "96 of all": replace(base, scores="all"),
        "96 of all drawn": replace(drawn, scores="all"),
        "144 of 288": replace(base, blocks=144, candidates=288),
        "144 of 288 drawn": replace(drawn, blocks=144, candidates=288),
        "192 of 384": replace(base, blocks=192, candidates=384),
        "mass .01 of 192": replace(most, min_mass=0.01),
        "mass .02 of 192": replace(most, min_mass=0.02),
    }
    pairs = DecodeRule("p2dr", cell=2, variance="page", sampled=1.0)
    tokens = [Variant(f"tokens {x} drawn", replace(pairs, tokens=x)) for x in (2048, 4096)]
    return [*tokens, *(Variant(name, prompt=rule) for name, rule in rules.items())]


def _one_step() -> list[Variant]:
    """Blocks that are drawn by means of keys alone, beside those that real keys rank."""
    twice = PromptRule("m16", dense_last=1024, draws=True, draws_candidates=True)
    once = replace(twice, candidates=144, ranks="")
    all_exact = replace(twice, scores="all", blocks=144)
    best = replace(twice, draws=False, draws_candidates=False)
    m4 = replace(once, scores="m4")
    rules = {
        "96 of 192": best,
        "96 of 192 drawn twice": twice,
        "144 of 288 drawn twice": replace(twice, blocks=144, candidates=288),
        "144 of all drawn": all_exact,
        "144 by p2dr drawn": replace(all_exact, ranks="p2dr", variance=True),
        "144": replace(once, draws_candidates=False),
        "144 drawn": once,
        "192 drawn": replace(once, candidates=192),
        "144 drawn 64 rows": replace(once, name_stride=1),
        "144 drawn tile 32": replace(once, tile=32),
        "144 drawn squares": replace(once, name_by="squares"),
        "144 drawn largest": replace(once, name_by="largest"),
        "144 drawn m8 largest": replace(once, scores="m8", name_by="largest"),
        "144 drawn m4": m4,
        "144 drawn m4 squares": replace(m4, name_by="squares"),
        "144 drawn m4 largest": replace(m4, name_by="largest"),
        "144 drawn m4 sums largest": replace(m4, name_by="largest", name_sums=True),
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _named() -> list[Variant]:
    """What names the candidates of blocks that are drawn twice, and how many there are of both."""
    twice = PromptRule("m16", dense_last=1024, draws=True, draws_candidates=True)
    m8 = replace(twice, scores="m8", name_by="largest")
    rules = {
        "96 of 192": twice,
        "96 of 192 largest": replace(twice, name_by="largest"),
        "96 of 192 m8": replace(twice, scores="m8"),
        "96 of 192 m8 largest": m8,
        "96 of 192 m4 largest": replace(m8, scores="m4"),
        "96 of 144 m8 largest": replace(m8, candidates=144),
        "128 of 192 m8 largest": replace(m8, blocks=128),
        "128 of 192": replace(twice, blocks=128),
        "144 of 192": replace(twice, blocks=144),
        "96 of 288": replace(twice, candidates=288),
        "144 of 288": replace(twice, blocks=144, candidates=288),
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _shared() -> list[Variant]:
    """More candidates for no more: shared by two tiles, of which half as many rows rank."""
    twice = PromptRule("m16", dense_last=1024, draws=True, draws_candidates=True)
    m8 = replace(twice, scores="m8", name_by="largest")
    fewer = replace(twice, rank_rows=16)
    shared = replace(fewer, neighbours=2)
    rules = {
        "96 of 192": twice,
        "96 of 288": replace(twice, candidates=288),
        "72 of 288": replace(twice, blocks=72, candidates=288),
        "96 of 384": replace(twice, candidates=384),
        "96 of 288 squares": replace(twice, candidates=288, rank_by="squares"),
        "96 of 288 m8 largest": replace(m8, candidates=288),
        "72 of 288 m8 largest": replace(m8, blocks=72, candidates=288),
        "96 of 192 16 rows": fewer,
        "96 of 288 16 rows": replace(fewer, candidates=288),
        "96 of 288 shared": replace(shared, candidates=288),
        "96 of 384 shared": replace(shared, candidates=384),
        "72 of 384 shared": replace(shared, blocks=72, candidates=384),
        "96 of 384 shared m8 largest": replace(
            shared, scores="m8", name_by="largest", candidates=384
        ),
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _adaptive() -> list[Variant]:
    """As many blocks as a tile and KV head needs, so that some need few and others get more."""
    twice = PromptRule("m16", dense_last=1024, draws=True, draws_candidates=True, candidates=288)
    most = replace(twice, blocks=288)
    rules = {"96 of 192": replace(twice, candidates=192), "96 of 288": twice}
    for sure in (0.005, 0.01, 0.02, 0.04, 0.08):
        rules[f"sure {sure} of 288"] = replace(most, sure=sure)
    for sure in (0.01, 0.02, 0.04):
        rules[f"sure {sure} of 192"] = replace(most, candidates=192, blocks=192, sure=sure)
    rules["144 sure 0.02 of 288"] = replace(most, blocks=144, sure=0.02)
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _deep() -> list[Variant]:
    """What keeps long contexts: more blocks, more candidates, more of both for deep tiles alone."""
    twice = PromptRule("m16", dense_last=1024, draws=True, draws_candidates=True)
    three = replace(twice, candidates=288)
    rules = {
        "96 of 192": twice,
        "96 of 288": three,
        "96 of 384": replace(twice, candidates=384),
        "144 of 288": replace(three, blocks=144),
        "144 of 432": replace(three, blocks=144, candidates=432),
        "192 of 384": replace(twice, blocks=192, candidates=384),
        "96 of 192 deepens .5": replace(twice, deepens=0.5),
        "96 of 288 deepens .5": replace(three, deepens=0.5),
        "96 of 288 power .75": replace(three, name_power=0.75),
        "96 of 288 power .5": replace(three, name_power=0.5),
        "96 of 288 by squares": replace(three, name_by="squares"),
        "96 of 288 power .75 by squares": replace(three, name_by="squares", name_power=0.75),
        "96 of 288 32 rows name": replace(three, name_stride=2),
    }
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


def _layers() -> list[Variant]:
    """Which layers' sparsity loses, where blocks are drawn."""
    twice = PromptRule("m16", dense_last=1024, draws=True, draws_candidates=True)
    rules = {"96 of 192": twice, "144 of 288": replace(twice, blocks=144, candidates=288)}
    for i in range(4):
        rules[f"96 of 192 quarter {i} dense"] = replace(twice, dense_quarters=(i,))
    return [Variant(name, prompt=rule) for name, rule in rules.items()]


SETS = {
    "decode": _decode(),
    "samples": _samples(),
    "prompts": _prompts(),
    "budgets": _budgets(),
    "ranks": _ranks(),
    "details": _details(),
    "corrections": _corrections(),
    "spared": _spared(),
    "drawn": _drawn(),
    "one_step": _one_step(),
    "named": _named(),
    "shared": _shared(),
    "adaptive": _adaptive(),
    "deep": _deep(),
    "layers": _layers(),
}
