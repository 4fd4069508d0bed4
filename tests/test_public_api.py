"""What users may rely on, and what may import what."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from transformers import GenerationMixin

import hf_specdec
from hf_specdec.keyword import install_keyword
from hf_specdec.registry import METHODS, register_method

PACKAGE = Path(hf_specdec.__file__).parent
METHOD_FILES = {"draft_model", "prompt_lookup"}  # in generation/: what the loop must not know by name


def test_public_names():
    assert sorted(hf_specdec.__all__) == [
        "CandidateGenerator",
        "CandidateTree",
        "DraftModel",
        "PromptLookup",
        "Run",
        "SpeculationStatistics",
        "SpeculativeOutput",
        "register_method",
        "speculative_decoding",
        "theory",
    ]
    assert all(hasattr(hf_specdec, name) for name in hf_specdec.__all__)


def test_arguments_of_generate():
    parameters = inspect.signature(hf_specdec.speculative_decoding).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == [
        "assistant",
        "assistant_sampling",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "tokenizer",
        "assistant_tokenizer",
    ]


def test_keyword_is_installed_once_and_keeps_the_signature():
    generate = GenerationMixin.generate
    install_keyword()
    assert GenerationMixin.generate is generate
    assert inspect.signature(generate) == inspect.signature(generate.__wrapped__)


def test_method_names_are_unique():
    with pytest.raises(ValueError, match=r"'prompt_lookup' is registered already"):
        register_method("prompt_lookup", hf_specdec.PromptLookup)
    assert METHODS["prompt_lookup"] is hf_specdec.PromptLookup


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and node.level}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("generation/*.py")), ids=lambda path: path.stem)
def test_the_loop_knows_no_method_by_name(path):
    if path.stem not in METHOD_FILES | {"assistant"}:  # assistant.py says what `assistant=` may be
        assert not imports(path) & METHOD_FILES
