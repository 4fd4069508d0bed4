"""Caches: one that comes back goes into a second turn, a user's own is filled in place, others get a clear error."""

from __future__ import annotations

import pytest
import torch
from conftest import OracleDrafter, ragged_batch, real_rows, tiny_llama
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, StaticCache

import hf_specdec
from hf_specdec.generation.cache import CACHE_NAME

NUM_NEW = 12
ONE, RAGGED = (9,), (5, 11, 3)
CASES = [
    pytest.param(lengths, oracle, id=f"{len(lengths)}-{name}")
    for lengths in (ONE, RAGGED)
    for name, oracle in {"chain": (0.8, 1), "tree": (0.8, 3), "right": (1.0, 1)}.items()
]


def make_model(name: str, sliding_window: int = 8):
    if name == "llama":
        return tiny_llama(2, seed=3, initializer_range=0.5)
    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        pad_token_id=0,
        eos_token_id=None,
        sliding_window=sliding_window,
    )
    return MistralForCausalLM(config).eval()


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request):
    return make_model(request.param)


def second_turn(ids: torch.Tensor, inputs: dict[str, torch.Tensor], ends: list[int] | None = None):
    """The whole conversation: the first turn's output and a few new tokens; padding after a row's end is masked."""
    num_new = ids.shape[1] - inputs["attention_mask"].shape[1]
    is_new = torch.arange(num_new) < torch.tensor(ends or [num_new] * len(ids))[:, None]
    more = torch.randint(3, 97, (len(ids), 4), generator=torch.Generator().manual_seed(9))
    mask = torch.cat([inputs["attention_mask"], is_new.long(), torch.ones_like(more)], dim=1)
    return {"input_ids": torch.cat([ids, more], dim=1), "attention_mask": mask}


def assert_same_cache(ours, plain, is_token: torch.Tensor) -> None:
    """Keys and values of all tokens (True in `is_token`, `(B, columns)`); padding may differ."""
    assert ours.get_seq_length() == plain.get_seq_length()
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine.keys.shape == theirs.keys.shape
        kept = is_token[:, plain.get_seq_length() - theirs.keys.shape[2] : plain.get_seq_length()]
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            torch.testing.assert_close(a.transpose(1, 2)[kept], b.transpose(1, 2)[kept], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("with_eos", [False, True])
def test_second_turn_from_a_returned_cache(model, lengths, oracle, with_eos):
    inputs = ragged_batch(lengths)
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "return_dict_in_generate": True}
    eos = None
    if with_eos:
        texts = model.generate(**inputs, **kwargs).sequences[:, max(lengths) :]
        eos = [text[2 + 3 * row].item() for row, text in enumerate(texts)]
    plain = model.generate(**inputs, **kwargs, eos_token_id=eos)
    drafts = OracleDrafter(real_rows(plain.sequences, inputs), *oracle)
    first = [model.generate(**inputs, **kwargs, eos_token_id=eos, assistant=drafts) for _ in range(2)]
    assert all(output.sequences.tolist() == plain.sequences.tolist() for output in first)
    ends = list(map(len, first[0].speculation.drafted_mask))
    turn = second_turn(plain.sequences, inputs, ends)
    for output in first:
        assert_same_cache(output[CACHE_NAME], plain[CACHE_NAME], turn["attention_mask"].bool())
    expected = model.generate(**turn, **kwargs, **{CACHE_NAME: plain[CACHE_NAME]})
    # Plain `generate` goes on with our cache ...
    got = model.generate(**turn, **kwargs, **{CACHE_NAME: first[0][CACHE_NAME]})
    assert got.sequences.tolist() == expected.sequences.tolist()
    # ... and so do we.
    mask = torch.nn.functional.pad(turn["attention_mask"], (0, NUM_NEW), value=1).bool()
    drafts = OracleDrafter([row[keep].tolist() for row, keep in zip(expected.sequences, mask)], *oracle)
    if len(set(ends)) > 1 and model.config.model_type == "mistral":
        with pytest.raises(ValueError, match=r"padding after a row's first token.*no cache from an earlier turn"):
            model.generate(**turn, **kwargs, **{CACHE_NAME: first[1][CACHE_NAME]}, assistant=drafts)
        return
    got = model.generate(**turn, **kwargs, **{CACHE_NAME: first[1][CACHE_NAME]}, assistant=drafts)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got[CACHE_NAME] is first[1][CACHE_NAME]
    assert got.speculation.num_accepted > 0
    assert_same_cache(got[CACHE_NAME], expected[CACHE_NAME], mask)


def test_padding_in_the_middle_of_a_window_that_holds_the_whole_text(same_text):
    model = make_model("mistral", sliding_window=64)
    inputs = ragged_batch((9, 9))
    inputs["attention_mask"][1, 3:6] = 0
    same_text(model, inputs, oracle=(0.8, 3), max_new_tokens=NUM_NEW)
    with pytest.raises(ValueError, match="has a sliding window, which counts that padding too"):
        make_model("mistral").generate(**inputs, max_new_tokens=NUM_NEW, assistant="prompt_lookup")


@pytest.mark.parametrize("branches", [1, 3])
def test_second_turn_with_the_new_tokens_alone(model, branches):
    """transformers takes the new ids alone if the mask covers the whole."""
    inputs = ragged_batch(ONE)
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **kwargs)
    ours = model.generate(**inputs, **kwargs, assistant=OracleDrafter(plain.sequences.tolist(), 0.8, branches))
    turn = second_turn(plain.sequences, inputs)
    turn["input_ids"] = turn["input_ids"][:, plain[CACHE_NAME].get_seq_length() :]
    expected = model.generate(**turn, **kwargs, **{CACHE_NAME: plain[CACHE_NAME]})
    drafts = OracleDrafter(expected.sequences.tolist(), 0.8, branches)
    got = model.generate(**turn, **kwargs, **{CACHE_NAME: ours[CACHE_NAME]}, assistant=drafts)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.speculation.num_accepted > 0


@pytest.mark.parametrize("assistant", ["draft_model", "prompt_lookup"])
@pytest.mark.parametrize("lengths", [ONE, RAGGED])
def test_three_turns(model, assistant, lengths):
    assistant = tiny_llama(1) if assistant == "draft_model" else hf_specdec.PromptLookup(min_ngram_size=1)
    turns = {name: ragged_batch(lengths) for name in ("plain", "ours")}
    caches = dict.fromkeys(turns)
    for _ in range(3):
        outputs = {}
        for name, inputs in turns.items():
            outputs[name] = model.generate(
                **inputs,
                max_new_tokens=6,
                pad_token_id=0,
                return_dict_in_generate=True,
                **{CACHE_NAME: caches[name]},
                assistant=assistant if name == "ours" else None,
            )
            turns[name] = second_turn(outputs[name].sequences, inputs)
            caches[name] = outputs[name][CACHE_NAME]
        assert outputs["ours"].sequences.tolist() == outputs["plain"].sequences.tolist()


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("with_config", [False, True])
def test_own_cache_is_filled_in_place(model, lengths, oracle, with_config):
    inputs = ragged_batch(lengths)
    plain, ours = (DynamicCache(config=model.config) if with_config else DynamicCache() for _ in range(2))
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0}
    expected = model.generate(**inputs, **kwargs, **{CACHE_NAME: plain})
    drafts = OracleDrafter(real_rows(expected, inputs), *oracle)
    got = model.generate(**inputs, **kwargs, **{CACHE_NAME: ours}, assistant=drafts)
    assert got.tolist() == expected.tolist()
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NUM_NEW), value=1).bool()
    assert_same_cache(ours, plain, mask)


def test_a_prompt_read_before(model):
    """A prompt's cache made with the model's own forward pass, as for a shared system prompt."""
    inputs = ragged_batch(ONE)
    expected = model.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0)
    for num_read in (1, 8):
        cache = DynamicCache(config=model.config)
        model(inputs["input_ids"][:, :num_read], **{CACHE_NAME: cache})
        drafts = OracleDrafter(expected.tolist(), 0.8)
        got = model.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0, **{CACHE_NAME: cache}, assistant=drafts)
        assert got.tolist() == expected.tolist()
        assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("implementation", ["static", "offloaded", "offloaded_static"])
def test_other_implementations_get_an_error(model, implementation):
    with pytest.raises(ValueError, match=f"`cache_implementation` is '{implementation}'.*Leave it out"):
        model.generate(
            **ragged_batch(ONE), max_new_tokens=3, cache_implementation=implementation, assistant="prompt_lookup"
        )


def test_quantized_cache_gets_an_error(model):
    """transformers makes the cache before it calls us, and asks for its backend first where that is not installed."""
    with pytest.raises((ValueError, ImportError), match=r"(?i)quantized|quanto"):
        model.generate(
            **ragged_batch(ONE), max_new_tokens=3, cache_implementation="quantized", assistant="prompt_lookup"
        )


def test_dynamic_implementation_works(model, same_text):
    same_text(model, ragged_batch(RAGGED), oracle=(0.8, 1), max_new_tokens=NUM_NEW, cache_implementation="dynamic")


def test_own_cache_of_another_kind_gets_an_error(model):
    cache = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match=r"is a StaticCache.*DynamicCache\(config=model.config\)"):
        model.generate(**ragged_batch(ONE), max_new_tokens=3, **{CACHE_NAME: cache}, assistant="prompt_lookup")


def test_own_offloaded_cache_gets_an_error(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    with pytest.raises(ValueError, match="offloaded DynamicCache"):
        model.generate(**ragged_batch(ONE), max_new_tokens=3, **{CACHE_NAME: cache}, assistant="prompt_lookup")


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_prefill_in_chunks(model, same_text, lengths, chunk_size):
    for oracle in ((0.8, 1), (0.8, 3)):
        same_text(model, ragged_batch(lengths), oracle=oracle, max_new_tokens=NUM_NEW, prefill_chunk_size=chunk_size)


def test_text_longer_than_the_first_buffers(same_text, monkeypatch):
    """Buffers that have to grow, also in the middle of a tree."""
    monkeypatch.setattr("hf_specdec.generation.target.GROWTH_ROOM", 1)
    for lengths in (ONE, RAGGED):
        for oracle in ((0.8, 1), (0.8, 3)):
            same_text(make_model("llama"), ragged_batch(lengths), oracle=oracle, max_new_tokens=30)
