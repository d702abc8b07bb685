"""Prompts: exact lengths, answers that stand in them, the same again from the same seed."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.eval.prompt import FOLLOWED_BY, VARIANTS, Prompt, Variant, make_text
from sparsek_backend.eval.prompt_file import PromptSet, load_prompts, save_prompts
from sparsek_backend.eval.tasks import TASKS, make_pool, make_prompts, read_texts
from tests.eval.readers import WordTokenizer

ASKING = [task for task in TASKS if task != "text"]


def prompts_of(
    task: str, length: int, *, variant: Variant = "plain", count: int = 1, seed: int = 0
) -> tuple[WordTokenizer, list[Prompt]]:
    tokenizer = WordTokenizer(before=(1, 2, 3), after=(4, 5))
    made = make_prompts(
        tokenizer, tasks=[task], variants=[variant], lengths=[length], count=count, seed=seed
    )
    return tokenizer, list(made)


@pytest.mark.parametrize("task", ASKING)
@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1500, 5000), seed=st.integers(0, 1 << 40), variant=st.sampled_from(VARIANTS)
)
def test_a_prompt_has_its_length_its_frame_and_its_answers(
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
    text = tokenizer.decode(ids)
    assert all(text.count(answer.text) == 1 for answer in prompt.answers)


@pytest.mark.parametrize("task", ASKING)
def test_prompts_depend_on_their_place_and_seed_alone(task: str) -> None:
    _, three = prompts_of(task, 2000, count=3)
    _, five = prompts_of(task, 2000, count=5)
    _, other = prompts_of(task, 2000, count=3, seed=1)
    _, longer = prompts_of(task, 2001, count=3)
    assert [p.digest for p in five[:3]] == [p.digest for p in three]
    digests = [p.digest for p in (*five, *other, *longer)]
    assert len(set(digests)) == len(digests)


def test_the_asked_needle_is_spread_over_the_text() -> None:
    tokenizer, prompts = prompts_of("question_first", 3000, count=20)
    texts = [(tokenizer.decode(prompt.ids), prompt.answers[0].text) for prompt in prompts]
    depths = sorted(text.index(answer) / len(text) for text, answer in texts)
    assert depths[0] < 0.1
    assert depths[-1] > 0.9
    assert max(b - a for a, b in pairwise(depths)) < 0.15


@pytest.mark.parametrize("task", ASKING)
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
@pytest.mark.parametrize("task", ASKING)
def test_a_length_without_room_is_refused(task: str, variant: Variant) -> None:
    with pytest.raises(ValueError, match=r"length: expected at least \d+ tokens") as caught:
        prompts_of(task, 20, variant=variant)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    # names differ a little from prompt to prompt
    with pytest.raises(ValueError, match="length: expected at least"):
        prompts_of(task, least - 40, variant=variant)
    _, (prompt,) = prompts_of(task, least + 40, variant=variant)
    assert len(prompt.ids) == least + 40


def test_texts_begin_at_places_spread_evenly_and_go_on(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    texts = [f"{word} " * 100 for word in ("one", "two", "three", "four")]
    kinds = {"tasks": ["text"], "variants": VARIANTS, "lengths": [250], "seed": 0}
    made = list(make_prompts(tokenizer, **kinds, count=4, texts=texts))
    assert all(text.fits and len(text.ids) == 125 for text in made)
    words = [tokenizer.decode((*text.ids, *text.target)).split() for text in made]
    assert [of[0] for of in words] == ["three", "one", "three", "two"]
    assert list(dict.fromkeys(words[0])) == ["three", "four", "one"]
    fewer = make_prompts(tokenizer, **kinds, count=2, texts=texts)
    assert list(fewer) == made[:2]
    with pytest.raises(ValueError, match="texts: expected some for the task text"):
        next(make_prompts(tokenizer, **kinds, count=1))
    with pytest.raises(ValueError, match=r"folder with \.txt files"):
        read_texts(tmp_path)
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert read_texts(tmp_path) == ["one", "two"]


def test_filler_repeats_no_sentence() -> None:
    pool = [sentence.strip() for sentence in make_pool(3)]
    assert len(set(pool)) == len(pool) == 4096
    assert make_pool(3) == make_pool(3) != make_pool(4)


@pytest.mark.parametrize("name", ["prompts.json", "deep/prompts.json.gz"])
def test_a_prompt_file_gives_back_what_was_saved(name: str, tmp_path: Path) -> None:
    _, prompts = prompts_of("continuation", 1500, count=3)
    text = make_text(0, (5, 6, 7))
    saved = PromptSet([*prompts, text], {"seed": 0})
    save_prompts(tmp_path / name, saved)
    assert load_prompts(tmp_path / name) == saved
    longest = max(max(p.max_tokens, len(p.target)) for p in prompts)
    assert saved.longest_request == 1500 + longest
    assert PromptSet([text]).longest_request == 4  # an engine answers texts too
    at_the_limit = replace(text, variant="plain", metric="string_match_all", max_tokens=7)
    assert PromptSet([at_the_limit]).longest_request == 1 + 7


def test_prompts_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Of tasks that went, with the places of what an answer rests on, and with texts apart."""
    path = tmp_path / "prompts.json"
    _, prompts = prompts_of("records", 1500)
    save_prompts(path, PromptSet(prompts))
    document = json.loads(path.read_text())
    (row,) = document["prompts"]
    del row["metric"]
    document["prompts"] = [{**row, "task": "multi_key", "evidence": [[7, 20]]}]
    path.write_text(json.dumps({**document, "texts": [{"name": "speech", "ids": [5, 6, 7]}]}))
    text = make_text(0, (5, 6, 7))
    assert load_prompts(path).prompts == [replace(prompts[0], task="multi_key"), text]


def test_a_prompt_file_is_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, prompts = prompts_of("records", 1500)
    path = tmp_path / "p.json.gz"
    save_prompts(path, PromptSet(prompts))

    def half(file: Path, data: bytes) -> int:
        with file.open("wb") as stream:
            stream.write(data[: len(data) // 2])
        assert load_prompts(path).prompts == prompts  # of another evaluation in the folder
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="no space left"):
        save_prompts(path, PromptSet(prompts))
    assert load_prompts(path).prompts == prompts
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_prompt_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    _, prompts = prompts_of("records", 1500)
    save_prompts(path, PromptSet(prompts))
    document = json.loads(path.read_text())
    for change, message in (
        ({"format": 9}, "in format 1"),
        ({"pieces": document["pieces"][:-1]}, "damaged"),
        ({"pieces": [[*piece, 1] for piece in document["pieces"]]}, "has .* tokens"),
        ({"prompts": [{"task": "records"}]}, "damaged"),
        ({"prompts": []}, "it has none"),
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
