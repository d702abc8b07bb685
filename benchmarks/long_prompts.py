"""What SPARSEK does for a long prompt beside other features of vLLM, against another backend.

    python benchmarks/long_prompts.py offload --json offload.json       # a GPU
    python benchmarks/long_prompts.py ngrams --json ngrams.json
    python benchmarks/long_prompts.py hybrid --model granite-4.0-h-micro --json hybrid.json
    python benchmarks/long_prompts.py ngrams --toy --json /tmp/toy.json  # a minute on a CPU

`offload`: a prompt is computed, answered again from its pages on the GPU, evicted by another one,
and answered from pages that vLLM's OffloadingConnector kept in host memory.  The last two answers
to it are the same arithmetic, and must be the same.
`ngrams`: time per output token with and without n-gram speculation.  Tokens of a draft select
together, so that the answer may be another one; `equal_tokens` says from where on.
`hybrid`: time to the first token and per output token of a model with recurrent layers; a short
prompt, which is attended whole, must have the other backend's answer.

Two answers are the same if the log-probabilities of their tokens are, up to rounding and up to the
first token that differs.  Each engine runs in processes of its own.  Models are shapes with random
weights (`random_weights.py`).  Exit status 1: an answer was another one.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsek_backend.bench.shapes import SHAPES
from sparsek_backend.eval.workers import WorkerError, run_worker
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.vllm_backend.names import BACKEND_NAME

SILENCE_LIMIT = 600.0
LONG_ANSWER = 128
"""Tokens of the longest answer."""
CONTEXT = 131072 - LONG_ANSWER - 32
"""Tokens of a prompt.  It ends within a page, so its last tokens are computed even if all before
them are loaded: a single last token would be attended by the rule of decode."""
STUDIES = ("offload", "ngrams", "hybrid")
WORKER = "benchmarks.long_prompts_worker"
GAP = 0.1
"""Largest difference of log-probabilities that rounding to 16 bits may make, in nats."""
POOL = 1.2
"""GPU pages of `offload`, in prompts."""
VOCABULARY, SHARPNESS = 256, 1.0
"""Of the model of `ngrams`: with few tokens to choose from, and attention that is spread over many
keys, random weights repeat themselves."""
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}

HYBRIDS: dict[str, dict[str, Any]] = {
    "granite-4.0-h-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8,
        "vocab_size": 100352,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "block_norm_eps": 1e-5,
        "num_hidden_layers": 16,
        "layer_types": [
            "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
        ],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 2048,
        "vocab_size": 65536,
        "max_position_embeddings": 131072,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}
"""Hybrid shapes, by the names of the models that have them.

Those models tie the embeddings.  With random weights that would repeat the last token.
"""


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """The folder with the shape's config.json.

    Args:
        name: of the shape.
        folder: is written to.
        changes: fields of the config besides the shape's.

    Raises:
        ValueError: unknown shape.
    """
    shapes = {**SHAPES, **HYBRIDS}
    if name not in shapes:
        raise ValueError(f"--model: expected one of {', '.join(shapes)}, got {name!r}")
    config = json.dumps({**shapes[name], **changes})
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


def judge(study: str, runs: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Ratios of a study, and what is wrong with its answers."""
    ours, theirs = runs[BACKEND_NAME], runs["baseline"]
    if study == "offload":
        ratios: dict[str, Any] = {
            "baseline_over_ours": {
                name: theirs[name]["ttft_s"] / ours[name]["ttft_s"]
                for name in ("computed", "cached", "loaded")
            },
            "equal_tokens": {
                name: first_difference(run["cached"]["tokens"], run["loaded"]["tokens"])
                for name, run in runs.items()
            },
        }
        wrong = [
            f"{name}: the loaded prompt was answered otherwise than the cached one, {parted}"
            for name, run in runs.items()
            if (parted := apart(run["cached"], run["loaded"]))
        ]
        wrong += [
            f"{name}: no page of the {step} prompt was found"
            for name, run in runs.items()
            for step in ("cached", "loaded")
            if not run[step]["cached_tokens"]
        ]
        return ratios, wrong
    if study == "ngrams":
        plain = runs["without speculation"]
        best = {name: min(run["tpot_s"]) for name, run in runs.items()}
        ratios = {
            "gain_of_speculation": best["without speculation"] / best[BACKEND_NAME],
            "baseline_over_ours": best["baseline"] / best[BACKEND_NAME],
            "equal_tokens": first_difference(plain["tokens"], ours["tokens"]),
        }
        return ratios, []
    ratios = {
        "ttft_baseline_over_ours": min(theirs["ttft_s"]) / min(ours["ttft_s"]),
        "tpot_baseline_over_ours": min(theirs["tpot_s"]) / min(ours["tpot_s"]),
        "equal_tokens": first_difference(theirs["tokens"], ours["tokens"]),
    }
    parted = apart(theirs, ours)
    return ratios, [f"the short prompt is answered otherwise, {parted}"] if parted else []


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What says that two answers differ by more than rounding; empty if they do not.

    Behind the first token that differs the two continue other texts: there, numbers are enough.
    """
    place = first_difference(one["tokens"], other["tokens"])
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    gaps = [abs(a - b) for a, b in pairs]
    wide = [gap for gap in gaps[: place + 1] if gap > GAP]
    wide += [gap for gap in gaps if not math.isfinite(gap)]
    return f"{wide[0]:.3g} nats apart, at most {GAP} expected" if wide else ""


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs; the length where none does."""
    pairs = zip(one, other, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))


def jobs(options: argparse.Namespace, model: str) -> dict[str, dict[str, Any]]:
    """Job of each engine, by name."""
    engine: dict[str, Any] = {
        "gpu_memory_utilization": options.gpu_memory,
        "max_num_batched_tokens": min(options.batched_tokens, options.context),
        "enforce_eager": options.eager,
    }
    common = {
        "study": options.study, "model": model, "context": options.context, "offload_bytes": 0,
        "repeats": options.repeats, "engine": engine, "baseline": None, "settings": None,
        "weights": {},
    }  # fmt: skip
    ours = common | {"settings": {"dense_below": 0} if options.toy else {}}
    theirs = common | {"baseline": options.baseline}
    if options.study == "offload":
        pool = {"num_gpu_blocks_override": math.ceil(POOL * options.context / options.page_size)}
        added = {
            "offload_bytes": int(options.offload_gib * 2**30),
            "engine": engine | pool | {"block_size": options.page_size},
        }
        return {BACKEND_NAME: ours | added, "baseline": theirs | added}
    if options.study == "ngrams":
        weights = {"weights": {"sharpness": SHARPNESS}}
        added = weights | {"engine": engine | {"speculative_config": NGRAMS}}
        named = {BACKEND_NAME: ours | added, "baseline": theirs | added}
        return {"without speculation": ours | weights, **named}
    return {BACKEND_NAME: ours, "baseline": theirs}


def main() -> int:
    """Run the engines of a study one after another, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape")
    parser.add_argument("--context", type=int, default=CONTEXT, help="prompt tokens")
    parser.add_argument("--baseline", default="FLASH_ATTN")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--page-size", type=int, default=64, help="of offload")
    parser.add_argument("--offload-gib", type=float, default=40.0, help="host memory for pages")
    parser.add_argument("--gpu-memory", type=float, default=0.9)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--toy", action="store_true", help="shape tiny, 1024 tokens, on a CPU")
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.toy and options.study == "offload":
        parser.error("offload: vLLM's connector needs a GPU, --toy is for a CPU")
    if options.toy:
        options.model, options.context, options.baseline = "tiny", 1024, "CPU_ATTN"
        options.eager, options.repeats, options.gpu_memory = True, 1, 0.1
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sparsek-shape-") as folder:
        try:
            changes = {"vocab_size": VOCABULARY} if options.study == "ngrams" else {}
            model = str(write_model(options.model, Path(folder), **changes))
            for name, job in jobs(options, model).items():
                print(f"{name}: starting the engine", flush=True)
                tell = functools.partial(_tell, name)
                runs[name] = run_worker(
                    WORKER, job, label=name, on_progress=tell,
                    timeout=SILENCE_LIMIT,
                )  # fmt: skip
        except (ValueError, WorkerError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    ratios, wrong = judge(options.study, runs)
    machine = describe_machine(choose_device("cpu" if options.toy else "auto"), options.commit)
    result = {
        "study": options.study, "model": options.model, "context": options.context,
        "baseline": options.baseline, **ratios, "wrong": wrong, "runs": runs,
        "machine": asdict(machine),
    }  # fmt: skip
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(ratios))
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(wrong))


def _tell(name: str, line: str) -> None:
    print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
