"""Scoring a server: what is sent, what is read, and every way it can fail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsek_backend.eval.cli import app
from sparsek_backend.eval.prompt import Prompt, make_text
from sparsek_backend.eval.prompt_file import load_prompts
from sparsek_backend.eval.record import read_rows
from sparsek_backend.eval.scoring import Reply
from sparsek_backend.eval.served import ServedScorer, ServerError
from tests.eval.endpoint import Endpoint, serving


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as address:
        yield address


def test_a_server_is_scored_through_its_api(url: str) -> None:
    scorer = ServedScorer(url)
    assert scorer.model == "served"
    assert scorer.encode("ab") == (97, 98)
    assert scorer.frame() == ((1,), (10,))
    prompt = Prompt("single", "plain", 2, 0, ((1, 2),), (), (3, 4), 4)
    likely = [{3: -3.0, 0: -0.1}, {4: -4.0, 0: -0.1}]
    assert scorer.reply([prompt] * 3) == [Reply(None, " 12345. ok", likely)] * 3
    assert scorer.reply([make_text(0, (1, 2, 3, 4))]) == [Reply(None, "", likely)]


def test_what_can_go_wrong_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match="expected a URL"):
        ServedScorer("127.0.0.1:8000")
    with pytest.raises(ServerError, match="no OpenAI server answers"):
        ServedScorer("http://127.0.0.1:1/v1")
    with pytest.raises(ServerError, match="expected one of"):
        ServedScorer(url, "other")
    with pytest.raises(ServerError, match="status 400"):
        ServedScorer(url).reply([make_text(0, (0,) * 6000)])
    monkeypatch.setattr(Endpoint, "logprobs", False)
    with pytest.raises(ServerError, match="no prompt_logprobs"):
        ServedScorer(url).reply([make_text(0, (1, 2))])
    monkeypatch.setattr(Endpoint, "models", {"error": "not here"})
    with pytest.raises(ServerError, match="lists no model"):
        ServedScorer(url)
    monkeypatch.setattr(Endpoint, "models", ["served"])
    with pytest.raises(ServerError, match="expected a JSON object, got list"):
        ServedScorer(url)


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/models", b'{"data": null}', "models: expected the answer of a vLLM server"),
        ("/v1/models", b'{"data": [{"name": "x"}]}', "KeyError: 'id'"),
        ("/v1/models", b"no HTTP at all\r\n\r\n", "no OpenAI server answers"),
        ("/tokenize", b'{"count": 1}', "KeyError: 'tokens'"),
        ("/tokenize", b'{"tokens": []}', "'What' has no tokens"),
        ("/v1/completions", b'{"choices": []}', "IndexError"),
        ("/v1/completions", b'{"choices": [', "IncompleteRead"),
    ],
)
def test_an_answer_that_is_none_of_vllm_s_is_named(
    url: str, path: str, answer: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(endpoint: Endpoint, *given: object) -> None:
        if endpoint.path != path:
            return usual(endpoint, *given)
        if answer.startswith(b"{"):
            size = len(answer) + 100 * answer.endswith(b"[")  # more is promised than comes
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n"
            endpoint.wfile.write(head.encode())
        endpoint.wfile.write(answer)

    def ask() -> None:
        scorer = ServedScorer(url)
        scorer.encode("What")
        scorer.reply([make_text(0, (1, 2))])

    usual = Endpoint._send
    monkeypatch.setattr(Endpoint, "_send", send)
    with pytest.raises(ServerError, match=re.escape(message)):
        ask()


def test_the_command_scores_servers(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text("some words of text. " * 100)
    arguments = ["--base-url", f"dense={url}", "--base-url", f"sparse={url}"]
    arguments += ["--texts-folder", str(folder), "--samples", "2", "--length", "2500"]
    arguments += ["--task", "question_first", "--task", "records", "--task", "text"]
    arguments += ["--out", str(tmp_path / "out"), "--commit", "abc1234"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert [run["label"] for run in document["runs"]] == ["dense", "sparse"]
    assert document["machine"]["commit"] == "abc1234"
    cells = {(r["label"], r["task"], r["variant"]): r for r in document["retrieval"]}
    assert cells["dense", "question_first", "plain"]["accuracy"] == 1.0
    assert cells["sparse", "records", "followed"]["prefill_share"] is None
    assert cells["sparse", "mean", "plain"]["delta_accuracy"] == 0.0
    assert cells["sparse", "mean", "plain"]["kl"] == 0.0
    assert cells["sparse", "text", "text"]["delta_nll"] == 0.0
    assert cells["dense", "text", "text"]["prompts"] == 2
    assert (tmp_path / "out" / "quality.png").is_file()
    record = tmp_path / "out" / "quality.jsonl"
    scored = [line for line in record.read_text().splitlines() if '"kind": "run"' not in line]
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    after = [line for line in record.read_text().splitlines() if '"kind": "run"' not in line]
    assert after == scored
    (tmp_path / "out" / "quality.json").unlink()
    assert CliRunner().invoke(app, ["report", str(record)]).exit_code == 0
    written = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert written["retrieval"] == document["retrieval"]


def test_labels_and_folders_are_printed_as_they_are(url: str, tmp_path: Path) -> None:
    out = tmp_path / ("long " * 20) / "[red]"
    arguments = ["--base-url", f"[new]={url}", "--length", "2500", "--samples", "1"]
    arguments += ["--task", "records", "--variant", "plain", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"wrote {out}/quality.csv\n" in result.stdout
    assert " [new] " in result.stdout
    assert "[new]: done" in result.stderr


def test_another_commit_scores_a_server_anew(url: str, tmp_path: Path) -> None:
    arguments = ["--base-url", url, "--length", "2500", "--task", "records", "--samples", "1"]
    arguments += ["--variant", "plain", "--out", str(tmp_path)]
    for count, commit in enumerate(("old", "new"), 1):
        result = CliRunner().invoke(app, [*arguments, "--commit", commit])
        assert result.exit_code == 0, result.output
        assert (tmp_path / "quality.jsonl").read_text().count('"kind": "prompt"') == count


def test_a_report_is_of_the_prompts_that_were_asked_last(url: str, tmp_path: Path) -> None:
    arguments = ["--base-url", f"dense={url}", "--base-url", f"sparse={url}", "--length", "2500"]
    arguments += ["--task", "records", "--variant", "plain", "--out", str(tmp_path)]
    for samples, seed in (("3", "0"), ("2", "1")):
        result = CliRunner().invoke(app, [*arguments, "--samples", samples, "--seed", seed])
        assert result.exit_code == 0, result.output
        document = json.loads((tmp_path / "quality.json").read_text())
        assert [row["prompts"] for row in document["retrieval"]] == [int(samples)] * 2
    record = tmp_path / "quality.jsonl"
    assert CliRunner().invoke(app, ["report", str(record)]).exit_code == 0
    document = json.loads((tmp_path / "quality.json").read_text())
    assert [row["prompts"] for row in document["retrieval"]] == [5, 5]  # all of the record
    kept = [load_prompts(file).prompts for file in tmp_path.glob("*.prompts.json.gz")]
    scored = {row["digest"] for row in read_rows(record) if row["kind"] == "prompt"}
    assert scored == {one.digest for one in chain(*kept)}  # each command's, whichever wrote last


def test_a_wrong_folder_of_texts_is_named_before_an_engine_starts(tmp_path: Path) -> None:
    arguments = ["--texts-folder", str(tmp_path), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "expected a folder with .txt files" in " ".join(result.output.split())


URL = "http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", URL], "no OpenAI server answers"),
        (["--base-url", URL, "--budget", "window", "--mixed"], "drop --budget, --mixed"),
        (["--base-url", URL, "--dtype", "float32", "--chat"], "drop --chat, --dtype"),
        (["--base-url", URL, "--reference", __file__], "drop --reference"),
        (["--base-url", f"a={URL}", "--base-url", "a=http://y/v1"], "given twice"),
        (["--served-model", "x"], "with --base-url only"),
        (["--budget", "blocks"], "expected dense"),
        (["--out", __file__], "File exists"),
        (["--samples", "0"], "--samples"),
        (["--task", "passkey"], "expected one of question_first"),
        (["--task", "records", "--task", "records"], "given twice"),
        (["--suite", "longbench"], "suite: expected one of ruler, got"),
        (["--suite", "ruler", "--task", "records"], "expected one of niah_single_1, "),
        (["--suite", "ruler", "--variant", "plain"], "drop --variant"),
        (["--variant", "late"], "expected one of plain, followed"),
        (["--prompts", "absent.json", "--seed", "1"], "drop --seed, --texts-folder"),
        (["--model", "."], "a folder with a tokenizer"),
    ],
)
def test_bad_arguments_exit_2_with_one_message(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("words " * 1000)
    given = ["--texts-folder", str(tmp_path), "--out", str(tmp_path / "out"), *arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == (1 if message == "no OpenAI server answers" else 2)
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("file", "message"), [("absent.json", "No such file"), (__file__, "does not read")]
)
def test_a_prompt_file_that_does_not_read_is_named(file: str, message: str, tmp_path: Path) -> None:
    given = ["--prompts", file, "--model", ".", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["prompts", "picture"])
def test_a_folder_in_place_of_a_file_is_named_at_once(command: str, tmp_path: Path) -> None:
    for folder in (str(tmp_path), "."):
        result = CliRunner().invoke(app, [command, "no-such-file", "--out", folder])
        assert result.exit_code == 2
        assert f"'{folder}' is a directory" in " ".join(result.output.split())


def test_help_is_readable_and_says_no_twice_nowhere() -> None:
    for arguments in (["--help"], ["prompts", "--help"], ["report", "--help"]):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
        assert result.exit_code == 0
        assert "no-no" not in result.output
        lines = result.output.splitlines()
        assert max(map(len, lines)) <= 100
        # what an option means has half of the line
        described = [line for line in lines if line.startswith("  --") and "  " in line.strip()]
        assert all(len(re.split(r"  +", line.strip(), maxsplit=1)[0]) <= 40 for line in described)
