"""`speculative_decoding`: the callable that `model.generate` runs as its decoding method."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .assistant import as_candidate_generator
from .cache import CACHE_NAME
from .candidates import CandidateGenerator
from .checks import check_call
from .choice import TypicalAcceptance
from .loop import decode
from .record import Record, SpeculativeOutput
from .run import Run
from .settings import Settings
from .target import Target, real_tokens


@torch.no_grad()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    *,
    assistant: PreTrainedModel | str | CandidateGenerator | None = None,
    assistant_sampling: str = "shared_noise",
    assistant_acceptance: str | TypicalAcceptance = "exact",
    num_assistant_tokens: int | str | None = None,
    num_assistant_tokens_schedule: str | None = None,
    assistant_confidence_threshold: float | None = None,
    prompt_lookup_num_tokens: int | None = None,
    max_matching_ngram_size: int | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> torch.LongTensor | SpeculativeOutput:
    """Decodes with drafts from `assistant`; the text is that of `generate` without it.

    Not called directly: `model.generate(..., assistant=...)` prepares everything and ends here, and so does
    `model.generate(..., custom_generate=hf_specdec.speculative_decoding, assistant=...)`.

    Args:
        assistant: a causal LM (draft model), a drafter with weights such as [`MedusaModel`], a string (Hub id or local
            folder of either, or name of a method such as `"prompt_lookup"`), or any [`CandidateGenerator`].
        assistant_sampling (`str`): what couples drafts and target when sampling. `"shared_noise"`: the text of plain
            `generate` for the same seed. `"rejection"`: speculative sampling (Leviathan et al. 2211.17192; Chen et al.
            2302.01318), the same distribution but not the same text; chains only.
        assistant_acceptance (`str`): `"exact"`, or `"typical"`, Medusa's typical acceptance, which is not lossless
            ([`TypicalAcceptance`] sets its thresholds).
        num_assistant_tokens (`int` or `"auto"`): draft tokens a pass, of a tree the number of its nodes; `"auto"` picks
            the length of a chain from measured acceptance and cost. Default: the drafter's own.
        num_assistant_tokens_schedule (`str`): `"constant"` (default), `"heuristic"` or `"heuristic_transient"`.
        assistant_confidence_threshold (`float`): a draft model stops where its probability falls below, and a tree
            leaves out nodes with a smaller chance; default never, for trees on a CPU 0.3.
        prompt_lookup_num_tokens (`int`): draft tokens of prompt lookup.
        max_matching_ngram_size (`int`): longest n-gram that prompt lookup matches.
        tokenizer, assistant_tokenizer: needed when target and draft model have different tokenizers.

    Returns: `torch.LongTensor` of shape `(batch, prompt + new)`, or [`SpeculativeOutput`] with
        `return_dict_in_generate=True`.

    Raises:
        ValueError: for arguments, targets and drafters that do not fit; the message names the fix.
    """
    start = time.perf_counter()
    settings = Settings(
        num_assistant_tokens,
        num_assistant_tokens_schedule,
        assistant_confidence_threshold,
        prompt_lookup_num_tokens,
        max_matching_ngram_size,
        assistant_sampling,
        assistant_acceptance,
        tokenizer,
        assistant_tokenizer,
    ).completed(generation_config)
    check_call(model, assistant, generation_config, model_kwargs, synced_gpus)
    with ExitStack() as exit_stack:
        prompts = real_tokens(input_ids, model_kwargs.get("attention_mask"))
        run = Run(
            model, input_ids, prompts, logits_processor, stopping_criteria, generation_config, settings, exit_stack
        )
        run.generator = as_candidate_generator(assistant, run)
        cache = model_kwargs.get(CACHE_NAME)
        run.keeps_cache = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        target = Target(model, generation_config, run)
        record = Record(generation_config, target)
        decode(run, target, record, input_ids, model_kwargs, streamer)
        run.choice.finish(run.num_steps)
        if run.keeps_cache:
            target.export(run)
    run.finish_statistics(time.perf_counter() - start)
    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return record.output(run, target.source)
    return run.output_ids()
