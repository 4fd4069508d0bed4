"""EAGLE drafters as other projects publish them: each test writes the files itself, under the published names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, tiny_llama
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.modeling.checkpoint import Checkpoint
from hf_specdec.modeling.eagle import EagleModel
from hf_specdec.modeling.eagle.conversion import convert, logger
from hf_specdec.modeling.medusa.conversion import convert as convert_medusa

WIDTH, INNER, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, EPS = 32, 48, 4, 2, 8, 1e-6
DRAFT_IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))[:40].sort().values
OFFSETS = DRAFT_IDS - torch.arange(40)
IS_DRAFTED = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, DRAFT_IDS, True)
MAPS = {"d2t": OFFSETS, "t2d": IS_DRAFTED}

LAYER_CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "vocab_size": VOCAB_SIZE,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 512}
EAGLE_1 = LAYER_CONFIG | {"architectures": ["LlamaForCausalLM"], "bias": True}
EAGLE_3 = LAYER_CONFIG | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}
SPECFORGE = LAYER_CONFIG | ROPE | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}
MODELOPT = SPECFORGE | {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    "head_dim": HEAD_DIM,
}
NEMO = LAYER_CONFIG | ROPE | {"architectures": ["LlamaEagle3DraftModel"], "draft_vocab_size": 40, "rope_theta": 10000.0}
DEEPSPEC = (
    LAYER_CONFIG
    | ROPE
    | {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "target_layer_ids": [0, 1, 2, 3, 6],
        "num_target_layers": 8,
        "target_model_name_or_path": "Qwen/Qwen3-8B",
        "use_sliding_window": False,
        "layer_types": ["full_attention"],
    }
)
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": VOCAB_SIZE,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": LAYER_CONFIG | ROPE | {"head_dim": HEAD_DIM},
}
WHOLE = SPECFORGE | {"draft_vocab_size": VOCAB_SIZE}


def weights(
    version: int = 3,
    *,
    prefix: str = "",
    layer: str = "layers.0.",
    num_features: int = 3,
    num_layers: int = 1,
    target_size: int = WIDTH,
    head: int | None = VOCAB_SIZE,
    embed: bool = True,
    norms: tuple[str, ...] = (),
    biases: tuple[str, ...] = (),
    head_norms: bool = False,
    norm_dtype: torch.dtype = torch.float32,
    maps: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """A file of a drafter with random weights.

    Args:
        norms: "fc_norm" or "input_norm".
        biases: of which linear layers there are, e.g. "q_proj" or "fc".
    """
    generator = torch.Generator().manual_seed(7)
    file: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        weight = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1
        file[f"{name}.weight"] = (1 + weight / 3).to(norm_dtype) if is_norm else weight / shape[-1] ** 0.5
        if name.rpartition(".")[2] in biases and not is_norm:
            file[f"{name}.bias"] = torch.randn(shape[0], generator=generator) / 2

    add(f"{prefix}fc", WIDTH, 2 * WIDTH if version == 1 else num_features * target_size)
    if embed:
        add(f"{prefix}embed_tokens", VOCAB_SIZE, WIDTH)
    for i in range(num_layers):
        name = prefix + (layer if i == 0 else f"layers.{i}.")
        q_width = 2 * WIDTH if version == 3 and i == 0 else WIDTH
        for part, rows in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            add(f"{name}self_attn.{part}_proj", rows * HEAD_DIM, q_width)
            if head_norms and part != "v":
                add(f"{name}self_attn.{part}_norm", HEAD_DIM)
        add(f"{name}self_attn.o_proj", WIDTH, NUM_HEADS * HEAD_DIM)
        add(f"{name}mlp.gate_proj", INNER, WIDTH)
        add(f"{name}mlp.up_proj", INNER, WIDTH)
        add(f"{name}mlp.down_proj", WIDTH, INNER)
        add(f"{name}post_attention_layernorm", WIDTH)
        if version == 3 or i > 0:
            add(f"{name}input_layernorm", WIDTH)
        if version == 3 and i == 0:
            add(f"{name}hidden_norm", WIDTH)
    if version == 3:
        add(f"{prefix}norm", WIDTH)
        if head is not None:
            add("lm_head", head, WIDTH)
    if "fc_norm" in norms:
        for i in range(num_features):
            add(f"{prefix}fc_norm.{i}", target_size)
    if "input_norm" in norms:
        add(f"{prefix}input_norm", num_features * target_size)
    return file | {name: ids.clone() for name, ids in (maps or {}).items()}


def reference(
    file: dict[str, torch.Tensor],
    features: list[torch.Tensor],
    embeddings: torch.Tensor,
    positions: torch.Tensor,
    theta: float = 10000.0,
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the drafter says, written out: the states that the next draft starts from, and those for the output head."""
    w = {name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor.float() for name, tensor in file.items()}

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w[f"{name}.weight"]

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def heads(name: str, x: torch.Tensor, normed_by: str = "") -> torch.Tensor:
        x = linear(name, x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        x = norm(normed_by, x) if f"{normed_by}.weight" in w else x
        return x.repeat_interleave(NUM_HEADS // x.shape[1], dim=1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] / theta ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def layer(name: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        q, k = (rotated(heads(f"{name}self_attn.{p}_proj", x, f"{name}self_attn.{p}_norm")) for p in "qk")
        scores = q @ k.transpose(-1, -2) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        values = scores.softmax(-1) @ heads(f"{name}self_attn.v_proj", x)
        x = residual + linear(f"{name}self_attn.o_proj", values.transpose(1, 2).flatten(2))
        normed = norm(f"{name}post_attention_layernorm", x)
        inner = F.silu(linear(f"{name}mlp.gate_proj", normed)) * linear(f"{name}mlp.up_proj", normed)
        return x + linear(f"{name}mlp.down_proj", inner)

    if "layers.0.hidden_norm.weight" in w:
        if "fc_norm.0.weight" in w:
            features = [norm(f"fc_norm.{i}", states) for i, states in enumerate(features)]
        fused = torch.cat(features, dim=-1)
        fused = norm("input_norm", fused) if "input_norm.weight" in w else fused
        fused = linear("fc", fused) if "fc.weight" in w else fused
        normed = norm("layers.0.hidden_norm", fused)
        inputs = torch.cat([norm("layers.0.input_layernorm", embeddings), normed], dim=-1)
        x = layer("layers.0.", inputs, normed if norm_before_residual else fused)
    else:
        fused = linear("fc", torch.cat([embeddings, *features], dim=-1))
        x = layer("layers.0.", fused, fused)
    for i in range(1, 9):
        if f"layers.{i}.input_layernorm.weight" in w:
            x = layer(f"layers.{i}.", norm(f"layers.{i}.input_layernorm", x), x)
    last = norm("norm", x) if "norm.weight" in w else x
    return last if norm_output else x, last


def folder(path: Path, config: dict, tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (torch.save if file.endswith(".bin") else save_file)(tensors, path / file)
    return str(path)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_llama(8)


@torch.no_grad()
def check(name: str, target, file: dict[str, torch.Tensor], token_ids=None, use_safetensors=None, **options):
    """Loads the folder and compares with `reference`, before and after saving in our format."""
    drafter = AutoDrafter.from_pretrained(name, target=target, use_safetensors=use_safetensors)
    assert type(drafter) is EagleModel and not drafter.training and drafter.dtype == torch.float32
    assert (drafter.token_ids is None) == (token_ids is None)
    generator = torch.Generator().manual_seed(3)
    size, num_features = drafter.config.hidden_size, drafter.config.num_target_features
    features = [torch.randn(2, 6, size, generator=generator) for _ in range(num_features)]
    ids, positions = torch.randint(VOCAB_SIZE, (2, 6), generator=generator), torch.arange(11, 17)
    embeddings = drafter.embedding(target)(ids)
    own_embedding = next((w for k, w in file.items() if k.endswith("embed_tokens.weight")), None)
    rows = own_embedding if drafter.config.has_own_embedding else target.get_input_embeddings().weight
    assert torch.equal(embeddings, rows[ids])
    head = file.get("lm_head.weight", target.lm_head.weight if token_ids is None else target.lm_head.weight[token_ids])
    states, last = reference(file, features, embeddings, positions, **options)
    expected = F.linear(last, head)

    def outputs(drafter: EagleModel) -> tuple[torch.Tensor, torch.Tensor]:
        states = drafter(drafter.fuse(features), embeddings, positions[None])
        return states, drafter.logits(states, drafter.output_head(target))

    ours = outputs(drafter)
    torch.testing.assert_close(ours[0], states, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours[1], expected, atol=2e-5, rtol=1e-4)
    if token_ids is not None:
        assert torch.equal(drafter.token_ids, token_ids)
    drafter.save_pretrained(Path(name) / "ours")
    again = AutoDrafter.from_pretrained(str(Path(name) / "ours"), target=target)
    assert all(torch.equal(a, b) for a, b in zip(outputs(again), ours))
    assert again.config.to_diff_dict() == drafter.config.to_diff_dict()
    return drafter


HALF_NORMS = {"prefix": "model.", "norm_dtype": torch.bfloat16}
REDUCED = {"head": 40, "maps": MAPS}
EAGLE_31 = {"norms": ("fc_norm",)}


@pytest.mark.parametrize(
    ("config", "how", "options", "layers", "numbering"),
    [
        (EAGLE_3, {"layer": "midlayer.", "embed": False, **REDUCED}, {}, None, None),
        (SPECFORGE, {"layer": "midlayer.", **REDUCED}, {}, None, None),
        (SPECFORGE, {"head": 40, "maps": {"draft_id_to_target_id": OFFSETS}}, {}, None, None),
        (MODELOPT, {"embed": False, "head": 40, "maps": {"d2t": OFFSETS}}, {}, [1, 3, 4], "outputs of layers"),
        (NEMO, HALF_NORMS | REDUCED, {}, None, None),
        (
            NEMO | {"fc_norm": True, "norm_output": True},
            HALF_NORMS | REDUCED | EAGLE_31,
            {"norm_output": True},
            None,
            None,
        ),
        (DEEPSPEC, {"num_features": 5, "head_norms": True}, {}, [0, 1, 2, 3, 6], "outputs of layers"),
        (
            SPECULATORS | {"fc_norm": True, "norm_output": True},
            EAGLE_31,
            {"norm_output": True},
            [1, 3, 4],
            "inputs of layers",
        ),
        (
            SPECULATORS | {"draft_vocab_size": 40, "norm_before_residual": True},
            REDUCED,
            {"norm_before_residual": True},
            [1, 3, 4],
            "inputs of layers",
        ),
        (
            SPECULATORS | {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
            {"norms": ("input_norm",)},
            {"norm_output": True, "norm_before_residual": True},
            [1, 3, 4],
            "inputs of layers",
        ),
    ],
    ids=[
        "SafeAILab",
        "SpecForge",
        "vLLM",
        "ModelOpt",
        "NeMo",
        "NeMo-3.1",
        "DeepSpec",
        "spec",
        "spec-reduced",
        "gpt-oss",
    ],
)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_version_3(target, tmp_path, config, how, options, layers, numbering, num_layers):
    file = weights(num_layers=num_layers, **how)
    drafter = check(folder(tmp_path, config, file), target, file, DRAFT_IDS if "maps" in how else None, **options)
    config = drafter.config
    assert (config.version, config.target_layers, config.source_numbering) == (3, layers, numbering)
    assert config.layer_config["model_type"] == ("qwen3" if "head_norms" in how else "llama")
    assert config.has_own_output_head and not config.has_own_embedding
    published_for = "Qwen/Qwen3-8B" if how.get("num_features") == 5 or numbering == "inputs of layers" else None
    assert config.target_name_or_path == published_for


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("config", "biases", "flavour"),
    [
        ({}, ("fc",), "llama"),
        ({"bias": False, "rope_theta": 500000.0}, (), "llama"),
        ({"bias": False}, ("fc",), "llama"),  # the tensors count, not the flag
        ({"use_sliding_window": False, "qkv_bias": True}, ("fc", "q_proj", "k_proj", "v_proj"), "qwen2"),
    ],
    ids=["bias", "no-bias", "wrong-flag", "Qwen2"],
)
def test_version_1(target, tmp_path, config, biases, flavour, file):
    tensors = weights(1, biases=biases)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(HEAD_DIM // 2)  # of old files
    name = folder(tmp_path, EAGLE_1 | config, tensors, file)
    if file.endswith(".bin"):
        with pytest.raises(OSError, match=r"legacy pickle file only \(pytorch_model.bin\).*use_safetensors=False"):
            AutoDrafter.from_pretrained(name)
    drafter = check(name, target, tensors, use_safetensors=False, theta=config.get("rope_theta", 10000.0))
    config = drafter.config
    assert (config.version, config.num_target_features, config.target_layers) == (1, 1, None)
    assert config.fc_bias == ("fc" in biases) and config.layer_config["model_type"] == flavour
    assert drafter.lm_head is None and drafter.embed_tokens is None


def test_version_1_with_an_output_head(target, tmp_path):
    tensors = weights(1) | {"lm_head.weight": torch.randn(VOCAB_SIZE, WIDTH)}
    assert check(folder(tmp_path, EAGLE_1, tensors), target, tensors).config.has_own_output_head


def test_version_3_in_a_pickle(target, tmp_path):
    tensors = weights(layer="midlayer.", embed=False, **REDUCED)
    name = folder(tmp_path, EAGLE_3 | {"num_hidden_layers": 2}, tensors, "pytorch_model.bin")
    with pytest.raises(OSError, match=r"use_safetensors=False"):
        AutoDrafter.from_pretrained(name)
    check(name, target, tensors, DRAFT_IDS, use_safetensors=False)


@pytest.mark.parametrize(
    ("biases", "head_norms", "flavour"),
    [
        (("q_proj", "k_proj", "v_proj", "o_proj"), False, "llama"),
        (("gate_proj", "up_proj", "down_proj", "fc"), False, "llama"),
        (("q_proj", "k_proj", "v_proj"), False, "qwen2"),
        (("q_proj", "k_proj", "v_proj", "o_proj"), True, "qwen3"),
    ],
)
def test_biases(target, tmp_path, biases, head_norms, flavour):
    tensors = weights(biases=biases, head_norms=head_norms, num_layers=2)
    config = SPECFORGE | {"draft_vocab_size": None, "use_sliding_window": True, "max_window_layers": 28}
    layer_config = check(folder(tmp_path, config, tensors), target, tensors).config.layer_config
    assert layer_config["model_type"] == flavour and not layer_config.get("use_sliding_window")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 777.0, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        {"rope_theta": 777, "rope_parameters": {"rope_theta": 777.0}},
        {"rope_theta": 777, "rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 1.0}},
    ],
)
def test_rotary_base(target, tmp_path, rope):
    tensors = weights()
    drafter = check(folder(tmp_path, WHOLE | rope, tensors), target, tensors, theta=777.0)
    assert drafter.config.layer_config["rope_parameters"]["rope_theta"] == 777.0


def test_scaled_rotary_embedding(tmp_path):
    rope = {"rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}}
    name = folder(tmp_path, WHOLE | {"rope_parameters": None, "rope_theta": 5e5} | rope, weights())
    drafter = AutoDrafter.from_pretrained(name)
    expected = tiny_llama(rope_parameters=drafter.config.layer_config["rope_parameters"], hidden_size=WIDTH).model
    assert drafter.config.layer_config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 32.0,
        "original_max_position_embeddings": 2048,
    }
    frequencies = drafter.body.rotary_emb.inv_freq
    assert torch.equal(frequencies, expected.rotary_emb.inv_freq) and frequencies.dtype == torch.float32


@pytest.mark.parametrize("with_fc", [True, False])
def test_last_state_alone(target, tmp_path, with_fc):
    config = SPECFORGE | {"draft_vocab_size": None, "eagle_config": {"use_aux_hidden_state": False}}
    tensors = weights(num_features=1, head=None, embed=False)
    if not with_fc:
        del tensors["fc.weight"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = []
    drafter = check(folder(tmp_path, config, tensors), target, tensors)
    assert drafter.layers_of(target) == (7,) and drafter.lm_head is None and drafter.config.has_fc == with_fc


def test_width_of_its_own(tmp_path):
    target = tiny_llama(8, hidden_size=40)
    tensors = weights(target_size=40)
    drafter = check(folder(tmp_path, SPECULATORS | {"target_hidden_size": 40}, tensors), target, tensors)
    assert drafter.config.width == WIDTH and drafter.config.hidden_size == 40 and drafter.config.has_own_embedding
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing embed_tokens.weight, lm_head.weight; left over none"):
        AutoDrafter.from_pretrained(folder(tmp_path, SPECULATORS | {"target_hidden_size": 40}, tensors))


def test_trained_embedding(target, tmp_path):
    tensors = weights()
    assert check(folder(tmp_path, SPECULATORS | {"embed_requires_grad": True}, tensors), target, tensors).embed_tokens


@pytest.mark.parametrize(
    ("key", "ids", "expected", "numbering"),
    [
        ("eagle_aux_hidden_state_layer_ids", [1, 3, 5], [0, 2, 4], "inputs of layers"),
        ("eagle_config", [1, 3, 5], [1, 3, 5], "outputs of layers"),
        ("eagle_config", [2, 4, 5], [1, 3, 4], "inputs of layers"),
        ("eagle_config", None, None, None),
        ("eagle_config", [], None, None),
        ("target_layer_ids", [2, 4, 5], [2, 4, 5], "outputs of layers"),
    ],
)
def test_layer_numbering(tmp_path, key, ids, expected, numbering):
    said = {"eagle_aux_hidden_state_layer_ids": ids} if key == "eagle_config" else ids
    config = AutoDrafter.from_pretrained(folder(tmp_path, WHOLE | {key: said}, weights())).config
    assert (config.target_layers, config.source_numbering) == (expected, numbering)


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ({"target_layer_ids": [-1, 2, 3]}, r"reads the target's embeddings \(layer -1 of \[-1, 2, 3\]\)"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, r"reads the target's embeddings \(layer 0 of"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}, r"embeddings \(layer 0 of"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 8], "num_target_layers": 8},
            r"state before the final norm \(layer 8 of \[2, 4, 8\]\), which is not supported yet; take another",
        ),
        ({"target_layer_ids": [2, 4, 7], "num_target_layers": 8}, r"state before the final norm \(layer 7 of"),
        (
            {"target_layer_ids": [2, 4]},
            r"`fc` of .* reads 96 numbers; expected those of the target's layers \[2, 4\], 32",
        ),
    ],
)
def test_layers_that_are_refused(tmp_path, layers, match):
    with pytest.raises(ValueError, match=match):
        AutoDrafter.from_pretrained(folder(tmp_path, WHOLE | layers, weights()))


def test_ambiguous_norm_output(target, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(logger, "warning_once", warnings.append)
    tensors = weights(layer="midlayer.", **REDUCED)
    name = folder(tmp_path, SPECFORGE | {"norm_output": True}, tensors)
    drafter = check(name, target, tensors, DRAFT_IDS, norm_output=True)
    plainly = SPECULATORS | {"norm_output": True, "draft_vocab_size": 40}
    AutoDrafter.from_pretrained(folder(tmp_path / "speculators", plainly, weights(**REDUCED)))
    assert len(warnings) == 1 and "`norm_output: true`, which is read as EAGLE-3.1" in warnings[0]
    drafter.config.norm_output = False  # as the warning says
    features, ids = [torch.randn(1, 4, WIDTH) for _ in range(3)], torch.tensor([[5, 6, 7, 8]])
    embeddings = target.get_input_embeddings()(ids)
    states = drafter(drafter.fuse(features), embeddings, torch.arange(4)[None])
    plain, last = reference(tensors, features, embeddings, torch.arange(4))
    torch.testing.assert_close(states, plain, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(drafter.logits(states, drafter.lm_head), last @ tensors["lm_head.weight"].T)


def test_map_of_the_whole_vocabulary(target, tmp_path):
    config, everything = SPECFORGE | {"draft_vocab_size": VOCAB_SIZE}, torch.ones(VOCAB_SIZE, dtype=torch.bool)
    maps = {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.long), "t2d": everything}
    tensors = weights(layer="midlayer.", maps=maps)
    assert check(folder(tmp_path, config, tensors), target, tensors).config.draft_vocab_size is None


def test_reduced_vocabulary_with_the_head_of_the_target(target, tmp_path):
    tensors = weights(head=None, maps=MAPS)
    assert check(folder(tmp_path, SPECFORGE, tensors), target, tensors, DRAFT_IDS).lm_head is None


@pytest.mark.parametrize(
    ("config", "changes", "match"),
    [
        ({}, {"d2t": None}, r"proposes 40 ids of 97, but has no d2t that says which"),
        ({}, {"d2t": DRAFT_IDS}, r"the 40 that t2d marks; it looks like ids, not offsets \(id minus place\)"),
        (
            {},
            {"d2t": OFFSETS - 60},
            r"leads to 40 different ids from -60 to 34; expected 40 from 0 to 96, the 40 ",
        ),
        (
            {},
            {"d2t": OFFSETS + 50, "t2d": None},
            r"different ids from 50 to 144; expected 40 from 0 to 96\. Take a",
        ),
        ({}, {"d2t": -torch.arange(40), "t2d": None}, r"leads to 1 different ids from 0 to 0; expected 40"),
        ({}, {"t2d": ~IS_DRAFTED}, r"leads to 40 different .*, the 57 that t2d marks"),
        (
            {},
            {"d2t": OFFSETS[:39]},
            r"ids that are proposed: draft_vocab_size 40, d2t 39, lm_head.weight 40; expected one",
        ),
        (
            {"draft_vocab_size": 39},
            {},
            r"ids that are proposed: draft_vocab_size 39, d2t 40, lm_head.weight 40",
        ),
        ({}, {"t2d": IS_DRAFTED[:96]}, r"different numbers of ids of the target: vocab_size 97, t2d 96, embed_tokens"),
        ({"vocab_size": 96}, {}, r"ids of the target: vocab_size 96, t2d 97, embed_tokens.weight 97; expected one"),
        ({"vocab_size": None}, {"t2d": None, "embed_tokens.weight": None}, r"lacks vocab_size, that of the target"),
    ],
)
def test_vocabularies_that_do_not_fit(tmp_path, config, changes, match):
    tensors = weights(**REDUCED) | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=match):
        AutoDrafter.from_pretrained(folder(tmp_path, SPECFORGE | config, tensors))


def test_vocabulary_that_only_the_tensors_tell(target, tmp_path):
    tensors = weights(**REDUCED)
    check(folder(tmp_path, SPECFORGE | {"vocab_size": None}, tensors), target, tensors, DRAFT_IDS)


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_attention_heads", "hidden_act", "rms_norm_eps"]
)
def test_numbers_are_not_invented(tmp_path, key):
    with pytest.raises(ValueError, match=rf"lacks {key} of the EAGLE drafter; take the complete checkpoint"):
        AutoDrafter.from_pretrained(folder(tmp_path, WHOLE | {key: None}, weights()))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"rope_theta": 5.0}, r"rotary embedding .*rope_theta 5.0; expected one base"),
        (
            {"rope_parameters": {"rope_type": "mrope", "mrope_section": [1, 2, 1]}},
            r"'mrope'.*expected .*'default' or, with",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": None},
            r"'yarn'.* with `max_",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, r"expected one base"),
        ({"partial_rotary_factor": 0.5}, r"no partial rotary embedding"),
        (
            {"use_sliding_window": True, "max_window_layers": 0},
            r"attends within a sliding window, which is not supported",
        ),
        ({"layer_types": ["sliding_attention"]}, r"attends within a sliding window, which is not supported yet; take"),
        ({"fc_norm": True}, r"missing fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight; left over none"),
        ({"norm_before_fc": True}, r"missing input_norm.weight; left over none"),
        ({"fc_norm": True, "norm_before_fc": True}, r"known here: `fc_norm` and .*they exclude each other"),
        ({"head_dim": 16}, r"layers.0.self_attn.q_proj.weight is \(32, 64\), expected \(64, 64\)"),
        ({"num_attention_heads": 5}, r"q_proj of .* has 32 rows, which are not 5 heads; correct `num_attention_heads`"),
        ({"hidden_size": 31}, r"`fc` of .* reads 96 numbers; expected those of the target's layers None, 31 each"),
    ],
)
def test_config_that_does_not_fit(tmp_path, config, match):
    with pytest.raises(ValueError, match=match):
        AutoDrafter.from_pretrained(folder(tmp_path, WHOLE | config, weights()))


@pytest.mark.parametrize(
    ("config", "complete"),
    [
        (EAGLE_1, weights(1, biases=("fc",))),
        (SPECFORGE, weights(layer="midlayer.", num_layers=2, **REDUCED)),
        (NEMO | {"fc_norm": True}, weights(**HALF_NORMS, **REDUCED, **EAGLE_31)),
    ],
    ids=["version 1", "SpecForge", "NeMo"],
)
def test_every_tensor_is_accounted_for(tmp_path, config, complete):
    def refused(tensors: dict[str, torch.Tensor], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            AutoDrafter.from_pretrained(folder(tmp_path, config, tensors))

    is_needed_to_know_it = {"fc.weight", "layers.0.self_attn.q_proj.weight"} if config is EAGLE_1 else ()
    for name in complete:
        without = {k: v for k, v in complete.items() if k != name}
        if not name.endswith(("embed_tokens.weight", "t2d", "fc.bias", "d2t", "lm_head.weight")):
            known = name not in is_needed_to_know_it
            refused(without, f"missing {name}; left over none" if known else "in the format of no drafter")
        if not name.endswith(("embed_tokens.weight", "t2d", "d2t", "lm_head.weight")):
            seen_first = r"q_proj of .* 3 rows|`fc` of .* reads 3 numbers"
            refused(complete | {name: torch.ones(3, 3, 3)}, rf"{name} is \(3, 3, 3\), expected \(|{seen_first}")
    first = next(name for name in complete if name.endswith("self_attn.o_proj.weight")).removesuffix("o_proj.weight")
    prefix = "model." if first.startswith("model.") else ""
    for extra in (f"{first}g_proj.weight", f"{prefix}layers.7.self_attn.rotary.weight", "other", f"{first}o_proj.bias"):
        refused(complete | {extra: torch.ones(2, 2)}, rf"left over {extra}")


def test_a_tensor_under_two_names(tmp_path):
    tensors = weights()
    with pytest.raises(ValueError, match=r"missing none; left over (model.)?norm.weight"):
        AutoDrafter.from_pretrained(folder(tmp_path, WHOLE, tensors | {"model.norm.weight": torch.ones(WIDTH)}))


def test_quantized(tmp_path):
    tensors = weights()
    with pytest.raises(ValueError, match=r"EAGLE drafter in .* are quantized: fc.weight_scale; expected float16"):
        AutoDrafter.from_pretrained(folder(tmp_path, WHOLE, tensors | {"fc.weight_scale": torch.ones(1)}))
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"are quantized: fc.weight \(torch.float8_e4m3fn\)"):
        AutoDrafter.from_pretrained(folder(tmp_path, WHOLE, tensors))


def test_dtype_of_the_file(target, tmp_path):
    tensors = {name: tensor.half() for name, tensor in weights(1).items()}
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].float()  # of old files, and not loaded
    name = folder(tmp_path, EAGLE_1, tensors)
    assert AutoDrafter.from_pretrained(name).dtype == torch.float16
    assert AutoDrafter.from_pretrained(name, target=target).dtype == torch.float32
    tensors["fc.weight"] = tensors["fc.weight"].bfloat16()
    drafter = AutoDrafter.from_pretrained(folder(tmp_path, EAGLE_1, tensors))
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}


def test_half_downloaded(tmp_path):
    name = folder(tmp_path, SPECFORGE, weights(**REDUCED))
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(OSError, match=r"is incomplete or damaged"):
        AutoDrafter.from_pretrained(name)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"has no weights; expected one of"):
        AutoDrafter.from_pretrained(name)


DFLASH = LAYER_CONFIG | ROPE | {"num_hidden_layers": 2, "block_size": 8, "model_type": "qwen3"}


def dflash(*extra: str) -> dict[str, torch.Tensor]:
    """Names of a DFlash drafter, and more; the values do not matter."""
    drafter = weights(1, num_layers=2, head_norms=True, embed=False)
    names = ["hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight", *extra]
    return drafter | {name: torch.ones(WIDTH) for name in names}


@pytest.mark.parametrize(
    ("config", "tensors", "match"),
    [
        (NEMO | {"parallel_drafting": True}, weights(**HALF_NORMS) | {"mask_hidden": torch.ones(1)}, "P-EAGLE"),
        (NEMO | {"parallel_drafting": True}, weights(**HALF_NORMS), "P-EAGLE"),
        (SPECULATORS | {"architectures": ["PEagleDraftModel"]}, weights(), "P-EAGLE"),
        (SPECULATORS, weights() | {"mask_hidden": torch.ones(1, 1, 96)}, "P-EAGLE"),
        (NEMO | {"architectures": ["LlamaForCausalLMEagle4"]}, weights(**HALF_NORMS), "EAGLE-4"),
        (NEMO, weights() | {"efficient_lm_head.weight": torch.ones(1)}, "EAGLE-4"),
        (MODELOPT | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, weights(), "MLA"),
        (SPECFORGE, weights() | {"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(1)}, "MLA"),
        (
            MODELOPT,
            weights() | {"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.ones(1)},
            "parallel heads",
        ),
        (
            DFLASH | {"architectures": ["DominoDraftModel"], "dflash_config": {"projector_type": "domino"}},
            dflash("prefix_gru.weight_ih_l0", "embed_proj.0.weight"),
            "Domino",
        ),
        (DFLASH | {"dflash_config": {"projector_type": "domino"}}, dflash(), "Domino"),
        (DFLASH | {"architectures": ["DSparkDraftModel"]}, dflash(), "DSpark"),
        (DFLASH, dflash("markov_head.markov_w1.weight"), "DSpark"),
        (DFLASH | {"architectures": ["DFlashDraftModel"]}, dflash("markov_w1.weight"), "DSpark"),
        (SPECULATORS | {"architectures": ["XPressDraftModel"]}, dflash("refiner_head.mix_l"), "XPress"),
        (DFLASH, dflash("xpress_head.mix.L"), "XPress"),
    ],
)
def test_relatives_are_refused_by_name(tmp_path, config, tensors, match):
    with pytest.raises(ValueError, match=rf"{match}.*which is not supported yet; take an EAGLE-3 or EAGLE-2 drafter"):
        AutoDrafter.from_pretrained(folder(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (DFLASH | {"architectures": ["Qwen3DSparkModel"]}, dflash("embed_tokens.weight")),
        (DFLASH, {"encoder.fc.weight": torch.ones(1), "layers.0.self_attn.q_proj.weight": torch.ones(1)}),
        (LAYER_CONFIG, {"mtp.fc.weight": torch.ones(1), "mtp.layers.0.self_attn.q_proj.weight": torch.ones(1)}),
        (LAYER_CONFIG, weights(1) | {"pre_fc_norm_embedding.weight": torch.ones(1)}),
        (LAYER_CONFIG, {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(1)}),
        ({"medusa_num_heads": 1}, {"0.0.linear.weight": torch.ones(2, 2), "0.0.linear.bias": torch.ones(2)}),
        (LAYER_CONFIG | {"architectures": ["Eagle2_5_VLForConditionalGeneration"]}, {"a": torch.ones(1)}),
    ],
    ids=["DeepSpec DFlash", "native DFlash", "MTP", "MTP alone", "MLA target", "Medusa", "Eagle VLM"],
)
def test_other_checkpoints_are_none(tmp_path, config, tensors):
    assert convert(Checkpoint(folder(tmp_path, config, tensors))) is None


@pytest.mark.parametrize("num_layers", [1, 4])
def test_a_causal_model_is_none(tmp_path, monkeypatch, num_layers):
    model = tiny_llama(num_layers)
    model.save_pretrained(tmp_path)
    assert convert(Checkpoint(str(tmp_path))) is None
    (tmp_path / "model.safetensors").unlink()
    assert convert(Checkpoint(str(tmp_path))) is None
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    if num_layers == 1:  # as the config of an EAGLE-1
        assert convert(Checkpoint(str(tmp_path), use_safetensors=False)) is None
        return
    monkeypatch.setattr(torch, "load", None)
    assert convert(Checkpoint(str(tmp_path))) is None
    assert convert(Checkpoint(str(tmp_path), use_safetensors=False)) is None


@pytest.mark.parametrize("config", [SPECFORGE, SPECULATORS, MODELOPT | {"architectures": ["LlamaForCausalLM"]}])
def test_no_drafter_where_there_should_be(tmp_path, config):
    with pytest.raises(ValueError, match=r"should hold an EAGLE drafter, but model.safetensors has no tensor named"):
        AutoDrafter.from_pretrained(folder(tmp_path, config, {"other": torch.ones(2)}))


def test_no_medusa_heads(tmp_path):
    for config, tensors in ((EAGLE_1, weights(1)), (SPECFORGE, weights(layer="midlayer.", **REDUCED))):
        assert convert_medusa(Checkpoint(folder(tmp_path, config, tensors))) is None


@pytest.mark.parametrize(
    ("config", "how"),
    [(EAGLE_1, {"version": 1}), (SPECFORGE, REDUCED), (DEEPSPEC, {"num_features": 5, "head_norms": True})],
)
def test_folder_as_assistant(target, tmp_path, same_text, config, how):
    name = folder(tmp_path, config, weights(**how))
    inputs = {"input_ids": torch.tensor([[5, 17, 33]]), "attention_mask": torch.ones(1, 3)}
    output = same_text(target, inputs, name, assistant_confidence_threshold=0.0)
    assert output.speculation.num_drafted > 0
