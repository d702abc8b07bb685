"""Worker of `sparsek bench load`: the sessions of a load, sent to one backend's engine.

The engine is the one that `vllm serve` has behind HTTP.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsek_backend.bench.load_results import Answer, LoadFile, next_rate
from sparsek_backend.bench.loads import LOADS, Limits, Session, draw_sessions
from sparsek_backend.bench.serve_worker import (
    FIRST_TOKEN_ID,
    cache_tokens,
    checked_share,
    open_measured,
    read_stats,
)
from sparsek_backend.eval.workers import report_progress, serve_job

Ask = Callable[[list[int], int, Answer], Awaitable[list[int]]]
"""Sends a prompt for so many tokens, notes times and tokens as they come; the answer's tokens."""

_TELL_SECONDS = 5.0


async def send_sessions(
    sessions: Sequence[Session],
    words: Sequence[Sequence[list[int]]],
    ask: Ask,
    keep: Callable[[Answer], None],
    *,
    rate: float,
    budget: float,
) -> float:
    """Seconds until all sessions are over, or the budget, which cuts off what is under way.

    Args:
        sessions: they begin at their arrivals, over ``rate``.
        words: tokens of each session's turns that come behind what was said before.
        ask: sends one request.
        keep: gets each request as it ends, with times since this call.
        rate: sessions a second.
        budget: seconds.
    """
    clock = asyncio.get_running_loop().time
    began = clock()

    async def run(index: int, session: Session) -> None:
        said: list[int] = []
        due = session.arrival / rate
        for number, turn in enumerate(session.turns):
            said += words[index][number]
            due += turn.think
            await asyncio.sleep(began + due - clock())
            answer = Answer(index, number, len(said), turn.cached, due)
            try:
                said += await ask(list(said), turn.output, answer)
                answer.finished = True
            finally:
                due = answer.end = clock() - began
                if answer.first is not None:
                    answer.first -= began
                keep(answer)

    try:
        async with asyncio.timeout(budget), asyncio.TaskGroup() as group:
            for index, session in enumerate(sessions):
                group.create_task(run(index, session))
    except TimeoutError:
        return budget
    return clock() - began


def draw_words(
    sessions: Sequence[Session], shared: int, vocabulary: Sequence[int], seed: int
) -> list[list[list[int]]]:
    """Random tokens of each session's turns; all sessions begin with the same ``shared``."""
    common = random.Random(seed).choices(vocabulary, k=shared)
    words = []
    for index, session in enumerate(sessions):
        numbers = random.Random(f"{seed} words {index}")
        own = [numbers.choices(vocabulary, k=turn.added) for turn in session.turns]
        own[0][:shared] = common
        words.append(own)
    return words


def open_server(**arguments: Any) -> Any:
    """The engine of an HTTP server, with its defaults."""
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER
    )


class Server:
    """One engine: requests sent to it, and what it says of itself."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._sent = 0

    async def ask(self, prompt: list[int], tokens: int, answer: Answer) -> list[int]:
        """The tokens of one answer, noted as they come."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        clock = asyncio.get_running_loop().time
        self._sent += 1
        said: list[int] = []
        request = {"prompt_token_ids": prompt}
        async for output in self._engine.generate(request, params, str(self._sent)):
            said += output.outputs[0].token_ids
            if said and answer.first is None:
                answer.first = clock()
            answer.tokens = len(said)
            answer.cached = output.num_cached_tokens or answer.cached
        return said

    async def forget(self) -> None:
        """Empty the prefix cache, once the requests that were cut off are gone."""
        async with asyncio.timeout(60):
            while not await self._engine.reset_prefix_cache():
                await asyncio.sleep(0.1)

    async def describe(self, ours: bool) -> dict[str, Any]:
        """Size of its cache; share of the context that our backend attended since the start."""
        share = checked_share(await self._engine.collective_rpc(read_stats)) if ours else 1.0
        return {"attended_share": share, "kv_cache_tokens": cache_tokens(self._engine.vllm_config)}


def work(job: Mapping[str, Any]) -> None:
    """Send the sessions at each rate that is left."""
    asyncio.run(_measure(job))


async def _measure(job: Mapping[str, Any]) -> None:
    load = LOADS[job["load"]].scaled(job["scale"])
    sessions = draw_sessions(load, job["requests"], job["seed"])
    turns = [turn for session in sessions for turn in session.turns]
    longest = max(turn.prompt + turn.output for turn in turns)
    engine = open_measured(job, create=open_server, max_model_len=longest)
    try:
        server = Server(engine)
        vocabulary = range(FIRST_TOKEN_ID, engine.model_config.get_vocab_size())
        words = draw_words(sessions, load.shared, list(vocabulary), job["seed"])
        report_progress("engine ready")
        await _warm(server, max(turn.prompt for turn in turns), list(vocabulary))
        report_progress("warm")
        file = LoadFile(Path(job["path"]), job["plan"], job["machine"])
        backend, limits = job["backend"], Limits(**job["limits"])
        while (rate := next_rate(file.read(), backend, job["rates"], limits)) is not None:
            await server.forget()
            counter = Progress(rate, len(turns), limits, job["budget"])

            def keep(answer: Answer, rate: float = rate, counter: Progress = counter) -> None:
                file.add({"backend": backend, "rate": rate, **asdict(answer)})
                counter.add(answer)

            seconds = await send_sessions(
                sessions, words, server.ask, keep, rate=rate, budget=job["budget"]
            )
            said = await server.describe(ours=job["settings"] is not None)
            file.add({"backend": backend, "rate": rate, "over": {"seconds": seconds, **said}})
    finally:
        engine.shutdown()


async def _warm(server: Server, longest: int, vocabulary: Sequence[int]) -> None:
    """Answer the longest prompt and three short ones together, so that kernels are compiled."""
    numbers = random.Random("warm")
    lengths = [longest] + [min(1000, longest)] * 3
    prompts = [numbers.choices(vocabulary, k=length) for length in lengths]
    await asyncio.gather(
        *(server.ask(prompt, 16, Answer(0, 0, len(prompt), 0, 0.0)) for prompt in prompts)
    )


class Progress:
    """Lines that say how many requests of a rate are answered, and when the last will be."""

    def __init__(self, rate: float, requests: int, limits: Limits, budget: float) -> None:
        self._rate, self._requests, self._limits, self._budget = rate, requests, limits, budget
        self._answered = self._good = 0
        self._told = 0.0

    def add(self, answer: Answer) -> None:
        """Count an answer, and tell every few seconds."""
        self._answered += answer.finished
        self._good += answer.keeps(self._limits)
        if answer.end < self._told + _TELL_SECONDS and self._answered < self._requests:
            return
        self._told = answer.end
        whole = answer.end * self._requests / max(1, self._answered)
        report_progress(
            f"rate {self._rate:g}: {self._answered} of {self._requests} answered, {self._good} in "
            f"time, about {min(whole, self._budget) - answer.end:.0f} s left"
        )


if __name__ == "__main__":
    serve_job(work)
