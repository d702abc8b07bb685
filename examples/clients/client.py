"""Talk to a SparseK server with OpenAI's Python client: stream, ask about a document, call a tool.

pip install openai
python examples/clients/client.py --url http://127.0.0.1:8000 --document report.txt
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import openai

WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def stream(client: openai.OpenAI, model: str, question: str) -> str:
    """Print an answer as it comes, and return it."""
    pieces = []
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=48,
        temperature=0,
        stream=True,
    ):
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return "".join(pieces)


def call_tool(client: openai.OpenAI, model: str) -> Any:
    """Have the model fill in a tool's arguments, and return them.

    The server needs `--enable-auto-tool-choice --tool-call-parser hermes` (or your model's parser).
    Check what comes back: a small model may not keep to the schema.
    """
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER_TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=48,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    return json.loads(call.function.arguments)


def refused_embeddings(client: openai.OpenAI, model: str) -> int:
    """Return the status with which a server of a generating model refuses embeddings."""
    try:
        client.embeddings.create(model=model, input="a text")
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def main() -> None:
    """Run the four requests against a server."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server; /v1 may follow")
    parser.add_argument("--document", type=Path, help="a text to ask about")
    options = parser.parse_args()
    base = options.url.rstrip("/").removesuffix("/v1")
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=600)
    try:
        model = client.models.list().data[0].id
    except (openai.APIConnectionError, openai.NotFoundError):
        raise SystemExit(f"error: no server answers at {options.url}: start one") from None

    print(f"==> {model}, streamed")
    stream(client, model, "What is the capital of France?")
    if options.document is not None:
        print(f"==> about {options.document.name}")
        text = options.document.read_text(encoding="utf-8")
        try:
            stream(client, model, f"{text}\n\nSummarise the document above in one sentence.")
        except openai.BadRequestError as error:  # longer than the server's context
            print(f"==> document: refused ({error.message})")
    try:
        print(f"==> tool: get_weather({call_tool(client, model)})")
    except openai.BadRequestError as error:
        print(f"==> tool: refused ({error.message})")
    print(f"==> embeddings: status {refused_embeddings(client, model)}, as for any chat model")


if __name__ == "__main__":
    main()
