"""EAGLE drafting: what the drafter reads, the trees that come of it, and the text, on a toy language.

In the toy language a token has one likely successor and two others. The target is written down, not trained: its
embedding is a one-hot code and its output layer a table of log-probabilities; random layers between them make the
context matter. The drafter passes the newest token's embedding on, so it knows the language; random weights beside that
make its guesses depend on all that it reads.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from conftest import VOCAB_SIZE, Moody, ragged_batch, successors, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList

import hf_specdec
from hf_specdec import Eagle, EagleConfig, EagleModel
from hf_specdec.generation.cache import CACHE_NAME
from hf_specdec.generation.choice import Greedy, SharedNoise
from hf_specdec.generation.tree import NO_TOKEN, ROOT
from hf_specdec.modeling.eagle.trees import EAGLE_1_TREE

HIDDEN_SIZE = 128
RAGGED = (5, 11, 3, 17)
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
GPT2_SIZES = {"n_embd": HIDDEN_SIZE, "n_head": 4, "n_layer": 3, "n_positions": 64, "n_inner": 64}


def speaker(kind: str = "llama", context: float = 0.25, **config):
    """A target that speaks the toy language; `context` is how much its layers have to say."""
    torch.manual_seed(0)
    sizes = SIZES | (GPT2_SIZES if kind == "gpt2" else {}) | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float()
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data.normal_(std=context * HIDDEN_SIZE**-0.5 if "proj" in name else 0.02)
        if "self_attn.q_proj" in name or "self_attn.k_proj" in name:
            weight.data.normal_(std=0.15)
    vocab_size = sizes["vocab_size"]
    logits = successors(vocab_size).log().T
    logits = torch.nn.functional.pad(logits - logits.min(), (0, HIDDEN_SIZE - vocab_size)).float()
    model.get_input_embeddings().weight.data.copy_(torch.eye(vocab_size, HIDDEN_SIZE))
    # Of states that have passed the final norm: a one-hot code is then sqrt(D) long.
    model.get_output_embeddings().weight.data.copy_(logits / HIDDEN_SIZE**0.5)
    return model.eval()


def listener(target, version: int = 1, context: float = 1.0, token_ids: torch.Tensor | None = None, **fields):
    """A drafter that knows the toy language; `context` is how much everything else that it reads has to say.

    Version 1 passes the embedding of the newest token through `fc`. Version 3 sees no embedding but through attention:
    a token's query finds the keys of the same token, and the value is its embedding.
    """
    if version == 3:
        fields = {"target_layers": [0, 1, 2]} | fields
    model = EagleModel.for_target(target, version=version, draft_token_ids=token_ids, **fields)
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 2 and weight is not getattr(model.lm_head, "weight", None):
            weight.data.normal_(std=context * weight.shape[1] ** -0.5)
    identity = torch.eye(HIDDEN_SIZE)
    attention = model.body.layers[0].self_attn
    if version == 1:
        attention.q_proj.weight.data.normal_(std=0.1)
        attention.k_proj.weight.data.normal_(std=0.1)
        model.fc.weight.data[:, :HIDDEN_SIZE] += HIDDEN_SIZE**0.5 * identity
    else:
        attention.q_proj.weight.data[:, :HIDDEN_SIZE].normal_(std=0.085 if context else 0.12)
        attention.k_proj.weight.data.copy_(attention.q_proj.weight.data)
        attention.v_proj.weight.data[:, :HIDDEN_SIZE] += 4 * identity
        attention.o_proj.weight.data += identity
    return model.eval()


@pytest.fixture(scope="module")
def target():
    return speaker()


DRAFTERS = {
    "eagle": {"version": 1},
    "eagle3": {"version": 3},
    "eagle_few_ids": {"version": 1, "token_ids": torch.arange(96, 2, -2)},
    "eagle3_own_head": {"version": 3, "token_ids": torch.arange(3, 90), "has_own_output_head": True, "num_layers": 2},
    "eagle3_bare": {"version": 3, "fc_norm": False, "norm_output": False, "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def drafters(target):
    return {name: listener(target, **options) for name, options in DRAFTERS.items()}


@dataclass
class Proposal:
    """What was proposed for which texts.

    `live`: places of the rows that go on, with their indices in the whole batch; `noise[b][k]` is what the k-th
    token from now of the row at place b will be chosen with.
    """

    texts: list[list[int]]
    live: dict[int, int]
    num_wanted: int
    num_draft_tokens: int
    tree: hf_specdec.CandidateTree
    num_passes: int
    noise: list[list[torch.Tensor]] | None

    def rows(self):
        """Place, text and noise of the rows that go on: nobody reads the drafts of a finished one that cannot leave."""
        return [(place, self.texts[place], None if self.noise is None else self.noise[place]) for place in self.live]


class Watched(Eagle):
    """Notes what it proposes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: list[Proposal] = []

    def propose(self, run, num_draft_tokens):
        passes = []
        handle = self.model.register_forward_hook(lambda *args: passes.append(1))
        tree = super().propose(run, num_draft_tokens)
        handle.remove()
        noise = None
        if type(run.choice) is SharedNoise:
            noise = [[run.choice.noise(row.num_emitted + k)[row.index] for k in range(8)] for row in run.rows]
        texts = [list(tokens) for tokens in run.tokens]
        live = {place: row.index for place, row in enumerate(run.rows) if row.finished_at is None}
        self.seen.append(Proposal(texts, live, run.num_wanted, num_draft_tokens, tree, len(passes), noise))
        return tree


class Reader:
    """What the drafter says after a text and some drafts, read anew as a whole for every question, without a cache.

    Args:
        text: all tokens; the target has read all but the last.
        first: how many features the drafter has not been given (of an earlier turn, or of a prompt without ids).
    """

    def __init__(self, model, target, text: list[int], first: int = 0) -> None:
        self.model, self.text = model, text[first + 1 :]
        self.embedding, self.head = model.embedding(target), model.output_head(target)
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[1:]
        self.features = {(): model.fuse([states[layer][:, first:] for layer in model.layers_of(target)])[0]}
        self.ids = list(range(target.config.vocab_size)) if model.token_ids is None else model.token_ids.tolist()

    def chances(self, paths: list[tuple[int, ...]], noise: list[torch.Tensor] | None) -> list[dict[int, float]]:
        """Logarithm of the chance of each next token after these drafts (all equally many)."""
        features = torch.stack([self.features[path] for path in paths])
        tokens = torch.tensor([[*self.text, *path] for path in paths])
        states = self.model(features, self.embedding(tokens), torch.arange(tokens.shape[1])[None])[:, -1]
        self.after = {path: torch.cat([*pair]) for path, pair in zip(paths, zip(features, states[:, None]))}
        scores = self.model.logits(states, self.head).log_softmax(-1)
        if noise is not None:
            scores = (2**0.5 * scores - noise[len(paths[0])][self.ids].log()).log_softmax(-1)
        return [dict(zip(self.ids, row)) for row in scores.tolist()]

    def level(self, paths: list[tuple[int, ...]], noise: list[torch.Tensor] | None, width: int):
        """For each path its best next tokens, best first, with the logarithms of their chances."""
        best = [sorted(row.items(), key=lambda pair: -pair[1])[:width] for row in self.chances(paths, noise)]
        self.features |= {(*path, token): self.after[path] for path, row in zip(paths, best) for token, _ in row}
        return best


@torch.no_grad()
def likeliest(
    reader: Reader, noise, depth: int, width: int, num_nodes: int, threshold: float
) -> tuple[list[tuple[int, ...]], int]:
    """EAGLE-2 in plain Python: the paths of the tree's nodes, and how many levels were looked at."""
    known: dict[tuple[int, ...], float] = {}
    above, least = {(): 0.0}, math.log(threshold) if threshold else -math.inf
    num_levels = 0
    while num_levels < depth:
        num_levels += 1
        best = reader.level(list(above), noise, width)
        below = {(*path, token): above[path] + chance for path, row in zip(above, best) for token, chance in row}
        known |= below
        above = dict(sorted(below.items(), key=lambda pair: -pair[1])[:width])
        if max(above.values()) < least:
            break
    order = sorted(known, key=lambda path: (-known[path], len(path)))[:num_nodes]
    return [path for path in order if known[path] >= least], num_levels


def ways(tree, row: int) -> list[tuple[int, ...] | None]:
    """Tokens on the way to each node of a row; `None` for nodes without a token."""
    parents = range(-1, tree.num_nodes - 1) if tree.is_chain else tree.parents.expand_as(tree.tokens)[row].tolist()
    found: list[tuple[int, ...] | None] = []
    for token, parent in zip(tree.tokens[row].tolist(), parents):
        above = () if parent == ROOT else found[parent]
        assert above is not None or token == NO_TOKEN, "a child without its parent"
        found.append(None if token == NO_TOKEN else (*above, token))
    return found


def generate(target, assistant, lengths, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": 16, "pad_token_id": 0, "return_dict_in_generate": True} | options
    return target.generate(**ragged_batch(lengths), assistant=assistant, **options)


# What the drafter reads and guesses


@pytest.mark.parametrize("lengths", [(6,), (5, 11, 1, 17)])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_are_those_of_a_drafter_that_reads_everything_anew(target, drafters, name, do_sample, lengths):
    """The features of all but the last token are the target's, each draft has read its own branch only, and of every
    level the best nodes are continued."""
    shapes = {"tree": (4, 3, 9, 0.0), "cautious": (5, 4, 12, 0.2), "chain": (3, 1, 3, 0.0)}
    for depth, width, num_nodes, threshold in shapes.values():
        eagle = Watched(drafters[name], num_draft_tokens=num_nodes, depth=depth, width=width)
        options = {"do_sample": do_sample, "top_k": 0, "assistant_confidence_threshold": threshold}
        options |= {"return_dict_in_generate": False, "max_new_tokens": 12}  # so that finished rows leave the batch
        generate(target, eagle, lengths, **options)
        assert 0 < len(eagle.seen) < 11, "some drafts are right"
        for proposal in eagle.seen:
            levels = []
            for row, text, noise in proposal.rows():
                reader = Reader(drafters[name], target, text)
                deepest = min(depth, num_nodes, proposal.num_wanted - 1)
                expected, num_levels = likeliest(reader, noise, deepest, width, num_nodes, threshold)
                levels.append(num_levels)
                got = [] if proposal.tree is None else [way for way in ways(proposal.tree, row) if way is not None]
                assert got == expected
            assert proposal.num_passes == max(levels), "one pass a level"


@pytest.mark.parametrize("name", ["eagle", "eagle3_own_head"])
@pytest.mark.parametrize("lengths", [(6,), RAGGED])
@torch.no_grad()
def test_static_trees_have_the_guess_of_their_rank(target, drafters, name, lengths):
    for paths, num_nodes, do_sample in ((EAGLE_1_TREE, 32, False), (EAGLE_1_TREE, 14, True), ([[2], [2, 1]], 5, False)):
        eagle = Watched(drafters[name], tree=paths)
        output = generate(target, eagle, lengths, do_sample=do_sample, top_k=0, num_assistant_tokens=num_nodes)
        assert output.speculation.num_accepted > 0 or len(paths) == 2
        paths = [tuple(path) for path in paths[:num_nodes]]
        for proposal in eagle.seen:
            deepest = min(max(map(len, paths)), proposal.num_wanted - 1)
            assert proposal.num_passes == proposal.tree.depth == deepest
            assert proposal.tree.parents.ndim == 1
            for row, text, noise in proposal.rows():
                reader, tokens = Reader(drafters[name], target, text), {(): ()}
                for level in range(deepest):
                    above = [path for path in paths if len(path) == level] if level else [()]
                    best = reader.level([tokens[path] for path in above], noise, 4)
                    for path, row_best in zip(above, best):
                        tokens |= {(*path, rank): (*tokens[path], token) for rank, (token, _) in enumerate(row_best)}
                assert ways(proposal.tree, row) == [tokens[path] for path in paths if len(path) <= deepest]


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize("kind", ["chunks", "embeds", "later_turn"])
@pytest.mark.parametrize("lengths", [(9,), RAGGED])
def test_prompts_of_other_kinds(target, drafters, same_text, name, kind, lengths):
    """Read in chunks, as embeddings, or behind a cache of an earlier turn: the drafter starts on what the last pass
    over the prompt reads, and where it has ids."""
    model, inputs, more, first = drafters[name], ragged_batch(lengths), {}, [0] * len(lengths)
    prompts = [[] for _ in lengths]
    if kind == "chunks":
        more = {"prefill_chunk_size": 4}
        first = [length - 1 for length in lengths]  # the last chunk is one column
    if kind == "embeds":
        embeds = target.get_input_embeddings()(inputs["input_ids"])
        prompts = [ids[-length:].tolist() for ids, length in zip(inputs.pop("input_ids"), lengths)]
        first = [length - 1 for length in lengths]
        inputs["inputs_embeds"] = embeds
    eagle = Watched(model, depth=3, width=2, num_draft_tokens=5)
    options = {"assistant_confidence_threshold": 0.0, "max_new_tokens": 12}
    if kind == "later_turn":
        before = generate(target, model, lengths, max_new_tokens=6)
        first = [length + 5 for length in lengths]  # the cache lacks the last token
        ids = torch.cat([before.sequences, torch.tensor([[4, 17]] * len(lengths))], dim=1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 8), value=1)
        inputs = {"input_ids": ids, "attention_mask": mask}
        expected = target.generate(**inputs, max_new_tokens=12, pad_token_id=0)
        more = {CACHE_NAME: before[CACHE_NAME], "return_dict_in_generate": True}
        output = target.generate(**inputs, pad_token_id=0, assistant=eagle, **options, **more)
        assert output.sequences.tolist() == expected.tolist()
    else:
        output = same_text(target, inputs, eagle, **options, **more)
    assert output.speculation.num_accepted > 0
    for proposal in eagle.seen:
        for row, text, _ in proposal.rows():
            index = proposal.live[row]
            reader = Reader(model, target, prompts[index] + text, first[index])
            expected, _ = likeliest(reader, None, min(3, proposal.num_wanted - 1), 2, 5, 0.0)
            assert ways(proposal.tree, row) == expected


def test_a_second_call_starts_afresh(target, drafters):
    eagle = Watched(drafters["eagle"])
    first = generate(target, eagle, (6,))
    seen = len(eagle.seen)
    generate(target, eagle, RAGGED)
    again = len(eagle.seen)
    assert generate(target, eagle, (6,)).sequences.tolist() == first.sequences.tolist()
    for one, other in zip(eagle.seen[:seen], eagle.seen[again:], strict=True):
        assert one.tree.tokens.tolist() == other.tree.tokens.tolist()


# The trees


@pytest.mark.parametrize("lengths", [(6,), RAGGED])
@pytest.mark.parametrize("num_assistant_tokens", [1, 2, 20, 200, None])
def test_number_of_nodes(target, drafters, num_assistant_tokens, lengths):
    eagle = Watched(drafters["eagle"], num_draft_tokens=11, depth=4, width=5)
    options = {"assistant_confidence_threshold": 0.0, "num_assistant_tokens": num_assistant_tokens}
    generate(target, eagle, lengths, **options)
    asked = num_assistant_tokens or 11
    for proposal in eagle.seen:
        assert proposal.num_draft_tokens == asked
        depth = min(4, asked, proposal.num_wanted - 1)
        assert proposal.num_passes == depth
        assert proposal.tree.num_nodes == min(asked, 5 + 25 * (depth - 1))
        assert proposal.tree.depth <= depth


@pytest.mark.parametrize("lengths", [(6,), RAGGED])
@pytest.mark.parametrize("size", [0.0, 1e5])
def test_equal_chances(target, lengths, size):
    """A drafter that knows nothing, and one that is certain of every token: a child is then as likely as its parent."""
    model = listener(target, has_own_output_head=True)
    model.lm_head.weight.data.mul_(size)
    for num_nodes in (3, 8, 40):
        eagle = Watched(model, depth=5, width=4, num_draft_tokens=num_nodes)
        generate(target, eagle, lengths, assistant_confidence_threshold=0.0)
        for proposal in eagle.seen:
            depth = min(5, num_nodes, proposal.num_wanted - 1)
            for row in range(len(proposal.texts)):
                found = [way for way in ways(proposal.tree, row) if way is not None]
                assert len(set(found)) == len(found)
                if size:
                    assert [len(way) for way in found] == list(range(1, depth + 1)), "the one branch that is possible"
                else:
                    assert len(found) == min(num_nodes, 4 + 16 * (depth - 1))
                    assert max(map(len, found)) <= depth


def test_threshold_cuts_and_saves_passes(target, drafters):
    sizes, passes = [], []
    for threshold in (0.0, 0.05, 0.3, 1.0):
        eagle = Watched(drafters["eagle"])
        generate(target, eagle, RAGGED, assistant_confidence_threshold=threshold, max_new_tokens=8)
        first = eagle.seen[0]
        sizes.append(0 if first.tree is None else int((first.tree.tokens != NO_TOKEN).sum(1).max()))
        passes.append(first.num_passes)
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1], passes[0], passes[-1]) == (32, 0, 6, 1)
    assert sizes[1] > sizes[2] > 0
    eagle = Watched(drafters["eagle"])
    generate(target, eagle, RAGGED, max_new_tokens=8)
    assert int((eagle.seen[0].tree.tokens != NO_TOKEN).sum(1).max()) == sizes[2], "the default on a CPU"


# The text


WAYS_TO_CHOOSE = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 0},
    "top_p": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "everything": {
        "do_sample": True,
        "repetition_penalty": 1.2,
        "top_k": 20,
        "suppress_tokens": list(range(0, 97, 3)),
        "bad_words_ids": [[7], [8, 9]],
    },
}
WAYS_TO_DRAFT = {"tree": {}, "chain": {"width": 1}, "static": {"tree": EAGLE_1_TREE}}
CASES = [("eagle", "tree", (7,)), ("eagle3", "chain", (7,)), ("eagle", "chain", RAGGED), ("eagle3", "tree", RAGGED)]
CASES += [("eagle_few_ids", "tree", RAGGED), ("eagle3_own_head", "static", RAGGED)]


@pytest.mark.parametrize(("name", "how", "lengths"), CASES)
@pytest.mark.parametrize("choose", WAYS_TO_CHOOSE)
def test_same_text(target, drafters, same_text, name, how, lengths, choose):
    eagle = Eagle(drafters[name], **WAYS_TO_DRAFT[how])
    output = same_text(target, ragged_batch(lengths), eagle, max_new_tokens=16, **WAYS_TO_CHOOSE[choose])
    assert output.speculation.num_accepted > 0


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("how", WAYS_TO_DRAFT)
def test_few_tokens(target, drafters, same_text, limit, how):
    for lengths in ((1,), (4, 1, 2)):
        for do_sample in (False, True):
            eagle = Eagle(drafters["eagle3"], **WAYS_TO_DRAFT[how])
            options = {"max_new_tokens": limit, "assistant_confidence_threshold": 0.0, "do_sample": do_sample}
            output = same_text(target, ragged_batch(lengths), eagle, **options)
            assert output.speculation.num_emitted == limit * len(lengths)


@pytest.mark.parametrize("num_assistant_tokens", [1, 2, 200])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 1.0])
def test_any_budget_and_threshold(target, drafters, same_text, num_assistant_tokens, threshold):
    options = {"num_assistant_tokens": num_assistant_tokens, "assistant_confidence_threshold": threshold}
    for do_sample in (False, True):
        output = same_text(
            target, ragged_batch((5, 9)), drafters["eagle"], max_new_tokens=12, do_sample=do_sample, **options
        )
        assert output.speculation.num_accepted > 0 or threshold == 1.0


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_num_return_sequences(target, drafters, same_text, name):
    options = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 16}
    same_text(target, ragged_batch((5, 9)), drafters[name], **options)


@pytest.mark.parametrize(("name", "how"), [("eagle", "tree"), ("eagle3", "chain"), ("eagle3", "static")])
@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_that_end_early(target, drafters, tokenizer, same_text, name, how, do_sample):
    """By an EOS token or a stop string that an accepted branch holds, not at its end; the other rows go on."""
    inputs = ragged_batch(RAGGED)
    eagle = Eagle(drafters[name], **WAYS_TO_DRAFT[how])
    options = {"max_new_tokens": 24, "do_sample": do_sample, "assistant_confidence_threshold": 0.0}
    output = same_text(target, inputs, eagle, **options)
    places = []
    for row, drafted in enumerate(output.speculation.drafted_mask):
        text = output.sequences[row, max(RAGGED) :].tolist()
        places += [
            (text[n], tokenizer.decode(text[n - 1 : n + 1]))
            for n in range(3, 20)
            if drafted[n] and drafted[n + 1] and text[n] not in text[:n] and min(text[: n + 1]) > 2
        ]
    token, string = places[-1]
    ended = same_text(target, inputs, eagle, eos_token_id=token, **options)
    assert len({len(mask) for mask in ended.speculation.drafted_mask}) > 1
    same_text(target, inputs, eagle, stop_strings=[string], tokenizer=tokenizer, eos_token_id=2, **options)


@pytest.mark.parametrize("lengths", [(7,), RAGGED])
@pytest.mark.parametrize("do_sample", [False, True])
def test_own_logits_processor(target, drafters, lengths, do_sample):
    def text(assistant):
        moody = Moody()
        more = {} if assistant is None else {"assistant": assistant}
        torch.manual_seed(5)
        options = {"max_new_tokens": 16, "pad_token_id": 0, "do_sample": do_sample}
        ids = target.generate(**ragged_batch(lengths), **options, logits_processor=LogitsProcessorList([moody]), **more)
        return ids.tolist(), moody.num_calls

    expected = text(None)
    for assistant in (drafters["eagle"], Eagle(drafters["eagle3"], width=1), Eagle(drafters["eagle"], tree=[[0], [1]])):
        assert text(assistant) == expected


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_all_outputs(target, drafters, name):
    """The states that the drafter asks for and those that the user asks for do not get in each other's way."""
    model = copy.deepcopy(target)
    model.set_attn_implementation("eager")
    names = ("scores", "logits", "hidden_states", "attentions")
    options = {f"output_{output}": True for output in names} | {"do_sample": True, "max_new_tokens": 12}
    options |= {"pad_token_id": 0, "return_dict_in_generate": True}
    torch.manual_seed(5)
    plain = model.generate(**ragged_batch((4, 7)), **options)
    ours = generate(model, drafters[name], (4, 7), **options)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.speculation.num_accepted > 0
    for output in names:
        mine, theirs = getattr(ours, output), getattr(plain, output)
        assert len(mine) == len(theirs) == 12
        for step in (1, 5, 11):
            last = (mine[step], theirs[step]) if output in ("scores", "logits") else (mine[step][-1], theirs[step][-1])
            torch.testing.assert_close(*last, atol=1e-3, rtol=1e-3)


TARGETS = {"gpt2": {}, "qwen3": {}, "gemma2": {"sliding_window": 6}, "mistral": {"sliding_window": 6}, "gpt_neox": {}}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("version", [1, 3])
def test_targets(same_text, kind, version):
    target = speaker(kind, **TARGETS[kind])
    model = listener(target, version, context=0.02)
    for lengths, do_sample in (((7,), False), (RAGGED, True)):
        options = {"max_new_tokens": 16, "do_sample": do_sample, "assistant_confidence_threshold": 0.0}
        output = same_text(target, ragged_batch(lengths), model, **options)
        assert output.speculation.num_accepted > 0


@pytest.mark.parametrize("lengths", [(40,), (40, 33, 50)])
def test_up_to_the_end_of_a_position_table(same_text, lengths):
    """GPT-2 has no embedding for the positions that the deepest nodes of a row at its end would have."""
    target = speaker("gpt2")
    options = {"max_new_tokens": 64 - max(lengths), "assistant_confidence_threshold": 0.0}
    for how in WAYS_TO_DRAFT.values():
        output = same_text(target, ragged_batch(lengths), Eagle(listener(target), **how), **options)
        assert output.speculation.num_accepted > 0
        assert output.sequences.shape[1] == 64


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3_own_head"])
def test_drafter_in_another_dtype(target, drafters, same_text, name):
    model = copy.deepcopy(drafters[name]).bfloat16()
    for do_sample in (False, True):
        output = same_text(target, ragged_batch(RAGGED), model, do_sample=do_sample, max_new_tokens=16)
        assert output.speculation.num_accepted > 0
    other, inputs = copy.deepcopy(target).bfloat16(), ragged_batch((9,))
    options = {"max_new_tokens": 24, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = other.generate(**inputs, **options, output_logits=True)
    got = other.generate(**inputs, **options, assistant=drafters[name])
    assert got.speculation.num_accepted > 0
    differs = (plain.sequences != got.sequences)[0, 9:].nonzero()
    if len(differs):
        best = plain.logits[int(differs[0])][0].topk(2).values
        assert best[0] - best[1] <= 2**-7 * best[0].abs() * 4


@pytest.mark.parametrize("token_ids", [[5, 9, 11], [8]])
@pytest.mark.parametrize("how", [{}, {"width": 1}, {"tree": EAGLE_1_TREE}, {"tree": [[0], [7], [7, 1]]}])
def test_fewer_ids_than_a_tree_is_wide(target, same_text, token_ids, how):
    eagle = Eagle(listener(target, token_ids=torch.tensor(token_ids)), **how)
    options = {"max_new_tokens": 10, "assistant_confidence_threshold": 0.0}
    for do_sample in (False, True):
        same_text(target, ragged_batch((5, 9)), eagle, do_sample=do_sample, **options)


@pytest.mark.parametrize("how", [*WAYS_TO_DRAFT.values(), "rejection"])
@pytest.mark.parametrize("broken", ["all", "one"])
def test_a_drafter_that_overflows_costs_its_guesses_only(target, same_text, how, broken):
    model = listener(target, has_own_output_head=True)
    model.lm_head.weight.data[5 if broken == "one" else slice(None)] = torch.nan
    if how == "rejection":
        output = generate(target, model, RAGGED, do_sample=True, assistant_sampling="rejection")
        assert output.sequences.shape[1] == max(RAGGED) + 16
        assert output.speculation.num_accepted == 0
    else:
        for do_sample in (False, True):
            same_text(target, ragged_batch(RAGGED), Eagle(model, **how), do_sample=do_sample, max_new_tokens=10)


# What it brings


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("how", WAYS_TO_DRAFT)
def test_the_likely_text_is_drafted_whole(version, how):
    """Without a context the drafter knows the greedy text: all levels are right in every pass."""
    target = speaker(context=0.0)
    eagle = Eagle(listener(target, version, context=0.0), **WAYS_TO_DRAFT[how])
    per_pass = 1 + (5 if how == "static" else 6)
    options = {"max_new_tokens": 1 + 4 * per_pass, "assistant_confidence_threshold": 0.0}
    for lengths in ((6,), RAGGED):
        assert generate(target, eagle, lengths, **options).speculation.num_target_passes == 1 + 4


def tokens_per_pass(target, model, lengths=RAGGED, **options) -> float:
    options = {"max_new_tokens": 40, "assistant_confidence_threshold": 0.0} | options
    output = generate(target, model, lengths, **options)
    return output.speculation.mean_acceptance_length


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize("lengths", [(7,), RAGGED])
def test_it_really_drafts(target, drafters, name, lengths, monkeypatch):
    for sampling in ({}, {"do_sample": True, "top_k": 0}):
        tree, static, chain = (
            tokens_per_pass(target, Eagle(drafters[name], **how), lengths, **sampling)
            for how in ({"depth": 5}, {"tree": EAGLE_1_TREE}, {"depth": 5, "width": 1})
        )
        assert chain > 1.7
        assert min(tree, static) > chain + 0.2
    monkeypatch.setattr(SharedNoise, "chances", Greedy.chances)
    assert tree > tokens_per_pass(target, Eagle(drafters[name], depth=5), lengths, **sampling) + 0.2


# Rejection sampling


@pytest.mark.parametrize("name", ["eagle", "eagle3_own_head"])
@pytest.mark.parametrize("lengths", [(7,), RAGGED])
@pytest.mark.parametrize("options", [{"top_k": 0}, {"temperature": 0.7, "top_k": 5}])
def test_rejection_drafts_chains_with_their_distributions(target, drafters, name, lengths, options):
    for eagle in (Watched(drafters[name]), Watched(drafters[name], tree=EAGLE_1_TREE)):
        more = {"do_sample": True, "assistant_sampling": "rejection", "assistant_confidence_threshold": 0.0}
        output = generate(target, eagle, lengths, **more, **options)
        assert output.speculation.num_accepted > 0
        for proposal in eagle.seen:
            tree = proposal.tree
            assert tree.is_chain
            assert tree.num_nodes == proposal.num_passes == min(6, proposal.num_wanted - 1)
            assert tree.draft_probs.shape == (*tree.tokens.shape, VOCAB_SIZE)
            torch.testing.assert_close(tree.draft_probs.sum(-1), torch.ones(tree.tokens.shape))
            assert (tree.draft_probs.gather(-1, tree.tokens[..., None]) > 0).all()
            if drafters[name].token_ids is not None:
                others = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, drafters[name].token_ids, False)
                assert (tree.draft_probs[..., others] == 0).all()


@pytest.mark.parametrize(("token_ids", "threshold"), [([4, 0, 3], 0.0), (None, None)])
@torch.no_grad()
def test_distribution_under_rejection(token_ids, threshold):
    """Of all texts of four tokens: the second pass verifies a chain, whose length must not hang on what it guesses."""
    target = speaker(vocab_size=5)
    model = listener(target, context=0.5, token_ids=None if token_ids is None else torch.tensor(token_ids))
    prompt, num_samples, options = [3, 1, 4], 2000, {"temperature": 2.5, "top_k": 0}
    torch.manual_seed(11)
    output = target.generate(
        torch.tensor([prompt]),
        num_return_sequences=num_samples,
        max_new_tokens=4,
        do_sample=True,
        assistant=model,
        assistant_sampling="rejection",
        assistant_confidence_threshold=threshold,
        return_dict_in_generate=True,
        **options,
    )
    assert output.speculation.num_accepted > 500
    texts = torch.tensor([[*prompt, *rest] for rest in itertools.product(range(5), repeat=4)])
    logits = target(texts).logits[:, 2:-1].double() / 2.5
    probs = logits.log_softmax(-1).gather(-1, texts[:, 3:, None]).sum((1, 2)).exp()
    counts = torch.bincount((output.sequences[:, 3:] * 5 ** torch.arange(3, -1, -1)).sum(1), minlength=len(texts))
    common = probs * num_samples >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = num_samples * torch.cat([probs[common], probs[~common].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum() / 2
    assert torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic) > 1e-6


# Errors


def refuses(target, assistant, message: str, **options) -> None:
    with pytest.raises(ValueError, match=message):
        target.generate(**ragged_batch((6,)), max_new_tokens=6, pad_token_id=0, assistant=assistant, **options)


def test_plain_name(target):
    refuses(target, "eagle", "`assistant` got 'eagle', a method that has weights; give the Hub id or folder")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"hidden_size": 64}, "made for a target .*hidden_size 64, but LlamaForCausalLM has hidden_size 32"),
        ({"vocab_size": 90}, "made for a target .*vocab_size 90, but LlamaForCausalLM has vocab_size 97"),
        ({"num_target_layers": 3}, "num_hidden_layers 3, but LlamaForCausalLM has num_hidden_layers 4"),
        ({"target_layers": [0, 1, 4]}, r"reads the layers \[0, 1, 4\] .* has the layers 0 to 3; take the drafter"),
        ({"target_layers": [0, -1, 2]}, r"reads the layers \[0, -1, 2\] .* has the layers 0 to 3"),
        ({}, r"has 4 layers, and EAGLE-3's choice .* needs 7; .*`target_layers=\[0, 1, 2\]`"),
        ({"num_target_features": 2}, "fuses 2 layers .* its file does not say which; set"),
        ({"source_numbering": "vllm", "target_layers": [1, 2, 3]}, "before the target's final norm"),
    ],
)
def test_drafters_of_another_target(field, message):
    target = tiny_llama(4)
    fields = {"hidden_size": 32, "vocab_size": 97, "num_target_layers": 4} | field
    layer = EagleConfig.layer_config_of(target) | {"hidden_size": fields["hidden_size"]}
    model = EagleModel(EagleConfig(layer_config=layer, **fields))
    for assistant in (model, Eagle(model)):
        refuses(target, assistant, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_assistant_tokens": "auto"}, "`num_assistant_tokens` is 'auto', which adapts.*but Eagle drafts trees"),
        ({"num_assistant_tokens_schedule": "heuristic"}, "is 'heuristic', which adapts.*give the number of nodes"),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens` is 0; expected an int of at least 1"),
    ],
)
def test_draft_lengths(target, drafters, options, message):
    refuses(target, drafters["eagle"], message, **options)


@pytest.mark.parametrize("name", ["num_draft_tokens", "depth", "width"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "3"])
def test_numbers(drafters, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}; expected an int of at least 1"):
        Eagle(drafters["eagle"], **{name: value})


def test_settings_of_the_generator(target, drafters):
    for model in (target, "eagle", None):
        with pytest.raises(ValueError, match=r"`model` is a .*; Eagle takes a loaded EagleModel"):
            Eagle(model)
    with pytest.raises(ValueError, match=r"`tree` has the path \[1, 0\]"):
        Eagle(drafters["eagle"], tree=[[0], [1, 0]])
    with pytest.raises(ValueError, match="`assistant` got the class Eagle; pass an object of it"):
        target.generate(**ragged_batch((6,)), max_new_tokens=6, assistant=hf_specdec.Eagle)
