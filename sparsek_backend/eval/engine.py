"""A vLLM engine with a chosen attention backend, for the workers of `eval` and `bench`."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sparsek_backend
import sparsek_kernels
from sparsek_backend.eval.prompt import Prompt, Tokens
from sparsek_backend.eval.scoring import Reply
from sparsek_backend.eval.stats import TOP
from sparsek_backend.extras import needing
from sparsek_backend.plugin import register
from sparsek_backend.vllm_backend.names import BACKEND_NAME

FORCE_TOKENS = "sparsek_backend.eval.forcing:ForceTokens"


def open_engine(
    model: str,
    *,
    settings: Mapping[str, Any] | None,
    baseline: str | None = None,
    in_process: bool = True,
    create: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Any:
    """A `vllm.LLM`.

    Args:
        settings: the `sparsek` settings, or None for another backend.
        baseline: that other backend; None is vLLM's own choice.
        in_process: whether the engine core runs in this process, so that its counters can be read
            here; False is how a server runs it.

    Raises:
        ImportError: vLLM is not installed; the message has the install command.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with needing("this needs vLLM (without a GPU: bash deploy/quickstart.sh)", extra="vllm"):
        from vllm import LLM
        from vllm.platforms import current_platform
    for name in [name for name in os.environ if name.startswith("SPARSEK_")]:
        del os.environ[name]  # the settings given are the whole of them
    register()
    chosen: dict[str, Any] = {} if baseline is None else {"attention_backend": baseline}
    if settings is not None:
        chosen["attention_backend"] = BACKEND_NAME
        chosen["additional_config"] = {"sparsek": dict(settings)}
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        arguments.setdefault("enforce_eager", True)
    return (create or LLM)(model=model, seed=0, disable_log_stats=False, **chosen, **arguments)


def ensure_entry_point() -> None:
    """Let the processes that this one starts find the plugin, also if it is not installed."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    if any(entry.name == "sparsek" for entry in found):
        return
    folder = Path(tempfile.mkdtemp(prefix="sparsek-plugin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    metadata = folder / "sparsek_backend-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sparsek-backend\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nsparsek = sparsek_backend.plugin:register\n"
    )
    sys.path.insert(0, str(folder))
    roots = [Path(package.__path__[0]).parent for package in (sparsek_backend, sparsek_kernels)]
    paths = (folder, *roots, os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, paths)))


def backend_report(settings: Mapping[str, Any] | None) -> str:
    """Name of the backend that ran in this process, with its own counters as proof.

    Raises:
        RuntimeError: our backend was asked for and its forward never ran.
    """
    if settings is None:
        return "vLLM's own"
    from sparsek_backend.vllm_backend.stats import STATS
    from sparsek_kernels.fallback import fallback_counts

    if not STATS.forward_calls:
        raise RuntimeError(f"{BACKEND_NAME} was chosen, but its forward never ran")
    shares = STATS.attended.shares(STATS.context).items()
    attended = "".join(f", {share:.1%} of the context attended in {x}" for x, share in shares)
    report = f"{BACKEND_NAME}, {STATS.forward_calls} forward calls{attended}"
    fallbacks = {reason: count for reason, count in fallback_counts().items() if count}
    return report + (f", fallbacks {fallbacks}" if fallbacks else "")


def open_scoring_engine(model: str, **arguments: Any) -> Any:
    """A `vllm.LLM` that needs no tokenizer and takes tokens to force.

    vLLM's first model runner is chosen: its logits processors are the same in every version.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    arguments.setdefault("skip_tokenizer_init", True)
    # A forced token is found by the number of tokens before it, which must be known each step.
    arguments.setdefault("async_scheduling", False)
    arguments.setdefault("enable_prefix_caching", True)
    arguments.setdefault("logits_processors", [FORCE_TOKENS])
    return open_engine(model, **arguments)


class LocalScorer:
    """A :class:`Scorer` over an in-process engine.

    Args:
        decode: token ids to text, or ``None`` where there is no tokenizer.
    """

    def __init__(self, engine: Any, decode: Callable[[Tokens], str] | None = None) -> None:
        self._engine = engine
        self._decode = decode

    def reply(self, prompts: Sequence[Prompt]) -> list[Reply]:
        """Answer prompts greedily, and force their targets token by token; texts are read.

        Both requests of a prompt share its pages: the second reads them from the prefix cache.
        """
        from vllm import SamplingParams

        from sparsek_backend.eval.forcing import FORCED

        greedy = partial(SamplingParams, temperature=0.0, detokenize=False)
        forced = partial(greedy, ignore_eos=True, logprobs=TOP)
        ids, params = [], []
        for prompt in prompts:
            target = list(prompt.target)
            if prompt.variant == "text":
                ids.append([*prompt.ids, *target])
                params.append(greedy(max_tokens=1, prompt_logprobs=TOP))
            else:
                ids += [prompt.ids] * 2
                params.append(greedy(max_tokens=prompt.max_tokens))
                params.append(forced(max_tokens=len(target), extra_args={FORCED: target}))
        outputs = iter(self._generate(ids, params))
        return [self._reply(prompt, outputs) for prompt in prompts]

    def _reply(self, prompt: Prompt, outputs: Iterator[Any]) -> Reply:
        free = next(outputs)
        if prompt.variant == "text":
            if not (read := free.prompt_logprobs):
                raise RuntimeError("the engine returned no prompt_logprobs for this model")
            return Reply((), None, _likely(read[-len(prompt.target) :]))
        led = next(outputs).outputs[0]
        if tuple(led.token_ids) != prompt.target:
            raise RuntimeError(f"{prompt.name}: the engine generated other tokens than forced")
        tokens = tuple(free.outputs[0].token_ids)
        text = None if self._decode is None else self._decode(tokens)
        return Reply(tokens, text, _likely(led.logprobs))

    def _generate(self, ids: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        requests = [{"prompt_token_ids": tokens} for tokens in ids]
        found: list[Any] = self._engine.generate(requests, list(params), use_tqdm=False)
        return found


def _likely(places: Iterable[Mapping[int, Any]]) -> list[dict[int, float]]:
    """Log-probabilities of the tokens that vLLM names at each place."""
    return [{token: float(entry.logprob) for token, entry in x.items()} for x in places]


def close_engine(engine: Any) -> None:
    """Shut the engine core down, so that the worker's process can end."""
    with contextlib.suppress(AttributeError):
        engine.llm_engine.engine_core.shutdown()
