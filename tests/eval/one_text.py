"""Many questions about one text: its pages are filled once, so that a CPU can ask many."""

from __future__ import annotations

import random
from collections import Counter

from sparsek_backend.eval.prompt import Prompt, Tokenizer, Tokens, endless, make_answer
from sparsek_backend.eval.tasks import draw_names, draw_numbers, make_pool

HEAD = "Some access numbers are hidden in the text below. Remember them; you will be asked.\n"


def questions_of_one_text(
    tokenizer: Tokenizer, start: Tokens, *, length: int, count: int, seed: int = 0, end: int = 640
) -> list[Prompt]:
    """``count`` prompts of equal length that share all tokens up to the question.

    Each asks for one of as many numbers, which lie evenly between ``start``, with which all begin,
    and the text's last ``end`` tokens.
    """
    rng = random.Random(f"one text {seed}")
    before, after = tokenizer.frame()

    def asking(name: str) -> tuple[tuple[int, ...], ...]:
        question = tokenizer.encode(f"\n\nWhat is the access number of the {name}?")
        return question, after, tokenizer.encode(f"The access number of the {name} is")

    names = draw_names(rng, 20 * count)
    sizes = {name: sum(map(len, asking(name))) for name in names}
    (size, _), *_ = Counter(sizes.values()).most_common()
    names = [name for name in names if sizes[name] == size][:count]
    numbers = draw_numbers(rng, count)
    pieces, used, asked = [start, before, tokenizer.encode(HEAD)], 0, 0
    room = length - size - sum(map(len, pieces))
    for text in endless(rng, make_pool(seed)):
        if asked < count and used >= (room - end) * asked // count:
            text = f"\nThe access number of the {names[asked]} is {numbers[asked]}.\n"
            asked += 1
        tokens = tokenizer.encode(text)
        pieces.append(tokens[: room - used])
        used += len(pieces[-1])
        if used == room:
            break
    body = tuple(token for piece in pieces for token in piece)
    prompts = []
    for index, (name, number) in enumerate(zip(names, numbers, strict=True)):
        target = tokenizer.encode(f" {number}")
        prompts.append(
            Prompt(
                task="one_text",
                variant="plain",
                length=length,
                index=index,
                pieces=(body, *(piece for piece in asking(name) if piece)),
                answers=(make_answer(tokenizer, number),),
                target=target,
                max_tokens=len(target) + 4,
            )
        )
    return prompts
