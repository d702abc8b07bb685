"""Long answers, dense against sparse: their lengths, and KL divergence position by position.

    python benchmarks/long_answers.py prompts MODEL --length 16384 --length 30592 --out long.json.gz
    python benchmarks/long_answers.py run MODEL --prompts long.json.gz --json RESULT.json \
        --budget block_topk:96,decode_tokens=3072,sparse_phase=decode

The documents are speeches, each with a question that asks for a long answer.  Every budget answers
freely, up to `--tokens` tokens, which gives the lengths of answers.  A second time it is led along
dense attention's own text, which never ends before `--tokens`: that gives the KL divergence from
dense attention at each position.  Answers are sampled, each document's with a seed of its own:
greedy answers of small models repeat themselves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sparsek_backend.eval.budgets import Budget, parse_budget
from sparsek_backend.eval.prompt import Prompt, Tokenizer
from sparsek_backend.eval.prompt_file import PromptSet, load_prompts, save_prompts
from sparsek_backend.eval.runs import LocalModel
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.eval.workers import run_worker
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.models import fetch_texts

WORKER = "benchmarks.long_answers_worker"
QUARTERS = 4
GRAM = 16
"""Tokens that count as a repetition if they stood in the answer before."""
QUESTIONS = (
    "Write a long summary of the text above. Take its subjects one after the other, in their "
    "order, and give names, figures and dates.",
    "List every subject of the text above in a numbered list, with three sentences on each.",
    "Write an essay of about 1500 words on the text above: what its speakers wanted, what they "
    "feared, and how they argued.",
    "Write forty questions about the text above, each with its answer.",
)
HEAD = "Read this text.\n\n"


def make_documents(tokenizer: Tokenizer, lengths: Sequence[int], count: int) -> PromptSet:
    """``count`` documents of each length: speeches, one after the other, and a question."""
    speeches = [path.read_text(errors="replace") for path in sorted(fetch_texts().glob("*.txt"))]
    before, after = tokenizer.frame()
    head = (*before, *tokenizer.encode(HEAD))
    documents: list[Prompt] = []
    for length in lengths:
        for index in range(count):
            question = tokenizer.encode("\n\n" + QUESTIONS[index % len(QUESTIONS)])
            room = length - len(head) - len(question) - len(after)
            body: list[int] = []
            for speech in islice(cycle(speeches), index * len(speeches) // count, None):
                if len(body) >= room:
                    break
                body += tokenizer.encode(speech)
            pieces = (head, tuple(body[:room]), question, after)
            document = Prompt("long_answer", "plain", length, index, pieces, (), (), max_tokens=0)
            documents.append(document)
    return PromptSet(documents)


def quarters_of(bins: Sequence[float]) -> list[float]:
    """Means of the quarters of an answer, of its bins."""
    size = math.ceil(len(bins) / QUARTERS)
    return [fmean(bins[begin : begin + size]) for begin in range(0, len(bins), size)]


def distinct_share(tokens: Sequence[int]) -> float:
    """Share of distinct ones among the runs of ``GRAM`` tokens: small where a text goes round."""
    runs = [tuple(tokens[begin : begin + GRAM]) for begin in range(len(tokens) - GRAM + 1)]
    return len(set(runs)) / max(len(runs), 1)


def summarise(arms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each budget and length: lengths of answers, and divergence by quarter.

    ``growth`` is the largest quarter's divergence over the first's, ``distinct`` the share of
    dense attention's text, along which others are led, that it does not repeat.
    """
    rows = []
    for arm in arms:
        for length in dict.fromkeys(one["length"] for one in arm["documents"]):
            pairs = [
                (one, dense)
                for one, dense in zip(arm["documents"], arms[0]["documents"], strict=True)
                if one["length"] == length
            ]
            here = [one for one, _ in pairs]
            row = {
                "label": arm["label"],
                "length": length,
                "documents": len(here),
                "answer_tokens": round(fmean(one["answer"] for one in here), 1),
                "ended": sum(one["ended"] for one in here),
                "same_answers": sum(one["tokens"] == dense["tokens"] for one, dense in pairs),
            }
            if arm is arms[0]:
                row["distinct"] = round(fmean(distinct_share(one["led"]) for one in here), 3)
            else:
                by_document = [quarters_of(one["kl"]) for one in here]
                columns = list(zip(*by_document, strict=True))
                means = [fmean(column) for column in columns]
                row |= {
                    "kl": [round(mean, 5) for mean in means],
                    "kl_error": [
                        round(stdev(column) / len(column) ** 0.5, 5) if len(column) > 1 else None
                        for column in columns
                    ],
                    "growth": round(max(means) / means[0], 3) if means[0] else None,
                    "same_tokens": round(fmean(fmean(one["same"]) for one in here), 4),
                }
            rows.append(row)
    return rows


def run(options: argparse.Namespace) -> None:
    """Answer by dense attention and every budget, in a process each, and write the result."""
    budgets = [Budget("dense", None), *map(parse_budget, options.budget)]
    load_prompts(options.prompts)  # a damaged file fails before an engine starts
    ends = json.loads((Path(options.model) / "config.json").read_text())["eos_token_id"]
    given = {} if options.gpu_memory is None else {"gpu_memory_utilization": options.gpu_memory}
    local = LocalModel(options.model, given)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    arms: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sparsek-long-answers-") as folder:
        for budget in budgets:
            job = {
                "model": options.model,
                "settings": None if budget.settings is None else dict(budget.settings),
                "engine": local.arguments(),
                "prompts": str(options.prompts),
                "tokens": options.tokens,
                "temperature": options.temperature,
                "stops": ends if isinstance(ends, list) else [ends],
                "reference": str(Path(folder) / "dense.pt"),
            }
            found = run_worker(
                WORKER, job, label=f"budget {budget.label!r}", on_progress=print, timeout=900.0
            )
            arms.append({"label": budget.label, "settings": budget.settings, **found})
            summary = summarise(arms)
            for row in summary:
                if row["label"] == budget.label:
                    print(row, flush=True)
            document = {
                "model": local.name,
                "date": datetime.date.today().isoformat(),
                "machine": asdict(describe_machine(choose_device(), options.commit)),
                "tokens": options.tokens,
                "temperature": options.temperature,
                "summary": summary,
                "arms": arms,
            }
            options.json.write_text(json.dumps(document) + "\n", encoding="utf-8")


def main() -> None:
    """Make documents, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prompts", help="make the documents, where the tokenizer is")
    make.add_argument("model")
    make.add_argument("--length", type=int, action="append", required=True)
    make.add_argument("--count", type=int, default=24)
    make.add_argument("--out", type=Path, required=True)
    measure = commands.add_parser("run", help="answer and compare")
    measure.add_argument("model", help="a model's folder")
    measure.add_argument("--prompts", type=Path, required=True)
    measure.add_argument("--budget", action="append", required=True)
    measure.add_argument("--tokens", type=int, default=2048)
    measure.add_argument("--temperature", type=float, default=0.7)
    measure.add_argument("--gpu-memory", type=float)
    measure.add_argument("--commit", default="")
    measure.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        made = make_documents(HubTokenizer(options.model), options.length, options.count)
        save_prompts(options.out, made)
        print(f"wrote {len(made.prompts)} documents to {options.out}")


if __name__ == "__main__":
    main()
