"""A model that two ranks trained together and saved: Transformers and vLLM agree on its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import training_cases
from tests.distributed.group import Ranks
from tests.vllm_backend.engines import engine, generate, requires_cpu_vllm, tokens
from tests.vllm_backend.nsa_models import CONFIG, complete, make_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]


def test_trained_saved_loaded_and_served(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    start, folder = tmp_path / "start", tmp_path / "end"
    untrained = make_model(CONFIG, start)
    pair = Ranks(2)
    try:
        pair.run(2, training_cases.train_and_save, str(start), str(folder), "context parallel")
    finally:
        pair.close()
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 512, (count,), generator=generator).tolist() for count in (300, 65)]
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [
        model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert expected != [complete(untrained, prompt, 16) for prompt in prompts]
    with engine(
        folder,
        "SPARSEK",
        max_model_len=400,
        block_size=64,
        num_gpu_blocks_override=21,
        skip_tokenizer_init=True,
    ) as llm:
        assert tokens(generate(llm, prompts, together=True)) == expected
