"""benchmarks/long_answers.py: its documents, the divergence along an answer, and the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import long_answers

pytest.importorskip("vllm")
worker = pytest.importorskip("benchmarks.long_answers_worker")

VOCABULARY, TOKENS, STOP = 700, 5, 3


class Letters:
    """A tokenizer of single characters, with a frame of one token on each side."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (1,), (2,)


def test_documents_have_their_length_and_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(str(number) * 400)
    monkeypatch.setattr(long_answers, "fetch_texts", lambda: tmp_path)
    made = long_answers.make_documents(Letters(), [500, 1000], 3)
    assert [len(document.ids) for document in made.prompts] == [500] * 3 + [1000] * 3
    assert len({document.digest for document in made.prompts}) == 6
    for document, question in zip(made.prompts, long_answers.QUESTIONS[:3] * 2, strict=True):
        assert document.fits
        assert (document.ids[0], document.ids[-1]) == (1, 2)
        assert "".join(map(chr, document.ids[1:-1])).endswith("\n\n" + question)
    long_answers.save_prompts(tmp_path / "long.json.gz", made)
    assert long_answers.load_prompts(tmp_path / "long.json.gz") == made


def test_divergence_is_of_the_whole_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(VOCABULARY, generator=generator).double() for _ in range(2))
    wanted, found = one.log_softmax(-1), other.log_softmax(-1)
    exact = (wanted.exp() * (wanted - found)).sum()
    assert torch.allclose(worker.divergence(wanted, found), exact, atol=1e-5)
    top, ids = wanted.topk(650)
    assert 0.97 * exact < worker.divergence(top, found[ids]) < exact
    assert worker.divergence(top, top) == 0.0


def answers(lead: Any, logits: torch.Tensor) -> list[int]:
    """The greedy tokens of a follower of some logits."""
    tokens: list[int] = []
    for row in logits:
        tokens.append(int(lead.step(tokens, row.clone()).argmax()))
    return tokens


def test_a_led_answer_is_compared_token_by_token() -> None:
    logits = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[2, STOP] = 50.0
    lead = worker.Lead(0, 0.0, TOKENS, [STOP])
    tokens = answers(lead, logits)
    assert STOP not in tokens
    reference = lead.reference(tokens)
    same, other = worker.Led(reference), worker.Led(reference)
    assert answers(same, logits) == tokens
    assert same.means()["kl"] == [pytest.approx(0.0, abs=1e-6)]
    assert same.means()["same"] == [1.0]
    assert answers(other, logits.roll(1, 0)) == tokens
    assert other.means()["kl"][0] > 0.5
    assert other.means()["same"] == [0.0]


def test_noise_samples_by_seed_and_position() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(4000, 3)
    one, other = (answers(worker.Free(seed, 0.5), logits) for seed in (1, 2))
    assert one == answers(worker.Free(1, 0.5), logits)
    assert one != other
    found = torch.tensor(one).bincount() / len(one)
    assert torch.allclose(found, (logits[0] / 0.5).softmax(-1), atol=0.03)
    assert set(answers(worker.Free(1, 0.0), logits)) == {2}


def document(name: str, answer: int, kl: list[float] | None = None) -> dict[str, Any]:
    """A document's row, with tokens that its answer's length decides."""
    row = {"name": name, "length": 10, "answer": answer, "ended": answer < 9}
    row |= {"tokens": [0] * answer}
    return row | ({"led": list(range(32)) * 2} if kl is None else {"kl": kl, "same": [1.0, 0.5]})


def test_summary() -> None:
    dense = {"label": "dense", "documents": [document("a", 4), document("b", 9)]}
    kl = [[1.0, 1.0, 2.0, 2.0, 0.0, 0.0, 4.0, 4.0], [1.0, 3.0, 2.0, 2.0, 0.0, 0.0, 2.0, 2.0]]
    sparse = {"label": "s", "documents": [document("a", 4, kl[0]), document("b", 6, kl[1])]}
    first, second = long_answers.summarise([dense, sparse])
    assert first == {
        "label": "dense",
        "length": 10,
        "documents": 2,
        "answer_tokens": 6.5,
        "ended": 1,
        "same_answers": 2,
        "distinct": 0.653,  # 32 of 49 runs
    }
    assert (second["answer_tokens"], second["ended"], second["same_answers"]) == (5, 2, 1)
    assert second["kl"] == [1.5, 2.0, 0.0, 3.0]
    assert second["kl_error"] == [0.5, 0.0, 0.0, 1.0]
    assert (second["growth"], second["same_tokens"]) == (2.0, 0.75)
