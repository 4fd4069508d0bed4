"""Time that prompt lookup takes to index a prompt and to draft, by length of the prompt.

    python benchmarks/prompt_lookup_index.py

Tokens are drawn with probabilities 1/rank, as words of a text are, from a vocabulary of 49,152; after each step five
tokens are accepted.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import torch

from hf_specdec.generation.prompt_lookup import PromptLookup

VOCAB_SIZE = 49_152
NUM_STEPS = 500


def measure(num_tokens: int) -> tuple[float, float, float]:
    """Seconds to build the index (best of 3), median and highest seconds of a step."""
    generator = torch.Generator().manual_seed(num_tokens)
    probs = 1.0 / torch.arange(1, VOCAB_SIZE + 1)
    ids = torch.multinomial(probs, num_tokens + 5 * NUM_STEPS, replacement=True, generator=generator).tolist()
    head = SimpleNamespace(out_features=VOCAB_SIZE)
    run = SimpleNamespace(
        tokens=[ids[:num_tokens]],
        device=torch.device("cpu"),
        target=SimpleNamespace(config=SimpleNamespace(), get_output_embeddings=lambda: head),
        settings=SimpleNamespace(max_matching_ngram_size=None),
    )
    lookup = PromptLookup()
    builds, steps = [], []
    for _ in range(3):
        start = time.perf_counter()
        lookup.begin(run)
        builds.append(time.perf_counter() - start)
    lookup.propose(run, 10)
    for step in range(NUM_STEPS):
        accepted = num_tokens + 5 * step
        run.tokens[0].extend(ids[accepted : accepted + 5])
        start = time.perf_counter()
        lookup.propose(run, 10)
        steps.append(time.perf_counter() - start)
    return min(builds), statistics.median(steps), max(steps)


def main() -> None:
    print(f"{'prompt tokens':>13}  {'index, ms':>9}  {'step, ms':>8}  {'slowest step, ms':>16}")
    for num_tokens in (1_000, 8_000, 32_000):
        build, step, slowest = (1000 * seconds for seconds in measure(num_tokens))
        print(f"{num_tokens:>13,}  {build:>9.2f}  {step:>8.4f}  {slowest:>16.4f}")


if __name__ == "__main__":
    main()
