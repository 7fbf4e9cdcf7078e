"""What is asked: generated or recorded prompts, and the request bodies made of them.

The same seed gives the same prompts, so that two servers can be asked the very same.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kiln.core.errors import ConfigError
from kiln.core.wording import reason
from kiln.loadgen.distributions import Fixed, Lengths

# Short common words: vocabularies of the usual size hold each, with its space, as one token.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community name "
    "president team minute idea kid body information back parent face others level office door health person "
    "art war history party result change morning reason research girl guy moment air teacher force education "
    "foot boy age policy music light voice paper space ground form event matter center couple site project "
    "base star table court oil cost road field stage market river street window summer winter stone bridge "
    "garden green white black early large small young old long great little own other good new first last"
).split()
TRIES = 50


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages of a chat or one text; `max_tokens` None leaves the length of the output to the server."""

    messages: tuple[dict[str, Any], ...] | None
    text: str | None
    max_tokens: int | None


class TextSource:
    """Texts of random words. `tokens_per_word` is what the server's tokenizer makes of them."""

    def __init__(self, seed: int | str, tokens_per_word: float = 1.0) -> None:
        self._rng = random.Random(f"text:{seed}")
        self._tokens_per_word = tokens_per_word
        self._given: set[str] = set()

    def text(self, tokens: int) -> str:
        """About `tokens` tokens of words, never the same text twice as long as the words allow it."""
        words = max(1, round(tokens / self._tokens_per_word))
        text = ""
        for _ in range(TRIES):
            text = " ".join(self._rng.choices(WORDS, k=words))
            if text not in self._given:
                break
        self._given.add(text)
        return text


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Lengths in tokens. `shared_prefix` tokens, the same in every prompt, come before its own."""

    prompt_tokens: Lengths = Fixed(128)
    output_tokens: Lengths = Fixed(128)
    shared_prefix: int = 0
    tokens_per_word: float = 1.0


def generate_prompts(shape: PromptShape, seed: int | str) -> Iterator[Prompt]:
    """Prompts without end; equal seeds give equal ones."""
    rng = random.Random(f"lengths:{seed}")
    prefix = ""
    if shape.shared_prefix:
        prefix = TextSource(f"prefix:{seed}", shape.tokens_per_word).text(shape.shared_prefix) + " "
    source = TextSource(seed, shape.tokens_per_word)
    while True:
        text = prefix + source.text(shape.prompt_tokens.draw(rng))
        yield Prompt(None, text, shape.output_tokens.draw(rng))


def read_dataset(path: Path) -> list[Prompt]:
    """The prompts of a JSON Lines file: `{"messages": […]}` or `{"prompt": "…"}`, and maybe `max_tokens`.

    Raises ConfigError, which names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {path} cannot be read: {reason(error)}") from None
    prompts = [_read_line(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--dataset {path} holds no prompt")
    return prompts


def _read_line(line: str, where: str) -> Prompt:
    hint = 'Write {"messages": [{"role": "user", "content": "…"}]} or {"prompt": "…"}.'
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}", hint=hint) from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is no JSON object", hint=hint)
    messages, text, most = (entry.get(name) for name in ("messages", "prompt", "max_tokens"))
    if most is not None and not (type(most) is int and most >= 1):
        raise ConfigError(f"{where}: max_tokens must be a whole number, 1 or more", hint=hint)
    if isinstance(text, str) and messages is None:
        return Prompt(None, text, most)
    if isinstance(messages, list) and messages and text is None:
        if all(isinstance(message, dict) for message in messages):
            return Prompt(tuple(messages), None, most)
    raise ConfigError(f"{where} has not exactly one of messages and prompt", hint=hint)


def recorded_prompts(prompts: Sequence[Prompt], shape: PromptShape, seed: int | str) -> Iterator[Prompt]:
    """The prompts in their order, again and again; a length drawn for those that name none."""
    rng = random.Random(f"lengths:{seed}")
    for prompt in itertools.cycle(prompts):
        drawn = shape.output_tokens.draw(rng)
        most = drawn if prompt.max_tokens is None else prompt.max_tokens
        yield Prompt(prompt.messages, prompt.text, most)


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What every request of a load has in common. `extra` fields override all others."""

    endpoint: str = "chat"
    model: str | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def encode_body(prompt: Prompt, options: BodyOptions, *, stream: bool = True) -> bytes:
    """The JSON of one request. Raises ConfigError where the prompt does not fit the endpoint."""
    body: dict[str, Any] = {}
    if options.model is not None:
        body["model"] = options.model
    if options.endpoint == "chat":
        messages = prompt.messages
        body["messages"] = messages if messages is not None else [{"role": "user", "content": prompt.text}]
    elif prompt.text is not None:
        body["prompt"] = prompt.text
    else:
        raise ConfigError("a dataset of messages does not go with --endpoint completions")
    if prompt.max_tokens is not None:
        body["max_tokens"] = prompt.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    if options.ignore_eos:
        body["ignore_eos"] = True
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body | options.extra, ensure_ascii=False).encode("utf-8", "replace")
