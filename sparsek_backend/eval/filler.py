"""Filler text: plain sentences from a grammar of our own, and the names and numbers hidden in it.

All prompts of one seed draw their filler from one pool of sentences: each is tokenized once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

POOL_SENTENCES = 4096
PARAGRAPH = 6
"""Every this many sentences of the pool, one begins a paragraph."""


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
NAMES = tuple(f"{a}-{n}" for a, n in itertools.product(ADJECTIVES, NOUNS))
"""Every adjective-noun name, such as ``amber-basket``."""
_PEOPLE = listed(
    "the miller|the old teacher|a young sailor|the baker's daughter|our neighbour|the postman|"
    "a travelling doctor|the mayor|the shepherd|two masons|the librarian|a quiet clerk|the judge|"
    "the widow next door|a group of farmers|the carpenter|the station master|my uncle|the gardener|"
    "an engineer from the coast|the choir|the ferryman|a painter|the night guard|the innkeeper"
)
_DEEDS = listed(
    "repaired|carried|sold|painted|borrowed|found|washed|hid|counted|measured|described|drew|bought|"
    "polished|forgot|returned|inspected|cleaned|packed|lost|copied|admired|moved|covered|traded"
)
_PLACES = listed(
    "behind the church|near the canal|in the upper village|at the market|below the hill|by the old "
    "well|on the eastern road|in the back room|under the railway bridge|beside the school|at the "
    "edge of the forest|in the courtyard|across the square|along the river bank|in the stable|on "
    "the third floor|at the harbour wall|in the empty theatre|by the orchard|outside the town "
    "hall"
)
_TIMES = listed(
    "before sunrise|on a wet Tuesday|after the long winter|during the festival|late in the "
    "evening|one morning in March|when the rain stopped|shortly after noon|in the year of the "
    "flood|while the others slept|at the end of the harvest|two days later|before the bells "
    "rang|on the last day of June|when nobody was looking|as the fog lifted"
)
_REASONS = listed(
    "because the roof had started to leak|so that the guests would be pleased|although nobody had "
    "asked for it|because the price of barley had fallen|and wrote a short letter about it|and "
    "never spoke of it again|since the council had agreed at last|as had been the custom for "
    "years|which surprised the whole street|and went home without a word|because a friend had "
    "given good advice|though the work was dull and slow|and then waited for the evening "
    "train|so the children had something to talk about|while a dog slept in the sun"
)

NOTES_BEGIN = "\n\nBefore you answer the question above, read these notes."
_NOTES = listed(
    "Read the whole question once more before you begin.|A short reply is better than a long "
    "one.|Do not explain how you found it.|Spell every name exactly as it stands in the "
    "text.|Numbers are written without spaces or commas inside them.|If several things are asked "
    "for, separate them with commas.|The order in which you list several things does not "
    "matter.|Do not add a greeting, and do not sign the reply.|Nothing outside the text is needed,"
    " and general knowledge does not help.|Do not translate anything.|Do not repeat the question "
    "in the reply.|The text may contain many similar passages; only one set of them was asked "
    "about.|Words in the question have the same meaning that they have in the text.|A reply that "
    "is almost right counts as wrong.|Do not use bullet points, tables or headings.|There is no "
    "need to be polite, and no need to hurry.|Some readers will see the reply on a small screen, "
    "so keep it on one line.|If you are unsure, give the one reply that seems most likely.|The "
    "length of the text says nothing about where the reply stands in it.|Passages at the start, in"
    " the middle and at the end matter equally.|Do not mention these notes in the reply.|Upper and"
    " lower case must be kept as they are.|Do not guess at what the author meant; report what is "
    "written.|Punctuation around names and numbers is not part of them."
)


def make_sentence(rng: random.Random) -> str:
    """One sentence about nothing in particular."""
    who, deed, where = rng.choice(_PEOPLE), rng.choice(_DEEDS), rng.choice(_PLACES)
    article, kind = rng.choice(("a", "the", "that", "another")), rng.choice(ADJECTIVES)
    if article == "a" and kind[0] in "aeiou":
        article = "an"
    what = f"{article} {kind} {rng.choice(NOUNS)}"
    when, why = rng.choice(_TIMES), rng.choice(_REASONS)
    form = rng.randrange(4)
    if form == 0:
        sentence = f"{who} {deed} {what} {where} {when}"
    elif form == 1:
        sentence = f"{when}, {who} {deed} {what} {where}"
    elif form == 2:
        sentence = f"{who} {deed} {what} {where}, {why}"
    else:
        sentence = f"{where}, {who} {deed} {what} {when}, {why}"
    return f"{sentence[0].upper()}{sentence[1:]}."


@lru_cache(maxsize=4)
def make_pool(seed: int) -> tuple[str, ...]:
    """The distinct sentences that all prompts of a seed draw from, each with its separator."""
    rng = random.Random(f"filler {seed}")
    sentences: dict[str, None] = {}
    while len(sentences) < POOL_SENTENCES:
        sentences[make_sentence(rng)] = None
    return tuple(
        ("\n" if index % PARAGRAPH == 0 else " ") + sentence
        for index, sentence in enumerate(sentences)
    )


def endless(rng: random.Random, pool: Sequence[str]) -> Iterator[str]:
    """The pool in random order, again and again; drawn as needed, since few need all of it."""
    while True:
        left = list(pool)
        while left:
            chosen = int(rng.random() * len(left))
            left[chosen], left[-1] = left[-1], left[chosen]
            yield left.pop()


def make_notes(rng: random.Random) -> Iterator[str]:
    """Notes on how to answer, without end."""
    return endless(rng, [f" {note}" for note in _NOTES])


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Distinct numbers of seven digits."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]
