"""The examples that need no server."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_listed_and_compiles() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.rglob("*.py"):
        assert f"({path.relative_to(EXAMPLES)})" in listed
        compile(path.read_text(), str(path), "exec")


def test_a_unet_block_trains_on_our_operators() -> None:
    pytest.importorskip("xformers")
    example = runpy.run_path(str(EXAMPLES / "xformers_unet_block.py"))
    assert example["main"]() < 1e-2


def test_generation_past_the_window_keeps_the_cache_small() -> None:
    pytest.importorskip("gguf")
    example = runpy.run_path(str(EXAMPLES / "endless_generate.py"))
    assert example["main"](["--tokens", "24", "--window-size", "16"]) <= 4 + 16


def test_a_language_model_learns_is_saved_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    sizes = ["--steps", "12", "--batch", "4", "--length", "128"]
    example = runpy.run_path(str(EXAMPLES / "train_nsa.py"))
    losses = example["main"]([*sizes, "--text", str(text), "--out", str(tmp_path / "model")])
    assert losses[-1] < losses[0] - 1
    assert "loaded, it continues" in capsys.readouterr().out


def test_the_notebook_of_kernels_lists_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    book = json.loads((EXAMPLES / "notebooks" / "kernels.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    lists = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("[")]
    assert len(lists) == 2  # KV heads
    for pairs in lists:
        assert {100, 101, 102, 103} <= set(pairs) <= set(range(256))


def test_the_notebook_of_serving_counts_both_phases(capsys: pytest.CaptureFixture[str]) -> None:
    book = json.loads((EXAMPLES / "notebooks" / "serve.ipynb").read_text(encoding="utf-8"))
    line = 'sparsek_{}_tokens_total{{engine="0",model_name="m",phase="{}"}} {}'
    counts = (("attended", "prefill", 25), ("attended", "decode", 3.0))
    counts += (("context", "prefill", 1e2), ("context", "decode", 6.0))
    page = io.BytesIO("\n".join(line.format(*count) for count in counts).encode())
    request = SimpleNamespace(urlopen=lambda url: page)
    server = SimpleNamespace(url="", stop=lambda: None)
    names = {"re": re, "urllib": SimpleNamespace(request=request), "server": server}
    exec("".join(book["cells"][-1]["source"]), names)
    shares = [said.partition("%")[0] for said in capsys.readouterr().out.splitlines()]
    assert shares == ["prefill: 25", "decode: 50"]


def test_a_text_too_short_to_train_on_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"")
    example = runpy.run_path(str(EXAMPLES / "train_nsa.py"))
    with pytest.raises(SystemExit):
        example["main"](["--text", str(text)])
    assert "--text: expected at least 514 bytes, got 0" in capsys.readouterr().err


def test_patterns_are_learned_saved_and_attended(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    example = runpy.run_path(str(EXAMPLES / "learn_patterns.py"))
    arguments = ["--tokens", "320", "--sparsity", "0.5", "--out", str(tmp_path / "p.safetensors")]
    kept, dense, sparse = example["main"](arguments)
    assert kept < 0.95
    assert 0 < abs(sparse - dense) < 0.5


ENGINE = """
import atexit
import multiprocessing
import time
from types import SimpleNamespace as Namespace


class SamplingParams:
    def __init__(self, **options):
        pass


class LLM:
    def __init__(self, model, additional_config, **options):
        core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(3600,))
        core.start()
        print("a core")
        atexit.register(core.terminate)  # As vLLM's: going out of scope ends no core.
        self.llm_engine = Namespace(engine_core=Namespace(shutdown=core.terminate))
        self.mode = additional_config["sparsek"].get("mode", "sparse")

    def generate(self, prompts, params):
        texts = [self.mode if prompt == "differ" else "equal" for prompt in prompts]
        return [
            Namespace(prompt=prompt, outputs=[Namespace(text=text)])
            for prompt, text in zip(prompts, texts)
        ]
"""


def test_answers_are_compared_by_engines_that_start_processes(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(ENGINE)
    (tmp_path / "prompts.txt").write_text("same\ndiffer\n\n")
    done = processes.run(
        sys.executable, str(EXAMPLES / "ab_compare.py"), "model", str(tmp_path / "prompts.txt"),
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a core") == 2
    assert "dense:  'dense'\nsparse: 'sparse'" in done.stdout
    assert "1 of 2 answers differ" in done.stdout


def test_answers_of_a_file_are_written(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(ENGINE)
    (tmp_path / "prompts.txt").write_text("same\ndiffer\n\n")
    answers = tmp_path / "answers.jsonl"
    done = processes.run(
        sys.executable, str(EXAMPLES / "offline_batch.py"), "model", str(tmp_path / "prompts.txt"),
        str(answers), env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in answers.read_text().splitlines()] == [
        {"prompt": "same", "answer": "equal"},
        {"prompt": "differ", "answer": "sparse"},
    ]
    assert "wrote 2 answers" in done.stdout


OPENAI = """
class APIError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}
class BadRequestError extends APIError {}
class APIConnectionError extends APIError {}

export default class OpenAI {
  static APIError = APIError;
  static BadRequestError = BadRequestError;
  static APIConnectionError = APIConnectionError;

  constructor({ baseURL }) {
    const lost = baseURL.includes("nowhere");
    this.models = {
      list: async () => {
        if (!/^http:\/\/[^/]+\/v1$/.test(baseURL)) throw new APIError(404, "not found");
        if (lost) throw new APIConnectionError(undefined, "no answer");
        return { data: [{ id: "tiny" }] };
      },
    };
    this.chat = { completions: { create: this.#create } };
    this.embeddings = { create: async () => { throw new BadRequestError(400, "no embeddings"); } };
  }

  async #create({ messages, stream }) {
    if (!stream) throw new BadRequestError(400, "set --tool-call-parser");
    const size = messages[0].content.length;
    if (size > 6000) throw new BadRequestError(400, "maximum context length");
    const content = `${size} characters`;
    return (async function* () { yield { choices: [{ delta: { content } }] }; })();
  }
}
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_client_in_node_takes_the_flags_of_the_one_in_python(tmp_path: Path) -> None:
    package = tmp_path / "node_modules" / "openai"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"type": "module", "exports": "./index.js"}')
    (package / "index.js").write_text(OPENAI)
    shutil.copy(EXAMPLES / "clients" / "client.mjs", tmp_path)
    (tmp_path / "report.txt").write_text("x" * 5000)
    done = processes.run("node", "client.mjs", "--document", "report.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "==> about report.txt\n50" in done.stdout
    assert "tool: refused (set --tool-call-parser)" in done.stdout
    assert "embeddings: status 400" in done.stdout
    (tmp_path / "report.txt").write_text("x" * 7000)
    done = processes.run("node", "client.mjs", "--document", "report.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "document: refused (maximum context length)" in done.stdout
    for url in ("http://here/", "http://here/v1", "http://here/v1/"):
        assert processes.run("node", "client.mjs", "--url", url, cwd=tmp_path).returncode == 0
    for url in ("http://nowhere", "http://here/v2"):
        lost = processes.run("node", "client.mjs", "--url", url, cwd=tmp_path)
        assert lost.returncode == 1
        assert f"no server answers at {url}" in lost.stderr
    assert processes.run("node", "client.mjs", "http://nowhere", cwd=tmp_path).returncode != 0


class WithoutTools(BaseHTTPRequestHandler):
    """A chat server whose every answer is `Paris`, and which takes neither tools nor embeddings."""

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self._reply(200 if found else 404, json.dumps({"object": "list", "data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        too_long = len(str(request.get("messages"))) > 6000
        if too_long or not request.get("stream"):
            reason = "maximum context length" if too_long else "set --tool-call-parser"
            self._reply(400, json.dumps({"error": {"message": reason}}))
            return
        event = json.dumps({"choices": [{"index": 0, "delta": {"content": "Paris"}}]})
        self._reply(200, f"data: {event}\n\ndata: [DONE]\n\n", "text/event-stream")

    def _reply(self, status: int, body: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_arguments: object) -> None:
        """Stay quiet."""


def test_the_client_goes_on_without_tools_and_names_a_server_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    main = runpy.run_path(str(EXAMPLES / "clients" / "client.py"))["main"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), WithoutTools)
    url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        (tmp_path / "report.txt").write_text("x" * 7000)
        for more in (["/v1/"], ["", "--document", str(tmp_path / "report.txt")]):
            monkeypatch.setattr("sys.argv", ["client.py", "--url", url + more[0], *more[1:]])
            main()
        monkeypatch.setattr("sys.argv", ["client.py", "--url", url + "/v2"])
        with pytest.raises(SystemExit, match="no server answers"):
            main()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "document: refused (" in printed
    assert "tool: refused" in printed
    assert "--tool-call-parser" in printed
    assert "embeddings: status 400" in printed
    with pytest.raises(SystemExit, match=f"no server answers at {url}"):
        main()
