"""EAGLE drafters: what a config allows, what a drafter owns, reads and says, and what it is saved with."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from conftest import VOCAB_SIZE, ragged_batch, tiny_llama
from safetensors.torch import load_file
from transformers import DynamicCache

from hf_specdec import AutoDrafter, Eagle, EagleConfig, EagleModel
from hf_specdec.modeling.base import BASE_FIELDS, DrafterConfig
from hf_specdec.modeling.eagle import Eagle3Objective, EagleObjective
from hf_specdec.modeling.eagle.modeling import default_layers
from hf_specdec.registry import METHODS

DRAFT_IDS = torch.tensor([90, 3, 17, 55, 8])
KINDS = {
    "1": {"version": 1},
    "1_bias": {"version": 1, "fc_bias": True, "num_layers": 2},
    "3": {},
    "3_few_ids": {"draft_token_ids": DRAFT_IDS},
    "3_own": {"draft_token_ids": DRAFT_IDS, "has_own_output_head": True, "has_own_embedding": True},
    "3_norms": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": False},
    "3_layers": {"target_layers": [6, 0], "num_layers": 2, "fc_bias": True},
}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(8)


def made(target, kind: str) -> EagleModel:
    """A drafter whose weights are all its own."""
    torch.manual_seed(0)
    model = EagleModel.for_target(target, **KINDS[kind])
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 4)
    return model.eval()


# The config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "`version` is 2; expected 1 (also for EAGLE-2) or 3"),
        ({"layer_config": {"model_type": "gpt2"}}, "`layer_config` has model_type 'gpt2'; expected one of ('llama', "),
        ({"num_target_features": 0}, "`num_target_features` is 0; expected at least 1"),
        ({"target_layers": [1, 2]}, "`target_layers` is [1, 2] and `num_target_features` is 3; give as many layers"),
        ({"layer_config": {"hidden_size": 16}}, "has hidden_size 16 and the target 32; a drafter of another width"),
        (
            {"layer_config": {"hidden_size": 16}, "has_own_embedding": True, "has_own_output_head": True, "version": 1},
            "a drafter of another width is of version 3",
        ),
        (
            {"layer_config": {"hidden_size": 16}, "has_own_embedding": True},
            "has an embedding, an output head and `fc` of its own",
        ),
        ({"fc_norm": True, "norm_before_fc": True}, "`fc_norm` and `norm_before_fc` are both True; they exclude"),
        *(({"version": 1, name: True}, "version 1 has no norms; leave fc_norm, norm_before_fc, ") for name in (
            "fc_norm",
            "norm_before_fc",
            "norm_before_residual",
            "norm_output",
        )),
        ({"draft_vocab_size": 98}, "`draft_vocab_size` is 98; expected 1 to 97"),
        ({"version": "three"}, "version"),
        ({"tree": [[0]]}, "EagleConfig has no field 'tree'; it has "),
    ],
)  # fmt: skip
def test_config_refuses(fields, message):
    with pytest.raises(Exception, match=re.escape(message)) as error:
        EagleConfig(**{"hidden_size": 32, "vocab_size": VOCAB_SIZE} | fields)
    assert isinstance(error.value, ValueError) or "StrictDataclass" in type(error.value).__name__


def test_a_narrow_drafter_with_everything_of_its_own():
    own = {"has_own_embedding": True, "has_own_output_head": True}
    config = EagleConfig(hidden_size=32, vocab_size=VOCAB_SIZE, layer_config={"hidden_size": 16}, **own)
    assert config.width == 16
    assert EagleConfig(hidden_size=32).width == 32


def test_fields_of_the_layers(target):
    config = EagleModel.for_target(target, num_layers=2, intermediate_size=48).config
    layer = config.layer_config
    assert {name: layer[name] for name in ("model_type", "hidden_size", "head_dim", "num_attention_heads")} == {
        "model_type": "llama",
        "hidden_size": 32,
        "head_dim": 8,
        "num_attention_heads": 4,
    }
    assert (layer["num_hidden_layers"], layer["intermediate_size"], layer["num_key_value_heads"]) == (2, 48, 2)
    assert config.num_target_layers == 8 and issubclass(EagleConfig, DrafterConfig)
    assert METHODS["eagle"].drafter is EagleModel and METHODS["eagle"].candidates is Eagle


# Which layers of the target


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(7, (1, 2, 3)), (8, (1, 3, 4)), (32, (1, 15, 28)), (36, (1, 17, 32)), (61, (1, 29, 57))]
)
def test_default_layers(num_layers, layers):
    """Inputs of the blocks 2, n // 2 and n - 3 in the reference, that is outputs of the ones before."""
    assert default_layers(num_layers) == layers


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6])
def test_too_few_layers_for_the_default(num_layers):
    target = tiny_llama(num_layers)
    with pytest.raises(
        ValueError, match=rf"the target has {num_layers} layers, .* needs 7; say which to read"
    ) as error:
        EagleModel.for_target(target)
    suggested = json.loads(re.search(r"target_layers=(\[.*?\])", str(error.value))[1])
    assert EagleModel.for_target(target, target_layers=suggested).layers_of(target) == tuple(suggested)
    assert EagleModel.for_target(target, version=1).layers_of(target) == (num_layers - 1,)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"version": 1}, (7,)),
        ({"target_layers": [7, 0, 3]}, (7, 0, 3)),
        ({"target_layers": [5]}, (5,)),
        ({}, (1, 3, 4)),
    ],
)
def test_layers_of(target, fields, layers):
    assert EagleModel.for_target(target, **fields).layers_of(target) == layers


def test_layers_that_a_file_does_not_name(target):
    layer_config = EagleConfig.layer_config_of(target)

    def layers(**fields):
        config = EagleConfig(hidden_size=32, vocab_size=VOCAB_SIZE, layer_config=layer_config, **fields)
        return EagleModel(config).layers_of(target)

    assert layers() == (1, 3, 4)
    assert layers(num_target_features=1) == (7,)
    assert layers(target_layers=[0, 1, 6], source_numbering="boundaries") == (0, 1, 6)
    with pytest.raises(ValueError, match="fuses 2 layers of the target and its file does not say which; set"):
        layers(num_target_features=2)
    with pytest.raises(ValueError, match="last layer's output before the target's final norm"):
        layers(target_layers=[0, 1, 7], source_numbering="boundaries")


@pytest.mark.parametrize("layers", [[0, 2], [], 3, [0, 1, 2, 3]])
def test_layers_set_by_hand(target, layers):
    drafter = EagleModel.for_target(target, target_layers=[0, 1, 2])
    drafter.config.target_layers = layers
    message = re.escape(f"`target_layers` is {layers}; the drafter fuses 3 layers, give so many")
    with pytest.raises(ValueError, match=message):
        drafter.check_target(target)


@pytest.mark.parametrize("layers", [[0, 1, 8], [-1, 0, 1]])
def test_layers_out_of_range(target, layers):
    message = re.escape(
        f"the drafter reads the layers {layers} of its target, but LlamaForCausalLM has the layers 0 to 7"
    )
    with pytest.raises(ValueError, match=message):
        EagleModel.for_target(target, target_layers=layers)


# What it owns, and what it is saved with


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_save_and_load(target, kind, tmp_path):
    model = made(target, kind)
    model.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    shared = [name for name in file if "embed_tokens" in name or "lm_head" in name]
    assert shared == ([] if kind != "3_own" else ["embed_tokens.weight", "lm_head.weight"])
    assert not any(tensor.shape[0] >= VOCAB_SIZE and name not in shared for name, tensor in file.items())
    has_ids = {"draft_token_ids"} if model.token_ids is not None else set()
    assert set(file) == {name for name, _ in model.named_parameters()} | has_ids
    features = torch.randn(2, 6, 32 * model.config.num_target_features).split(32, -1)
    ids, positions = torch.randint(VOCAB_SIZE, (2, 6)), torch.arange(6)[None]
    outputs = []
    same, auto = EagleModel.from_pretrained(tmp_path).eval(), AutoDrafter.from_pretrained(str(tmp_path), target=target)
    for loaded in (model, same, auto):
        for name in set(EagleConfig.__dataclass_fields__) - BASE_FIELDS:
            assert getattr(loaded.config, name) == getattr(model.config, name), name
        states = loaded(loaded.fuse(features), loaded.embedding(target)(ids), positions)
        outputs.append(loaded.logits(states, loaded.output_head(target)))
    assert outputs[0].shape == (2, 6, VOCAB_SIZE if model.token_ids is None else 5)
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])
    inputs = ragged_batch((4, 7))
    options = {"max_new_tokens": 8, "pad_token_id": 0, "assistant_confidence_threshold": 0.0}
    texts = [target.generate(**inputs, assistant=drafter, **options).tolist() for drafter in (str(tmp_path), model)]
    assert texts[0] == texts[1] == target.generate(**inputs, max_new_tokens=8, pad_token_id=0).tolist()


@torch.no_grad()
def test_an_output_head_of_its_own_begins_as_the_targets(target):
    model = EagleModel.for_target(target, draft_token_ids=DRAFT_IDS, has_own_output_head=True)
    states = torch.randn(3, 32)
    torch.testing.assert_close(model.output_head(target)(states), target.lm_head(states)[:, DRAFT_IDS])
    shared = EagleModel.for_target(target, draft_token_ids=DRAFT_IDS)
    torch.testing.assert_close(shared.output_head(target)(states), target.lm_head(states)[:, DRAFT_IDS])
    assert shared.lm_head is None
    model.lm_head.weight.data.zero_()
    assert target.lm_head.weight.any(), "a copy"


def test_dtype_of_the_target(target):
    model = EagleModel.for_target(copy.deepcopy(target).bfloat16())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.embedding(target)(torch.tensor([[1, 2]])).dtype == torch.bfloat16
    assert model.fuse([torch.randn(1, 2, 32)] * 3).dtype == torch.bfloat16


# What it computes


def test_default_norms(target):
    config = EagleModel.for_target(target).config
    assert config.fc_norm and config.norm_output and not config.norm_before_fc
    config = EagleModel.for_target(target, norm_before_fc=True).config
    assert config.norm_before_fc and not config.fc_norm
    assert not EagleModel.for_target(target, fc_norm=False, norm_output=False).config.fc_norm
    assert EagleModel.for_target(target, version=1).norm.__class__ is torch.nn.Identity


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * states * (states.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


@torch.no_grad()
def test_fuse(target):
    features = [torch.randn(2, 3, 32) * scale for scale in (1, 10, 100)]
    assert torch.equal(made(target, "1").fuse(features[:1]), features[0])
    model = made(target, "3")
    norms = [rms(states, norm.weight) for states, norm in zip(features, model.fc_norm)]
    torch.testing.assert_close(model.fuse(features), torch.cat(norms, -1) @ model.fc.weight.T)
    model = made(target, "3_norms")
    fused = rms(torch.cat(features, -1), model.input_norm.weight) @ model.fc.weight.T
    torch.testing.assert_close(model.fuse(features), fused)
    config = EagleConfig(
        hidden_size=32,
        vocab_size=9,
        num_target_features=1,
        has_fc=False,
        layer_config=EagleConfig.layer_config_of(target),
    )
    assert torch.equal(EagleModel(config).fuse(features[:1]), features[0])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_cache_changes_nothing(target, kind):
    """All at once, token by token, and with a mask that says what is the default anyway."""
    model = made(target, kind)
    features, embeddings, positions = torch.randn(2, 7, 32), torch.randn(2, 7, 32), torch.arange(7)[None]
    whole = model(features, embeddings, positions)
    causal = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(model(features, embeddings, positions, causal), whole)
    cache, parts = DynamicCache(), []
    for step in range(7):
        now = slice(step, step + 1)
        parts.append(model(features[:, now], embeddings[:, now], positions[:, now], None, cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        model(features[:, :4], embeddings[:, :4], positions[:, :4]), whole[:, :4], atol=1e-3, rtol=1e-3
    )
    for changed in ((features + 1, embeddings), (features, embeddings.roll(1, -1))):
        assert not torch.allclose(model(*changed, positions), whole, atol=0.01)


@torch.no_grad()
def test_the_state_that_the_next_draft_starts_from(target):
    """With `norm_output` it has passed the final norm; the logits are the same either way."""
    normed, bare = made(target, "3"), made(target, "3")
    bare.config.norm_output = False
    inputs = torch.randn(1, 4, 32), torch.randn(1, 4, 32), torch.arange(4)[None]
    states, bare_states = normed(*inputs), bare(*inputs)
    torch.testing.assert_close(states, rms(bare_states, normed.norm.weight))
    assert not torch.allclose(states, bare_states, atol=0.1)
    head = normed.output_head(target)
    torch.testing.assert_close(normed.logits(states, head), bare.logits(bare_states, head))


# Errors


@pytest.mark.parametrize(("version", "objective"), [(3, EagleObjective), (1, Eagle3Objective)])
def test_objective_of_the_other_version(target, version, objective):
    drafter = EagleModel.for_target(target, version=version)
    message = f"the drafter is of version {version}, but this objective is for version {4 - version}"
    with pytest.raises(ValueError, match=message):
        objective(drafter, target)
    assert type(METHODS["eagle"].objective(drafter, target)) is not objective


@pytest.mark.parametrize("ids", [[3, 5, 3], [3, 97], [-1, 4], [], [[3, 5]]])
def test_draft_vocabulary(target, ids):
    with pytest.raises(ValueError, match=r"`draft_token_ids` .*expected one row of different ids from 0 to 96"):
        EagleModel.for_target(target, draft_token_ids=torch.tensor(ids))


def test_folders_that_do_not_fit(target, tmp_path):
    made(target, "3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"made for a target .*num_hidden_layers 8, but LlamaForCausalLM has"):
        AutoDrafter.from_pretrained(str(tmp_path), target=tiny_llama(7))
    with pytest.raises(ValueError, match="hidden_size 32, but LlamaForCausalLM has hidden_size 64"):
        tiny_llama(8, hidden_size=64).generate(
            **ragged_batch((4,)), assistant=str(tmp_path), max_new_tokens=4, pad_token_id=0
        )


def test_a_refused_folder_can_be_mended(target, tmp_path):
    """What was refused is not kept for the target."""
    EagleModel.for_target(target, target_layers=[0, 1, 2]).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    good = config.read_text()
    config.write_text(json.dumps(json.loads(good) | {"target_layers": [0, 1, 8]}))
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 3, "pad_token_id": 0}
    with pytest.raises(ValueError, match=r"reads the layers \[0, 1, 8\] of its target"):
        target.generate(**inputs, assistant=str(tmp_path))
    config.write_text(good)
    assert torch.equal(target.generate(**inputs, assistant=str(tmp_path)), target.generate(**inputs))
