"""`return_dict_in_generate`: lengths, shapes and values are those of plain `generate`, and the statistics add up."""

from __future__ import annotations

import pytest
import torch
from conftest import OracleDrafter, ragged_batch, real_rows, tiny_llama
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

import hf_specdec

NUM_NEW = 12
ONE, RAGGED = (9,), (5, 11, 3)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "pad_token_id": 0,
    "max_new_tokens": NUM_NEW,
}


def make_model(name: str):
    torch.manual_seed(3)
    if name == "llama":
        return tiny_llama(2, seed=3, initializer_range=0.5, attn_implementation="eager")
    if name == "mistral":  # every layer has the window
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval()
    types = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, layer_types=types)).eval()


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3"])
def model(request):
    return make_model(request.param)


def assert_same_steps(ours, plain, ends: list[int]) -> None:
    """Tuples (steps) of tensors or of tuples (layers) of them; row b counts for its first `ends[b]` steps."""
    assert len(ours) == len(plain)
    for step, (mine, theirs) in enumerate(zip(ours, plain)):
        rows = [row for row, end in enumerate(ends) if step < end]
        layers = zip((mine,), (theirs,)) if isinstance(mine, torch.Tensor) else zip(mine, theirs, strict=True)
        for a, b in layers:
            assert a.shape == b.shape
            torch.testing.assert_close(a[rows], b[rows], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("oracle", [(0.8, 1), (0.8, 3), (1.0, 1)])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("with_eos", [False, True])
def test_same_outputs(model, lengths, oracle, do_sample, with_eos):
    inputs = ragged_batch(lengths)
    kwargs = EVERYTHING | {"do_sample": do_sample, "repetition_penalty": 1.1}
    if with_eos:
        torch.manual_seed(5)
        texts = model.generate(**inputs, **kwargs).sequences[:, max(lengths) :]
        kwargs["eos_token_id"] = [text[3 + 2 * row].item() for row, text in enumerate(texts)]
    torch.manual_seed(5)
    plain = model.generate(**inputs, **kwargs)
    torch.manual_seed(5)
    drafts = OracleDrafter(real_rows(plain.sequences, inputs), *oracle)
    ours = model.generate(**inputs, **kwargs, assistant=drafts)
    assert isinstance(ours, hf_specdec.SpeculativeOutput)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    ends = list(map(len, ours.speculation.drafted_mask))
    num_steps = plain.sequences.shape[1] - max(lengths)
    assert max(ends) == len(ours.scores) == num_steps
    assert_same_steps(ours.logits, plain.logits, ends)
    assert_same_steps(ours.scores, plain.scores, ends)
    assert_same_steps(ours.hidden_states, plain.hidden_states, ends)
    assert_same_steps(ours.attentions, plain.attentions, ends)
    assert_consistent(ours.speculation, ends)


def assert_consistent(speculation: hf_specdec.SpeculationStatistics, ends: list[int]) -> None:
    assert speculation.num_emitted == sum(ends)
    assert speculation.num_drafted == sum(speculation.drafted_per_depth)
    assert speculation.num_accepted == sum(speculation.accepted_per_depth)
    assert len(speculation.accepted_per_depth) == len(speculation.drafted_per_depth)
    assert speculation.accepted_per_depth == sorted(speculation.accepted_per_depth, reverse=True)
    assert all(a <= d for a, d in zip(speculation.accepted_per_depth, speculation.drafted_per_depth))
    assert speculation.num_accepted == sum(map(sum, speculation.drafted_mask))
    # Every row and pass gives its accepted drafts and one token of the target's own, unless a stop cuts it short.
    surplus = speculation.num_accepted + speculation.num_row_passes - speculation.num_emitted
    assert 0 <= surplus <= len(ends)
    assert speculation.num_target_passes <= speculation.num_row_passes <= len(ends) * speculation.num_target_passes
    assert speculation.mean_acceptance_length == speculation.num_emitted / speculation.num_row_passes
    assert speculation.total_seconds >= speculation.target_seconds + speculation.drafter_seconds
    assert speculation.target_seconds > 0


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_hidden_states", "output_attentions"])
def test_only_what_was_asked_for(name):
    model, inputs = make_model("llama"), ragged_batch(ONE)
    kwargs = {"max_new_tokens": 4, "pad_token_id": 0, "return_dict_in_generate": True, name: True}
    plain = model.generate(**inputs, **kwargs)
    ours = model.generate(**inputs, **kwargs, assistant="prompt_lookup")
    assert set(ours.keys()) == {*plain.keys(), "speculation"}
    # Without `return_dict_in_generate` the flags are of no effect, as with plain `generate`.
    del kwargs["return_dict_in_generate"]
    assert torch.equal(model.generate(**inputs, **kwargs, assistant="prompt_lookup"), plain.sequences)


def test_attentions_that_the_implementation_does_not_give():
    """sdpa gives none; transformers says so and returns empty tuples."""
    model, inputs = tiny_llama(1, attn_implementation="sdpa"), ragged_batch(ONE)
    plain = model.generate(**inputs, **EVERYTHING)
    ours = model.generate(**inputs, **EVERYTHING, assistant="prompt_lookup")
    assert ours.attentions == plain.attentions == ((),) * NUM_NEW


@pytest.mark.parametrize("branches", [1, 3])
def test_outputs_of_a_cold_start(branches):
    """One token of prompt; hidden states at step 0 are the prompt's."""
    model, inputs = make_model("llama"), ragged_batch((1,))
    plain = model.generate(**inputs, **EVERYTHING)
    drafts = OracleDrafter(real_rows(plain.sequences, inputs), 0.8, branches)
    ours = model.generate(**inputs, **EVERYTHING, assistant=drafts)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_same_steps(getattr(ours, name), getattr(plain, name), [NUM_NEW])


class Spy(OracleDrafter):
    """Keeps the hidden states that the loop hands out, at `update` and at `propose`."""

    hidden_state_layers = (0, 1)

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.at_update: list = []
        self.at_propose: list = []

    def _look(self, run) -> list:
        return [
            (row.index, row.num_emitted, {layer: states[place, :new] for layer, states in run.hidden_states.items()})
            for place, (row, new) in enumerate(zip(run.rows, run.num_new, strict=True))
        ]

    def update(self, run) -> None:
        self.at_update.append(self._look(run))

    def propose(self, run, num_draft_tokens):
        if run.hidden_states:
            self.at_propose.append(self._look(run))
        return super().propose(run, num_draft_tokens)


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("asked", [False, True])
def test_hidden_states_for_a_generator(lengths, branches, asked):
    """Layer l at every token that was read and kept, whatever the caller wants to see and whoever leaves the batch."""
    model, inputs = make_model("llama"), ragged_batch(lengths)
    texts = model.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0)
    eos = [text[max(lengths) + 3 + 3 * row].item() for row, text in enumerate(texts)]
    rows = real_rows(texts, inputs)
    spy = Spy(rows, 0.8, branches)
    kwargs = {"return_dict_in_generate": True, "output_hidden_states": True} if asked else {}
    model.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0, eos_token_id=eos, assistant=spy, **kwargs)
    whole = [model(torch.tensor([row]), output_hidden_states=True).hidden_states for row in rows]
    for looks in (spy.at_update, spy.at_propose):
        read = dict.fromkeys(range(len(lengths)), 0)
        for look in looks:
            for index, num_emitted, states in look:
                if not states[0].shape[0]:
                    continue  # a finished row that is still in the batch
                upto = lengths[index] + num_emitted - 1  # the newest token has not been read
                assert read[index] + states[0].shape[0] == upto
                for layer in (0, 1):
                    want = whole[index][layer + 1][0, read[index] : upto]
                    torch.testing.assert_close(states[layer], want, atol=1e-4, rtol=1e-4)
                read[index] = upto
        assert all(read.values())
