"""Names, numbers and made-up words, drawn from a seed."""

from __future__ import annotations

import itertools
import random


def listed(text: str) -> tuple[str, ...]:
    """The entries of a list that is written with bars between them, or else with spaces."""
    entries = text.split("|") if "|" in text else text.split()
    return tuple(entry.strip() for entry in entries)


ADJECTIVES = listed(
    "amber bold brave brisk broad calm clear cold crisp dense dim dry dusty eager early faint "
    "fine firm flat fresh gentle golden grand green grey heavy hollow humble icy jolly keen large "
    "late light lofty loud mild misty neat noble odd old olive pale plain polite proud quick quiet "
    "rare rough round rusty sharp short silent silver simple slow small smooth soft solid steep "
    "still stout strange sturdy swift tall thick thin tidy tiny urban vivid warm weary wide wild "
    "wise wooden young zesty"
)
NOUNS = listed(
    "anchor apron arrow basket beacon bell bench blanket boat bottle bridge broom bucket button "
    "cabin candle canvas carpet cart castle chain chair chest chimney clock coat compass copper "
    "cottage cradle crown cup curtain desk dish door drum engine falcon feather fence fiddle flag "
    "flute forest fountain garden gate glove guitar hammer harbour hat helmet hinge island jacket "
    "jar kettle key kite ladder lamp lantern lemon lock loom map mast mill mirror nail needle oar "
    "orange oven paddle pencil piano pillow pipe plate pocket pump quarry quilt raft ribbon ring "
    "river rope saddle sail scarf shelf shield shovel sled spoon stove table temple tent thread "
    "tower tray trumpet tunnel vase vessel violin wagon wheel whistle window yarn"
)
_ONSETS = listed("b d f g k l m n p r s t v z br dr fl gr kl pr st tr")
_VOWELS = listed("a e i o u")


NAMES = tuple(f"{a}-{n}" for a, n in itertools.product(ADJECTIVES, NOUNS))
"""Every adjective-noun name, such as ``amber-basket``."""


def draw_names(rng: random.Random, count: int) -> list[str]:
    """Distinct names."""
    return rng.sample(NAMES, count)


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Distinct numbers of seven digits."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]


def draw_made_up_words(rng: random.Random, count: int) -> list[str]:
    """Distinct made-up words, such as ``zofrate``."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(3))] = None
    return list(words)


def draw_letters(rng: random.Random, count: int) -> list[str]:
    """Distinct names of five capital letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 5))] = None
    return list(names)
