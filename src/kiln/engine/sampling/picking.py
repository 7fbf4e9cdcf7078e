"""The next token of a sequence: its sampler draws, its gate and its grammar have their say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kiln.core.errors import AdapterUnusable
from kiln.core.tokens import Source
from kiln.engine.sampling.grammar import GrammarState
from kiln.engine.schedule.plan import Pick
from kiln.engine.sequence import Sequence
from kiln.thinking.gate import ThinkingGate


def choose(sequence: Sequence, logits: NDArray[np.float32], now: float) -> Pick:
    """Sample, let the thinking gate replace what was sampled, and keep the answer to its grammar."""
    gate, grammar = sequence.gate, sequence.grammar
    if sequence.request.adapters and not np.isfinite(logits).all():
        raise AdapterUnusable(
            "the model's output is no number with these adapters at these scales", hint="Use smaller scales."
        )
    if gate is None or gate.is_done:
        token, logprob = sequence.sampler.pick(logits, None if grammar is None else grammar.allowed())
        if grammar is not None:
            grammar.accept(token)
        return Pick(token, Source.SAMPLED, logprob)
    if gate.next_forced is not None:
        token, source = gate.accept(gate.next_forced, now)
        return Pick(token, source, None)
    if grammar is not None:
        return _choose_before_grammar(sequence, gate, grammar, logits, now)
    sampled, logprob = sequence.sampler.pick(logits)
    token, source = gate.accept(sampled, now)
    return Pick(token, source, logprob if source is Source.SAMPLED else None)


def _choose_before_grammar(
    sequence: Sequence, gate: ThinkingGate, grammar: GrammarState, logits: NDArray[np.float32], now: float
) -> Pick:
    """Sample a thinking token; another one if it ends the turn, for there is no answer yet, or if it closes
    the thinking and goes on with what the grammar refuses."""
    allowed, attempt = grammar.while_thinking, 0
    sampled, logprob = sequence.sampler.pick(logits)
    while not (allowed.mask[sampled] and grammar.can_begin_with(gate.text_after_close(sampled))):
        allowed, attempt = allowed.without(sampled), attempt + 1
        sampled, logprob = sequence.sampler.pick(logits, allowed, attempt)
    rest = gate.text_after_close(sampled)
    token, source = gate.accept(sampled, now)
    if source is Source.FORCED:
        return Pick(token, source, None)
    grammar.begin_with(rest)
    return Pick(token, source, logprob)
