"""Draft layers: what they share with the target, what is stored, and the text that stays as it is."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers
from conftest import VOCAB_SIZE, ragged_batch, tiny_llama
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from hf_specdec import AutoDrafter, DraftLayersConfig, DraftLayersModel, DraftModel
from hf_specdec.modeling.draft_layers import DraftLayers
from hf_specdec.modeling.draft_layers.modeling import _heads

IDS = torch.tensor([[5, 17, 33, 41, 7], [8, 90, 3, 22, 61]])
EVERY_OTHER = torch.arange(1, VOCAB_SIZE, 2)
SCRAMBLED = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:60]
VOCABULARIES = pytest.mark.parametrize("token_ids", [None, SCRAMBLED], ids=["whole", "reduced"])
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8}
ARCHITECTURES = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {"use_sliding_window": True} | WINDOWED,
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": WINDOWED | {"final_logit_softcapping": 2.0},
    "Gemma3": WINDOWED,
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "SmolLM3": {"no_rope_layers": [1, 0, 1, 0]},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4},
}


def tiny(name: str, **config) -> PreTrainedModel:
    config_class = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")
    torch.manual_seed(1)
    model = getattr(transformers, name + "ForCausalLM")(config_class(**COMMON | ARCHITECTURES.get(name, {}) | config))
    model.generation_config.eos_token_id = None
    return model.eval()


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def snapshot(model: nn.Module) -> tuple:
    """All that could be changed on a model, with the identity of its parameters."""
    modules = {name: (id(module), sorted(vars(module)), module.training) for name, module in model.named_modules()}
    parameters = {
        name: (id(parameter), parameter.data_ptr(), parameter.requires_grad, parameter.detach().clone().tolist())
        for name, parameter in model.named_parameters()
    }
    return modules, parameters, model.config.to_dict(), model.generation_config.to_dict()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_layers_of_a_target_make_its_own_logits(name):
    target = tiny(name)
    expected = logits(target)
    layers = list(range(4))
    assert torch.equal(logits(DraftLayersModel.for_target(target, layers=layers).causal_lm(target)), expected)
    reduced = DraftLayersModel.for_target(target, layers=layers, draft_token_ids=SCRAMBLED)
    torch.testing.assert_close(logits(reduced.causal_lm(target)), expected[..., SCRAMBLED])


@pytest.mark.parametrize("name", ["Gemma3", "SmolLM3", "Mixtral"])
def test_other_architectures(name, same_text, tmp_path):
    target = tiny(name)
    drafter = DraftLayersModel.for_target(target, layers=[1, 2], draft_token_ids=SCRAMBLED)
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(str(tmp_path), target=target)
    assert torch.equal(logits(loaded.causal_lm(target)), logits(drafter.causal_lm(target)))
    same_text(target, ragged_batch(), loaded, max_new_tokens=12)


@VOCABULARIES
@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True}, {"assistant_confidence_threshold": 0.1}])
def test_same_text(target, same_text, token_ids, kwargs):
    drafter = DraftLayersModel.for_target(target, 3, draft_token_ids=token_ids)
    output = same_text(target, ragged_batch(), drafter, max_new_tokens=24, **kwargs)
    assert output.speculation.num_accepted > 5
    same_text(target, {"input_ids": IDS[:1, :1]}, DraftLayers(drafter, num_draft_tokens=1), max_new_tokens=9, **kwargs)


def test_a_whole_copy_is_always_right(target, same_text):
    """With the target's layers every draft that can be proposed is right, greedy and with the shared noise."""
    for token_ids in (None, torch.arange(VOCAB_SIZE).flip(0)):
        drafter = DraftLayersModel.for_target(target, layers=[0, 1, 2, 3], draft_token_ids=token_ids)
        for kwargs in ({}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_k": 20}):
            statistics = same_text(target, {"input_ids": IDS[:1]}, drafter, **kwargs).speculation
            assert statistics.num_accepted == statistics.num_drafted > 20


def test_only_ids_of_the_draft_vocabulary_are_drafted(target):
    drafter = DraftLayersModel.for_target(target, 3, draft_token_ids=EVERY_OTHER)
    drafted = []

    class Watched(DraftLayers):
        def propose(self, run, num_draft_tokens):
            tree = super().propose(run, num_draft_tokens)
            drafted.append(tree)
            return tree

    for sampling in ("shared_noise", "rejection"):
        kwargs = {"assistant_sampling": sampling, "do_sample": True, "max_new_tokens": 30, "pad_token_id": 0}
        target.generate(**ragged_batch(), assistant=Watched(drafter), **kwargs)
    assert all((tree.tokens % 2 == 1).all() for tree in drafted)
    probs = drafted[-1].draft_probs
    assert probs.shape[-1] == VOCAB_SIZE
    assert (probs[..., ::2] == 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:2]))


@VOCABULARIES
def test_rejection_sampling(target, token_ids):
    drafter = DraftLayersModel.for_target(target, 3, draft_token_ids=token_ids)
    torch.manual_seed(0)
    output = target.generate(
        **ragged_batch(),
        assistant=drafter,
        do_sample=True,
        assistant_sampling="rejection",
        max_new_tokens=30,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[1] == 17 + 30
    assert output.speculation.num_accepted > 10


def test_rejection_sampling_keeps_the_distribution():
    """The first token after a prompt that the drafter guesses from half of the vocabulary: chi-square, 15 degrees."""
    target = tiny_llama(2, vocab_size=16)
    drafter = DraftLayersModel.for_target(target, 1, draft_token_ids=torch.tensor([9, 2, 4, 11, 0, 15, 7, 6]))
    ids = torch.tensor([[5, 3]]).expand(4000, 2)
    torch.manual_seed(0)
    kwargs = {"do_sample": True, "top_k": 0, "assistant_sampling": "rejection", "num_assistant_tokens": 2}
    texts = target.generate(ids, assistant=drafter, max_new_tokens=3, pad_token_id=0, **kwargs)
    for place in (2, 3):
        expected = torch.zeros(16, dtype=torch.float64)
        for start in texts[:, :place].unique(dim=0):  # given what stands before it
            share = (texts[:, :place] == start).all(1).sum()
            expected += share * logits(target, start[None])[0, -1].double().softmax(-1)
        observed = texts[:, place].bincount(minlength=16)
        assert ((observed - expected) ** 2 / expected).sum() < 55  # 1e-6


def test_the_target_stays_as_it_was(target):
    target = copy.deepcopy(target)
    target.model.norm.weight.requires_grad_(False)
    before = snapshot(target)
    for token_ids in (None, SCRAMBLED):
        drafter = DraftLayersModel.for_target(target, 2, draft_token_ids=token_ids)
        target.generate(IDS, assistant=drafter, max_new_tokens=8, pad_token_id=0)
        drafter(target, IDS, None).sum().backward()
        drafter.half().double()
        assert drafter.causal_lm(target).lm_head.out_features == (60 if token_ids is not None else VOCAB_SIZE)
    assert snapshot(target) == before
    assert all(parameter.grad is None for parameter in target.model.layers.parameters())


def test_the_drafter_owns_its_layers_alone(target):
    drafter = DraftLayersModel.for_target(target, 2, draft_token_ids=SCRAMBLED)
    before = list(drafter.state_dict())
    drafter.causal_lm(target)
    assert list(drafter.state_dict()) == before
    assert {name.split(".")[2] for name in before if name.startswith("body.")} == {"layers", "norm"}
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    assert not any(parameter.data_ptr() in shared for parameter in drafter.parameters())


def test_initial_weights(target):
    drafter = DraftLayersModel.for_target(target, 3, intermediate_size=20)
    layers = drafter.body.model.layers
    for own, index in zip(layers, (0, 2, 3)):
        mlp, source = own.mlp, target.model.layers[index].mlp
        assert torch.equal(mlp.gate_proj.weight, source.gate_proj.weight[:20])
        assert torch.equal(mlp.down_proj.weight, source.down_proj.weight[:, :20])
        assert torch.equal(own.self_attn.q_proj.weight, target.model.layers[index].self_attn.q_proj.weight)
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2]
    assert torch.equal(drafter.body.model.norm.weight, target.model.norm.weight)
    one = DraftLayersModel.for_target(target)
    assert torch.equal(one.body.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight)


def test_settings_of_the_layers_come_along():
    target = tiny("SmolLM3", layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8)
    config = DraftLayersModel.for_target(target, layers=[3, 0]).config.layer_config
    assert config["no_rope_layers"] == [0, 1]
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


@VOCABULARIES
def test_round_trip(target, tmp_path, same_text, token_ids):
    drafter = DraftLayersModel.for_target(target, 2, intermediate_size=24, draft_token_ids=token_ids)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    drafter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any("embed" in name or "head" in name for name in stored)
    assert sum(tensor.numel() for tensor in stored.values() if tensor.is_floating_point()) == drafter.num_parameters()
    loaded = AutoDrafter.from_pretrained(str(tmp_path), target=target)
    assert type(loaded) is DraftLayersModel
    assert torch.equal(logits(loaded.causal_lm(target)), logits(drafter.causal_lm(target)))
    kwargs = {"max_new_tokens": 30, "pad_token_id": 0, "return_dict_in_generate": True}
    counts = [target.generate(IDS, assistant=d, **kwargs).speculation for d in (drafter, loaded, str(tmp_path))]
    assert len({tuple(statistics.accepted_per_depth) for statistics in counts}) == 1
    same_text(target, ragged_batch(), str(tmp_path), do_sample=True, max_new_tokens=9)


def test_small_for_a_small_target():
    """The sizes of SmolLM2-135M."""
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    target = tiny_llama(2, vocab_size=300, intermediate_size=1536, **sizes)
    for num_layers, intermediate_size in ((1, None), (2, 600)):
        drafter = DraftLayersModel.for_target(target, num_layers, intermediate_size)
        assert 2 * drafter.num_parameters() < 8e6


def test_positions_stay_exact_in_half_precision(target, tmp_path):
    drafter = DraftLayersModel.for_target(target)
    exact = drafter.body.model.rotary_emb.inv_freq.clone()
    drafter.bfloat16().save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(str(tmp_path))
    for model in (drafter, loaded, copy.deepcopy(loaded).half()):
        assert model.dtype != torch.float32
        assert torch.equal(model.body.model.rotary_emb.inv_freq, exact)


@VOCABULARIES
def test_dtype_of_its_own(target, same_text, token_ids):
    drafter = DraftLayersModel.for_target(target, 3, draft_token_ids=token_ids)
    same_text(target, ragged_batch(), drafter.bfloat16(), max_new_tokens=9)
    half = copy.deepcopy(target).bfloat16()
    half.generate(**ragged_batch(), assistant=drafter.float(), max_new_tokens=8, pad_token_id=0)


def test_the_rows_of_the_head_are_copied_once_for_a_target(target):
    target = copy.deepcopy(target)
    drafter = DraftLayersModel.for_target(target, draft_token_ids=SCRAMBLED)
    first = drafter.causal_lm(target).lm_head
    assert type(first) is nn.Linear and not first.weight.requires_grad
    assert drafter.causal_lm(target).lm_head is first
    with torch.no_grad():
        target.lm_head.weight.mul_(2)
    second = drafter.causal_lm(target).lm_head
    assert torch.equal(second.weight, 2 * first.weight)
    drafter.draft_token_ids.copy_(SCRAMBLED.flip(0))
    assert torch.equal(drafter.causal_lm(target).lm_head.weight, second.weight.flip(0))
    head = weakref.ref(target.lm_head)
    assert len(_heads[drafter]) == 1
    del target, first, second
    gc.collect()
    assert head() is None
    assert len(_heads[drafter]) == 0


def test_rows_copied_in_inference_mode_serve_training_too(target):
    drafter = DraftLayersModel.for_target(target, draft_token_ids=SCRAMBLED)
    with torch.inference_mode():
        target.generate(IDS, assistant=drafter, max_new_tokens=4, pad_token_id=0)
    drafter.causal_lm(target)(IDS).logits.sum().backward()
    assert drafter.body.model.norm.weight.grad is not None


def test_head_with_a_bias():
    target = tiny_llama(4)
    target.lm_head = nn.Linear(32, VOCAB_SIZE)
    drafter = DraftLayersModel.for_target(target, layers=[0, 1, 2, 3], draft_token_ids=SCRAMBLED)
    torch.testing.assert_close(logits(drafter.causal_lm(target)), logits(target)[..., SCRAMBLED])


def test_adapted_target(target, same_text):
    peft = pytest.importorskip("peft")
    modules = ["q_proj", "lm_head", "embed_tokens"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=modules, init_lora_weights=False)
    torch.manual_seed(0)
    drafter = DraftLayersModel.for_target(target, layers=[0, 1, 2, 3], draft_token_ids=SCRAMBLED)
    adapted = peft.get_peft_model(copy.deepcopy(target), config).eval()
    with torch.no_grad():
        ends = drafter.causal_lm(adapted)
        states = drafter(adapted, IDS, None)
        torch.testing.assert_close(ends(IDS).logits, adapted.lm_head(states)[..., SCRAMBLED])
    same_text(adapted, {"input_ids": IDS}, drafter)
    with pytest.raises(
        ValueError, match=r"a LlamaDecoderLayer of the target cannot be copied because of self_attn.q_proj.base_"
    ):
        DraftLayersModel.for_target(adapted)


def test_a_draft_model_with_all_ids_in_order_drafts_the_same(target):
    drafter = DraftLayersModel.for_target(target, 2)
    kwargs = {"max_new_tokens": 30, "pad_token_id": 0, "return_dict_in_generate": True, "do_sample": True}
    counts = []
    for assistant in (DraftModel(drafter.causal_lm(target)), DraftLayers(drafter, 5)):
        torch.manual_seed(0)
        counts.append(target.generate(IDS, assistant=assistant, **kwargs).speculation.accepted_per_depth)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_layers": 0}, r"`num_layers` is 0; expected 1 to 4, the layers of the target"),
        ({"num_layers": 5}, r"`num_layers` is 5; expected 1 to 4"),
        ({"layers": []}, r"`layers` is \[\]; expected at least one of 0 to 3"),
        ({"layers": [0, 4]}, r"`layers` is \[0, 4\]; expected at least one of 0 to 3"),
        ({"intermediate_size": 65}, r"`intermediate_size` is 65; expected 1 to 64, the target's, or None"),
        ({"draft_token_ids": torch.tensor([3, 3])}, r"`draft_token_ids` is a torch.int64 tensor of shape \(2,\)"),
        ({"draft_token_ids": torch.tensor([3, 97])}, r"different ids from 0 to 96, the target's vocabulary, or None"),
        ({"draft_token_ids": torch.tensor([3.0])}, r"`draft_token_ids` is a torch.float32 tensor"),
        ({"draft_token_ids": torch.tensor([[3]])}, r"of shape \(1, 1\); expected one row"),
        ({"draft_token_ids": torch.tensor([], dtype=torch.long)}, r"of shape \(0,\); expected one row"),
    ],
)
def test_bad_arguments(target, arguments, expected):
    with pytest.raises(ValueError, match=expected):
        DraftLayersModel.for_target(target, **arguments)


@pytest.mark.parametrize(
    ("layers", "config", "expected"),
    [
        (
            4,
            {"hidden_size": 64},
            r"this DraftLayersModel was made for a target with hidden_size 32, but LlamaForCausalLM",
        ),
        (4, {"vocab_size": 98}, r"with vocab_size 97, but LlamaForCausalLM has vocab_size 98"),
        (3, {}, r"with num_hidden_layers 4, but LlamaForCausalLM has num_hidden_layers 3"),
    ],
)
def test_another_target(target, tmp_path, layers, config, expected):
    drafter = DraftLayersModel.for_target(target)
    drafter.save_pretrained(tmp_path)
    other = tiny_llama(layers, **config)
    with pytest.raises(ValueError, match=expected):
        AutoDrafter.from_pretrained(str(tmp_path), target=other)
    with pytest.raises(ValueError, match=expected):
        other.generate(IDS, assistant=drafter, max_new_tokens=3)


def test_architectures_of_another_kind():
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(
        ValueError, match=r"cannot be made of the architecture 'gpt2': it has other weights, such as tra"
    ):
        DraftLayersModel.for_target(transformers.GPT2LMHeadModel(config))
    with pytest.raises(
        ValueError, match=r"architecture 'bert_x': transformers has no causal LM for it: .*distil a small"
    ):
        DraftLayersModel(DraftLayersConfig(layer_config={"model_type": "bert_x"}))
    with pytest.raises(ValueError, match=r"architecture None: transformers has no causal LM"):
        DraftLayersModel(DraftLayersConfig())


def test_experts_keep_their_width():
    with pytest.raises(
        ValueError, match=r"`intermediate_size` cannot make a MixtralDecoderLayer smaller: its mlp.experts"
    ):
        DraftLayersModel.for_target(tiny("Mixtral"), intermediate_size=8)


def test_offloaded_target(target):
    with pytest.raises(
        ValueError, match=r"LlamaDecoderLayer of the target cannot be copied .*quantized, adapted, offloaded, or"
    ):
        DraftLayersModel.for_target(copy.deepcopy(target).to("meta"))


def test_config_out_of_range():
    with pytest.raises(
        StrictDataclassError, match=r"`draft_vocab_size` is 98; expected 1 to 97, the target's vocabulary, or None"
    ):
        DraftLayersConfig(hidden_size=32, vocab_size=97, draft_vocab_size=98)
    with pytest.raises(
        StrictDataclassError, match=r"`layer_config` has hidden_size 64 and `hidden_size` is 32; both must be"
    ):
        DraftLayersConfig(hidden_size=32, vocab_size=97, layer_config={"hidden_size": 64})


@pytest.mark.parametrize("lengths", [(7,), (5, 11, 3)])
def test_layers_that_overflow_under_rejection(target, lengths):
    """A draft drawn from nan is no guess, whichever ids the layers propose."""
    drafter = DraftLayersModel.for_target(target, draft_token_ids=torch.arange(10, 60))
    with torch.no_grad():
        drafter.body.model.norm.weight.fill_(torch.nan)
    output = target.generate(
        **ragged_batch(lengths),
        max_new_tokens=12,
        pad_token_id=0,
        do_sample=True,
        assistant=drafter,
        assistant_sampling="rejection",
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[1] == max(lengths) + 12
    assert output.speculation.num_accepted == 0
