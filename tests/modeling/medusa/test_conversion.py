"""Medusa heads as other projects publish them: each test writes the files itself, under the published names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, tiny_llama
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter, MedusaModel
from hf_specdec.modeling.checkpoint import Checkpoint
from hf_specdec.modeling.medusa.conversion import convert
from hf_specdec.modeling.target import OutputHead

HIDDEN_SIZE = 32
BLOCK, OUTPUT = "{i}.{j}.linear", "{i}.{n}"
VLLM = {"block": "blocks.{i}.layers.{j}", "output": "lm_heads.{i}"}
VLLM_CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "num_heads": 3,
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN_SIZE,
    "vocab_size": VOCAB_SIZE,
    "truncated_vocab_size": VOCAB_SIZE,
    "original_lm_head": False,
    "medusa_fc_bias": False,  # wrong in most of these tests, as it may be
}


def heads(
    num_heads: int = 3, num_layers: int = 1, bias: bool = True, outputs: int | None = None, rows: int = VOCAB_SIZE
):
    """Weights of heads: for each its blocks as (weight, bias or None), and its output layer or None."""
    torch.manual_seed(7)
    blocks = [
        [(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE) / 6, torch.randn(HIDDEN_SIZE) if bias else None)] * num_layers
        for _ in range(num_heads)
    ]
    num_outputs = num_heads if outputs is None else outputs
    return blocks, [torch.randn(rows, HIDDEN_SIZE) for _ in range(num_outputs)]


def named(weights, prefix: str = "", block: str = BLOCK, output: str = OUTPUT) -> dict[str, torch.Tensor]:
    blocks, outputs = weights
    tensors = {}
    for i, layers in enumerate(blocks):
        for j, (weight, bias) in enumerate(layers):
            tensors[prefix + block.format(i=i, j=j) + ".weight"] = weight.clone()
            if bias is not None:
                tensors[prefix + block.format(i=i, j=j) + ".bias"] = bias.clone()
    for i, weight in enumerate(outputs):
        tensors[prefix + output.format(i=i, n=len(blocks[0])) + ".weight"] = weight.clone()
    return tensors


def logits(weights, states: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
    """What the heads say, written out: x + SiLU(W x + b) for each block, then an output layer."""
    blocks, outputs = weights
    heads_states = []
    for layers in blocks:
        x = states
        for weight, bias in layers:
            x = x + F.silu(F.linear(x, weight, bias))
        heads_states.append(x)
    if not outputs:
        return F.linear(torch.stack(heads_states, dim=-2), target_head)
    rows = [F.linear(x, outputs[min(i, len(outputs) - 1)]) for i, x in enumerate(heads_states)]
    return torch.stack(rows, dim=-2)


def folder(path: Path, config: dict, tensors: dict[str, torch.Tensor], file: str = "model.safetensors", **how) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (torch.save if file.endswith((".pt", ".bin")) else save_file)(tensors, path / file, **how)
    return str(path)


def check(name: str, target, weights, token_ids=None, **options) -> MedusaModel:
    """Loads the folder and compares with `logits`, bit by bit, before and after saving in our format."""
    drafter = AutoDrafter.from_pretrained(name, target=target, **options)
    assert type(drafter) is MedusaModel and not drafter.training
    assert (drafter.token_ids is None) == (token_ids is None)
    if token_ids is not None:
        assert torch.equal(drafter.token_ids, torch.as_tensor(token_ids))
    states = torch.randn(2, 5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    rows = target.lm_head.weight if token_ids is None else target.lm_head.weight[token_ids]
    expected = logits(weights, states, rows)
    with torch.no_grad():
        assert torch.equal(drafter(states, OutputHead(target, drafter.token_ids)), expected)
        drafter.save_pretrained(Path(name) / "ours")
        again = AutoDrafter.from_pretrained(str(Path(name) / "ours"), target=target)
        assert torch.equal(again(states, OutputHead(target, again.token_ids)), expected)
    assert again.config.to_diff_dict() == drafter.config.to_diff_dict()
    ids = torch.tensor([[5, 17, 33, 8]])
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    assert target.generate(ids, max_new_tokens=12, do_sample=False, assistant=drafter).tolist() == plain.tolist()
    return drafter


V01_CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_heads_alone(target, tmp_path, file, num_layers):
    weights = heads(5, num_layers)  # the config says two
    name = folder(tmp_path, V01_CONFIG, named(weights), file)
    if file.endswith(".pt"):
        with pytest.raises(OSError, match=r"legacy pickle file only \(medusa_lm_head.pt\).*use_safetensors=False"):
            AutoDrafter.from_pretrained(name)
        with pytest.raises(OSError, match=r"legacy pickle file only \(medusa_lm_head.pt\).*use_safetensors=False"):
            target.generate(torch.tensor([[5, 17]]), max_new_tokens=3, assistant=name)
    drafter = check(name, target, weights, use_safetensors=False if file.endswith(".pt") else None)
    assert drafter.config.num_heads == 5 and drafter.config.num_layers == num_layers
    assert drafter.config.num_target_layers is None
    assert drafter.config.target_name_or_path == "lmsys/vicuna-7b-v1.3"
    assert (drafter.config.hidden_size, drafter.config.vocab_size) == (HIDDEN_SIZE, VOCAB_SIZE)


@pytest.mark.parametrize("says", [{"medusa_num_heads": 3, "medusa_num_layers": 1}, {}], ids=["named", "unnamed"])
@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."], ids=["FasterDecoding", "ModelOpt"])
def test_heads_beside_their_target(target, tmp_path, prefix, says):
    weights = heads(num_layers=2)
    target.save_pretrained(tmp_path)
    backbone = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | says
    name = folder(tmp_path, config, backbone | named(weights, prefix))
    drafter = check(name, target, weights)
    assert drafter.config.target_name_or_path == name and drafter.config.num_target_layers == 4


def test_target_and_heads_from_one_folder(tmp_path, same_text):
    tiny_llama(4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors") | named(heads(), "medusa_head.")
    target = AutoModelForCausalLM.from_pretrained(folder(tmp_path, config, tensors, metadata={"format": "pt"}))
    same_text(target, {"input_ids": torch.tensor([[5, 17, 33]])}, str(tmp_path))


def test_heads_beside_their_target_in_pickles(target, tmp_path):
    weights = heads()
    config = json.loads(target.config.to_json_string())
    tensors = {name: tensor.clone() for name, tensor in target.state_dict().items()} | named(weights, "medusa_head.")
    folder(tmp_path, config, tensors, "part.bin")
    index = {"weight_map": dict.fromkeys(tensors, "part.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match=r"legacy pickle file only \(part.bin\).*use_safetensors=False"):
        AutoDrafter.from_pretrained(str(tmp_path))
    check(str(tmp_path), target, weights, use_safetensors=False)


def test_of_a_target_in_several_files_only_those_with_heads_are_read(target, tmp_path):
    weights = heads()
    target.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    save_file(named(weights, "medusa_head."), tmp_path / "model-heads.safetensors")
    index["weight_map"] |= dict.fromkeys(named(weights, "medusa_head."), "model-heads.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in set(index["weight_map"].values()) - {"model-heads.safetensors"}:
        (tmp_path / shard).unlink()
    check(str(tmp_path), target, weights)
    (tmp_path / "model-heads.safetensors").unlink()
    with pytest.raises(OSError, match=r"lacks model-heads.safetensors, which model.safetensors.index.json names"):
        AutoDrafter.from_pretrained(str(tmp_path))


def test_heads_that_use_the_targets_output_layer(target, tmp_path):
    config = {"version": "2", "base_model_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2"}
    weights = heads(outputs=0)
    drafter = check(folder(tmp_path, config, named(weights), "medusa_lm_head.safetensors"), target, weights)
    assert not drafter.config.has_own_output_heads and drafter.config.vocab_size == 0
    check(
        folder(tmp_path, config | {"vocab_size": VOCAB_SIZE}, named(weights), "medusa_lm_head.safetensors"),
        target,
        weights,
    )


def test_heads_in_a_file_of_their_own_beside_a_whole_model(target, tmp_path):
    target.save_pretrained(tmp_path)
    weights = heads(outputs=0)
    save_file(named(weights), tmp_path / "medusa_lm_head.safetensors")
    check(str(tmp_path), target, weights)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_vllm(target, tmp_path, prefix, bias):
    weights = heads(bias=bias)
    drafter = check(folder(tmp_path, VLLM_CONFIG, named(weights, prefix, **VLLM)), target, weights)
    assert drafter.config.num_target_layers is None and drafter.config.block_bias == bias


def test_vllm_one_output_layer_for_all_heads(target, tmp_path):
    weights = heads(outputs=1)
    check(folder(tmp_path, VLLM_CONFIG | {"original_lm_head": True}, named(weights, **VLLM)), target, weights)


def test_vllm_output_layer_of_the_target(target, tmp_path):
    weights = heads(outputs=0)
    check(folder(tmp_path, VLLM_CONFIG | {"original_lm_head": True}, named(weights, **VLLM)), target, weights)


@pytest.mark.parametrize("rows", [20, VOCAB_SIZE], ids=["rows of the map", "all rows"])
def test_vllm_some_ids(target, tmp_path, rows):
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:20]
    blocks, outputs = heads(rows=rows)
    tensors = named((blocks, outputs), **VLLM) | {"token_map": ids.to(torch.int32)}
    name = folder(tmp_path, VLLM_CONFIG | {"truncated_vocab_size": 20}, tensors)
    outputs = [output[ids] for output in outputs] if rows == VOCAB_SIZE else outputs
    assert check(name, target, (blocks, outputs), ids).config.draft_vocab_size == 20


def test_vllm_some_ids_of_the_targets_output_layer(target, tmp_path):
    weights = heads(outputs=0)
    tensors = named(weights, **VLLM) | {"token_map": torch.tensor([5, 3, 90])}
    config = {key: value for key, value in VLLM_CONFIG.items() if key != "truncated_vocab_size"}
    check(folder(tmp_path, config, tensors), target, weights, [5, 3, 90])


def test_vllm_first_ids(target, tmp_path):
    weights = heads(rows=20)
    name = folder(tmp_path, VLLM_CONFIG | {"truncated_vocab_size": 20}, named(weights, **VLLM))
    check(name, target, weights, range(20))


def test_vllm_takes_no_map_for_the_whole_vocabulary(target, tmp_path):
    weights = heads()
    check(folder(tmp_path, VLLM_CONFIG, named(weights, **VLLM) | {"token_map": torch.arange(5)}), target, weights)


@pytest.mark.parametrize(
    ("config", "token_map"),
    [
        ({"truncated_vocab_size": 4}, [1, 2, 3]),
        ({"truncated_vocab_size": 3}, [1, 2, 2]),
        ({"truncated_vocab_size": 3}, [1, 2, VOCAB_SIZE]),
        ({"truncated_vocab_size": 3}, [1, 2, -1]),
        ({"truncated_vocab_size": 3}, [1.0, 2.0, 3.0]),
        ({"truncated_vocab_size": 3, "vocab_size": None}, [1, 2, 3]),
        ({"truncated_vocab_size": VOCAB_SIZE + 1}, None),
        ({"truncated_vocab_size": 3, "vocab_size": None}, None),
    ],
)
def test_vllm_ids_that_cannot_be(tmp_path, config, token_map):
    tensors = named(heads(rows=3), **VLLM) | ({} if token_map is None else {"token_map": torch.tensor(token_map)})
    with pytest.raises(
        ValueError, match=r"model.safetensors.*`truncated_vocab_size` .* `vocab_size` .*expected as many"
    ):
        AutoDrafter.from_pretrained(folder(tmp_path, VLLM_CONFIG | config, tensors))


NVIDIA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 4,
    "medusa": {"num_medusa_heads": 3, "num_medusa_layers": 2},
}


@pytest.mark.parametrize(
    "names", [{}, {"block": "{i}.medusa_layers.{j}.linear", "output": "{i}.lm_head"}], ids=["ModelOpt", "TensorRT-LLM"]
)
def test_nvidia_heads_alone(target, tmp_path, names):
    weights = heads(num_layers=2)
    drafter = check(folder(tmp_path, NVIDIA_CONFIG, named(weights, "medusa_heads.", **names)), target, weights)
    assert drafter.config.num_target_layers == 4 and drafter.config.target_name_or_path is None


@pytest.mark.parametrize(
    "config", [NVIDIA_CONFIG | {"medusa": {"num_medusa_heads": 4}}, VLLM_CONFIG | {"num_heads": 4}]
)
def test_fewer_heads_than_the_config_says(tmp_path, config):
    names = {"prefix": "medusa_heads."} if "medusa" in config else VLLM
    with pytest.raises(ValueError, match=r"has 3 heads, but its config.json speaks of 4"):
        AutoDrafter.from_pretrained(folder(tmp_path, config, named(heads(), **names)))


def test_quantized_heads(tmp_path):
    weights = named(heads(), "medusa_heads.")
    scaled = weights | {"medusa_heads.0.0.linear.weight_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"are quantized: medusa_heads.0.0.linear.weight_scale; expected float16"):
        AutoDrafter.from_pretrained(folder(tmp_path, NVIDIA_CONFIG, scaled))
    weights["medusa_heads.1.1.weight"] = weights["medusa_heads.1.1.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"are quantized: medusa_heads.1.1.weight \(torch.float8_e4m3fn\)"):
        AutoDrafter.from_pretrained(folder(tmp_path, NVIDIA_CONFIG, weights))


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_every_tensor_is_accounted_for(tmp_path, prefix):
    complete = named(heads(), prefix)
    file = "model.safetensors"

    def refused(tensors: dict[str, torch.Tensor], match: str) -> None:
        with pytest.raises(ValueError, match=match) as error:
            AutoDrafter.from_pretrained(folder(tmp_path, V01_CONFIG, tensors, file))
        assert file in str(error.value)

    for name in complete:
        refused({k: v for k, v in complete.items() if k != name}, f"missing .*{prefix}{name[len(prefix)]}[.]|left over")
        refused(complete | {name: torch.ones(3, 3, 3)}, rf"{name} is \(3, 3, 3\), expected \(")
    for extra in ("0.2.weight", "0.1.bias", "0.norm.weight", "3.1.weight", "4.0.linear.weight"):
        refused(complete | {prefix + extra: torch.ones(2, 2)}, rf"left over .*{prefix}{extra}")
    gap = {k: v for k, v in complete.items() if not k.startswith(f"{prefix}1.")}
    refused(gap, rf"missing {prefix}1.0.linear.bias.* left over {prefix}2.0.linear.bias")


def test_no_heads_where_there_should_be(tmp_path):
    with pytest.raises(
        ValueError, match=r"should hold Medusa heads, but model.safetensors has no tensor named like one of"
    ):
        AutoDrafter.from_pretrained(folder(tmp_path, VLLM_CONFIG, {"other": torch.ones(2)}))


def test_dtype_of_the_file(target, tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in named(heads()).items()}
    name = folder(tmp_path, V01_CONFIG, tensors, "medusa_lm_head.safetensors")
    assert AutoDrafter.from_pretrained(name).dtype == torch.bfloat16
    assert AutoDrafter.from_pretrained(name, target=target).dtype == torch.float32
    assert AutoDrafter.from_pretrained(name, target=target, dtype="float16").dtype == torch.float16
    tensors["0.0.linear.weight"] = tensors["0.0.linear.weight"].half()
    drafter = AutoDrafter.from_pretrained(folder(tmp_path, V01_CONFIG, tensors, "medusa_lm_head.safetensors"))
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}


@pytest.mark.parametrize("shared", [False, True])
def test_folder_as_assistant(target, tmp_path, same_text, shared):
    name = folder(tmp_path, V01_CONFIG, named(heads(outputs=0 if shared else None)), "medusa_lm_head.safetensors")
    output = same_text(target, {"input_ids": torch.tensor([[5, 17, 33]]), "attention_mask": torch.ones(1, 3)}, name)
    assert output.speculation.num_drafted > 0


def test_a_causal_model_is_none_and_its_pickle_stays_closed(target, tmp_path, monkeypatch):
    target.save_pretrained(tmp_path)
    assert convert(Checkpoint(str(tmp_path))) is None
    (tmp_path / "model.safetensors").unlink()
    assert convert(Checkpoint(str(tmp_path))) is None
    torch.save(target.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", None)
    assert convert(Checkpoint(str(tmp_path))) is None
    assert convert(Checkpoint(str(tmp_path), use_safetensors=False)) is None
    with pytest.raises(ValueError, match=r"in the format of no drafter known here: .*medusa.*AutoModelForCausalLM"):
        AutoDrafter.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 64, "intermediate_size": 64}, r"hidden_size 32 .*lmsys/vicuna.*has hidden_size 64"),
        ({"vocab_size": 98}, r"vocab_size 97 .*has vocab_size 98"),
    ],
)
def test_another_target(tmp_path, config, expected):
    name = folder(tmp_path, V01_CONFIG, named(heads()), "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=expected):
        AutoDrafter.from_pretrained(name, target=tiny_llama(4, **config))


def test_a_target_with_another_number_of_layers(tmp_path):
    name = folder(tmp_path, NVIDIA_CONFIG, named(heads(), "medusa_heads."))
    with pytest.raises(ValueError, match=r"num_hidden_layers 4, but LlamaForCausalLM has num_hidden_layers 2"):
        AutoDrafter.from_pretrained(name, target=tiny_llama(2))


def test_malicious_pickle(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (tmp_path / "done").mkdir, ()

    name = folder(tmp_path, V01_CONFIG, named(heads()) | {"0.0.linear.bias": Malicious()}, "medusa_lm_head.pt")
    with pytest.raises(OSError, match=r"medusa_lm_head.pt is no file of plain tensors .*refused"):
        AutoDrafter.from_pretrained(name, use_safetensors=False)
    assert not (tmp_path / "done").exists()
