"""What users may rely on, and what may import what."""

from __future__ import annotations

import ast
import inspect
import re
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
        "AutoDrafter",
        "CandidateGenerator",
        "CandidateTree",
        "DraftLayersConfig",
        "DraftLayersModel",
        "DraftModel",
        "Eagle",
        "EagleConfig",
        "EagleModel",
        "Medusa",
        "MedusaConfig",
        "MedusaModel",
        "PromptLookup",
        "Run",
        "SpeculationStatistics",
        "SpeculativeOutput",
        "TypicalAcceptance",
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
        "assistant_acceptance",
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
    assert METHODS["prompt_lookup"].candidates is hf_specdec.PromptLookup


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and node.level}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("generation/*.py")), ids=lambda path: path.stem)
def test_the_loop_knows_no_method_by_name(path):
    if path.stem not in METHOD_FILES | {"assistant"}:  # assistant.py says what `assistant=` may be
        assert not imports(path) & METHOD_FILES


ROOMS = sorted(path.parent for path in PACKAGE.glob("modeling/*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_imports_no_other_room(room):
    allowed = {"base", "target", "checkpoint", "registry", "training.objective"}
    for path in room.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > 1:
                assert node.module in allowed or node.module.startswith("generation."), f"{path}: {node.module}"


def test_outside_its_room_a_method_costs_one_import():
    """The training commands, which make drafters by name, and the demo aside."""
    for room in ROOMS:
        users = [
            path.name
            for path in PACKAGE.rglob("*.py")
            if path.parent != room
            and re.search(rf"modeling\.{room.name} import|\.{room.name} import", path.read_text())
        ]
        assert sorted(users) == ["__init__.py", "commands.py"]
