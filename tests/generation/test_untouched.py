"""A call changes nothing of either model, however it ends, and the random state only as plain `generate` does."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import OracleDrafter, early_layers, ragged_batch, real_rows, tiny_llama
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

import hf_specdec
from hf_specdec import CandidateGenerator
from hf_specdec.keyword import install_keyword

NUM_NEW = 10
ONE, RAGGED = (7,), (5, 11, 3)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@pytest.fixture
def models():
    target = tiny_llama(2, seed=3, initializer_range=0.5)
    return target, early_layers(target, 1)


def snapshot(model) -> dict:
    """Everything of a model that a call could have changed."""
    modules = list(model.modules())
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "config_attributes": copy.deepcopy({k: v for k, v in vars(model.config).items()}),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(value), value.requires_grad) for name, value in model.named_parameters()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "hooks": [[list(getattr(module, name)) for name in HOOKS] for module in modules],
        "attributes": [sorted(vars(module)) for module in modules],
        "own_methods": [[name for name in ("forward", "generate") if name in vars(module)] for module in modules],
        "training": [module.training for module in modules],
        "class": (type(model), sorted(vars(type(model)))),
    }


def assert_untouched(model, before: dict) -> None:
    after = snapshot(model)
    for name in before:
        if name in ("state", "buffers"):
            assert list(after[name]) == list(before[name])
            assert all(torch.equal(after[name][key], value) for key, value in before[name].items())
        else:
            assert after[name] == before[name], name


class Raises:
    """Raises at its third call."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls = error, []  # a list, since the loop works on a shallow copy

    def count(self, *args) -> None:
        self.calls.append(None)
        if len(self.calls) == 3:
            raise self.error("on purpose")


class Processor(Raises, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.count()
        return scores


class Criterion(Raises, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Drafter(Raises, CandidateGenerator):
    def propose(self, run, num_draft_tokens):
        self.count()


CALLS = {
    "plain": {},
    "sample": {"do_sample": True, "temperature": 0.7},
    "rejection": {"do_sample": True, "assistant_sampling": "rejection"},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 3},
    "auto": {"num_assistant_tokens": "auto"},
    "threshold": {"assistant_confidence_threshold": 0.3},
    "outputs": {"return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True},
}


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("name", CALLS)
def test_after_success(models, lengths, name):
    inputs = ragged_batch(lengths)
    if name == "outputs":  # transformers installs what captures hidden states once and for all
        models[0].generate(**inputs, max_new_tokens=1, **CALLS[name])
    before = [snapshot(model) for model in models]
    config = GenerationConfig(max_new_tokens=NUM_NEW, pad_token_id=0)
    config_before = config.to_dict()
    kept = {name: value.clone() for name, value in inputs.items()}
    models[0].generate(**inputs, generation_config=config, assistant=models[1], **CALLS[name])
    for model, state in zip(models, before):
        assert_untouched(model, state)
    assert config.to_dict() == config_before
    assert all(torch.equal(inputs[name], kept[name]) for name in kept)


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["processor", "criterion", "propose", "target", "drafter"])
@pytest.mark.parametrize("attention", ["sdpa", "hf_specdec_test_attention"])
def test_after_an_exception(models, lengths, error, where, attention, register_attention):
    """Also Ctrl-C, and also where the attention implementation had to be switched for the call."""
    for model in models:
        model.set_attn_implementation(attention)
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "assistant": models[1], "do_sample": True}
    hook = None
    if where == "processor":
        kwargs["logits_processor"] = LogitsProcessorList([Processor(error)])
    elif where == "criterion":
        kwargs["stopping_criteria"] = StoppingCriteriaList([Criterion(error)])
    elif where == "propose":
        kwargs["assistant"] = Drafter(error)
    else:
        model = models[where == "drafter"]
        hook = model.model.layers[0].register_forward_hook(Raises(error).count)
    before = [snapshot(model) for model in models]
    state = torch.get_rng_state()
    with pytest.raises(error, match="on purpose"):
        models[0].generate(**ragged_batch(lengths), **kwargs)
    for model, snap in zip(models, before):
        assert_untouched(model, snap)
    assert torch.equal(torch.get_rng_state(), state)
    if hook is not None:
        hook.remove()
    # And the models go on working.
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0}
    expected = models[0].generate(**ragged_batch(lengths), **kwargs)
    assert models[0].generate(**ragged_batch(lengths), **kwargs, assistant=models[1]).tolist() == expected.tolist()


@pytest.fixture
def register_attention():
    """An attention implementation of a user's own: sdpa by another name; counts how often it runs."""
    name, calls = "hf_specdec_test_attention", []

    def attention(*args, **kwargs):
        calls.append(name)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    yield calls
    del AttentionInterface._global_mapping[name]
    del AttentionMaskInterface._global_mapping[name]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("lengths", [ONE, RAGGED])
def test_attention_is_switched_only_where_it_must_be(models, same_text, register_attention, lengths, branches):
    target = models[0]
    target.set_attn_implementation("hf_specdec_test_attention")
    inputs = ragged_batch(lengths)
    expected = target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0)
    register_attention.clear()
    before = snapshot(target)
    drafts = OracleDrafter(real_rows(expected, inputs), 0.8, branches)
    got = target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0, assistant=drafts)
    assert got.tolist() == expected.tolist()
    assert_untouched(target, before)
    assert target.config._attn_implementation == "hf_specdec_test_attention"
    assert bool(register_attention) == (lengths == ONE), "one row's prompt at least runs on the user's own"
    if lengths == ONE and branches == 1:
        assert len(register_attention) % len(target.model.layers) == 0


def test_the_switch_is_said_once(models, register_attention, caplog):
    type(logging.get_logger()).warning_once.cache_clear()
    logging.enable_propagation()
    try:
        models[0].set_attn_implementation("hf_specdec_test_attention")
        for _ in range(2):
            models[0].generate(**ragged_batch((4, 6)), max_new_tokens=3, pad_token_id=0, assistant="prompt_lookup")
    finally:
        logging.disable_propagation()
    said = [record.getMessage() for record in caplog.records if "takes no explicit masks" in record.getMessage()]
    assert len(said) == 1


def test_a_generator_serves_several_calls(models):
    """The loop works on a copy: what a call sets on the generator is gone afterwards."""
    target, drafter = models
    for generator in (hf_specdec.DraftModel(drafter), hf_specdec.PromptLookup(min_ngram_size=1)):
        before = dict(vars(generator))
        for lengths in (ONE, RAGGED):
            kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0}
            expected = target.generate(**ragged_batch(lengths), **kwargs)
            got = target.generate(**ragged_batch(lengths), **kwargs, assistant=generator)
            assert got.tolist() == expected.tolist()
        assert vars(generator) == before


def test_calls_at_once(models):
    """One target, one generator, several threads."""
    target, drafter = models
    generator = hf_specdec.DraftModel(drafter)
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0}
    expected = {lengths: target.generate(**ragged_batch(lengths), **kwargs).tolist() for lengths in (ONE, RAGGED)}

    def call(lengths) -> bool:
        return target.generate(**ragged_batch(lengths), **kwargs, assistant=generator).tolist() == expected[lengths]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, [ONE, RAGGED] * 4))


@pytest.mark.parametrize("do_sample", [False, True])
def test_random_state_afterwards(models, do_sample):
    """The next draw is the one that would come after plain `generate`."""
    draws = []
    for assistant in (None, models[1], "prompt_lookup"):
        torch.manual_seed(5)
        models[0].generate(
            **ragged_batch(RAGGED), max_new_tokens=NUM_NEW, pad_token_id=0, do_sample=do_sample, assistant=assistant
        )
        draws.append(torch.rand(4).tolist())
    assert draws[0] == draws[1] == draws[2]


def test_without_the_keyword_nothing_changes(models):
    """`generate` calls through; installing twice wraps once."""
    wrapped = GenerationMixin.generate
    install_keyword()
    assert GenerationMixin.generate is wrapped
    inputs = ragged_batch(ONE)
    expected = wrapped.__wrapped__(models[0], **inputs, max_new_tokens=NUM_NEW, pad_token_id=0)
    assert models[0].generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0).tolist() == expected.tolist()
    assert models[0].generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0, assistant=None).tolist() == (
        expected.tolist()
    )
    # transformers' own assisted generation is still there.
    got = models[0].generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0, assistant_model=models[1])
    assert got.tolist() == expected.tolist()
