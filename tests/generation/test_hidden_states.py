"""What a generator sees of the target: hidden states at the accepted tokens, and only those."""

from __future__ import annotations

import pytest
import torch
from conftest import OracleDrafter, ragged_batch, real_rows


class Watcher(OracleDrafter):
    """An oracle that also notes the hidden states it is shown."""

    hidden_state_layers = (0, 2)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = {}

    def update(self, run):
        for place, row in enumerate(run.rows):
            for layer in self.hidden_state_layers:
                states = run.hidden_states[layer][place, : run.num_new[place]]
                self.seen.setdefault((row.index, layer), []).append(states)


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("wants_all", [False, True])
@pytest.mark.parametrize("lengths", [(6,), (5, 11, 3)])
def test_hidden_states_of_accepted_tokens(target, lengths, branches, wants_all):
    inputs = ragged_batch(lengths)
    options = {"max_new_tokens": 24, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    watcher = Watcher(real_rows(plain.sequences, inputs), 0.6, branches)
    output = target.generate(**inputs, assistant=watcher, output_hidden_states=wants_all, **options)
    assert torch.equal(output.sequences, plain.sequences)
    for row, tokens in enumerate(real_rows(plain.sequences, inputs)):
        expected = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        for layer in watcher.hidden_state_layers:
            seen = torch.cat(watcher.seen[row, layer])
            # Each token once, in order, up to the newest one that the generator was told of.
            assert len(lengths) > 1 or len(seen) >= len(tokens) - 8
            torch.testing.assert_close(seen, expected[layer + 1][0, : len(seen)], atol=1e-4, rtol=1e-4)
