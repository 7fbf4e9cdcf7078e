"""Requests that turn texts into token ids and back."""

from __future__ import annotations

from msgspec import UNSET

from kiln.core.errors import InvalidField
from kiln.core.messages import Conversation
from kiln.core.turn import ChatTurn, RawPrompt
from kiln.dialects.openai.messages import read_messages, read_tools
from kiln.dialects.validate import decode
from kiln.wire import openai_text


def decode_tokenize(body: bytes) -> openai_text.TokenizeRequest:
    request = decode(body, openai_text.TokenizeRequest)
    if (request.prompt is UNSET) == (request.messages is UNSET):
        raise InvalidField(
            "either prompt or messages is required, and not both", param="prompt", hint="Send one of them."
        )
    return request


def decode_detokenize(body: bytes) -> openai_text.DetokenizeRequest:
    return decode(body, openai_text.DetokenizeRequest)


def to_tokenize_turn(request: openai_text.TokenizeRequest) -> ChatTurn:
    """A turn that is only rendered and tokenized."""
    if not isinstance(request.messages, list):
        assert isinstance(request.prompt, str)
        prompt = RawPrompt(request.prompt, add_special=request.add_special_tokens is not False)
        return ChatTurn(Conversation(messages=()), model=request.model, prompt=prompt)
    return ChatTurn(
        Conversation(
            messages=read_messages(request.messages),
            tools=read_tools(request.tools),
            template_kwargs=request.chat_template_kwargs or {},
        ),
        model=request.model,
    )
