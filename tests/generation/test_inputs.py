"""Prompts, targets and drafters of every kind that plain `generate` takes."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from conftest import OracleDrafter, early_layers, ragged_batch, real_rows, tiny_llama
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import hf_specdec
from hf_specdec.generation.cache import CACHE_NAME

NUM_NEW = 12
ONE, RAGGED = (7,), (5, 11, 3)
ORACLES = {"chain": (0.8, 1), "tree": (0.8, 3), "right": (1.0, 1)}
CASES = [
    pytest.param(lengths, oracle, id=f"{len(lengths)}-{name}")
    for lengths in (ONE, RAGGED)
    for name, oracle in ORACLES.items()
]


def make_target():
    return tiny_llama(2, seed=3, initializer_range=0.5)


def make_gpt2(n_positions: int, num_layers: int = 2, seed: int = 0, **config) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 97, "n_embd": 32, "n_head": 4, "n_layer": num_layers, "initializer_range": 0.5}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes | tokens | config, n_positions=n_positions)).eval()


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
def test_embeddings(target, lengths, oracle, with_ids, do_sample):
    """The output holds new tokens alone, unless the ids are given too."""
    inputs = ragged_batch(lengths)
    prompt = {"inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]).detach()}
    prompt |= inputs if with_ids else {"attention_mask": inputs["attention_mask"]}
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "do_sample": do_sample, "repetition_penalty": 1.1}
    torch.manual_seed(5)
    expected = target.generate(**prompt, **kwargs)
    assert expected.shape[1] == NUM_NEW + (max(lengths) if with_ids else 0)
    texts = real_rows(expected, inputs) if with_ids else expected.tolist()
    for assistant in (OracleDrafter(texts, *oracle), tiny_llama(1), hf_specdec.PromptLookup(min_ngram_size=1)):
        torch.manual_seed(5)
        assert target.generate(**prompt, **kwargs, assistant=assistant).tolist() == expected.tolist()


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
def test_no_eos_and_no_pad_token(same_text, oracle):
    model = tiny_llama(2, seed=3, initializer_range=0.5, pad_token_id=None, bos_token_id=None)
    for lengths in ((1,), ONE, (6, 6)):
        same_text(model, ragged_batch(lengths), oracle=oracle, max_new_tokens=NUM_NEW, pad_token_id=None)


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
def test_pad_token_is_the_eos_token(target, same_text, oracle):
    inputs = ragged_batch(RAGGED)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0)
    eos = text[0, max(RAGGED) + 4].item()
    same_text(target, inputs, oracle=oracle, max_new_tokens=NUM_NEW, eos_token_id=eos, pad_token_id=None)


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
@pytest.mark.parametrize("lengths", [(1,), (1, 1), (1, 8)])
def test_one_token_and_nothing_but_the_start(target, same_text, oracle, lengths):
    same_text(target, ragged_batch(lengths), oracle=oracle, max_new_tokens=NUM_NEW)
    if lengths == (1,):
        expected = target.generate(max_new_tokens=NUM_NEW)  # the BOS token of the config
        got = target.generate(max_new_tokens=NUM_NEW, assistant=OracleDrafter(expected.tolist(), *oracle))
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
def test_a_row_of_padding_alone(target, same_text, oracle):
    """What a tokenizer makes of an empty prompt in a batch."""
    inputs = ragged_batch(RAGGED)
    inputs["attention_mask"][1] = 0
    inputs["input_ids"][1] = 0
    same_text(target, inputs, oracle=oracle, max_new_tokens=NUM_NEW)


@pytest.mark.parametrize("padding", ["right", "middle"])
@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
def test_padding_anywhere(target, same_text, oracle, padding):
    inputs = ragged_batch((9, 9))
    hidden = slice(6, 9) if padding == "right" else slice(2, 5)
    inputs["attention_mask"][1, hidden] = 0
    same_text(target, inputs, oracle=oracle, max_new_tokens=NUM_NEW)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
def test_own_position_ids(target, same_text, lengths, oracle):
    inputs = ragged_batch(lengths)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs["position_ids"] = 3 * positions + torch.arange(len(lengths))[:, None]
    same_text(target, inputs, oracle=oracle, max_new_tokens=NUM_NEW)


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float32])
def test_dtypes_of_ids_and_mask(target, oracle, dtype):
    inputs = ragged_batch(RAGGED)
    name = "input_ids" if dtype == torch.int32 else "attention_mask"
    inputs[name] = inputs[name].to(dtype)
    expected = target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0)
    drafts = OracleDrafter(real_rows(expected, inputs), *oracle)
    got = target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0, assistant=drafts)
    assert got.tolist() == expected.tolist()
    assert got.dtype == expected.dtype


def test_inference_mode(target, same_text):
    with torch.inference_mode():
        same_text(target, ragged_batch(RAGGED), early_layers(target, 1), max_new_tokens=NUM_NEW, do_sample=True)


def test_draft_length_from_the_generation_config(target):
    model = copy.deepcopy(target)
    lengths = []
    for name, assistant in (
        ("num_assistant_tokens", OracleDrafter([], 1.0)),
        ("prompt_lookup_num_tokens", hf_specdec.PromptLookup(min_ngram_size=1)),
    ):
        setattr(model.generation_config, name, 3)
        for given in ({}, {name: 2}):
            output = model.generate(
                torch.tensor([[5, 6, 7, 5, 6, 7, 5]]),
                max_new_tokens=NUM_NEW,
                assistant=assistant,
                return_dict_in_generate=True,
                **given,
            )
            lengths.append(len(output.speculation.drafted_per_depth))
    assert lengths == [3, 2, 3, 2], "what is given to `generate` wins over the config"


@pytest.mark.parametrize("do_sample", [False, True])
def test_several_sequences_for_a_prompt(target, same_text, do_sample):
    if do_sample:
        for oracle in ORACLES.values():
            inputs = ragged_batch((5, 9))
            expanded = {name: value.repeat_interleave(3, 0) for name, value in inputs.items()}
            torch.manual_seed(5)
            texts = target.generate(
                **inputs, max_new_tokens=NUM_NEW, pad_token_id=0, do_sample=True, num_return_sequences=3
            )
            torch.manual_seed(5)
            got = target.generate(
                **inputs,
                max_new_tokens=NUM_NEW,
                pad_token_id=0,
                do_sample=True,
                num_return_sequences=3,
                assistant=OracleDrafter(real_rows(texts, expanded), *oracle),
            )
            assert got.tolist() == texts.tolist()


# PEFT


def lora(model, seed: int = 7):
    """LoRA with weights that do something (PEFT begins with zeros)."""
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    )
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
def test_lora_target(target, same_text, lengths, oracle):
    inputs = ragged_batch(lengths)
    model = lora(make_target())
    output = same_text(model, inputs, oracle=oracle, max_new_tokens=NUM_NEW)
    assert output.sequences.tolist() != target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0).tolist()
    assert output.speculation.num_accepted > 0


@pytest.mark.skipif(CACHE_NAME != "past_key_values", reason="PEFT does not know this transformers' name of the cache")
@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning"])
def test_soft_prompt_target(target, same_text, lengths, oracle, kind):
    torch.manual_seed(7)
    config = {"prompt_tuning": PromptTuningConfig, "prefix_tuning": PrefixTuningConfig}[kind]
    model = get_peft_model(make_target(), config(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    inputs = ragged_batch(lengths)
    output = same_text(model, inputs, oracle=oracle, max_new_tokens=NUM_NEW)
    assert output.sequences.tolist() != target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0).tolist()
    assert output.speculation.num_accepted > 0


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("do_sample", [False, True])
def test_lora_drafter(target, same_text, lengths, do_sample):
    drafter = lora(early_layers(target, 1))
    output = same_text(target, ragged_batch(lengths), drafter, max_new_tokens=NUM_NEW, do_sample=do_sample)
    assert output.speculation.num_drafted > 0


def test_soft_prompt_drafter(target, same_text):
    """Drafts as its base model does: a guess like any other."""
    drafter = get_peft_model(early_layers(target, 1), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    output = same_text(target, ragged_batch(RAGGED), drafter.eval(), max_new_tokens=NUM_NEW)
    assert output.speculation.num_drafted > 0


def test_both_with_adapters(same_text):
    same_text(lora(make_target()), ragged_batch(RAGGED), lora(early_layers(make_target(), 1)), max_new_tokens=NUM_NEW)


# Where the weights lie


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("placement", ["cpu_offload", "dispatch"])
def test_accelerate(target, same_text, lengths, oracle, placement):
    """Offloaded parameters are on the meta device between passes; ids follow the inputs, not `model.device`."""
    inputs = ragged_batch(lengths)
    expected = target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0)
    model = copy.deepcopy(target)
    if placement == "cpu_offload":
        model = cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.device.type == "meta"
    else:
        model = dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    output = same_text(model, inputs, oracle=oracle, max_new_tokens=NUM_NEW)
    assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.num_accepted > 0


@pytest.mark.parametrize("offloaded", ["target", "drafter", "both"])
def test_offloaded_draft_model(target, same_text, offloaded):
    models = {"target": copy.deepcopy(target), "drafter": early_layers(target, 1)}
    for name, model in models.items():
        if offloaded in (name, "both"):
            cpu_offload(model, execution_device=torch.device("cpu"))
    same_text(models["target"], ragged_batch(RAGGED), models["drafter"], max_new_tokens=NUM_NEW, do_sample=True)
    for model in models.values():
        remove_hook_from_submodules(model)


def test_draft_model_by_name_for_an_offloaded_target(target, same_text, tmp_path):
    early_layers(target, 1).save_pretrained(tmp_path / "draft")
    model = cpu_offload(copy.deepcopy(target), execution_device=torch.device("cpu"))
    same_text(model, ragged_batch(RAGGED), str(tmp_path / "draft"), max_new_tokens=NUM_NEW)
    same_text(model, ragged_batch(ONE), tmp_path / "draft", max_new_tokens=NUM_NEW)


# Drafters of other sizes


def resized(model, vocab_size: int):
    """The same model with rows added to its vocabulary or taken away."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[97:] *= 40  # the padding would win if it were looked at
    return model


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"do_sample": True, "assistant_sampling": "rejection"}])
@pytest.mark.parametrize("vocab_size", [64, 90, 96, 98, 128])
def test_drafter_with_another_padding_of_the_vocabulary(target, same_text, lengths, options, vocab_size):
    drafter = resized(early_layers(target, 1), vocab_size)
    inputs = ragged_batch(lengths)
    if vocab_size < 97:  # ids the drafter lacks: none in the prompt here, but the text may hold some
        inputs["input_ids"] = inputs["input_ids"] % vocab_size
    if "assistant_sampling" in options:
        output = target.generate(
            **inputs,
            **options,
            max_new_tokens=NUM_NEW,
            pad_token_id=0,
            return_dict_in_generate=True,
            assistant=drafter,
        )
    else:
        output = same_text(target, inputs, drafter, max_new_tokens=NUM_NEW, **options)
    assert output.speculation.num_drafted > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_padding_of_a_vocabulary_is_never_drafted(target, same_text, do_sample):
    """With the target's own weights every draft is right, however well the padding scores."""
    drafter = resized(target, 128)
    output = same_text(target, ragged_batch(RAGGED), drafter, max_new_tokens=NUM_NEW, do_sample=do_sample)
    assert output.speculation.acceptance_rate == 1.0


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("n_positions", [2, 8, 10, 11, 15, 22, 23])
def test_drafter_with_a_shorter_position_table(same_text, lengths, n_positions):
    """Drafts get shorter and stop; the text goes on."""
    target = make_gpt2(64)
    drafter = make_gpt2(n_positions, num_layers=1, seed=1)
    output = same_text(target, ragged_batch(lengths), drafter, max_new_tokens=NUM_NEW)
    assert (output.speculation.num_drafted > 0) == (n_positions >= max(lengths))


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
def test_target_whose_position_table_ends_with_the_text(same_text, lengths, oracle):
    """The last token is never read, so a table of prompt + new - 1 is enough for plain `generate`."""
    for n_positions in (max(lengths) + NUM_NEW - 1, max(lengths) + NUM_NEW):
        same_text(make_gpt2(n_positions), ragged_batch(lengths), oracle=oracle, max_new_tokens=NUM_NEW)


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
def test_returned_cache_where_the_position_table_ends(same_text, lengths):
    """Rows that stop early are read to the end for the cache that is returned: no position past the table's."""
    model = make_gpt2(max(lengths) + NUM_NEW - 1)
    inputs = ragged_batch(lengths)
    text = model.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0)
    for row in range(len(lengths)):
        eos = text[row, max(lengths) + 4].item()
        same_text(model, inputs, oracle=(0.9, 1), max_new_tokens=NUM_NEW, eos_token_id=eos)


def test_target_drafts_for_itself(target, same_text):
    output = same_text(target, ragged_batch(RAGGED), target, max_new_tokens=NUM_NEW)
    assert output.speculation.acceptance_rate == 1.0
