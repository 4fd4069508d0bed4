"""How the target chooses a token, and how a drafter guesses that choice. Randomness is passed in or owned here.

Shapes: B rows, M = 1 + N tokens of a block (the last verified token, then the tree's nodes), V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from .tree import NO_TOKEN, CandidateTree

if TYPE_CHECKING:
    from .run import Run

INVALID = -2  # the choice where there is no distribution to choose from
NOISE_BYTES = 256 * 2**20  # draws kept ready; older ones are drawn again from their saved random state


class Choice(Protocol):
    """Greedy, shared noise, rejection or typical."""

    def choose(self, scores: torch.Tensor, run: Run, tree: CandidateTree | None) -> torch.LongTensor:
        """The target's token after every token of the block.

        Args:
            scores (`torch.FloatTensor` of shape `(B, M, V)`): processed scores.
            tree ([`CandidateTree`], *optional*): the drafts; `None` when the block is the last verified token alone.
        Returns: `torch.LongTensor` of shape `(B, M)`.
        """

    def rank(
        self, scores: torch.Tensor, run: Run, offset: int, token_ids: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Order in which a drafter should guess the token `offset` steps ahead; the larger the better.

        Args:
            scores (`torch.FloatTensor` of shape `(B, V_draft)` or `(B, n, V_draft)`): the drafter's processed scores.
            offset (`int`): 0 for the next token, 1 for the one after it, ...
            token_ids (`torch.LongTensor` of shape `(V_draft,)`, *optional*): the ids they stand for; default the first.
        Returns: `torch.FloatTensor` of the same shape.
        """

    def chances(
        self,
        scores: torch.Tensor,
        run: Run,
        token_ids: torch.LongTensor | None = None,
        uncertainty: float = 1.0,
        offset: int | None = None,
    ) -> torch.Tensor:
        """The chance that the target chooses each token, as far as a drafter can tell, for several scores at once.

        Args:
            scores (`torch.FloatTensor` of shape `(B, K, V_draft)`): the drafter's processed scores.
            token_ids (`torch.LongTensor` of shape `(V_draft,)`, *optional*): the ids they stand for; default all.
            uncertainty (`float`): how far the drafter's log-probabilities are from the target's, as the scale of a
                Gumbel distribution; above zero.
            offset (`int`, *optional*): all are guesses for the token that many steps ahead, as for `rank`; default:
                they are for the next K tokens.
        Returns: `torch.FloatTensor` of the same shape, rows summing to 1.
        """

    def draft(
        self, scores: torch.Tensor, run: Run, offset: int, token_ids: torch.LongTensor | None = None
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """One draft a row, `(B,)`, as an index into `scores`, and the distribution `(B, V_draft)` it was drawn from
        (rejection only). Arguments as for `rank`."""

    def finish(self, num_steps: int) -> None:
        """Called at the end with the number of steps that plain `generate` would have made."""


class Greedy:
    """argmax(scores)."""

    takes_trees = True

    def choose(self, scores: torch.Tensor, run: Run, tree: CandidateTree | None) -> torch.LongTensor:
        return argmax(scores)

    def rank(
        self, scores: torch.Tensor, run: Run, offset: int, token_ids: torch.LongTensor | None = None
    ) -> torch.Tensor:
        return scores

    def chances(
        self,
        scores: torch.Tensor,
        run: Run,
        token_ids: torch.LongTensor | None = None,
        uncertainty: float = 1.0,
        offset: int | None = None,
    ) -> torch.Tensor:
        return scores.softmax(-1)

    def draft(
        self, scores: torch.Tensor, run: Run, offset: int, token_ids: torch.LongTensor | None = None
    ) -> tuple[torch.LongTensor, None]:
        return argmax(self.rank(scores, run, offset, token_ids)), None

    def finish(self, num_steps: int) -> None:
        pass


class SharedNoise(Greedy):
    """argmax(softmax(scores) / e_t) with e_t exponential noise, the draw that `torch.multinomial` makes inside.

    The noise of step t is one draw `(B_all, V)` from the random state in which plain `generate` would have been at that
    step, so the text is that of plain `generate(do_sample=True)`, and the drafter ranks its guesses by the same noise.
    Source: exponential race / Gumbel-max; Daliri et al. 2024 (drafter-invariant speculative decoding).

    Args:
        num_rows (`int`): rows of the whole batch, finished ones included.
        device (`torch.device`): where plain `generate` would sample: the device of the ids.
        vocab_size (`int`): width of the target's logits.
    """

    def __init__(self, num_rows: int, device: torch.device, vocab_size: int) -> None:
        self.num_rows = num_rows
        self.device = device
        self.generator = torch.Generator(device)
        self.generator.set_state(random_state(device))
        self.states = [self.generator.get_state()]  # states[t]: before the draw of step t
        self.draws: OrderedDict[int, torch.Tensor] = OrderedDict()
        self.vocab_size = vocab_size

    def noise(self, step: int) -> torch.Tensor:
        """The draw of a step, `(B_all, V)` float32."""
        if step in self.draws:
            self.draws.move_to_end(step)
            return self.draws[step]
        while len(self.states) <= step + 1:
            self._draw(len(self.states) - 1)
        return self.draws[step] if step in self.draws else self._draw(step)

    def _noise_ahead(
        self, run: Run, offsets: Sequence[int], ids: slice | torch.LongTensor = slice(None)
    ) -> torch.Tensor:
        """Each row's draws `(B, len(offsets), V or ids)` for the steps that far after its next token."""
        return torch.stack(
            [torch.stack([self.noise(row.num_emitted + k)[row.index, ids] for k in offsets]) for row in run.rows]
        )

    def _draw(self, step: int) -> torch.Tensor:
        self.generator.set_state(self.states[step])
        draw = torch.empty(self.num_rows, self.vocab_size, device=self.device).exponential_(generator=self.generator)
        if step + 1 == len(self.states):
            self.states.append(self.generator.get_state())
        self.draws[step] = draw
        while len(self.draws) * draw.nbytes > NOISE_BYTES and len(self.draws) > 1:
            self.draws.popitem(last=False)
        return draw

    def choose(self, scores: torch.Tensor, run: Run, tree: CandidateTree | None) -> torch.LongTensor:
        if scores.shape[-1] != self.vocab_size:  # the head is wider than it says: draw anew
            self.vocab_size = scores.shape[-1]
            self.states, self.draws = self.states[:1], OrderedDict()
        if tree is None:
            return pick(self.rank(scores, run, 0))
        max_depth = min(tree.depth, scores.shape[1] - 1)
        noise = self._noise_ahead(run, range(max_depth + 1))
        if not tree.is_chain:
            depths, _ = tree.visibility()
            noise = noise.gather(1, depths[..., None].expand(len(noise), -1, self.vocab_size))
        return pick(scores.softmax(-1) / noise)

    def rank(
        self, scores: torch.Tensor, run: Run, offset: int, token_ids: torch.LongTensor | None = None
    ) -> torch.Tensor:
        vocab_size = scores.shape[-1]
        noise = self._noise_ahead(run, [offset], slice(vocab_size) if token_ids is None else token_ids)
        noise = noise.to(scores.device).view(len(noise), *[1] * (scores.ndim - 2), vocab_size)
        return scores.softmax(-1) / noise

    def chances(
        self,
        scores: torch.Tensor,
        run: Run,
        token_ids: torch.LongTensor | None = None,
        uncertainty: float = 1.0,
        offset: int | None = None,
    ) -> torch.Tensor:
        """What the shared noise tells of the target's choice, and what it leaves open.

        The target chooses the largest log p(x) + g(x), with g = -log e known here, and log p only up to an error of
        scale u, the uncertainty: softmax((c log q + g) / u), if the error is of the Gumbel kind (Gumbel-max once more).
        With c = sqrt(1 + u^2) the mean over g is about q: a certain drafter (u near 0) trusts the noise, a vague one
        itself.
        """
        ids = slice(scores.shape[-1]) if token_ids is None else token_ids
        offsets = range(scores.shape[1]) if offset is None else [offset]
        noise = self._noise_ahead(run, offsets, ids).to(scores.device)
        log_probs = scores.log_softmax(-1) * (1 + uncertainty**2) ** 0.5
        return ((log_probs - noise.log()) / uncertainty).softmax(-1)

    def finish(self, num_steps: int) -> None:
        """Leaves the global random state as plain `generate` would have left it."""
        while len(self.states) <= num_steps:
            self._draw(len(self.states) - 1)
        set_random_state(self.states[num_steps], self.device)


class Rejection(Greedy):
    """Speculative sampling: keeps a draft x with probability min(1, target(x) / draft(x)), else draws from the residual
    max(0, target - draft). Chains only; the distribution of plain sampling, not its text seed for seed.

    A rejected x has target(x) < draft(x), so the residual never gives x again: "kept" and "the chosen token equals the
    draft" are the same, and the walk down the tree needs to know nothing of this rule.
    Source: Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318, Algorithm 2.
    """

    takes_trees = False

    def choose(self, scores: torch.Tensor, run: Run, tree: CandidateTree | None) -> torch.LongTensor:
        target_probs = scores.softmax(-1)
        if tree is None or tree.num_nodes == 0:
            return sample(target_probs)
        drafted = tree.tokens
        index = drafted.clamp(min=0)[..., None]
        probs, bonus = target_probs.split([tree.num_nodes, scores.shape[1] - tree.num_nodes], dim=1)
        draft_probs = torch.zeros_like(probs)
        if tree.draft_probs is None:  # a deterministic draft: all of its probability on one token
            draft_probs.scatter_(-1, index, 1.0)
        else:
            shared = min(probs.shape[-1], tree.draft_probs.shape[-1])
            draft_probs[..., :shared] = tree.draft_probs[..., :shared]
        uniforms = torch.rand(drafted.shape, device=scores.device, dtype=torch.float64)
        is_kept = uniforms * draft_probs.gather(-1, index)[..., 0] < probs.gather(-1, index)[..., 0]
        is_kept &= drafted != NO_TOKEN
        residual = (probs - draft_probs).clamp(min=0)
        # No draft at this depth, or no residual (target equals draft up to rounding): draw from the target itself.
        is_plain = (drafted == NO_TOKEN) | (residual.sum(-1) == 0)
        residual = torch.where(is_plain[..., None], probs, residual)
        chosen = torch.where(is_kept, drafted, sample(residual))
        return torch.cat([chosen, sample(bonus)], dim=1)

    def draft(
        self, scores: torch.Tensor, run: Run, offset: int, token_ids: torch.LongTensor | None = None
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        probs = scores.softmax(-1)
        return sample(probs), probs


class TypicalAcceptance(Greedy):
    """Typical acceptance: keeps a draft x with target(x) > min(epsilon, delta exp(-H(target))), H the entropy; of the
    branches kept to their end the longest, of equally long ones the likeliest. NOT lossless: the text is neither that
    of plain `generate` nor from the target's distribution. The token after the drafts is the target's likeliest. (With
    logits processors of the user's own, which see one step at a time, it looks at chains only.)

    Source: Cai et al. 2401.10774, section 2.3.1.

    Args:
        epsilon, delta (`float`): the hard and the entropy-dependent threshold.

    Raises:
        ValueError: if one of them is negative or no number.
    """

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"`{name}` is {value!r}; expected a number of at least 0.")
        self.epsilon, self.delta = epsilon, delta

    def choose(self, scores: torch.Tensor, run: Run, tree: CandidateTree | None) -> torch.LongTensor:
        chosen = argmax(scores)
        if tree is None or tree.num_nodes == 0:
            return chosen
        log_probs = scores.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).nan_to_num().sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        num_rows, num_nodes = tree.tokens.shape
        depths, is_visible = tree.visibility()
        depths, is_visible = depths.expand(num_rows, -1), is_visible.expand(num_rows, -1, -1)
        above = torch.arange(num_nodes, device=scores.device) if tree.is_chain else tree.parents + 1
        above = above.expand(num_rows, -1)  # each node's parent in the block
        rows = torch.arange(num_rows, device=scores.device)
        node_log_probs = log_probs[rows[:, None], above, tree.tokens.clamp(min=0)]
        is_typical = (node_log_probs.exp() > threshold.gather(1, above)) & (tree.tokens != NO_TOKEN)
        is_typical = torch.nn.functional.pad(is_typical, (1, 0), value=True)
        node_log_probs = torch.nn.functional.pad(node_log_probs, (1, 0))
        # Of every node, whether all on the way to it is kept, and how likely that way is.
        is_reached = (is_typical[:, None] | ~is_visible).all(-1)
        way = torch.where(is_visible, node_log_probs[:, None], 0).sum(-1).double()
        longest = torch.where(is_reached, depths, -1).amax(1, keepdim=True)
        end = way.where(is_reached & (depths == longest), -torch.inf).argmax(1)
        on_way = is_visible[rows, end][:, 1:]
        # Where the way goes on, the choice is its next node.
        going = torch.where(on_way, above, scores.shape[1])
        chosen = torch.nn.functional.pad(chosen, (0, 1))
        return chosen.scatter(1, going, tree.tokens)[:, :-1]


def argmax(scores: torch.Tensor) -> torch.LongTensor:
    """`scores.argmax(-1)`; of equal scores the first."""
    # On a CPU, 3 to 6 times as fast as argmax itself (torch 2.13), with the same index also for equal scores.
    return scores.max(-1).indices if scores.device.type == "cpu" else scores.argmax(-1)


def pick(weights: torch.Tensor) -> torch.LongTensor:
    """Index of the largest weight; `INVALID` where a weight is nan, for `torch.multinomial` refuses those."""
    best = weights.max(-1)
    return best.indices.masked_fill(best.values.isnan(), INVALID)


def sample(weights: torch.Tensor) -> torch.LongTensor:
    """One index from the last dimension, with probability proportional to `weights`."""
    return pick(weights / torch.empty_like(weights).exponential_())


def target_ids(index: torch.LongTensor, token_ids: torch.LongTensor | None) -> torch.LongTensor:
    """The target's ids for indices into the scores of a drafter that proposes `token_ids`; `INVALID` is no guess."""
    return index if token_ids is None else token_ids[index.clamp(min=0)].where(index >= 0, NO_TOKEN)


def target_probs(probs: torch.Tensor, token_ids: torch.LongTensor | None, vocab_size: int) -> torch.Tensor:
    """Distributions `(B, K, V_draft)` of such a drafter, as `(B, K, vocab_size)` over the target's ids."""
    if token_ids is None:
        return probs
    return probs.new_zeros(*probs.shape[:2], vocab_size).index_copy_(2, token_ids, probs)


def random_state(device: torch.device) -> torch.Tensor:
    """State of the global random generator that `torch.multinomial` uses on this device."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
