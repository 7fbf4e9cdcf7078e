"""Finished or streamed exchanges as text completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from kiln.core.completion import (
    ChoiceEnd,
    ExchangeEvent,
    ExchangeHead,
    TextDelta,
    TokenLogprob,
    TokenScored,
)
from kiln.core.scoring import PositionScore
from kiln.core.tokens import FinishReason
from kiln.dialects.openai.text_request import TextReply
from kiln.dialects.openai.usage import Counting, to_usage
from kiln.text.detokenizer import Detokenizer
from kiln.wire import openai_text as wire
from kiln.wire.openai_chat import Usage

_NAMES: dict[FinishReason, wire.FinishName] = {
    FinishReason.LENGTH: "length",
    FinishReason.CONTENT_FILTER: "content_filter",
}


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the model read it. `scores` are of its tokens after the first, where they are wanted."""

    head: ExchangeHead
    ids: tuple[int, ...]
    text: str
    scores: tuple[PositionScore, ...] | None


class TokenTable:
    """Collects the parallel lists of `logprobs`, offsets counted through."""

    def __init__(self, pieces: Sequence[bytes], hidden_ids: frozenset[int], most: int) -> None:
        self._pieces = pieces
        self._most = most
        self._prompt = Detokenizer(pieces)
        self._completion = Detokenizer(pieces, hidden_ids)
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._found = wire.TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])

    def add_prompt(self, prompt: ReadPrompt) -> None:
        """The tokens of an echoed prompt; nothing predicts the first."""
        assert prompt.scores is not None
        self._add(prompt.ids[0], None, (), self._prompt)
        for score in prompt.scores:
            self._add(score.token_id, score.logprob, score.top, self._prompt)

    def skip(self, text: str) -> None:
        """Text of the choice that has no tokens here."""
        self._offset += len(text)

    def add(self, token: TokenLogprob) -> None:
        top = tuple((other, logprob) for other, _, logprob in token.top)
        self._add(token.token_id, token.logprob, top, self._completion)

    def take(self) -> wire.TextLogprobs | UnsetType:
        """What was collected since the last time."""
        found = self._found
        self._clear()
        return found if found.tokens else UNSET

    def _add(
        self,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
        detokenizer: Detokenizer,
    ) -> None:
        found = self._found
        found.tokens.append(token_text(self._pieces[token]))
        found.token_logprobs.append(logprob)
        likeliest = {token_text(self._pieces[other]): value for other, value in top[: self._most]}
        if logprob is not None:
            likeliest.setdefault(token_text(self._pieces[token]), logprob)
        found.top_logprobs.append(likeliest or None)
        found.text_offset.append(self._offset)
        self._offset += len(detokenizer.feed(token))


def token_text(piece: bytes) -> str:
    """A token as text. One that is no text of its own is spelled in bytes, so that no two look alike."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class TextEncoder:
    """Text completions of several prompts. Choices count through: those of the first prompt come first."""

    def __init__(
        self,
        identity: ExchangeHead,
        prompts: Sequence[ReadPrompt],
        reply: TextReply,
        counting: Counting,
        *,
        pieces: Sequence[bytes],
        hidden_ids: frozenset[int],
    ) -> None:
        """`identity` has the id, time and model of the whole."""
        self._identity = identity
        self._prompts = prompts
        self._reply = reply
        self._counting = counting
        self._ends: dict[int, ChoiceEnd] = {}
        self._ids: dict[int, list[int]] = {}
        self._json = msgspec.json.Encoder()
        self._opening: bytes | None = None
        self._tables: list[TokenTable] | None = None
        if reply.logprobs is not None:
            self._tables = [
                TokenTable(pieces, hidden_ids, reply.logprobs) for _ in range(len(prompts) * reply.choices)
            ]

    def whole(self, choices: Sequence[ChoiceEnd]) -> wire.TextResponse:
        """The answer that is not streamed. The choices are in order, numbered through."""
        found = []
        for end in choices:
            self._ends[end.index] = end
            prompt = self._prompt_of(end.index)
            self._begin(end.index)
            for token in end.logprobs or ():
                self._note(end.index, token)
            found.append(
                self._choice(
                    end.index,
                    (prompt.text if self._reply.echo else "") + end.content,
                    finish=_NAMES.get(end.finish_reason, "stop"),
                    prompt_ids=True,
                )
            )
        return self._response(found, usage=self._usage())

    def opening(self) -> bytes:
        """The echoed prompts and their ids, where they are wanted."""
        if self._opening is None:
            self.open()
        assert self._opening is not None
        return self._opening

    def open(self) -> None:
        """Make the opening ready; with many scores it is work for a worker thread."""
        chunks = []
        for index in range(len(self._prompts) * self._reply.choices):
            self._begin(index)
            if self._reply.echo or self._reply.token_ids:
                text = self._prompt_of(index).text if self._reply.echo else ""
                chunks.append(self._chunk([self._choice(index, text, prompt_ids=True)]))
        self._opening = b"".join(chunks)

    def encode(self, events: Iterable[ExchangeEvent]) -> bytes:
        return b"".join(self._event(event) for event in events)

    def closing(self) -> bytes:
        chunk = b""
        if self._reply.include_usage:
            chunk = self._chunk([], usage=self._usage())
        return chunk + b"data: [DONE]\n\n"

    def _event(self, event: ExchangeEvent) -> bytes:
        if isinstance(event, TokenScored):
            self._note(event.index, event.token)
        elif isinstance(event, TextDelta):
            return self._chunk([self._choice(event.index, event.text)])
        elif isinstance(event, ChoiceEnd):
            self._ends[event.index] = event
            finish = _NAMES.get(event.finish_reason, "stop")
            return self._chunk([self._choice(event.index, "", finish=finish)])
        return b""

    def _prompt_of(self, index: int) -> ReadPrompt:
        return self._prompts[index // self._reply.choices]

    def _begin(self, index: int) -> None:
        if self._tables is None or not self._reply.echo:
            return
        prompt = self._prompt_of(index)
        if prompt.scores is not None:
            self._tables[index].add_prompt(prompt)

    def _note(self, index: int, token: TokenLogprob) -> None:
        if self._tables is not None:
            self._tables[index].add(token)
        if self._reply.token_ids:
            self._ids.setdefault(index, []).append(token.token_id)

    def _choice(
        self,
        index: int,
        text: str,
        *,
        finish: wire.FinishName | UnsetType = UNSET,
        prompt_ids: bool = False,
    ) -> wire.TextChoice:
        with_ids = self._reply.token_ids
        return wire.TextChoice(
            index=index,
            text=text,
            logprobs=UNSET if self._tables is None else self._tables[index].take(),
            finish_reason=finish,
            prompt_token_ids=list(self._prompt_of(index).ids) if with_ids and prompt_ids else UNSET,
            token_ids=self._ids.pop(index, []) if with_ids else UNSET,
        )

    def _usage(self) -> Usage:
        n = self._reply.choices
        parts = [
            (prompt.head, [self._ends[i] for i in range(p * n, p * n + n)])
            for p, prompt in enumerate(self._prompts)
        ]
        return to_usage(parts, self._counting)

    def _chunk(self, choices: list[wire.TextChoice], *, usage: Usage | UnsetType = UNSET) -> bytes:
        return b"data: " + self._json.encode(self._response(choices, usage=usage)) + b"\n\n"

    def _response(self, choices: list[wire.TextChoice], *, usage: Usage | UnsetType) -> wire.TextResponse:
        return wire.TextResponse(
            id=self._identity.id,
            created=self._identity.created,
            model=self._identity.model,
            choices=choices,
            usage=usage,
            service_tier=self._reply.tier if self._reply.tier is not None else UNSET,
        )
