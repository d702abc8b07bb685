"""From prompts to results: interrupted and continued, paired, warned about."""

from __future__ import annotations

import csv
import json
import lzma
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsek_backend.eval.budgets import Budget, parse_budget
from sparsek_backend.eval.cli import app
from sparsek_backend.eval.prompt import Prompt, make_text
from sparsek_backend.eval.prompt_file import PromptSet, save_prompts
from sparsek_backend.eval.record import adopt_dense, append_rows, pending, read_rows, run_key
from sparsek_backend.eval.results import (
    MEAN,
    Run,
    collect_runs,
    compare_runs,
    read_results,
    warnings_of,
)
from sparsek_backend.eval.runs import Workplace, run_server, work
from sparsek_backend.eval.scoring import Reply
from sparsek_backend.eval.stats import pack
from sparsek_backend.eval.tables import result_tables
from sparsek_backend.eval.tasks import make_prompts
from tests.eval.readers import Reader, WordTokenizer

TASKS = ("question_first", "records", "continuation")
COUNT = 8
NOTHING_YET = json.dumps(
    {"kind": "run", "run": "x", "label": "dense", "settings": None, "known": True}
    | {"model": "m", "machine": {}}
)


def prompt_set(tokenizer: WordTokenizer) -> PromptSet:
    made = make_prompts(
        tokenizer, tasks=TASKS, variants=("plain",), lengths=(1200,), count=COUNT, seed=0
    )
    return PromptSet([*made, make_text(0, tuple(range(900)))])


def run(reader: Reader, prompts: PromptSet, record: Path, label: str, batch: int = 5) -> str:
    """One run of the evaluation, as a worker does it."""
    key = run_key({"label": label})
    settings = parse_budget(label).settings
    about = {"label": label, "settings": settings, "known": True, "model": "m", "machine": {}}
    append_rows(record, [{"kind": "run", "run": key, **about}])
    Workplace(prompts, record, record).score(reader.reply, key, batch, lambda count, what: None)
    append_rows(record, [{"kind": "run", "run": key, **about, "seconds": 2.0}])
    return key


def two_runs(record: Path) -> list[Run]:
    tokenizer = WordTokenizer()
    prompts = prompt_set(tokenizer)
    keys = [
        run(Reader(), prompts, record, "dense"),
        run(Reader(reach=600), prompts, record, "sink_window:600"),
    ]
    return collect_runs(read_rows(record), keys)


def test_a_missing_metric_is_named_before_a_model_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RULER's metric scores the first reply, minutes after the start."""
    asked = prompt_set(WordTokenizer()).prompts[0]
    length = asked.length + asked.max_tokens  # RULER's has room for the answer
    prompts = PromptSet([replace(asked, metric="string_match_all", length=length)])
    file, record = tmp_path / "prompts.json", tmp_path / "r.jsonl"
    save_prompts(file, prompts)
    monkeypatch.setitem(sys.modules, "long_context_eval.eval.synthetic", None)
    monkeypatch.setattr("sparsek_backend.eval.runs.HubTokenizer", lambda model: WordTokenizer())
    monkeypatch.setattr("sparsek_backend.eval.local.open_scoring_engine", None)
    run_row = {"run": "x", "settings": None}
    job = {"model": "m", "engine": {}, "prompts": str(file), "record": str(record), "run": run_row}
    with pytest.raises(ImportError, match=r"sparsek-backend\[ruler\]"):
        work(job)
    place = Workplace(prompts, file, record)
    with pytest.raises(ImportError, match=r"sparsek-backend\[ruler\]"):
        run_server("A", "http://127.0.0.1:1/v1", None, place, lambda count, what: None)
    assert not record.exists()


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_run_continues_where_its_record_ends(tmp_path: Path, torn: bool) -> None:
    tokenizer, record = WordTokenizer(), tmp_path / "r.jsonl"
    prompts = prompt_set(tokenizer)
    first = Reader(fails_after=2)
    with pytest.raises(KeyboardInterrupt):
        run(first, prompts, record, "dense")
    assert len(first.asked) == 10
    if torn:  # ended while it wrote a line
        with record.open("a") as file:
            file.write('{"kind": "prompt", "ru')
    second = Reader()
    key = run(second, prompts, record, "dense")
    assert sorted(first.asked + second.asked) == sorted(p.name for p in prompts.prompts)
    rows = [row for row in read_rows(record) if row["kind"] == "prompt"]
    assert [row["run"] for row in rows] == [key] * len(prompts.prompts)
    third = Reader()
    run(third, prompts, record, "dense")
    assert not third.asked


def test_fewer_prompts_are_asked_in_one_call_where_they_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call's scores are kept at its end, and an interruption loses what was not kept."""
    calls: list[int] = []
    reply, record = Reader().reply, tmp_path / "r.jsonl"

    def counted(asked: Sequence[Prompt]) -> list[Reply]:
        calls.append(len(asked))
        return reply(asked)

    monkeypatch.setattr("sparsek_backend.eval.runs._TOKENS_AT_ONCE", 6 * 1200 - 1)
    place = Workplace(prompt_set(WordTokenizer()), record, record)
    place.score(counted, "key", 16, lambda count, what: None)
    assert calls == [5, 5, 5, 5, 4, 1]


def test_both_variants_of_a_task_are_asked_in_one_call(tmp_path: Path) -> None:
    tokenizer, calls = WordTokenizer(), []
    made = make_prompts(
        tokenizer,
        tasks=TASKS,
        variants=("plain", "followed"),
        lengths=(1200,),
        count=COUNT,
        seed=0,
    )
    reply, record = Reader().reply, tmp_path / "r.jsonl"

    def counted(asked: Sequence[Prompt]) -> list[Reply]:
        calls.append(len(asked))
        return reply(asked)

    place = Workplace(PromptSet([*made, make_text(0, tuple(range(900)))]), record, record)
    place.score(counted, "key", 16, lambda count, what: None)
    assert calls == [16, 16, 16, 1]


def test_other_settings_and_other_prompts_are_scored_anew(tmp_path: Path) -> None:
    tokenizer, record = WordTokenizer(), tmp_path / "r.jsonl"
    prompts = prompt_set(tokenizer)
    key = run(Reader(), prompts, record, "dense")
    asked = prompts.prompts
    assert len(pending(asked, record, run_key({"label": "other"}))) == len(asked) == 3 * COUNT + 1
    changed = make_prompts(
        tokenizer, tasks=TASKS, variants=("plain",), lengths=(1200,), count=COUNT, seed=1
    )
    assert len(pending(changed, record, key)) == 3 * COUNT


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl"
    assert read_rows(record) == []
    record.write_text('{"a": 1}\nnot json\n{"b": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(record)


def test_dense_scores_of_an_earlier_record_serve_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No budget of a later evaluation waits for dense attention."""
    earlier, later = tmp_path / "earlier.jsonl", tmp_path / "later.jsonl"
    dense, window = two_runs(earlier)
    packed = tmp_path / "earlier.jsonl.xz"
    packed.write_bytes(lzma.compress(earlier.read_bytes()))
    prompts = prompt_set(WordTokenizer())
    save_prompts(tmp_path / "prompts.json", prompts)

    class Local:
        name = "m"

        def __init__(self, *_: object) -> None:
            pass

        def run(self, budget: Budget, place: Workplace, *_: object) -> str:
            assert budget.label == "sink_window:600"
            return run(Reader(reach=600), prompts, place.record, budget.label)

    monkeypatch.setattr("sparsek_backend.eval.cli.LocalModel", Local)
    command = ["--model", "m", "--prompts", str(tmp_path / "prompts.json"), "--name", "later"]
    command += ["--budget", "sink_window:600", "--out", str(tmp_path), "--reference"]
    for _ in range(2):  # the second time goes on where all is there
        done = CliRunner().invoke(app, [*command, str(packed)])
        assert done.exit_code == 0, done.output
        found = collect_runs(read_rows(later))
        assert [len(one.rows) for one in found] == [len(dense.rows), len(window.rows)]
        assert compare_runs(found) == compare_runs([dense, window])
    taken = [row for row in read_rows(later) if row["run"] == dense.about["run"]]
    assert len(taken) == len(dense.rows) + 1

    asked = prompts.prompts
    with pytest.raises(ValueError, match=r"expected scores of other, got scores of m"):
        adopt_dense(earlier, later, asked, "other")
    more = [*asked, make_text(1, tuple(range(800)))]
    with pytest.raises(ValueError, match=rf"all {len(more)} prompts, got {len(asked)} in"):
        adopt_dense(earlier, later, more, "m")
    with pytest.raises(ValueError, match="got 0 in"):
        adopt_dense(tmp_path / "none.jsonl", later, asked, "m")
    packed.write_bytes(b"not compressed")
    with pytest.raises(ValueError, match=r"earlier.jsonl.xz does not read"):
        adopt_dense(packed, later, asked, "m")


def test_the_first_token_is_told_apart() -> None:
    """It tells what the prompt lost: decoded tokens came later."""

    def scored(label: str, *likely: float) -> Run:
        row = {"task": "vt", "variant": "plain", "length": 4096, "index": 0, "digest": "d"}
        row |= {"accuracy": 1.0, "correct": True, "nll": 0.0}
        places = [{1: math.log(x), 2: math.log(1 - x)} for x in likely]
        return Run(label, {"settings": None, "known": False}, [row | {"likely": pack(places)}])

    (row,) = compare_runs([scored("dense", 0.5, 0.5), scored("sparse", 0.9, 0.5)])[1:]
    first = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert row["kl_first"] == pytest.approx(first)
    assert row["kl"] == pytest.approx(first / 2)


def test_runs_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    dense, window = two_runs(tmp_path / "r.jsonl")
    rows = compare_runs([dense, window])
    assert [row["task"] for row in rows] == [MEAN, *TASKS, "text"] * 2
    cells = {(row["label"], row["task"]): row for row in rows}
    assert cells["dense", MEAN]["accuracy"] == 1.0
    assert "delta_accuracy" not in cells["dense", MEAN]
    single = cells["sink_window:600", "question_first"]
    missed = round(COUNT * (1 - single["accuracy"]))
    assert 0 < missed < COUNT
    assert (single["lost"], single["gained"]) == (missed, 0)
    assert single["mcnemar_p"] == pytest.approx(min(2 * 0.5**missed, 1.0))
    assert single["delta_accuracy"] == pytest.approx(-missed / COUNT)
    assert single["delta_accuracy_low"] <= single["delta_accuracy"] <= 0
    assert single["delta_nll"] == pytest.approx(math.log(90) * missed / COUNT)
    kl = 0.9 * math.log(90) + 0.1 * math.log(0.1 / 0.99)
    assert single["kl"] == pytest.approx(kl * missed / COUNT)
    assert single["kl_low"] < single["kl"] < single["kl_high"]
    assert single["of_reference"] == pytest.approx(1 - missed / COUNT)
    mean = cells["sink_window:600", MEAN]
    assert mean["prompts"] == 3 * COUNT
    assert mean["accuracy"] == pytest.approx(
        sum(cells["sink_window:600", task]["accuracy"] for task in TASKS) / 3
    )
    assert mean["prefill_share"] == parse_budget("sink_window:600").prefill_share(1200)
    assert mean["decode_share"] == pytest.approx(604 / 1201)


def test_only_prompts_that_both_runs_scored_are_compared(tmp_path: Path) -> None:
    tokenizer, record = WordTokenizer(), tmp_path / "r.jsonl"
    prompts = prompt_set(tokenizer)
    keys = [run(Reader(), prompts, record, "dense")]
    with pytest.raises(KeyboardInterrupt):
        run(Reader(fails_after=1), prompts, record, "window:100")
    keys.append(run_key({"label": "window:100"}))
    rows = compare_runs(collect_runs(read_rows(record), keys))
    assert [(row["label"], row["prompts"]) for row in rows][-1] == ("window:100", 5)
    place = "question_first, plain, 1200 tokens"
    assert f"window:100, {place}: 5 of 8 prompts were scored" in warnings_of(rows)


def test_a_task_that_a_run_did_not_reach_is_warned_of(tmp_path: Path) -> None:
    dense, window = two_runs(tmp_path / "r.jsonl")
    unfinished = replace(
        window, rows=[row for row in window.rows if row["task"] in ("question_first", "text")]
    )
    rows = compare_runs([dense, unfinished])
    assert warnings_of(rows) == [
        f"sink_window:600, {task}, plain, 1200 tokens: no prompt was scored"
        for task in ("records", "continuation")
    ]


def test_the_run_of_a_label_that_went_on_last_is_reported() -> None:
    about = {"kind": "run", "label": "dense", "settings": None, "known": True}
    rows = [{**about, "run": key} for key in ("first", "second", "first")]
    rows.insert(1, {**about, "run": "other", "label": "window:100"})
    found = collect_runs(rows)
    assert [(one.label, one.about["run"]) for one in found] == [
        ("dense", "first"),
        ("window:100", "other"),
    ]


def test_dense_attention_is_the_reference_wherever_it_stands_in_a_record(tmp_path: Path) -> None:
    runs = two_runs(tmp_path / "r.jsonl")
    rows = read_rows(tmp_path / "r.jsonl")
    first = [row for row in rows if row["run"] == runs[1].about["run"]]  # a faster engine, or `cat`
    again = collect_runs([*first, *(row for row in rows if row not in first)])
    assert compare_runs(again) == compare_runs(runs)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        ('{"a": 1}\n', "line 1 lacks kind, run"),
        ('{"kind": "run", "run": "x"}\n', "line 1 lacks known, label, settings"),
        (NOTHING_YET + "\n", "expected scores of dense, "),
    ],
    ids=["missing", "another file", "half a run", "no score"],
)
def test_what_is_no_record_is_refused_in_one_line(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    record = tmp_path / "r.jsonl"
    if content is not None:
        record.write_text(content)
    found = CliRunner().invoke(app, ["report", str(record)])
    assert found.exit_code == 2
    assert reason in " ".join(found.stderr.split())


def test_a_file_of_other_lines_is_not_continued(tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl"
    two_runs(record)
    rows = read_rows(record)
    append_rows(record, [{"kind": "prompt", "run": rows[0]["run"]}])
    with pytest.raises(ValueError, match=f"line {len(rows) + 1} lacks accuracy, correct, digest"):
        pending(prompt_set(WordTokenizer()).prompts, record, rows[0]["run"])


def test_a_report_does_not_take_the_place_of_its_record(tmp_path: Path) -> None:
    two_runs(tmp_path / "r.json")
    before = (tmp_path / "r.json").read_bytes()
    found = CliRunner().invoke(app, ["report", str(tmp_path / "r.json")])
    assert found.exit_code == 2
    assert "expected a .jsonl file" in found.stderr
    assert (tmp_path / "r.json").read_bytes() == before


def test_a_result_without_what_is_drawn_is_refused(tmp_path: Path) -> None:
    cell = {"variant": "plain", "length": 1, "label": "dense", "task": "question_first"}
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"model": "m", "retrieval": [cell]}))
    with pytest.raises(ValueError, match="KeyError: 'accuracy'"):
        read_results([path])


def test_a_budget_that_attends_everything_is_warned_of() -> None:
    row = {"label": "block_topk:32", "task": MEAN, "length": 2000, "delta_nll": 0.0}
    whole = {**row, "prefill_share": 1.0, "decode_share": 1.0}
    (warning,) = warnings_of([whole, whole])
    assert "block_topk:32 attends 100 % of 2000 tokens" in warning
    assert not warnings_of([{**row, "prefill_share": 0.7, "decode_share": 0.5}])
    assert not warnings_of([{**whole, "label": "dense"}])
    half = {**whole, "label": "block_topk:8,sparse_phase=prefill", "prefill_share": 0.5}
    assert not warnings_of([half])


def test_results_are_written_and_read_from_the_record_alone(tmp_path: Path) -> None:
    runs = two_runs(tmp_path / "r.jsonl")
    again = collect_runs(read_rows(tmp_path / "r.jsonl"))
    assert [one.label for one in again] == ["dense", "sink_window:600"]
    assert again[0].about["seconds"] == 2.0
    assert compare_runs(again) == compare_runs(runs)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r.jsonl")])
    assert done.exit_code == 0, done.output
    full = tmp_path / "r.json"
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["dense"] * 5 + ["sink_window:600"] * 5
    assert float(rows[5]["delta_nll"]) > 0
    assert (rows[9]["task"], rows[9]["delta_nll"], rows[9]["kl"]) == ("text", "0", "0")
    document = json.loads(full.read_text())
    assert [one["label"] for one in document["runs"]] == ["dense", "sink_window:600"]
    assert document["retrieval"] == compare_runs(runs)
    assert read_results([full, full]) == {"m": document["retrieval"]}
    with pytest.raises(ValueError, match=r"r\.jsonl: expected the JSON of"):
        read_results([full, tmp_path / "r.jsonl"])
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert [table.row_count for table in result_tables(compare_runs(runs))] == [2, 3, 2]
    with pytest.raises(ValueError, match="expected runs of an evaluation, it has none"):
        collect_runs([])
    (tmp_path / "r.jsonl").write_text(json.dumps(read_rows(tmp_path / "r.jsonl")[0]) + "\n")
    begun = CliRunner().invoke(app, ["report", str(tmp_path / "r.jsonl")])
    assert "expected scores of dense, " in begun.output
    assert json.loads(full.read_text()) == document  # what is there stays
