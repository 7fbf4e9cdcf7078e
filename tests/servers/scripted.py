"""A server whose model says what a script tells it, token by token.

Everything but the model is real: tokenizer, template, engine, gate, scanner, HTTP. A sequence's position
decides what is sampled, so a token that the thinking gate replaces is lost, as a sampled one would be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette

from kiln.backends.llamacpp import LlamaModel
from kiln.cli.assembly import app_over, describe_model, load_model
from kiln.core.settings import Settings
from kiln.engine.runner import ModelCall

from .server import Server, serving, settings_of

# A token id, or what decides one: it may also wait, or raise.
Beat = int | Callable[[], int]

KV_CELLS = 16384
# A logit that leaves no doubt at ordinary temperatures.
SURE = 100.0


class Stage:
    """What the scripted model will say. After the script it ends its turn."""

    def __init__(self, settings: Settings) -> None:
        self.llama: LlamaModel = load_model(settings)
        self.settings = settings
        self.end = self.token("<|im_end|>")
        self.clear()

    def clear(self) -> None:
        self.script: list[Beat] = []
        self.queue: list[list[Beat]] = []
        self.loop: list[Beat] = []
        self.pace_s = 0.0

    def token(self, text: str) -> int:
        """The one token of this text."""
        (token,) = self.llama.encode(text)
        return token

    def tokens(self, *texts: str) -> list[Beat]:
        """Each text as the tokenizer would write it alone."""
        return [token for text in texts for token in self.llama.encode(text)]

    def bytes(self, text: str) -> list[Beat]:
        """One token a byte."""
        return [self.llama.pieces.index(bytes([byte])) for byte in text.encode()]

    def say(self, *parts: str | list[Beat]) -> None:
        """Set the script. Texts are tokenized alone, one after the other."""
        self.script = self._beats(*parts)

    def then(self, *parts: str | list[Beat]) -> None:
        """Add a script for one completion. The first to begin takes the first of these; after them, and
        without any, the script is that of `say`."""
        self.queue.append(self._beats(*parts))

    def _beats(self, *parts: str | list[Beat]) -> list[Beat]:
        return [b for part in parts for b in (self.tokens(part) if isinstance(part, str) else part)]

    def next_script(self) -> list[Beat] | None:
        return self.queue.pop(0) if self.queue else None

    def repeat(self, *parts: str) -> None:
        """After the script say this for ever."""
        self.loop = self.tokens(*parts)

    def beat(self, position: int, script: list[Beat] | None = None) -> int:
        if self.pace_s:
            time.sleep(self.pace_s)
        script = self.script if script is None else script
        if position < len(script):
            beat = script[position]
        elif self.loop:
            beat = self.loop[(position - len(script)) % len(self.loop)]
        else:
            beat = self.end
        return beat if isinstance(beat, int) else beat()


class ScriptedRunner:
    """Implements the `ModelRunner` port over a stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.n_vocab = stage.llama.n_vocab
        self.sequences = stage.settings.engine.parallel
        self.kv_cells = KV_CELLS
        self.max_rows = 2048
        self.can_share = self.exact_drafts = False
        self.adapter_s = 0.0
        # Where each sequence's completion begins.
        self._begins: dict[int, int] = {}
        self._scripts: dict[int, list[Beat] | None] = {}

    def execute(self, call: ModelCall) -> NDArray[np.float32]:
        rows = []
        for chunk in call.chunks:
            end = chunk.start + len(chunk.tokens)
            if chunk.start == 0:
                self._begins.pop(chunk.sequence, None)
            if chunk.outputs:
                assert chunk.logits == "last", "only completions are scripted"
                if chunk.sequence not in self._begins:
                    self._begins[chunk.sequence] = end
                    self._scripts[chunk.sequence] = self._stage.next_script()
                begin, script = self._begins[chunk.sequence], self._scripts[chunk.sequence]
                row = np.zeros(self.n_vocab, np.float32)
                row[self._stage.beat(end - begin, script)] = SURE
                rows.append(row)
        return np.stack(rows) if rows else np.empty((0, self.n_vocab), np.float32)

    def drop(self, sequence: int) -> None:
        self._begins.pop(sequence, None)

    def length(self, sequence: int) -> int:
        raise AssertionError("nothing is held")

    def save(self, sequence: int, most_bytes: int) -> NDArray[np.uint8] | None:
        raise AssertionError("nothing is held")

    def restore(self, sequence: int, data: NDArray[np.uint8]) -> None:
        raise AssertionError("nothing is held")

    def trim(self, sequence: int, length: int) -> None:
        raise AssertionError("nothing can be trimmed")

    def collect(self) -> None:
        pass

    def copy(self, source: int, target: int, length: int) -> None:
        raise AssertionError("this runner cannot share prefixes")

    def describe(self) -> Mapping[str, object]:
        return {"backend": "scripted"}

    def close(self) -> None:
        pass


def scripted_app(settings: Settings | None = None, /, **values: Any) -> tuple[Starlette, Stage]:
    """The application over a scripted model, and the stage that directs it."""
    settings = settings_of(**values) if settings is None else settings
    stage = Stage(settings)
    model = describe_model(settings, stage.llama)
    return app_over(settings, stage.llama, model, lambda: ScriptedRunner(stage)), stage


@dataclass(frozen=True)
class Staged:
    """A running server whose model says what its stage tells it."""

    server: Server
    stage: Stage

    @property
    def app(self) -> Starlette:
        return self.server.app

    def cleared(self) -> Iterator[Stage]:
        """The stage, empty, for a fixture; it leaves an idle engine."""
        self.stage.clear()
        yield self.stage
        self.stage.clear()
        self.server.wait_idle()


@contextmanager
def staging(settings: Settings | None = None, /, **values: Any) -> Iterator[Staged]:
    """A scripted model under some settings."""
    app, stage = scripted_app(settings, **values)
    with serving(app, stage.settings) as server:
        yield Staged(server, stage)
