"""Small pretrained models, where they lie beside the repository: real text, real tokenizers, real acceptance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).parents[3] / "shared" / "models"
PROMPTS = ["Once upon a time, there was a little", "One day, a girl named Lily went to the park.", "The dog"]

pytestmark = pytest.mark.skipif(
    not MODELS.is_dir(), reason=f"no pretrained models in {MODELS.name}/ beside the repository"
)


@pytest.fixture(scope="module")
def small():
    folder = MODELS / "stories260K-hf"
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def large():
    folder = MODELS / "self-stories-3m"
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": 0.8}], ids=str
)
@pytest.mark.parametrize("method", ["prompt_lookup", "other_tokenizer", "other_tokenizer_by_name"])
def test_same_text(small, large, num_prompts, options, method):
    model, tokenizer = large
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(
        PROMPTS[:num_prompts], return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    )
    assisted = {
        "prompt_lookup": {"assistant": "prompt_lookup"},
        "other_tokenizer": {"assistant": small[0], "tokenizer": tokenizer, "assistant_tokenizer": small[1]},
        "other_tokenizer_by_name": {"assistant": str(MODELS / "stories260K-hf"), "tokenizer": tokenizer},
    }[method]
    torch.manual_seed(1)
    plain = model.generate(**inputs, max_new_tokens=60, **options)
    torch.manual_seed(1)
    output = model.generate(**inputs, max_new_tokens=60, return_dict_in_generate=True, **options, **assisted)
    assert output.sequences.tolist() == plain.tolist()
    if method != "prompt_lookup":  # a drafter of the same kind of text is often right
        assert output.speculation.mean_acceptance_length > (1.5 if options["do_sample"] else 2)
