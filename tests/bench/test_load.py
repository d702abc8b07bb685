"""`sparsek bench load`: arrivals by a simulated clock, files that go on, and one real engine."""

from __future__ import annotations

import asyncio
import csv
import json
import selectors
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sparsek_backend.bench import plan as plans
from sparsek_backend.bench.cli import app
from sparsek_backend.bench.load import LoadPlan, load_table, open_ends, run_load, write_load
from sparsek_backend.bench.load_results import Answer, LoadFile, Measured, load_rows, next_rate
from sparsek_backend.bench.load_worker import Progress, draw_words, send_sessions
from sparsek_backend.bench.loads import LOADS, Limits, Session, Turn, draw_sessions
from sparsek_backend.machine import Machine, cpu_dtype

MACHINE = Machine("gpu", "1", "2", "3", "4", "abc")
LIMITS = Limits(first=2.0, later=1.0, per_token=0.5)
BACKENDS = ("FLASH_ATTN", "SPARSEK")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """A loop that waits for nothing: its clock jumps to what is due next."""

    def __init__(self) -> None:
        self.now = 100.0
        loop = self

        class Jumps(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Jumps())

    def time(self) -> float:
        return self.now


class SimulatedServer:
    """Computes one prompt at a time, 100 tokens a second; an answer's tokens take 0.1 s each."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self._busy = asyncio.Lock()

    async def ask(self, prompt: list[int], tokens: int, answer: Answer) -> list[int]:
        self.prompts.append(prompt)
        clock = asyncio.get_running_loop().time
        async with self._busy:
            await asyncio.sleep((len(prompt) - answer.ideal) / 100)
        answer.first = clock()
        for answer.tokens in range(1, tokens + 1):
            await asyncio.sleep(0.1 if answer.tokens > 1 else 0)
        return [-len(prompt)] * tokens


def send(
    sessions: list[Session], rate: float, budget: float = 1e9
) -> tuple[list[Answer], float, list[list[int]]]:
    kept: list[Answer] = []
    words = draw_words(sessions, 3, range(50), seed=0)

    async def run() -> tuple[float, list[list[int]]]:
        server = SimulatedServer()
        seconds = await send_sessions(
            sessions, words, server.ask, kept.append, rate=rate, budget=budget
        )
        return seconds, server.prompts

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return kept, *runner.run(run())


def document(arrival: float, prompt: int) -> Session:
    return Session(arrival, (Turn(0, prompt, prompt, 11, 0),))


def test_documents_arrive_at_the_rate_whatever_the_server_does() -> None:
    sessions = [document(0, 100), document(1, 300), document(1.5, 100)]
    answers, seconds, _ = send(sessions, rate=0.5)
    first, long, behind = answers
    assert [answer.due for answer in answers] == [0, 2, 3]
    assert [answer.ttft for answer in answers] == pytest.approx([1, 3, 3])
    assert [answer.tpot for answer in answers] == pytest.approx([0.1] * 3)
    assert seconds == behind.end == pytest.approx(7)
    assert all(answer.finished for answer in (first, long, behind))
    assert send(sessions, rate=5)[0][2].due == pytest.approx(0.3)


def test_a_turn_waits_for_the_answer_before_it_and_a_time_to_think() -> None:
    turns = (Turn(0, 100, 100, 11, 0), Turn(5, 20, 131, 11, 110), Turn(2, 20, 162, 11, 141))
    answers, _, prompts = send([Session(1, turns)], rate=2)
    assert [answer.due for answer in answers] == pytest.approx([0.5, 7.5, 10.71])
    for answer, before, think in zip(answers[1:], answers, (5, 2), strict=False):
        assert answer.due == pytest.approx(before.end + think)
    assert [len(prompt) for prompt in prompts] == [100, 131, 162]
    assert prompts[1][:100] == prompts[0]
    assert prompts[1][100:111] == [-100] * 11
    assert prompts[2][:131] == prompts[1]


def test_the_budget_cuts_off_what_is_under_way() -> None:
    sessions = [document(0, 100), document(1, 400), document(2, 100), document(9, 100)]
    answers, seconds, _ = send(sessions, rate=1, budget=6)
    assert seconds == 6
    found = {answer.session: answer for answer in answers}
    assert sorted(found) == [0, 1, 2]  # the last had not come
    assert [found[n].finished for n in range(3)] == [True, True, False]
    assert (found[2].end, found[2].first) == (pytest.approx(6), pytest.approx(6))


def test_words_are_of_the_seed_and_all_sessions_begin_alike() -> None:
    sessions = draw_sessions(LOADS["agent"].scaled(0.01), 12)
    words = draw_words(sessions, 81, range(500), seed=1)
    assert [[len(part) for part in own] for own in words] == [
        [turn.added for turn in session.turns] for session in sessions
    ]
    assert words[0][0][:81] == words[1][0][:81]
    assert words[0][0][81:99] != words[1][0][81:99]
    assert words == draw_words(sessions, 81, range(500), seed=1)


def test_an_answer_is_good_if_it_is_whole_and_keeps_to_every_limit() -> None:
    good = Answer(0, 0, 9, 0, due=1, first=3, end=8, tokens=11, finished=True)
    assert good.keeps(LIMITS)
    assert not replace(good, first=3.1).keeps(LIMITS)
    assert not replace(good, turn=1).keeps(LIMITS)
    assert not replace(good, end=8.1).keeps(LIMITS)
    assert not replace(good, finished=False).keeps(LIMITS)


def measured(good: int, late: int, seconds: float, over: bool = True) -> Measured:
    """Answers of two tokens, so many of which are in time."""
    answers = {
        (n, 0): Answer(n, 0, 10, 4, 0, 1 if n < good else 3, 3, 2, 2, finished=True)
        for n in range(good + late)
    }
    limits_kept = {key: replace(a, end=(a.first or 0) + 0.1) for key, a in answers.items()}
    return Measured(limits_kept, {"seconds": seconds} if over else {})


def test_each_backend_is_judged_at_its_own_best_rate() -> None:
    results = {
        ("FLASH_ATTN", 1.0): measured(8, 0, 10),
        ("FLASH_ATTN", 2.0): measured(5, 3, 10),
        ("SPARSEK", 1.0): measured(8, 0, 10),
        ("SPARSEK", 2.0): measured(12, 4, 10),
    }
    rows = load_rows(results, BACKENDS, LIMITS)
    assert [(row["rate"], row["backend"]) for row in rows if row["best"]] == [
        (1.0, "FLASH_ATTN"),
        (2.0, "SPARSEK"),
    ]
    assert [row["gain"] for row in rows] == [1.0, None, None, pytest.approx(1.5)]
    assert [row["goodput"] for row in rows] == pytest.approx([0.8, 0.8, 0.5, 1.2])
    assert rows[3]["ttft_p99_ms"] == pytest.approx(3000)
    assert (rows[3]["hit_share"], rows[3]["ideal_hit_share"]) == (0.2, 0.4)
    assert [line.split()[0] for line in open_ends(rows)] == ["SPARSEK"]


def test_a_backend_without_a_good_answer_has_no_ratio() -> None:
    results = {("FLASH_ATTN", 1.0): measured(0, 5, 10), ("SPARSEK", 1.0): measured(5, 0, 10)}
    assert [row["gain"] for row in load_rows(results, BACKENDS, LIMITS)] == [None, None]


def test_rates_are_measured_upwards_until_the_best_is_behind() -> None:
    results = {("A", 1.0): measured(8, 0, 10)}
    rates = (4.0, 1.0, 2.0)
    assert next_rate(results, "A", rates, LIMITS) == 2.0
    assert next_rate(results, "B", rates, LIMITS) == 1.0
    results["A", 2.0] = measured(7, 1, 10)
    assert next_rate(results, "A", rates, LIMITS) == 4.0
    results["A", 2.0] = measured(6, 2, 10)
    assert next_rate(results, "A", rates, LIMITS) is None
    results["A", 1.0] = measured(8, 0, 10, over=False)
    assert next_rate(results, "A", rates, LIMITS) == 1.0


def plan(**changes: Any) -> LoadPlan:
    values: dict[str, Any] = {
        "model": "tiny",
        "load": "agent",
        "scale": 0.01,
        "rates": (1.0, 2.0),
        "requests": 12,
        "budget": 60.0,
        "limits": LIMITS,
        "settings": {"top_k": 4},
        "baseline": "FLASH_ATTN",
        "engine": {},
    }
    return LoadPlan(**(values | changes))


def fake_worker(jobs: list[dict[str, Any]], fails_at: float = 0) -> Callable[..., dict[str, Any]]:
    """A worker that answers two requests at each rate that is left."""

    def run(module: str, job: dict[str, Any], **_: Any) -> dict[str, Any]:
        jobs.append(job)
        assert (Path(job["model"]) / "config.json").is_file()
        file = LoadFile(Path(job["path"]), job["plan"], job["machine"])
        backend, limits = job["backend"], Limits(**job["limits"])
        while (rate := next_rate(file.read(), backend, job["rates"], limits)) is not None:
            for n in range(2):
                answer = Answer(n, 0, 10, 5, n, n + 0.5, n + 1, 3, 4, finished=True)
                file.add({"backend": backend, "rate": rate, **asdict(answer)})
                if rate == fails_at:
                    raise RuntimeError("interrupted")
            seconds = 2.0 if job["settings"] is None else 1.0
            file.add({"backend": backend, "rate": rate, "over": {"seconds": seconds}})
        return {}

    return run


def test_both_backends_are_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs))
    rows = run_load(plan(), MACHINE, tmp_path / "load.jsonl", lambda _: None)
    assert [(job["backend"], job["baseline"], job["settings"]) for job in jobs] == [
        ("FLASH_ATTN", "FLASH_ATTN", None),
        ("SPARSEK", None, {"top_k": 4}),
    ]
    assert jobs[0]["engine"] == {"load_format": "dummy"}
    table, full = write_load(tmp_path, "load", plan(), rows)
    with table.open(newline="") as file:
        assert [row["gain"] for row in csv.DictReader(file)] == ["1", "2", "", ""]
    written = json.loads(full.read_text())
    assert written["load"]["requests"] == 12
    assert written["limits"] == asdict(LIMITS)
    assert {name: row["goodput"] for name, row in written["best"].items()} == {
        "FLASH_ATTN": 1.0,
        "SPARSEK": 2.0,
    }
    assert written["rates"][1]["settings"] == "top_k=4"
    assert written["rates"][0]["commit"] == "abc"
    assert load_table(plan(), rows).row_count == 4


def test_an_interrupted_run_goes_on_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, jobs = tmp_path / "load.jsonl", list[dict[str, Any]]()
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs, fails_at=2.0))
    with pytest.raises(RuntimeError, match="interrupted"):
        run_load(plan(), MACHINE, path, lambda _: None)
    with path.open("a") as file:
        file.write('{"backend": "FLASH_ATTN", "rate": 2.0, "sess')  # cut off within a line
    known = path.read_text().splitlines()[:-1]
    assert len(known) == 1 + 3 + 1
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs))
    rows = run_load(plan(), MACHINE, path, lambda _: None)
    assert len(rows) == 4
    assert path.read_text().splitlines()[: len(known)] == known
    assert len(path.read_text().splitlines()) == len(known) + 3 + 6
    assert [job["backend"] for job in jobs] == ["FLASH_ATTN", "FLASH_ATTN", "SPARSEK"]


def test_a_whole_file_is_judged_anew_without_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, jobs = tmp_path / "load.jsonl", list[dict[str, Any]]()
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs))
    run_load(plan(), MACHINE, path, lambda _: None)
    strict, elsewhere = plan(limits=Limits(0.1, 0.1, 0.1)), replace(MACHINE, gpu="none")
    rows = run_load(strict, elsewhere, path, lambda _: None)
    assert [row["goodput"] for row in rows] == [0.0] * 4
    assert {row["gpu"] for row in rows} == {"gpu"}
    assert len(jobs) == 2
    with pytest.raises(ValueError, match="measured with gpu 'gpu' and not 'none'"):
        run_load(plan(rates=(3.0,)), elsewhere, path, lambda _: None)
    with pytest.raises(ValueError, match="measured with requests 12 and not 13"):
        run_load(plan(requests=13), MACHINE, path, lambda _: None)
    assert len(run_load(plan(rates=(3.0,)), MACHINE, path, lambda _: None)) == 6


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "load.jsonl").write_text('{"kind": "run", "run": "x"}\n')
    arguments = ["load", "--model", "tiny", "--out", str(tmp_path), "--rate", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "is no file of `sparsek bench load`" in " ".join(result.output.split())


def test_a_rate_that_is_not_over_is_not_judged() -> None:
    results = {("FLASH_ATTN", 1.0): measured(8, 0, 10), ("SPARSEK", 1.0): measured(9, 0, 1, False)}
    assert [row["backend"] for row in load_rows(results, BACKENDS, LIMITS)] == ["FLASH_ATTN"]


def test_backends_are_measured_apart_and_their_files_put_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs))
    joined = tmp_path / "joined.jsonl"
    for name in BACKENDS:
        path = tmp_path / f"{name}.jsonl"
        rows = run_load(plan(only=name), MACHINE, path, lambda _: None)
        assert {row["backend"] for row in rows} == {name}
        with joined.open("a") as file:
            file.write(path.read_text())
    rows = run_load(plan(), MACHINE, joined, lambda _: None)
    assert len(jobs) == 2
    assert [row["gain"] for row in rows if row["best"]] == [1.0, 2.0]
    run_load(plan(requests=13, only="SPARSEK"), MACHINE, tmp_path / "other.jsonl", lambda _: None)
    with joined.open("a") as file:
        file.write((tmp_path / "other.jsonl").read_text())
    with pytest.raises(ValueError, match="measured with requests 13 and not 12"):
        run_load(plan(), MACHINE, joined, lambda _: None)


def test_progress_says_how_long_the_rest_takes(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(0.5, requests=4, limits=LIMITS, budget=30)
    for end, finished in ((6.0, True), (7.0, True), (20.0, False)):
        progress.add(Answer(0, 0, 9, 0, end - 1, end - 0.5, end, 2, finished=finished))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "PROGRESS rate 0.5: 1 of 4 answered, 1 in time, about 18 s left",
        "PROGRESS rate 0.5: 2 of 4 answered, 2 in time, about 10 s left",
    ]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--load", "songs"], "load: expected one of documents-32k, documents-128k, agent"),
        (["--rate", "0"], "rate: expected positive numbers"),
        (["--rate", "nan"], "rate: expected positive numbers"),
        (["--out", "/dev/null"], "File exists: '/dev/null'"),
        (["--budget-seconds", "0"], "budget_seconds: expected a positive number"),
        (["--only", "OTHER"], "only: expected vLLM's own or SPARSEK, got 'OTHER'"),
        (["--first-limit", "0"], "limits: expected a positive first"),
        (["--scale", "2"], "scale: expected a share"),
        (["--model", "no-such-model"], "model: expected a folder or one of"),
        (["--baseline", "sparsek"], "baseline: expected another backend than ours"),
        (["--sparsek", '{"top_q": 1}'], "top_q"),
    ],
)
def test_bad_arguments_exit_2(extra: list[str], message: str, tmp_path: Path) -> None:
    arguments = ["load", "--model", "tiny", "--out", str(tmp_path), "--rate", "1", *extra]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.engine
def test_an_engine_answers_sessions_from_its_prefix_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The baseline's lines are there already; SPARSEK's engine is measured."""
    real, arguments = plans.run_worker, ["load", "--model", "tiny", "--out", str(tmp_path)]
    arguments += ["--load", "agent", "--scale", "0.02", "--requests", "4", "--rate", "1", "--eager"]
    arguments += ["--sparsek", '{"dense_below": 0, "top_k": 1, "window_size": 64}']
    arguments += [] if torch.cuda.is_available() else ["--dtype", cpu_dtype()]

    def run(module: str, job: dict[str, Any], **options: Any) -> dict[str, Any]:
        if job["settings"] is None:
            return fake_worker([])(module, job)
        return real(module, job, **options)

    monkeypatch.setattr(plans, "run_worker", run)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "SPARSEK: rate 1: 4 of 4 answered" in result.output
    sessions = draw_sessions(LOADS["agent"].scaled(0.02), 4)
    answers = [
        line
        for line in map(json.loads, (tmp_path / "load.jsonl").read_text().splitlines())
        if line.get("backend") == "SPARSEK" and "turn" in line
    ]
    turns = sessions[0].turns
    assert [answer["prompt"] for answer in answers] == [turn.prompt for turn in turns]
    assert [answer["tokens"] for answer in answers] == [turn.output for turn in turns]
    assert answers[0]["cached"] == 0
    assert all(0 < answer["cached"] <= answer["ideal"] for answer in answers[1:])
    ours = json.loads((tmp_path / "load.json").read_text())["best"]["SPARSEK"]
    assert 0 < ours["hit_share"] < ours["ideal_hit_share"] < 1
    assert ours["attended_share"] < 0.9
