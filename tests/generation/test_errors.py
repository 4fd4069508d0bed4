"""What is not supported says so before anything is generated, and says what to do."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch
from conftest import OracleDrafter, ragged_batch, tiny_llama
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_specdec
from hf_specdec import CandidateGenerator, CandidateTree

ONE = (7,)
GENERATE = {"max_new_tokens": 6, "pad_token_id": 0}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(1)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def refuses(model, message: str, lengths=ONE, error: type[Exception] = ValueError, **kwargs) -> None:
    with pytest.raises(error, match=message):
        model.generate(**ragged_batch(lengths), **GENERATE | {"assistant": "prompt_lookup"} | kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 3}, r"`num_beams` is 3;.*Set `num_beams=1`, or leave out `assistant`"),
        ({"num_beams": 2, "do_sample": True}, r"`num_beams` is 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "`penalty_alpha` selects another decoding method; leave it out"),
        ({"dola_layers": "low"}, "`dola_layers` selects another decoding method; leave it out"),
        ({"use_cache": False}, "`use_cache` is False; speculative decoding needs the cache. Leave `use_cache` out"),
        ({"cache_implementation": "static"}, "`cache_implementation` is 'static'.*Leave it out"),
        ({"synced_gpus": True}, "`synced_gpus`.*is not supported.*leave out `assistant`"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"assistnat": 1}, "model_kwargs.*assistnat"),
    ],
)
def test_arguments(target, kwargs, message):
    refuses(target, message, **kwargs)


def test_both_keywords(target):
    message = "`assistant` and `assistant_model` were both given; `assistant` takes draft models too"
    refuses(target, message, assistant_model=target)


def test_called_through_without_an_assistant(target):
    with pytest.raises(ValueError, match="`assistant` is missing: give a draft model"):
        target.generate(**ragged_batch(ONE), **GENERATE, custom_generate=hf_specdec.speculative_decoding)


@pytest.mark.parametrize("assistant", [3, object(), ["prompt_lookup"], torch.nn.Linear(2, 2), LlamaForCausalLM])
def test_wrong_kind_of_assistant(target, assistant):
    message = "it takes a causal language model, a drafter, a Hub id or local folder, one of 'prompt_lookup', or a Cand"
    refuses(target, f"`assistant` got a .*; {message}", assistant=assistant)


def test_unknown_name(target):
    refuses(
        target,
        "'no_such/model', which is neither one of 'prompt_lookup' nor a model that can be loaded",
        error=OSError,
        assistant="no_such/model",
    )


# Checkpoints


@pytest.fixture
def checkpoint(target, tmp_path):
    target.save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def test_half_downloaded_checkpoint(target, checkpoint):
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    for share in (0.6, 0.001):
        weights.write_bytes(whole[: int(share * len(whole))])
        refuses(target, "incomplete or damaged.*download it again", error=OSError, assistant=str(checkpoint))
    weights.unlink()
    refuses(target, "model.safetensors", error=OSError, assistant=str(checkpoint))
    # A failed attempt leaves nothing behind.
    weights.write_bytes(whole)
    assert target.generate(**ragged_batch(ONE), **GENERATE, assistant=str(checkpoint)).shape == (1, 13)


def test_checkpoint_without_some_tensors(target, checkpoint):
    """transformers would fill them with random numbers and go on."""
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    refuses(target, "lacks.*model.layers.0.mlp.up_proj.weight", error=OSError, assistant=str(checkpoint))


def test_shard_that_is_missing(target, tmp_path):
    target.save_pretrained(tmp_path / "draft", max_shard_size="20KB")
    index = json.loads((tmp_path / "draft" / "model.safetensors.index.json").read_text())
    (tmp_path / "draft" / sorted(set(index["weight_map"].values()))[-1]).unlink()
    refuses(target, "safetensors", error=OSError, assistant=str(tmp_path / "draft"))


def test_folder_without_a_tokenizer(target, checkpoint):
    """The target's tokenizer may be given for other reasons, such as stop strings."""
    tokenizer = object()
    got = target.generate(**ragged_batch(ONE), **GENERATE, tokenizer=tokenizer, assistant=str(checkpoint))
    assert got.tolist() == target.generate(**ragged_batch(ONE), **GENERATE).tolist()


# Models


def recurrent_model():
    return MambaForCausalLM(
        MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=1, pad_token_id=0, eos_token_id=None)
    )


def hybrid_model():
    config = Qwen3NextConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        eos_token_id=None,
    )
    return Qwen3NextForCausalLM(config)


def encoder_decoder_model():
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=97,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            eos_token_id=None,
        )
    )


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (recurrent_model, "MambaForCausalLM keeps .*which cannot be rolled back.*Generate without `assistant=`"),
        (hybrid_model, "Qwen3NextForCausalLM keeps .*which cannot be rolled back.*Generate without `assistant=`"),
        (encoder_decoder_model, "T5ForConditionalGeneration is an encoder-decoder model; only decoder-only"),
    ],
)
def test_models_that_are_not_supported(target, make, message, role):
    model = make().eval()
    if role == "target":
        refuses(model, f"the target {message}")
        refuses(model, f"the target {message}", assistant=target)
    else:
        refuses(target, f"the drafter {message}", assistant=model)


def test_alibi(same_text):
    """One row and a chain work; a batch or a tree needs a mask that such a model does not take."""
    torch.manual_seed(0)
    model = BloomForCausalLM(
        BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=None)
    ).eval()
    same_text(model, ragged_batch(ONE), oracle=(0.8, 1), max_new_tokens=10)
    refuses(model, "A batch needs an explicit.*BloomForCausalLM computes ALiBi.*one row at a time", (3, 5))
    refuses(model, "A draft tree needs an explicit.*chain drafter", assistant=OracleDrafter([], 0.5, 3))


def test_vocabularies_of_different_sizes(target):
    other = tiny_llama(1, vocab_size=1000)
    message = (
        r"a vocabulary of 97 tokens, the drafter LlamaForCausalLM of 1000.*`tokenizer=` and.*`assistant_tokenizer=`"
    )
    refuses(target, message, assistant=other)
    refuses(target, message, assistant=hf_specdec.DraftModel(other), tokenizer=object())


# Generators of a user's own


class Returns(CandidateGenerator):
    def __init__(self, tree: CandidateTree) -> None:
        self.tree = tree

    def propose(self, run, num_draft_tokens):
        return self.tree


def test_wrong_number_of_rows(target):
    tree = CandidateTree(torch.tensor([[5, 6]]))
    message = r"`propose` of Returns returned 1 rows for the 2 rows of `run.tokens`; return one row for each"
    refuses(target, message, (4, 6), assistant=Returns(tree))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lengths", [ONE, (4, 6)])
@pytest.mark.parametrize(
    "tree",
    [
        None,
        CandidateTree(torch.zeros(1, 0, dtype=torch.long)),
        CandidateTree(torch.full((1, 3), -1)),
        CandidateTree(torch.tensor([[5, -1, 7]])),
        CandidateTree(torch.arange(30)[None]),
        CandidateTree(torch.tensor([[5, 5, 5, 6]]), torch.tensor([-1, -1, -1, 2])),
        CandidateTree(torch.tensor([[-1, 5, 6]]), torch.tensor([-1, 0, 1])),
    ],
    ids=["none", "empty", "padding", "gap", "too_long", "equal_siblings", "child_of_padding"],
)
def test_odd_proposals_do_no_harm(target, same_text, tree, lengths, do_sample):
    """Nothing that a generator returns can change the text; more than was wanted is of no use, but does not crash."""
    if tree is not None:
        tree = CandidateTree(tree.tokens.repeat(len(lengths), 1), tree.parents)
    same_text(target, ragged_batch(lengths), Returns(tree), do_sample=do_sample, max_new_tokens=8)


def test_generator_without_propose():
    with pytest.raises(TypeError, match=r"abstract.*propose"):
        CandidateGenerator()
