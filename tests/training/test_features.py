"""The store of hidden states: what it holds, how it survives interruptions, and what it refuses."""

from __future__ import annotations

import errno
import json
import pickle
import random
import shutil
from collections import namedtuple

import pytest
import torch
from conftest import VOCAB_SIZE, tiny_llama
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from hf_specdec.modeling.target import target_hash
from hf_specdec.training import features
from hf_specdec.training.data import Example
from hf_specdec.training.features import FeatureStore, required_bytes, write_features

LAYERS = (0, 2, 3)
SMALL_SHARDS = 12_000  # two to three examples in float32
OPTIONS = {"layers": LAYERS, "batch_size": 2, "dtype": torch.float32, "shard_bytes": SMALL_SHARDS}


def make_examples(lengths=(7, 3, 19, 1, 12, 8, 19, 5, 9), seed: int = 0) -> list[Example]:
    generator = random.Random(seed)
    return [
        Example([generator.randrange(VOCAB_SIZE) for _ in range(n)], [generator.random() < 0.5 for _ in range(n)])
        for n in lengths
    ]


EXAMPLES = make_examples()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "features"


@pytest.fixture(scope="module")
def finished(target, tmp_path_factory):
    """A folder with features of EXAMPLES; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "features"
    write_features(target, EXAMPLES, folder, **OPTIONS)
    return folder


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shards(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


class Interrupted(Exception):
    pass


def stop_after(num_examples: int):
    def progress(num_done: int, total: int) -> None:
        if num_done >= num_examples:
            raise Interrupted

    return progress


def interrupt(target, folder, num_examples: int = 5, **options) -> None:
    with pytest.raises(Interrupted):
        write_features(target, EXAMPLES, folder, **OPTIONS | {"progress": stop_after(num_examples)} | options)


def expected_states(target, ids: list[int], layer: int) -> torch.Tensor:
    with torch.no_grad():
        return target(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer + 1][0]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_values_of_a_direct_pass(target, folder, batch_size):
    store = write_features(target, EXAMPLES, folder, **OPTIONS | {"batch_size": batch_size})
    assert (len(store), store.layers, store.hidden_size, store.dtype) == (len(EXAMPLES), LAYERS, 32, torch.float32)
    for example, item in zip(EXAMPLES, store):
        assert item["input_ids"].dtype == torch.long
        assert item["input_ids"].tolist() == example.input_ids
        assert item["is_response"].dtype == torch.bool
        assert item["is_response"].tolist() == example.is_response
        assert tuple(item["hidden_states"]) == LAYERS
        for layer, states in item["hidden_states"].items():
            torch.testing.assert_close(states, expected_states(target, example.input_ids, layer), atol=1e-5, rtol=0)


def test_the_target_reads_in_evaluation_mode_and_keeps_its_modes(finished, folder):
    target = tiny_llama(4, attention_dropout=0.5).train()
    target.model.norm.eval()
    write_features(target, EXAMPLES, folder, **OPTIONS)
    assert target.training and target.model.layers[0].training and not target.model.norm.training
    for name in shards(finished):
        assert (folder / name).read_bytes() == (finished / name).read_bytes()
    with pytest.raises(Interrupted):
        write_features(target, EXAMPLES, folder / "2", **OPTIONS, progress=stop_after(1))
    assert target.training


def test_an_item_is_no_view_of_its_shard(finished):
    item = FeatureStore(finished)[2]
    states = item["hidden_states"][0]
    assert states.untyped_storage().nbytes() == states.numel() * states.itemsize


def test_items_count_from_the_end_and_end(finished):
    store = FeatureStore(finished)
    assert store[-1]["input_ids"].tolist() == EXAMPLES[-1].input_ids
    with pytest.raises(IndexError):
        store[len(EXAMPLES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_dtype_is_half_precision(folder, dtype):
    target = tiny_llama(1).to(dtype)
    store = write_features(target, EXAMPLES, folder, layers=(0,))
    assert store.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    assert store[0]["hidden_states"][0].dtype == store.dtype
    assert shards(folder) == ["features-00000.safetensors"]


def test_shards_keep_their_size_and_pad_little(finished):
    index = json.loads((finished / "index.json").read_text())
    assert len(index["shards"]) > 2
    lengths = [n for shard in index["shards"] for n in shard["lengths"]]
    assert lengths == sorted(lengths, reverse=True)
    for shard in index["shards"]:
        size = (finished / shard["file"]).stat().st_size
        payload = required_bytes([EXAMPLES[i] for i in shard["examples"]], 32, LAYERS, torch.float32)
        assert size == shard["num_bytes"] and payload < size < payload + 1000
        assert payload <= SMALL_SHARDS
    assert required_bytes(EXAMPLES, 32, LAYERS, torch.float32) == 83 * (8 + 1 + 3 * 32 * 4)


def test_an_example_larger_than_a_shard_has_its_own(target, folder):
    store = write_features(target, EXAMPLES, folder, **OPTIONS | {"shard_bytes": 1})
    assert len(shards(folder)) == len(store) == len(EXAMPLES)
    assert [item["input_ids"].tolist() for item in store] == [example.input_ids for example in EXAMPLES]


def test_progress_counts_examples(target, folder):
    seen = []
    write_features(target, EXAMPLES, folder, **OPTIONS, progress=lambda *counts: seen.append(counts))
    assert seen == sorted(seen) and seen[-1] == (9, 9) and len(seen) >= 5
    seen.clear()
    (folder / "features-00001.safetensors").unlink()
    write_features(target, EXAMPLES, folder, **OPTIONS, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (9, 9) and seen[0][0] > 2


@pytest.mark.parametrize("num_examples", [1, 3, 5, 9])
def test_an_interrupted_run_goes_on_with_the_same_bytes(target, finished, folder, num_examples):
    interrupt(target, folder, num_examples)
    num_shards = len(shards(folder))
    assert num_shards < len(shards(finished))
    with pytest.raises(ValueError, match=rf"unfinished: {num_shards} of {len(shards(finished))} shards are there. Run"):
        FeatureStore(folder)
    kept = {name: (folder / name).stat().st_mtime_ns for name in shards(folder)}
    write_features(target, EXAMPLES, folder, **OPTIONS)
    assert all((folder / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert contents(folder) == contents(finished)


def test_a_finished_store_is_not_made_again(target, finished):
    before = {path: path.stat().st_mtime_ns for path in finished.iterdir()}
    write_features(target, EXAMPLES, finished, **OPTIONS, progress=stop_after(0))
    assert before == {path: path.stat().st_mtime_ns for path in finished.iterdir()}


def test_a_rerun_may_use_smaller_batches(target, finished, folder):
    interrupt(target, folder)
    store = write_features(target, EXAMPLES, folder, **OPTIONS | {"batch_size": 1, "shard_bytes": 1})
    assert shards(folder) == shards(finished)
    for item, other in zip(store, FeatureStore(finished)):
        torch.testing.assert_close(item, other, atol=1e-5, rtol=0)


def test_what_a_killed_process_leaves_does_no_harm(target, finished, folder):
    interrupt(target, folder)
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / ".tmp123").write_bytes(b"half")
    (folder / "features-00002.safetensors").write_bytes(b"renamed, and not in the index yet")
    write_features(target, EXAMPLES, folder, **OPTIONS)
    assert contents(folder) == contents(finished)


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"target": tiny_llama(4, seed=1)},
            r"`target` was \w{12}\.\.\. and is \w{12}\.\.\.\. Give another folder, or delete this",
        ),
        ({"examples": EXAMPLES[:-1]}, r"`examples` was \w{12}\.\.\. and is \w{12}\.\.\.\."),
        ({"layers": (0, 1)}, r"`layers` was \[0, 2, 3\] and is \[0, 1\]\."),
        ({"dtype": torch.float16}, r"`dtype` was float32 and is float16\."),
        ({"layers": (3,), "dtype": None}, r"`layers` was .* is \[3\]; `dtype` was float32 and is float16\."),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_a_folder_made_otherwise_is_refused(target, finished, folder, changed, message, complete):
    if not complete:
        interrupt(target, folder)
    arguments = {"target": target, "examples": EXAMPLES, "folder": finished if complete else folder} | OPTIONS | changed
    before = contents(arguments["folder"])
    with pytest.raises(ValueError, match=f"'{arguments['folder']}' holds features that were made otherwise: {message}"):
        write_features(**arguments)
    assert contents(arguments["folder"]) == before


def test_a_response_mask_counts_as_data(target, finished):
    ids, is_response = EXAMPLES[0]
    examples = [Example(ids, [not flag for flag in is_response]), *EXAMPLES[1:]]
    with pytest.raises(ValueError, match="`examples` was"):
        write_features(target, examples, finished, **OPTIONS)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def spoil_header(path):
    data = bytearray(path.read_bytes())
    data[8:12] = b"\0\0\0\0"
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, message",
    [(lambda path: path.unlink(), "is missing"), (cut, r"has \d+ bytes instead of \d+"), (spoil_header, "is damaged")],
)
def test_damaged_shards_are_named_and_made_anew(target, finished, folder, damage, message):
    shutil.copytree(finished, folder)
    damage(folder / "features-00001.safetensors")
    with pytest.raises(ValueError, match=rf"features-00001.safetensors {message}.* Run `write_features` again"):
        FeatureStore(folder)
    write_features(target, EXAMPLES, folder, **OPTIONS)
    assert contents(folder) == contents(finished)


def test_no_store(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"no features in '.*' \(no index.json\); give a folder that"):
            FeatureStore(folder)


def test_a_damaged_index(finished, folder):
    shutil.copytree(finished, folder)
    cut(folder / "index.json")
    with pytest.raises(ValueError, match=r"index.json is damaged \(.*\); delete '.*' and run `write_features` anew"):
        FeatureStore(folder)


@pytest.mark.parametrize("text, version", [('{"format_version": 99}', 99), ("[]", None)])
def test_an_index_of_another_format(folder, text, version):
    folder.mkdir()
    (folder / "index.json").write_text(text)
    with pytest.raises(ValueError, match=rf"has the format version {version}; this version of hf_specdec reads 1"):
        FeatureStore(folder)


def test_too_little_room_is_found_before_the_target_runs(target, folder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 32_618, 32_618))
    with pytest.raises(OSError, match=r"need 0.00 GB and the disk of '.*features' has 0.00 GB free. Make room"):
        write_features(target, EXAMPLES, folder, **OPTIONS, progress=stop_after(0))
    assert not list(folder.iterdir())
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 32_619, 32_619))
    write_features(target, EXAMPLES, folder, **OPTIONS)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), features.SafetensorError("No space left")])
def test_a_full_disk_leaves_the_finished_shards(target, finished, folder, monkeypatch, error):
    save_file = features.save_file

    def save_on_a_full_disk(tensors, path):
        if path.name == "features-00002.safetensors":
            path.write_bytes(b"half")
            raise error
        save_file(tensors, path)

    monkeypatch.setattr(features, "save_file", save_on_a_full_disk)
    with pytest.raises(OSError, match=r"features-00002.safetensors could not be written: .*No space left.*; make room"):
        write_features(target, EXAMPLES, folder, **OPTIONS)
    assert sorted(contents(folder)) == ["features-00000.safetensors", "features-00001.safetensors", "index.json"]
    monkeypatch.undo()
    write_features(target, EXAMPLES, folder, **OPTIONS)
    assert contents(folder) == contents(finished)


def test_worker_processes(finished):
    store = FeatureStore(finished)
    assert store[0]["input_ids"].tolist() == EXAMPLES[0].input_ids  # opened here before the workers start
    loader = DataLoader(store, batch_size=None, num_workers=2)
    for item, expected in zip(loader, store):
        torch.testing.assert_close(item, expected, atol=0, rtol=0)


def test_pickle(finished):
    store = pickle.loads(pickle.dumps(FeatureStore(finished)))
    assert store[3]["input_ids"].tolist() == EXAMPLES[3].input_ids


def test_check(target, finished):
    store = FeatureStore(finished)
    store.check()
    store.check(target, layers=(3, 0))
    with pytest.raises(ValueError, match=r"`layers` is \(1, 2\); the features in '.*' are of the layers \(0, 2, 3\)"):
        store.check(layers=(1, 2))
    with pytest.raises(ValueError, match=r"`target` 'LlamaForCausalLM' has the hidden size 16; .* with 32\. Write"):
        store.check(tiny_llama(4, hidden_size=16))
    other = tiny_llama(4, seed=1)
    hashes = rf"hash {target_hash(other)[:12]}; .* with {target_hash(target)[:12]}\. Write them"
    with pytest.raises(ValueError, match=hashes):
        store.check(other)


def test_target_hash(target):
    expected = target_hash(target)
    assert target_hash(tiny_llama(4)) == expected
    stored = tiny_llama(4).to(torch.bfloat16)
    assert target_hash(stored) == target_hash(stored.float())
    assert target_hash(tiny_llama(3)) != expected
    trained = tiny_llama(4)
    trained.model.layers[3].mlp.up_proj.weight.data.mul_(1.01)
    assert target_hash(trained) != expected


def test_adapters_count(folder):
    wrapped = get_peft_model(tiny_llama(2), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    options = {"layers": (1,), "dtype": torch.float32}
    store = write_features(wrapped, EXAMPLES, folder, **options)
    store.check(wrapped)
    torch.testing.assert_close(store[0]["hidden_states"][1], expected_states(wrapped, EXAMPLES[0].input_ids, 1))
    with pytest.raises(ValueError, match="has the hash"):
        store.check(tiny_llama(2))
    next(p for name, p in wrapped.named_parameters() if "lora_B" in name).data.mul_(2)
    with pytest.raises(ValueError, match="`target` was"):
        write_features(wrapped, EXAMPLES, folder, **options)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"layers": ()}, r"`layers` is \(\); give at least one of the layers 0 to 3 of 'LlamaForCausalLM'\."),
        ({"layers": (0, 4)}, r"`layers` is \(0, 4\); give"),
        ({"layers": (-1,)}, r"`layers` is \(-1,\); give"),
        ({"dtype": torch.int8}, r"`dtype` is torch.int8; features are stored in one of torch.float16, torch.bfloat16"),
        ({"batch_size": 0}, r"`batch_size` is 0; it must be at least 1\."),
        ({"shard_bytes": 0}, r"`shard_bytes` is 0; it must be at least 1\."),
        ({"examples": []}, r"`examples` is empty; give at least one example\."),
        ({"examples": [EXAMPLES[0], Example([5, 6], [True])]}, r"`examples\[1\]` has 2 ids and 1 flags .* Mend or"),
        ({"examples": [Example([], [])]}, r"`examples\[0\]` has 0 ids and 0 flags"),
        ({"examples": [Example([3, 97], [True, True])]}, r"has ids from 3 to 97; .* knows 0 to 96\. Encode the data"),
    ],
)
def test_bad_arguments(target, folder, changed, message):
    with pytest.raises(ValueError, match=message):
        write_features(**{"target": target, "examples": EXAMPLES, "folder": folder} | OPTIONS | changed)
    assert not folder.exists()


def test_states_too_large_for_the_dtype(folder):
    target = tiny_llama(2)
    target.model.embed_tokens.weight.data.mul_(1e6)
    with pytest.raises(ValueError, match=r"`dtype` is torch.float16, which cannot hold the outputs of layer 0 of .*"):
        write_features(target, EXAMPLES, folder, layers=(0,))
    write_features(target, EXAMPLES, folder.with_name("other"), layers=(0,), dtype=torch.bfloat16)
