"""Target architectures: the text of plain `generate`, or a clear error; never a wrong text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import VOCAB_SIZE, OracleDrafter, ragged_batch, real_rows
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.gpt_oss import modeling_gpt_oss

from hf_specdec.generation.checks import changing_rope

NUM_TOKENS = 24
WINDOW = 8  # shorter than the longest prompts, crossed by every row
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = COMMON | {"num_key_value_heads": 2}
HEADS_OF_8 = GROUPED | {"head_dim": 8}
LAYERS = ["sliding_attention", "full_attention"]
WINDOWED = HEADS_OF_8 | {"sliding_window": WINDOW, "layer_types": LAYERS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = COMMON | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
ROPE_BY_LAYER = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in LAYERS}
PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}

# Name of the classes without ForCausalLM and Config -> arguments of the config.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": WINDOW},
    "Ministral": WINDOWED,
    "Mixtral": GROUPED | {"num_local_experts": 4, "sliding_window": WINDOW},
    "Qwen2": GROUPED | {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": LAYERS},
    "Qwen2Moe": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 32},
    "Qwen3": HEADS_OF_8,
    "Qwen3Moe": HEADS_OF_8 | EXPERTS,
    "Gemma": HEADS_OF_8,
    "Gemma2": WINDOWED,
    "Gemma3": WINDOWED,
    "Gemma3n": WINDOWED  # layers that share their keys and values
    | PER_LAYER_INPUTS
    | {"num_hidden_layers": 4, "layer_types": LAYERS * 2, "num_kv_shared_layers": 2, "intermediate_size": 64}
    | {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    "Gemma4": WINDOWED
    | PER_LAYER_INPUTS
    | {"num_hidden_layers": 4, "layer_types": LAYERS * 2, "num_kv_shared_layers": 2, "global_head_dim": 8}
    | {"rope_parameters": ROPE_BY_LAYER},
    "Phi": GROUPED,
    "Phi3": GROUPED | {"sliding_window": WINDOW},
    "GptOss": WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2LMHeadModel": COMMON | {"num_hidden_layers": 3},
    "GPTNeoX": COMMON,
    "GPTJ": COMMON | {"rotary_dim": 4},
    "GPTBigCode": COMMON,
    "OPT": COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_hidden_layers": 3, "init_std": 0.3},
    "Falcon": COMMON,
    "StableLm": GROUPED,
    "Starcoder2": GROUPED | {"sliding_window": WINDOW},
    "Olmo2": GROUPED,
    "Olmo3": WINDOWED,
    "Olmoe": GROUPED | EXPERTS,
    "Cohere": GROUPED,
    "Cohere2": WINDOWED,
    "Granite": GROUPED,
    "Glm4": HEADS_OF_8,
    "SmolLM3": GROUPED | {"no_rope_layers": [1, 0]},
    "Exaone4": WINDOWED,
    "DeepseekV3": LATENT,
    "Doge": GROUPED,
    "Llama4": HEADS_OF_8
    | {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": WINDOW}
    | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "ModernBertDecoder": COMMON | {"sliding_window": WINDOW, "layer_types": LAYERS, "local_attention": WINDOW},
    "Moshi": HEADS_OF_8 | {"sliding_window": WINDOW},  # the window lies in the cache alone, not in the mask
    "BertLMHeadModel": COMMON | {"is_decoder": True},
}
CONFIGS = {"Gemma3": "Gemma3Text", "Gemma3n": "Gemma3nText", "Gemma4": "Gemma4Text", "Llama4": "Llama4Text"}
# Seeds of the weights, where seed 1 makes a text that soon repeats itself.
SEEDS = {
    "Qwen3Moe": 5,
    "Gemma3n": 2,
    "GPTNeoX": 2,
    "GPTBigCode": 2,
    "OPT": 8,
    "Falcon": 5,
    "StableLm": 2,
    "Olmo2": 2,
    "Olmoe": 3,
    "Glm4": 2,
    "Doge": 3,
    "BertLMHeadModel": 4,
}


def tiny(name: str, implementation: str | None = None, **config: Any) -> PreTrainedModel:
    """A random model of one of the architectures above, or of another one whose arguments are all given."""
    stem = name.removesuffix("LMHeadModel")
    config_class = getattr(transformers, CONFIGS.get(name, stem) + "Config")
    model_class = getattr(transformers, name if name != stem else name + "ForCausalLM")
    return randomised(model_class, config_class(**ARCHITECTURES.get(name, {}) | config), implementation)


def randomised(model_class: type, config: Any, implementation: str | None = None) -> PreTrainedModel:
    """A model whose weights are all so large that attention is sharp and no two contexts give the same scores."""
    kwargs = {} if implementation is None else {"attn_implementation": implementation}
    model = model_class._from_config(config, **kwargs).eval()
    torch.manual_seed(SEEDS.get(model_class.__name__.removesuffix("ForCausalLM"), 1))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(
    scope="module",
    params=[(name, implementation) for name in ARCHITECTURES for implementation in ("sdpa", "eager")],
    ids="-".join,
)
def model(request) -> PreTrainedModel:
    try:
        return tiny(*request.param)
    except ValueError as error:  # which models support sdpa differs between versions of transformers
        if "scaled_dot_product_attention" not in str(error):
            raise
        pytest.skip("no sdpa")


def new_tokens(sequences: torch.Tensor) -> list[list[int]]:
    return sequences[:, -NUM_TOKENS:].tolist()


@pytest.mark.parametrize("draft", ["chain", "tree"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
def test_batch(model, same_text, draft, do_sample):
    drafts = {"oracle": (0.6, 1)} if draft == "chain" else {"oracle": (0.6, 3), "num_assistant_tokens": 4}
    output = same_text(model, ragged_batch(), max_new_tokens=NUM_TOKENS, do_sample=do_sample, top_k=0, **drafts)
    distinct = [len(set(row)) for row in new_tokens(output.sequences)]
    assert min(distinct) >= (10 if do_sample else 6) and sum(distinct) >= (56 if do_sample else 36), distinct
    assert output.speculation.num_accepted > 0


def test_row_by_row(model):
    """The batch gives each row the text that it has alone; one row alone is assisted too."""
    inputs = ragged_batch()
    settings = {"max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "do_sample": False}
    batch = model.generate(**inputs, **settings)
    texts = real_rows(batch, inputs)
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        alone = {name: value[row : row + 1, -length:] for name, value in inputs.items()}
        got = model.generate(**alone, **settings, assistant=OracleDrafter(texts, 0.6))
        assert got[0].tolist() == texts[row]
        assert row or model.generate(**alone, **settings)[0].tolist() == texts[row]


def test_as_its_own_draft_model(model):
    """A drafter that is the target itself guesses right: its ragged cache holds what the target's holds."""
    settings = {"max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "do_sample": True, "top_k": 0}
    output = model.generate(**ragged_batch(), **settings, assistant=model, return_dict_in_generate=True)
    assert output.speculation.num_accepted >= 0.9 * output.speculation.num_drafted > 0


@pytest.mark.parametrize("name", ["Mistral", "Gemma3n", "Llama4", "Moshi", "DeepseekV3"])
def test_hidden_states_and_attentions(name):
    """Windows, chunks, layers that share keys, latent attention: the shapes and values of plain `generate`."""
    model, inputs = tiny(name, "eager"), ragged_batch()
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True}
    settings |= {"output_hidden_states": True, "output_attentions": True}
    expected = model.generate(**inputs, **settings)
    drafter = OracleDrafter(real_rows(expected.sequences, inputs), 0.6, branches=3)
    got = model.generate(**inputs, **settings, assistant=drafter)
    for field in ("hidden_states", "attentions"):
        for mine, plain in zip(got[field][1:], expected[field][1:], strict=True):
            torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


def refused(
    model: PreTrainedModel, message: str, inputs=None, branches: int = 1, num_tokens: int = 8, **kwargs
) -> None:
    """Checks that the call is refused with this message."""
    inputs = ragged_batch((7,)) if inputs is None else inputs
    drafter = OracleDrafter([], branches=branches)
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, assistant=drafter, max_new_tokens=num_tokens, pad_token_id=0, **kwargs)


def padded_row() -> dict[str, torch.Tensor]:
    return {name: value[:1] for name, value in ragged_batch((7, 12)).items()}


ALIBI = {
    "Bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mpt": {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layers": 2, "n_heads": 4, "use_cache": True},
    "Falcon": {"alibi": True},
}


@pytest.mark.parametrize("name", ALIBI)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
def test_alibi_runs_one_row_with_a_chain(same_text, name, do_sample):
    model = tiny(name, "eager", **ALIBI[name])
    same_text(model, ragged_batch((9,)), max_new_tokens=NUM_TOKENS, do_sample=do_sample, top_k=0, oracle=(0.6, 1))
    refused(model, "A batch needs an explicit attention mask, but .*Generate one row at a time", ragged_batch())
    refused(model, "A draft tree needs an explicit attention mask, but .*chain drafter", branches=3)


def test_window_by_place_in_the_cache_runs_one_row_with_a_chain(same_text):
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": WINDOW}
    model = tiny("GPTNeo", "eager", **sizes, attention_types=[[["global", "local"], 1]])
    same_text(model, ragged_batch((9,)), max_new_tokens=NUM_TOKENS, oracle=(0.6, 1))
    same_text(model, padded_row(), max_new_tokens=NUM_TOKENS, oracle=(0.6, 1))
    refused(model, "A batch needs .* window by the place of a token in the cache", ragged_batch())
    model = tiny("GPTNeo", "eager", **sizes, attention_types=[[["global"], 2]])
    same_text(model, ragged_batch(), max_new_tokens=NUM_TOKENS, oracle=(0.6, 3))


def test_without_position_ids_padding_is_refused(same_text):
    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 64}
    model = tiny("Bart", **sizes, decoder_attention_heads=4, encoder_attention_heads=4, max_position_embeddings=128)
    same_text(model, ragged_batch((9,)), max_new_tokens=NUM_TOKENS, oracle=(0.6, 1))
    refused(model, "takes no position ids and counts padding", padded_row())


@pytest.mark.parametrize("oracle", [(0.6, 1), (0.6, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["Gemma3", "Gemma2", "Llama"])
def test_attention_in_both_directions(same_text, name, oracle):
    """What the prompt sees is what plain `generate` shows it; drafts see nothing that comes after them."""
    model = tiny(name, **({} if name == "Llama" else {"use_bidirectional_attention": True}))
    if name == "Llama":
        model.config.is_causal = False
    for inputs in (ragged_batch((9,)), ragged_batch()):
        same_text(model, inputs, max_new_tokens=NUM_TOKENS, do_sample=True, top_k=0, oracle=oracle)


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
ROPES = {
    "Llama": {
        "max_position_embeddings": 30,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
    "Phi3": {"original_max_position_embeddings": 30, "rope_parameters": LONG_ROPE | {"factor": 4.0}},
    "Qwen2": {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 30, "factor": 4.0}},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_embedding_that_changes_with_the_length(same_text, name):
    model = tiny(name, **ROPES[name])
    inputs = ragged_batch((5, 11, 3, 7))
    same_text(model, inputs, max_new_tokens=20, do_sample=True, top_k=0, oracle=(1.0, 1))  # reads 30 tokens
    refused(model, "changes its rotary embedding .* beyond 30 tokens, and this one may reach 31", inputs, num_tokens=21)
    if name == "Llama":
        refused(model, "changes its rotary embedding", ragged_batch((31,)))
        return
    refused(model, "changes its rotary embedding", ragged_batch((31, 5)))
    same_text(model, ragged_batch((31, 35)), max_new_tokens=20, do_sample=True, top_k=0, oracle=(0.6, 3))


def test_rotary_embedding_of_one_kind_of_layers():
    long = LONG_ROPE | {"original_max_position_embeddings": 30, "factor": 4.0}
    model = tiny("Gemma3", rope_parameters=ROPE_BY_LAYER | {"full_attention": long})
    assert list(changing_rope(model)) == [("longrope", 30)]
    assert not list(changing_rope(tiny("Gemma3")))


def test_attention_scaled_by_the_length_of_the_cache(same_text):
    model = tiny("Llama4", floor_scale=16, attn_scale=0.5)
    same_text(model, ragged_batch((9,)), max_new_tokens=NUM_TOKENS, do_sample=True, top_k=0, oracle=(0.6, 1))
    same_text(model, ragged_batch((5, 3)), max_new_tokens=9, oracle=(0.6, 1))
    for inputs, branches in ((ragged_batch(), 1), (padded_row(), 1), (ragged_batch((13,)), 3)):
        refused(model, "scales attention by the length of the cache beyond 15 tokens", inputs, branches)


def test_attention_that_picks_its_tokens():
    refused(tiny("Doge", keep_window_size=16), "picks which 16 tokens", ragged_batch((9,)))
    refused(tiny("Doge", is_moe=True, num_experts=4, num_experts_per_tok=2), "mixes the tokens of a pass")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Llama"])
def test_positions_that_the_model_counts_itself(same_text, monkeypatch, name):
    """Told them anyway, a model with rotary positions does the same; others may begin to count anywhere."""
    model = tiny(name)
    prepare = type(model).prepare_inputs_for_generation

    def without_positions(self, *args, **kwargs):
        inputs = prepare(self, *args, **kwargs)
        return {name: value for name, value in inputs.items() if name != "position_ids"}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", without_positions)
    if name == "Llama":
        same_text(model, ragged_batch(), max_new_tokens=NUM_TOKENS, do_sample=True, top_k=0, oracle=(0.6, 3))
    else:
        refused(model, "counts positions in its own way")


def test_model_that_takes_one_token_a_pass():
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_decoder_layers": 1, "num_decoder_attention_heads": 4}
    sizes |= {"decoder_ffn_dim": 64, "is_encoder_decoder": False, "is_decoder": True, "add_cross_attention": False}
    refused(tiny("ProphetNet", "eager", **sizes), "it reads one token a pass")
    model = tiny("Llama")
    model.config.recurrent_kv_cache_mode = "last_loop"
    refused(model, "earlier loops see what the last loop made")


def test_model_that_reads_the_whole_text_for_every_token():
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 64}
    refused(tiny("CpmAnt", "eager", **sizes, num_hidden_layers=2), "reads the whole text again")


MAMBA = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
MAMBA_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
INDEXED = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, "layer_types": ["indexed_attention"] * 2}
OTHER_STATE = {
    "Mamba": MAMBA | {"state_size": 8},
    "Mamba2": MAMBA | {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2},
    "FalconMamba": MAMBA | {"state_size": 8},
    "Rwkv": MAMBA | {"attention_hidden_size": 32, "context_length": 64},
    "Jamba": GROUPED | EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "Bamba": GROUPED | MAMBA_HEADS | {"attn_layer_indices": [1]},
    "FalconH1": GROUPED | MAMBA_HEADS | {"mamba_d_ssm": 64},
    "NemotronH": HEADS_OF_8
    | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8}
    | {"n_groups": 1},
    "RecurrentGemma": GROUPED | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW},
    "Qwen3Next": HEADS_OF_8 | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "MiniMax": HEADS_OF_8 | {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
    "Lfm2": GROUPED | {"layer_types": ["conv", "full_attention"]},
    "DeepseekV32": LATENT | INDEXED,
}


class ForwardWasCalled(Exception):
    """Raised by a hook."""


def fail(*args) -> None:
    raise ForwardWasCalled


@pytest.mark.parametrize("lengths", [(7,), (5, 11)], ids=["one", "batch"])
@pytest.mark.parametrize("name", OTHER_STATE)
def test_state_that_cannot_be_rolled_back_is_refused_before_any_pass(name, lengths):
    model = tiny(name, **OTHER_STATE[name])
    inputs = ragged_batch(lengths)
    assert model.generate(**inputs, max_new_tokens=3, pad_token_id=0).shape[1] == max(lengths) + 3
    model.register_forward_pre_hook(fail)
    refused(model, f"the target {type(model).__name__} keeps .* cannot be rolled back", inputs)
    with pytest.raises(ValueError, match=f"the drafter {type(model).__name__} keeps .* cannot be rolled back"):
        tiny("Llama").generate(**inputs, assistant=model, max_new_tokens=8, pad_token_id=0)


ENCODER = {"vocab_size": VOCAB_SIZE, "d_model": 32, "decoder_start_token_id": 1, "pad_token_id": 0}
LAYER_COUNTS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
ENCODER_DECODERS = {
    "T5": ENCODER | {"d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
    "Bart": ENCODER | LAYER_COUNTS | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    "Whisper": ENCODER | LAYER_COUNTS | {"num_mel_bins": 8, "max_source_positions": 16, "eos_token_id": 2},
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoder_is_refused(name):
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    model = randomised(model_class, getattr(transformers, f"{name}Config")(**ENCODER_DECODERS[name]))
    inputs = {"input_features": torch.randn(1, 8, 32)} if name == "Whisper" else ragged_batch((7,))
    model.get_decoder().register_forward_pre_hook(fail)
    refused(model, f"the target {type(model).__name__} is an encoder-decoder model", inputs)


@pytest.mark.parametrize("name, instead", [("Gemma3", "sdpa"), ("GptOss", "eager")])
def test_attention_implementation_without_explicit_masks_is_switched_for_the_call(same_text, name, instead):
    function = sdpa_attention_forward if instead == "sdpa" else modeling_gpt_oss.eager_attention_forward
    used = []

    def own_attention(*args, **kwargs):
        used.append("own")
        return function(*args, **kwargs)

    model = tiny(name, instead)
    monitored = model.generate(**ragged_batch(), max_new_tokens=NUM_TOKENS, pad_token_id=0)
    AttentionInterface.register("own", own_attention)
    AttentionMaskInterface.register("own", sdpa_mask if instead == "sdpa" else eager_mask)
    model.set_attn_implementation("own")
    drafter = OracleDrafter(real_rows(monitored, ragged_batch()), branches=3)
    got = model.generate(**ragged_batch(), max_new_tokens=NUM_TOKENS, pad_token_id=0, assistant=drafter)
    assert got.tolist() == monitored.tolist() and not used
    assert model.config._attn_implementation == "own"
    same_text(model, ragged_batch((9,)), max_new_tokens=NUM_TOKENS, oracle=(0.6, 1))
    assert used  # one row with a chain runs on it


VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
IMAGE_TOKEN = VOCAB_SIZE - 1


def multimodal(name: str) -> PreTrainedModel:
    text = {"Gemma3": ("gemma3_text", "Gemma3"), "PaliGemma": ("gemma", "Gemma")}.get(name, ("llama", "Llama"))
    text_config = {"model_type": text[0], **ARCHITECTURES[text[1]]}
    config: dict[str, Any] = {"tie_word_embeddings": False, "image_token_id": IMAGE_TOKEN}
    if name == "Llava":
        config |= {"vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}}
        config |= {"vision_feature_layer": -1}
    elif name == "Qwen2_5_VL":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        text_config = GROUPED | {"rope_parameters": rope}
        config |= {"vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}}
    else:
        vision = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
        config |= {"vision_config": vision, "mm_tokens_per_image": 4, "projection_dim": 32}
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    return randomised(model_class, config_class(text_config=text_config, **config))


@pytest.mark.parametrize("name", ["Llava", "Gemma3", "PaliGemma"])
def test_multimodal_wrapper_with_text_alone(same_text, name):
    model = multimodal(name)
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": True, "top_k": 0}
    for oracle in ((0.6, 1), (0.6, 3)):
        same_text(model, ragged_batch((9,)), oracle=oracle, **settings)
        same_text(model, ragged_batch(), oracle=oracle, **settings)


@pytest.mark.parametrize("name", ["Llava", "Gemma3"])
def test_multimodal_wrapper_with_an_image(same_text, name):
    model = multimodal(name)
    inputs = ragged_batch((9, 12))
    inputs["input_ids"][:, -8:-4] = IMAGE_TOKEN
    inputs["pixel_values"] = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    for oracle in ((0.6, 1), (0.6, 3)):
        same_text(model, inputs, oracle=oracle, max_new_tokens=NUM_TOKENS, do_sample=True, top_k=0)


def test_positions_in_three_dimensions_are_refused():
    refused(multimodal("Qwen2_5_VL"), "3D position ids")
