"""Which keys keep the answers?  Selection rules against a model's own dense logits, exactly.

    sparsek eval prompts MODEL --length 16384 --length 31000 --samples 2 --out prompts.json.gz
    python -m benchmarks.simulate run MODEL --name qwen05b --prompts prompts.json.gz --set decode --out DIR
    python -m benchmarks.simulate merge DIR --commit COMMIT --json RESULT.json
    python -m benchmarks.simulate table RESULT.json --set decode

``run`` gives each prompt its right answer token by token, once for every variant of the set, and
writes a file a prompt.  As many processes as wished share a folder: each takes the next prompt that
none has taken.  Plain torch, none of the project's code; attention's logits are in float32.
"""  # noqa: E501

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import decode, prompts, results
from .model import Model, Prompt
from .sketches import Pages
from .variants import DENSE, SETS, Variant


def read_prompts(path: Path) -> Iterator[dict[str, Any]]:
    """Prompts of ``sparsek eval prompts``: task, variant, length, index, ids and target."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    for row in document["prompts"]:
        ids = [token for piece in row["pieces"] for token in document["pieces"][piece]]
        about = {name: row[name] for name in ("task", "variant", "length", "index", "target")}
        # the first token follows from the prompt; texts ask nothing
        if len(row["target"]) > 1 and row["variant"] != "text":
            yield {**about, "ids": ids}


def simulate(model: Model, row: dict[str, Any], variants: list[Variant]) -> dict[str, Any]:
    """Figures of every variant on one prompt, dense attention first."""
    target = torch.tensor(row["target"][1:], device=model.device)
    dense = _Prompt(model, row["ids"], prompts.PromptRule())
    reference, _ = dense.answer(row["target"][:-1], DENSE)
    found = {}
    for variant in (Variant("dense"), *variants):
        start = time.perf_counter()
        same = variant.prompt.scores == "dense"
        prompt = dense if same else _Prompt(model, row["ids"], variant.prompt)
        logits, attended = prompt.answer(row["target"][:-1], variant.decode)
        read = variant.decode.bytes_read(len(row["ids"]), model.head_dim)
        found[variant.name] = {
            **results.figures(reference, logits, target),
            "attended": round(attended, 1),
            "mib_read": round(read / 2**20, 4),
            "values_error": round(prompt.values_error(dense), results.DIGITS),
            "share": round(prompt.attended / ((len(row["ids"]) + 1) / 2), 4),
            "seconds": round(time.perf_counter() - start, 3),
        }
    return found


class _Prompt:
    """A prompt that has been read by a rule.

    Args:
        model: the model.
        ids: its tokens.
        rule: what its queries attend.
    """

    def __init__(self, model: Model, ids: list[int], rule: prompts.PromptRule) -> None:
        self._model = model
        seen = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            dense = 4 * layer // model.layers in rule.dense_quarters
            out, attended = prompts.attend(prompts.PromptRule() if dense else rule, q, k, v)
            seen.append(attended)
            return out

        self._prompt: Prompt = model.prompt(ids, attend)
        self._pages = [Pages(k, v) for k, v in self._prompt.cache]
        self.attended: float = torch.stack(seen).mean().item()

    def values_error(self, other: _Prompt) -> float:
        """Squared error of the values of all layers but the first, over the squares of ``other``'s.

        It is a mean over layers, of the whole prompt, and so differs less by chance than answers.
        """
        pairs = zip(self._prompt.cache[1:], other._prompt.cache[1:], strict=True)
        shares = [
            (x.float() - y.float()).pow(2).sum() / y.float().pow(2).sum()
            for (_, x), (_, y) in pairs
        ]
        return torch.stack(shares).mean().item()

    def answer(self, tokens: list[int], rule: decode.DecodeRule) -> tuple[torch.Tensor, float]:
        """Logits after each token of an answer, and the keys that a row attends in the mean."""
        seen = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, attended = decode.attend(rule, self._pages[layer], q, k, v)
            seen.append(attended)
            return out

        logits = self._model.answer(tokens, self._prompt, attend)
        return logits, torch.stack(seen).mean().item()


@torch.no_grad()
def run(arguments: argparse.Namespace) -> None:
    """Simulate prompts that no other process has taken, the first of every task first."""
    # Products of bf16 numbers come out of TF32 exactly: all of their bits fit into it.
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else device
    rows = list(read_prompts(arguments.prompts))
    random.Random(0).shuffle(rows)  # a run that ends early has some of every task
    rows.sort(key=lambda row: row["index"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    model, end = None, time.monotonic() + arguments.seconds
    for row in rows:
        if row["length"] not in (arguments.length or [row["length"]]):
            continue
        if row["index"] >= arguments.per_task or time.monotonic() > end:
            continue
        about = {"set": arguments.set, "model": arguments.name}
        about |= {name: row[name] for name in ("task", "variant", "length", "index")}
        path = arguments.out / ("_".join(map(str, about.values())) + ".json")
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            continue
        with file:
            model = model or Model(arguments.model, device)
            started = time.monotonic()
            found = simulate(model, row, SETS[arguments.set])
            about |= {"device": name, "torch": torch.__version__, "results": found}
            json.dump(about, file)
        print(f"{path.stem}: {time.monotonic() - started:.1f} s", flush=True)


def merge(arguments: argparse.Namespace) -> None:
    """Write one document of a folder of results."""
    document = results.merge(arguments.out, arguments.commit)
    text = json.dumps(document, separators=(",", ":"))
    arguments.json.write_text(text.replace('},"', '},\n"') + "\n", encoding="utf-8")


def main() -> int:
    """Run what the command line says."""
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="simulate prompts")
    one.add_argument("model", type=Path)
    one.add_argument("--name", required=True, help="the model's name in the results")
    one.add_argument("--prompts", type=Path, required=True)
    one.add_argument("--set", choices=SETS, required=True)
    one.add_argument("--out", type=Path, required=True, help="folder of a file a prompt")
    one.add_argument("--length", type=int, action="append", help="prompts of these lengths alone")
    one.add_argument("--per-task", type=int, default=sys.maxsize)
    one.add_argument("--seconds", type=float, default=float("inf"), help="take no prompt after")
    two = commands.add_parser("merge", help="make one document of a folder")
    two.add_argument("out", type=Path)
    two.add_argument("--commit", required=True)
    two.add_argument("--json", type=Path, required=True)
    three = commands.add_parser("table", help="print a Markdown table of documents")
    three.add_argument("documents", type=Path, nargs="+")
    three.add_argument("--set", choices=SETS, required=True)
    three.add_argument("--variant", action="append", default=[], help="this one (repeatable)")
    arguments = parser.parse_args()
    if arguments.command == "table":
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.documents]
        print(results.table(documents, arguments.set, arguments.variant))
    else:
        {"run": run, "merge": merge}[arguments.command](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
