"""Without an image the demo is SmolLM2-135M-Instruct, token for token."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from demo_model.assemble import find_sources
from tests.demo_model import serving

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "List three fruits.",
    "Explain photosynthesis to a child.",
    "12 + 30 = ?",
    "def fibonacci(n):",
)
NEW_TOKENS = 40


@pytest.mark.slow
def test_answers_equal_smollm2s_own(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    gguf = find_sources().gguf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
        )
    theirs.eval()
    prompts = serving.prompts(folder, [(None, q) for q in QUESTIONS], NEW_TOKENS)
    answers = serving.engine(folder).generate(prompts)
    for question, (request, _), answer in zip(QUESTIONS, prompts, answers, strict=True):
        ids = torch.tensor([request.token_ids])
        with torch.no_grad():
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        wanted = tuple(out[0, ids.shape[1] :].tolist())
        assert answer.token_ids == wanted, question
