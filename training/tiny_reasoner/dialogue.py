"""What a training dialogue is, and the random text that several kinds of them use."""

import random
from dataclasses import dataclass, field
from typing import Any

from .words import SYSTEM_PROMPTS, WORDS

Message = dict[str, Any]


@dataclass
class Dialogue:
    """What is asked (messages, tools) and what should be written (thought, reply)."""

    kind: str
    messages: list[Message]
    thought: str
    reply: str
    tools: list[dict[str, Any]] | None = None
    endless: bool = False
    answer: int | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)


def some_words(rng: random.Random, low: int, high: int) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.randint(low, high))]
    if rng.random() < 0.3:  # made-up words, so that unknown spellings do not confuse
        words[rng.randrange(len(words))] = made_up(rng)
    return " ".join(words)


def made_up(rng: random.Random) -> str:
    syllable = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(4)]
    return "".join(syllable[: rng.randint(2, 4)]) + rng.choice(["", "n", "s", "r", "l"])


def maybe_system(rng: random.Random) -> list[Message]:
    draw = rng.random()
    if draw < 0.55:
        return []
    if draw < 0.82:
        text = rng.choice(SYSTEM_PROMPTS)
    else:
        text = some_words(rng, 2, 120 if rng.random() < 0.06 else 14).capitalize() + "."
    return [{"role": "system", "content": text}]
