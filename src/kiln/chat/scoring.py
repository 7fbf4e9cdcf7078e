"""The scoring use case: log-probabilities of a prompt's own tokens.

Scores are computed exactly, so they do not depend on what else runs, and they equal those that
decoding the same ids had. Logits are reduced to scores call by call on the engine thread; they are
never held for a whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from kiln.adapters.selection import Selection
from kiln.chat.models.served import ServedModel
from kiln.core.errors import AdapterInUse, ContextExceeded, EmptyPrompt, InvalidField, ModelNotFound
from kiln.core.sampling import SamplingParams
from kiln.core.text import shorten
from kiln.engine.ports import AdapterUse, GenerationRequest, ScoreSpec

MAX_PROMPT = 4096
MAX_CANDIDATES = 65536


def prepare_scoring(
    prompt: str | Sequence[int],
    top_k: int,
    *,
    model_id: str | None,
    add_special: bool,
    model: ServedModel,
    adapters: Selection | None = None,
) -> GenerationRequest:
    """The engine request that scores a prompt. Raises the RequestError that names what to mend.

    The base model scores it, or the `adapters` that are given.
    """
    if model_id is not None and model_id != model.id:
        raise ModelNotFound(f"the model {shorten(model_id)} is not served here", param="model")
    if adapters is None and model.adapters.default is not None:
        raise AdapterInUse(
            f"prompts are scored by the base model, but the adapter {shorten(model.adapters.default)} is the"
            " server's default"
        )
    if isinstance(prompt, str):
        limit = min(MAX_PROMPT, model.context_length)
        if len(prompt) // model.longest_piece > limit:
            raise ContextExceeded(f"the prompt has more than {limit} tokens", param="prompt")
        ids = model.tokenizer.encode(prompt, add_special=add_special)
    else:
        ids = list(prompt)
        wrong = next((i for i, token in enumerate(ids) if token >= model.tokenizer.n_vocab), None)
        if wrong is not None:
            raise InvalidField(
                f"token id {ids[wrong]} is not in the vocabulary of {model.tokenizer.n_vocab}",
                param=f"prompt[{wrong}]",
            )
    _check_size(ids, top_k, model)
    return GenerationRequest(
        prompt_ids=ids,
        max_tokens=1,
        sampling=SamplingParams(),
        seed=0,
        exact=model.exact != "never",
        scores=ScoreSpec(top_k),
        scope=adapters.scope if adapters is not None else "",
        adapters=() if adapters is None else tuple(AdapterUse(*use) for use in adapters.uses),
    )


def _check_size(ids: Sequence[int], top_k: int, model: ServedModel) -> None:
    if not ids:
        raise EmptyPrompt("the prompt has no tokens", param="prompt", hint="Send at least one token.")
    limit = min(MAX_PROMPT, model.context_length)
    if len(ids) > limit:
        raise ContextExceeded(f"the prompt has {len(ids)} tokens, at most {limit} are scored", param="prompt")
    if top_k > model.tokenizer.n_vocab:
        raise InvalidField(
            f"prompt_logprobs = {top_k} exceeds the vocabulary of {model.tokenizer.n_vocab}",
            param="prompt_logprobs",
        )
    candidates = (len(ids) - 1) * (top_k + 1)
    if candidates > MAX_CANDIDATES:
        raise InvalidField(
            f"{len(ids) - 1} positions with {top_k + 1} candidates each are {candidates},"
            f" at most {MAX_CANDIDATES} are returned",
            param="prompt_logprobs",
        )
