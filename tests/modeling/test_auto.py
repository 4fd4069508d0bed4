"""AutoDrafter with drafters in our own format; other formats are tested with their method."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter, MedusaModel
from hf_specdec.modeling.target import OutputHead


@pytest.fixture
def saved(target, tmp_path):
    torch.manual_seed(0)
    model = MedusaModel.for_target(target, num_heads=2, draft_token_ids=torch.tensor([4, 9, 30]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    return model


def test_round_trip(saved, target, tmp_path):
    states = torch.randn(3, target.config.hidden_size)
    loaded = AutoDrafter.from_pretrained(str(tmp_path), target=target)
    assert type(loaded) is MedusaModel and not loaded.training
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in saved.state_dict().items())
    head = OutputHead(target, saved.token_ids)
    assert torch.equal(loaded(states, head), saved(states, head))
    assert AutoDrafter.from_pretrained(tmp_path).config.num_target_layers == 4


def test_folder_as_assistant(saved, target, tmp_path, same_text):
    same_text(target, {"input_ids": torch.tensor([[5, 17, 33]])}, str(tmp_path), do_sample=True)


def test_several_files(target, tmp_path):
    model = MedusaModel.for_target(target, num_heads=3)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert AutoDrafter.from_pretrained(str(tmp_path)).config.num_heads == 3
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(OSError, match=r"incomplete or damaged .*model-00001.*download it again"):
        AutoDrafter.from_pretrained(str(tmp_path))


def test_dtype(saved, target, tmp_path):
    saved.bfloat16().save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(str(tmp_path)).dtype == torch.bfloat16
    assert AutoDrafter.from_pretrained(str(tmp_path), target=target).dtype == torch.float32
    assert AutoDrafter.from_pretrained(str(tmp_path), target=target, dtype="float16").dtype == torch.float16
    assert AutoDrafter.from_pretrained(str(tmp_path), dtype=torch.float64).dtype == torch.float64
    for dtype in ("int8", torch.int8, "nonsense", "load", 3):
        with pytest.raises(ValueError, match=r"`dtype` is .*; expected a floating-point torch.dtype"):
            AutoDrafter.from_pretrained(str(tmp_path), dtype=dtype)


def test_tensors_missing_and_left_over(saved, tmp_path):
    weights = load_file(tmp_path / "model.safetensors")
    del weights["heads.1.0.linear.weight"]
    save_file(weights | {"other": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing heads.1.0.linear.weight; left over other. Download it again"):
        AutoDrafter.from_pretrained(str(tmp_path))


def test_damaged_weights(saved, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(OSError, match=r"incomplete or damaged .*download it again"):
        AutoDrafter.from_pretrained(str(tmp_path))


def test_no_weights(target, tmp_path):
    target.config.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"has no weights; download it again"):
        AutoDrafter.from_pretrained(str(tmp_path))


def test_no_config(saved, tmp_path):
    (tmp_path / "config.json").unlink()
    with pytest.raises(OSError, match=r"has no config.json; download it again"):
        AutoDrafter.from_pretrained(str(tmp_path))


def test_an_adapter_without_config_is_left_to_transformers(tmp_path):
    peft = pytest.importorskip("peft")
    target = tiny_llama(2)
    target.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    ids = torch.tensor([[5, 17, 33]])
    plain = target.generate(ids, max_new_tokens=9)
    assert target.generate(ids, max_new_tokens=9, assistant=str(tmp_path / "adapter")).tolist() == plain.tolist()
    MedusaModel.for_target(target).save_pretrained(tmp_path / "heads")
    AutoDrafter.from_pretrained(str(tmp_path / "heads"), target=adapted)


def test_format_of_no_drafter(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"model_type 'llama', architectures \['LlamaForCausalLM'\].*no drafter .*medusa"
    ):
        AutoDrafter.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("layers", "config", "expected"),
    [
        (4, {"hidden_size": 64}, r"with hidden_size 32, but LlamaForCausalLM has hidden_size 64"),
        (4, {"vocab_size": 98}, r"with vocab_size 97, but LlamaForCausalLM has vocab_size 98"),
        (3, {}, r"with num_hidden_layers 4, but LlamaForCausalLM has num_hidden_layers 3"),
    ],
)
def test_another_target(saved, tmp_path, layers, config, expected):
    with pytest.raises(ValueError, match=expected):
        AutoDrafter.from_pretrained(str(tmp_path), target=tiny_llama(layers, **config))


def test_fields_that_are_not_known_fit_every_target(saved, tmp_path):
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_target_layers": None}))
    AutoDrafter.from_pretrained(str(tmp_path), target=tiny_llama(3))


def test_bad_arguments(saved, tmp_path):
    with pytest.raises(ValueError, match=r"`target` got a str; pass the loaded causal LM"):
        AutoDrafter.from_pretrained(str(tmp_path), target="meta-llama/Llama-2-7b-hf")
    with pytest.raises(TypeError, match=r"'device_map'; the options are"):
        AutoDrafter.from_pretrained(str(tmp_path), device_map="cpu")
    with pytest.raises(OSError, match=r"AutoDrafter is not made itself"):
        AutoDrafter()
