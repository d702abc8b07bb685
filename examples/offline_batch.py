"""Answer the prompts of a file, without a server.

    python examples/offline_batch.py MODEL prompts.txt answers.jsonl

One prompt a line. MODEL is a folder, or a name on the Hugging Face Hub. Without a GPU add `--cpu`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    """Generate, and write one JSON object a prompt."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, help="the model's own by default")
    parser.add_argument("--cpu", action="store_true", help="no compilation, half of the memory")
    options = parser.parse_args()

    on_cpu = {"enforce_eager": True, "gpu_memory_utilization": 0.5} if options.cpu else {}
    llm = LLM(
        options.model,
        attention_backend="SPARSEK",
        additional_config={"sparsek": {"top_k": 32}},
        max_model_len=options.max_model_len,
        **on_cpu,
    )
    prompts = [line for line in options.prompts.read_text().splitlines() if line]
    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    with options.answers.open("w", encoding="utf-8") as file:
        for output in llm.generate(prompts, sampling):
            answer = {"prompt": output.prompt, "answer": output.outputs[0].text}
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
    print(f"wrote {len(prompts)} answers to {options.answers}")


if __name__ == "__main__":
    main()
