"""Checkpoints that are whole, half there, damaged or malicious."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.utils import cached_file

from hf_specdec import MedusaConfig, MedusaModel
from hf_specdec.modeling.checkpoint import (
    Checkpoint,
    account_for,
    drafter_of,
    parameter_shapes,
    refuse_other_dtypes,
)

TENSORS = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}


@pytest.fixture
def name(tmp_path) -> str:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return str(tmp_path)


def sharded(path: Path, weight_map: dict[str, str], kind: str = "model.safetensors") -> None:
    (path / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def same(read: dict[str, torch.Tensor]) -> bool:
    return list(read) == ["b", "a"] and all(
        torch.equal(read[k], TENSORS[k]) and read[k].dtype == TENSORS[k].dtype for k in read
    )


@pytest.mark.parametrize(
    "file", ["model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"]
)
def test_one_file(name, tmp_path, file):
    (save_file if file.endswith("safetensors") else torch.save)(TENSORS, tmp_path / file)
    checkpoint = Checkpoint(name, use_safetensors=None if file.endswith("safetensors") else False)
    assert sorted(checkpoint.tensor_names) == ["a", "b"] and checkpoint.config == {"model_type": "llama"}
    assert same(checkpoint.tensors(["b", "a"]))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_several_files(name, tmp_path, kind):
    whole = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[kind]
    for tensor, value in TENSORS.items():
        (save_file if kind == "safetensors" else torch.save)({tensor: value}, tmp_path / f"part-{tensor}.{kind}")
    sharded(tmp_path, {tensor: f"part-{tensor}.{kind}" for tensor in TENSORS}, whole)
    checkpoint = Checkpoint(name, use_safetensors=kind == "safetensors")
    assert checkpoint.tensor_names == ["a", "b"] and same(checkpoint.tensors(["b", "a"]))
    (tmp_path / f"part-b.{kind}").unlink()
    assert torch.equal(checkpoint.tensors(["a"])["a"], TENSORS["a"])
    with pytest.raises(OSError, match=rf"lacks part-b.{kind}, which {whole}.index.json names; download it again"):
        checkpoint.tensors(["a", "b"])
    sharded(tmp_path, {"a": f"part-a.{kind}", "b": f"part-a.{kind}"}, whole)
    with pytest.raises(OSError, match=rf"part-a.{kind}.*download it again"):
        Checkpoint(name, use_safetensors=kind == "safetensors").tensors(["b"])


def test_old_pickle_that_is_no_zip_file(name, tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(Checkpoint(name, use_safetensors=False).tensors(["b", "a"]))


def test_subfolder_and_layout_of_the_hub_without_a_network(tmp_path):
    snapshot = tmp_path / "models--someone--heads" / "snapshots" / ("0" * 40)
    for place in (snapshot, snapshot / "inner"):
        place.mkdir(parents=True)
        (place / "config.json").write_text('{"model_type": "llama"}')
        save_file(TENSORS, place / "model.safetensors")
    (tmp_path / "models--someone--heads" / "refs").mkdir()
    (tmp_path / "models--someone--heads" / "refs" / "main").write_text("0" * 40)
    offline = {"cache_dir": str(tmp_path), "local_files_only": True}
    assert same(Checkpoint(str(snapshot)).tensors(["b", "a"]))
    assert same(Checkpoint(str(snapshot), subfolder="inner").tensors(["b", "a"]))
    assert same(Checkpoint("someone/heads", **offline).tensors(["b", "a"]))
    assert same(Checkpoint("someone/heads", subfolder="inner", **offline).tensors(["b", "a"]))
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"'someone/heads' has no weights"):
        _ = Checkpoint("someone/heads", **offline).files
    with pytest.raises(OSError, match=r"someone/other|internet"):
        Checkpoint("someone/other", **offline)


@pytest.mark.parametrize("content", ["", '{"a": ', "[1]", "3", b"\xff\xfe\x00{"])
def test_damaged_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OSError, match=r"config.json is incomplete or no JSON object; download it again"):
        Checkpoint(str(tmp_path))


def test_no_such_folder(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        Checkpoint(str(tmp_path / "nothing"))


def test_option_that_does_not_exist(name):
    with pytest.raises(
        TypeError, match=r"not loaded with 'device_map', 'torch_dtype'; the options are .*revision.*\.to\("
    ):
        Checkpoint(name, torch_dtype="float16", device_map="auto")


def test_no_weights(name):
    with pytest.raises(OSError, match=r"has no weights; expected one of .*model.safetensors.*Download it again"):
        _ = Checkpoint(name).tensor_names


@pytest.mark.parametrize("size", [0, 4, 60, -1])
def test_truncated_safetensors(name, tmp_path, size):
    save_file(TENSORS, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:size])
    with pytest.raises(
        OSError, match=r"model.safetensors is incomplete or damaged \(.*delete it and download it again"
    ):
        _ = Checkpoint(name).tensor_names


def test_pointer_instead_of_the_file(name, tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(OSError, match=r"incomplete or damaged"):
        _ = Checkpoint(name).tensor_names


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_damaged_index(name, tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        OSError, match=r"index.json (is incomplete or no JSON object|has no 'weight_map'); download it again"
    ):
        _ = Checkpoint(name).tensor_names


@pytest.mark.parametrize("shard", ["part.bin", "../part.safetensors", "/tmp/part.safetensors", 3])
def test_index_that_leads_elsewhere(name, tmp_path, shard):
    torch.save(TENSORS, tmp_path / "part.bin")
    sharded(tmp_path, {"a": shard})
    with pytest.raises(OSError, match=rf"index.json names {shard!r}; expected a .safetensors file beside it"):
        Checkpoint(name, use_safetensors=False).tensors(["a"])


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt", "pytorch_model.bin.index.json"])
def test_pickle_without_permission(name, tmp_path, file):
    if file.endswith(".json"):
        sharded(tmp_path, {"a": "part.bin"}, "pytorch_model.bin")
        torch.save(TENSORS, tmp_path / "part.bin")
        assert Checkpoint(name).tensor_names == ["a"]
    else:
        torch.save(TENSORS, tmp_path / file)
    for asked in (None, True):
        with pytest.raises(OSError, match=r"legacy pickle file only .*use_safetensors=False.*no code is run"):
            Checkpoint(name, use_safetensors=asked).tensors(["a"])


@pytest.mark.parametrize("subfolder", ["", "inner"])
def test_pickle_without_permission_is_not_downloaded(name, tmp_path, monkeypatch, subfolder):
    place = tmp_path / subfolder
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text("{}")
    torch.save(TENSORS, place / "pytorch_model.bin")
    asked = []

    def spy(name, file, **options):
        asked.append(file)
        return cached_file(name, file, **options)

    monkeypatch.setattr("hf_specdec.modeling.checkpoint.cached_file", spy)
    assert Checkpoint(name, subfolder=subfolder).is_one_pickle
    assert "config.json" in asked and not {"pytorch_model.bin", "medusa_lm_head.pt"} & set(asked)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old"])
def test_malicious_pickle(name, tmp_path, new):
    content = {"a": TENSORS["a"], "b": Malicious(tmp_path / "done")}
    torch.save(content, tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(
        OSError, match=r"medusa_lm_head.pt is no file of plain tensors .*would run code.*refused"
    ) as error:
        _ = Checkpoint(name, use_safetensors=False).tensor_names
    assert "weights_only=False" not in str(error.value)
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 3}, {"state_dict": TENSORS}, b"no pickle"])
def test_pickle_of_something_else(name, tmp_path, content):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(OSError, match=r"is no file of plain tensors"):
        _ = Checkpoint(name, use_safetensors=False).tensor_names


def test_tensors_are_accounted_for(name, tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(name)
    account_for(checkpoint, "the heads", [], [])
    with pytest.raises(
        ValueError, match=r"the heads in .*model.safetensors.* missing a, b; left over none. Download it"
    ):
        account_for(checkpoint, "the heads", {"b", "a"}, ())
    with pytest.raises(ValueError, match=r"missing none; left over other.bias"):
        account_for(checkpoint, "the heads", (), ["other.bias"])
    with pytest.raises(ValueError, match=r"the heads in .* are quantized: c.qweight, c.scales; expected float16"):
        account_for(checkpoint, "the heads", ["c.weight"], ["c.scales", "c.qweight", "other"])
    refuse_other_dtypes(checkpoint, "the heads", TENSORS)
    with pytest.raises(ValueError, match=r"are quantized: c \(torch.int8\); expected .* that was not quantized"):
        refuse_other_dtypes(checkpoint, "the heads", TENSORS | {"c": torch.ones(2, dtype=torch.int8)})


def test_drafter_of_tensors(name, tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    config = MedusaConfig(hidden_size=3, vocab_size=5, draft_vocab_size=2, num_heads=1, block_bias=False)
    own, ids = "heads.0.0.linear.weight", torch.tensor([4, 1])
    assert parameter_shapes(MedusaModel, config) == {own: (3, 3)}
    weight = torch.randn(3, 3, dtype=torch.float64)
    drafter = drafter_of(MedusaModel, config, {own: weight}, ids, Checkpoint(name), {own: "published"})
    assert torch.equal(drafter.heads[0][0].linear.weight, weight) and drafter.dtype == torch.float64
    assert torch.equal(drafter.token_ids, ids)
    with pytest.raises(ValueError, match=r"has tensors of the wrong shape: published is \(3, 2\), expected \(3, 3\)"):
        drafter_of(MedusaModel, config, {own: weight[:, :2]}, ids, Checkpoint(name), {own: "published"})
