"""Prompts: exact lengths, evidence where it is said to be, the same again from the same seed."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.eval.filler import make_pool
from sparsek_backend.eval.prompt import FOLLOWED_BY, VARIANTS, Prompt, Variant
from sparsek_backend.eval.prompt_file import PromptSet, load_prompts, save_prompts
from sparsek_backend.eval.tasks import TASKS, make_prompts
from tests.eval.readers import WordTokenizer

COUNTED = {"common_words", "frequent_words"}


def prompts_of(
    task: str, length: int, *, variant: Variant = "plain", count: int = 1, seed: int = 0
) -> tuple[WordTokenizer, list[Prompt]]:
    tokenizer = WordTokenizer(before=(1, 2, 3), after=(4, 5))
    made = make_prompts(
        tokenizer, tasks=[task], variants=[variant], lengths=[length], count=count, seed=seed
    )
    return tokenizer, list(made)


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1500, 5000), seed=st.integers(0, 1 << 40), variant=st.sampled_from(VARIANTS)
)
def test_a_prompt_has_its_length_its_frame_and_its_evidence(
    task: str, length: int, seed: int, variant: Variant
) -> None:
    tokenizer, (prompt,) = prompts_of(task, length, variant=variant, seed=seed)
    ids = prompt.ids
    assert len(ids) == length
    assert tuple(ids[:3]) == (1, 2, 3)
    frame = [i for i in range(length) if tuple(ids[i : i + 2]) == (4, 5)]
    assert len(frame) == 1  # the user's words end once, before the lead
    target = tokenizer.decode(prompt.target)
    for answer in prompt.answers:
        assert answer.text in target
        assert all(tokenizer.decode(form).strip() == answer.text for form in answer.tokens)
    assert prompt.max_tokens > len(prompt.target)
    if task in COUNTED:
        assert prompt.evidence == ()
        return
    assert prompt.evidence
    shown = " ".join(tokenizer.decode(ids[begin:end]) for begin, end in prompt.evidence)
    for answer in prompt.answers:
        assert answer.text in shown
    hidden = [i for i in range(length) if not any(b <= i < e for b, e in prompt.evidence)]
    rest = tokenizer.decode([ids[i] for i in hidden])
    assert not any(answer.text in rest for answer in prompt.answers)


@pytest.mark.parametrize("task", sorted(COUNTED))
@pytest.mark.parametrize("length", [1500, 6000])
def test_the_words_asked_for_come_most_often(task: str, length: int) -> None:
    tokenizer, (prompt,) = prompts_of(task, length)
    words = tokenizer.decode(prompt.ids).split("\n", 1)[1].split("\n\n")[0].split()
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    answers = {answer.text for answer in prompt.answers}
    assert {word for _, word in counts[: len(answers)]} == answers
    assert counts[len(answers)][0] * 3 <= counts[len(answers) - 1][0]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_depend_on_their_place_and_seed_alone(task: str) -> None:
    _, three = prompts_of(task, 2000, count=3)
    _, five = prompts_of(task, 2000, count=5)
    _, other = prompts_of(task, 2000, count=3, seed=1)
    _, longer = prompts_of(task, 2001, count=3)
    assert [p.digest for p in five[:3]] == [p.digest for p in three]
    digests = [p.digest for p in (*five, *other, *longer)]
    assert len(set(digests)) == len(digests)


def test_the_asked_needle_is_spread_over_the_text() -> None:
    _, prompts = prompts_of("single", 3000, count=20)
    depths = sorted(prompt.evidence[0][0] / 3000 for prompt in prompts)
    assert depths[0] < 0.1
    assert depths[-1] > 0.9
    assert max(b - a for a, b in pairwise(depths)) < 0.15


@pytest.mark.parametrize("task", TASKS)
def test_a_followed_question_lies_behind_its_notes(task: str) -> None:
    tokenizer = WordTokenizer(before=(1, 2, 3), after=(4, 5))
    plain, followed = make_prompts(
        tokenizer, tasks=[task], variants=VARIANTS, lengths=[3000], count=1, seed=0
    )
    assert (followed.target, followed.answers) == (plain.target, plain.answers)
    ids = followed.ids
    end = next(i for i in range(3000) if tuple(ids[i : i + 2]) == (4, 5))
    notes = tokenizer.decode(ids[end - FOLLOWED_BY : end])
    assert notes.startswith("\n\nBefore you answer")
    asked = tokenizer.decode(ids[: end - FOLLOWED_BY])
    assert asked.rstrip()[-1] in "?."
    assert tokenizer.decode(ids[end + 2 :]) == "The answer is:"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("task", TASKS)
def test_a_length_without_room_is_refused(task: str, variant: Variant) -> None:
    length = 20
    for _ in range(3):  # what words of a list take grows with the length
        with pytest.raises(ValueError, match=r"length: expected at least \d+ tokens") as caught:
            prompts_of(task, length, variant=variant)
        least = int(str(caught.value).split("at least ")[1].split()[0])
        assert least > length
        length = least - 40  # the frame and the names differ a little from prompt to prompt
    if task not in COUNTED:
        _, (prompt,) = prompts_of(task, least + 40, variant=variant)
        assert len(prompt.ids) == least + 40


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match="expected one of single"):
        prompts_of("passkey", 2000)


def test_filler_repeats_no_sentence() -> None:
    pool = [sentence.strip() for sentence in make_pool(3)]
    assert len(set(pool)) == len(pool) == 4096
    assert make_pool(3) == make_pool(3) != make_pool(4)


@pytest.mark.parametrize("name", ["prompts.json", "deep/prompts.json.gz"])
def test_a_prompt_file_gives_back_what_was_saved(name: str, tmp_path: Path) -> None:
    _, prompts = prompts_of("multi_value", 1500, count=3)
    saved = PromptSet(prompts, [("speech", (5, 6, 7))], {"seed": 0})
    save_prompts(tmp_path / name, saved)
    assert load_prompts(tmp_path / name) == saved
    longest = max(max(p.max_tokens, len(p.target)) for p in prompts)
    assert saved.longest_request == 1500 + longest


def test_a_damaged_prompt_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    _, prompts = prompts_of("single", 1500)
    save_prompts(path, PromptSet(prompts))
    document = json.loads(path.read_text())
    for change, message in (
        ({"format": 9}, "in format 1"),
        ({"pieces": document["pieces"][:-1]}, "damaged"),
        ({"pieces": [[*piece, 1] for piece in document["pieces"]]}, "has .* tokens"),
        ({"prompts": [{"task": "single"}]}, "damaged"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(ValueError, match=message):
            load_prompts(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="does not read"):
        load_prompts(path)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(b"{}" * 500)[:-9])
    with pytest.raises(ValueError, match="does not read"):
        load_prompts(cut)
