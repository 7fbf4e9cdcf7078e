"""Prompts that come without a conversation: read as they are, no template, nothing shielded."""

from __future__ import annotations

from kiln.chat.models.served import ServedModel
from kiln.core.errors import ContextExceeded, InvalidField
from kiln.core.turn import RawPrompt
from kiln.text.reasoning import starts_in_reasoning

# An open tag is at most so many tokens long.
_TAIL = 64


def read_raw(prompt: RawPrompt, model: ServedModel) -> tuple[tuple[int, ...], bool]:
    """Token ids, and whether they end inside a reasoning block. Raises InvalidField, ContextExceeded."""
    if isinstance(prompt.content, str):
        refuse_hopeless(prompt.content, model)
        ids = tuple(model.tokenizer.encode(prompt.content, add_special=prompt.add_special))
        return ids, starts_in_reasoning(prompt.content, model.tags)
    ids, size = prompt.content, model.tokenizer.n_vocab
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise InvalidField(f"token id {wrong} is not in the vocabulary of {size}", param="messages")
    return ids, starts_in_reasoning(text_of(ids[-_TAIL:], model), model.tags)


def text_of(ids: tuple[int, ...], model: ServedModel) -> str:
    """What token ids spell, control tokens included."""
    pieces = model.tokenizer.pieces
    return b"".join(pieces[token] for token in ids).decode("utf-8", "replace")


def refuse_hopeless(text: str, model: ServedModel) -> None:
    """Refuse what cannot fit whatever its tokens are: tokenizing it would cost everybody time.

    No token is longer than the vocabulary's longest, and every control token's spelling is one at least.
    """
    limit = model.context_length
    least = max((text.count(spelling) for spelling in model.tokenizer.control_spellings), default=0)
    least = max(least, len(text) // model.longest_piece)
    if least > limit:
        raise ContextExceeded(
            f"the prompt has more than {least - 1} tokens, the context holds {limit}", param="messages"
        )
