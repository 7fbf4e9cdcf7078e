"""The state of one running sequence. Only the scheduler's writes and the loop's commands change it."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from kiln.core.errors import KilnError
from kiln.core.tokens import FinishReason
from kiln.engine.ports import GenerationEnd, GenerationRequest, Timings, adapter_set
from kiln.engine.sampling.grammar import GrammarState
from kiln.engine.sampling.sampler import SequenceSampler
from kiln.engine.sampling.speculation import Drafter
from kiln.thinking.gate import ThinkingGate


class Sequence:
    """A request on its way: waiting (no slot), prefilling (computed < tokens), or decoding.

    `tokens` holds prompt and generated ids; `computed` says how many of them are in the KV cache.
    A sequence that has exactly one uncomputed token and has generated before is a decode row.
    """

    __slots__ = (
        "_prompt",
        "adapter_s",
        "adapters",
        "admitted",
        "cached_tokens",
        "computed",
        "decode_s",
        "drafter",
        "first_token",
        "gate",
        "grammar",
        "key",
        "prefill_s",
        "prompt_length",
        "received",
        "request",
        "sampler",
        "sampling_s",
        "scored",
        "slot",
        "submitted",
        "tokens",
    )

    def __init__(
        self,
        key: int,
        request: GenerationRequest,
        gate: ThinkingGate | None,
        submitted: float,
        *,
        draft_tokens: int = 0,
    ) -> None:
        """With `draft_tokens` that many tokens may be drafted at once."""
        self.key = key
        self.request = request
        self.gate = gate
        self.adapters = adapter_set(request.adapters)
        # There once it is compiled, which is before the scheduler hears of the sequence.
        self.grammar: GrammarState | None = None
        self.sampler = SequenceSampler(request)
        self.tokens = list(request.prompt_ids)
        can_draft = draft_tokens > 0 and request.scores is None
        self.drafter = Drafter(self.tokens, most=draft_tokens) if can_draft else None
        self._prompt = np.asarray(self.tokens, np.int32)
        self.prompt_length = len(self.tokens)
        self.computed = 0
        self.cached_tokens = 0
        self.scored = 0
        self.slot: int | None = None
        self.submitted = submitted
        self.received = time.monotonic()
        self.prefill_s = self.decode_s = self.sampling_s = self.adapter_s = 0.0
        self.admitted: float | None = None
        self.first_token: float | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        """Known tokens that are not in the KV cache yet."""
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        return self.generated > 0 and len(self.tokens) - self.computed == 1

    def record(self, token: int) -> None:
        """Note a token that was placed after the others."""
        self.tokens.append(token)
        self.sampler.record(token)
        if self.drafter is not None:
            self.drafter.record(token)

    def propose(self, most: int) -> list[int]:
        """Tokens, at most `most`, that may come next and would be wanted. Changes nothing."""
        if self.drafter is None or (self.gate is not None and self.gate.next_forced is not None):
            return []
        # The last token that is allowed needs no successor.
        return self.drafter.propose(min(most, self.request.max_tokens - self.generated - 1))

    @property
    def follows_grammar(self) -> bool:
        """Whether the next token is the grammar's to allow: there is one, and no thinking is open."""
        return self.slot is not None and self.generated > 0 and (self.gate is None or self.gate.is_done)

    @property
    def ids(self) -> NDArray[np.int32]:
        """What is to be computed before the next pick."""
        return self._prompt if self.generated == 0 else np.asarray(self.tokens, np.int32)

    @property
    def cells_to_start(self) -> int:
        """KV cells for all that is known and the token after it; scoring has no token after it."""
        return len(self.tokens) + (0 if self.wants_scores else 1)

    @property
    def exact(self) -> bool:
        return self.request.exact

    @property
    def scope(self) -> str:
        return self.request.scope

    @property
    def wants_scores(self) -> bool:
        return self.request.scores is not None

    def end(self, reason: FinishReason, now: float, error: KilnError | None = None) -> GenerationEnd:
        """The closing account of this sequence."""
        return GenerationEnd(
            reason=reason,
            outcome=self.gate.outcome() if self.gate is not None else None,
            timings=Timings(
                submitted=self.submitted,
                received=self.received,
                admitted=self.admitted,
                first_token=self.first_token,
                ended=now,
                prefill_s=self.prefill_s,
                decode_s=self.decode_s,
                sampling_s=self.sampling_s,
                adapter_s=self.adapter_s,
            ),
            error=error,
            cached_tokens=self.cached_tokens,
        )
