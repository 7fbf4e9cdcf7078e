"""A model that speaks by a script, behind the `ModelRunner` port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kiln.engine.ports import AdapterSet
from kiln.engine.runner import AdapterFailed, Chunk, KVExhausted, ModelCall

FAILSAFE_S = 30.0


@dataclass(frozen=True)
class Script:
    """What the model says after a prompt. The prompt's first token names it among the others."""

    prompt: tuple[int, ...]
    says: tuple[int, ...]


class Hold:
    """A call of the model that waits: `entered` once the engine is in it, until `release`."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def release(self) -> None:
        self.let_go.set()

    def wait(self) -> None:
        self.entered.set()
        assert self.let_go.wait(FAILSAFE_S)


class ScriptedRunner:
    """Greedy picks follow the scripts; the KV cache is a list of token ids for each slot.

    It refuses what a real cache would corrupt silently: positions with a gap, rows of a slot that
    was not dropped, more rows than fit a call. `before` runs at the head of every call.
    """

    def __init__(
        self,
        scripts: Sequence[Script] = (),
        *,
        n_vocab: int = 64,
        sequences: int = 4,
        kv_cells: int = 1024,
        max_rows: int = 64,
        cells: int | None = None,
        can_share: bool = True,
    ) -> None:
        self.n_vocab = n_vocab
        self.sequences = sequences
        self.kv_cells = kv_cells
        self.max_rows = max_rows
        self.can_share = can_share
        self.exact_drafts = can_share
        # What the cache really holds; fewer cells than it says make it raise KVExhausted.
        self.cells = kv_cells if cells is None else cells
        self.scripts: Mapping[int, Script] = {script.prompt[0]: script for script in scripts}
        self.calls: list[ModelCall] = []
        # For each slot its (cell, token) pairs; copies share cells.
        self.kv: dict[int, list[tuple[int, int]]] = {}
        self._cells = count()
        self.dead: set[int] = set()
        # With which adapters the cells of each slot were computed.
        self.made_with: dict[int, AdapterSet] = {}
        self.saved_with: dict[tuple[int, ...], AdapterSet] = {}
        self.broken_adapters: set[str] = set()
        self.first_of_call: list[list[int]] = []
        self.threads: set[int] = {threading.get_ident()}
        self.closed = False
        self.adapter_s = 0.0
        self.most_cells = 0
        self.before: Callable[[int, ModelCall], None] = lambda index, call: None
        self._holds: list[Hold] = []
        self._logits = np.zeros((max_rows, n_vocab), np.float32)

    def execute(self, call: ModelCall) -> NDArray[np.float32]:
        self.threads.add(threading.get_ident())
        assert not self.closed
        assert 0 < call.rows <= self.max_rows
        index = len(self.calls)
        self.calls.append(call)
        self.first_of_call.append([self._first(chunk) for chunk in call.chunks])
        self.before(index, call)
        for use in call.adapters:
            if use.path in self.broken_adapters:
                raise AdapterFailed(use.path, "it is broken")
        if self._cells_held() + call.rows > self.cells:
            raise KVExhausted
        self._logits.fill(np.nan)
        wanted = 0
        for chunk in call.chunks:
            assert 0 <= chunk.sequence < self.sequences
            held = self.kv.setdefault(chunk.sequence, [])
            assert chunk.start == len(held), "a gap, or a slot that was not dropped"
            made_with = self.made_with.setdefault(chunk.sequence, call.adapters)
            assert made_with == call.adapters, "KV of other adapters"
            for place, token in enumerate(chunk.tokens, 1):
                held.append((next(self._cells), token))
                if chunk.logits == "all" or (chunk.logits == "last" and place == len(chunk.tokens)):
                    self._logits[wanted] = self._answer([token for _, token in held])
                    wanted += 1
        assert wanted == sum(chunk.outputs for chunk in call.chunks)
        self.most_cells = max(self.most_cells, self._cells_held())
        return self._logits[:wanted]

    def drop(self, sequence: int) -> None:
        self.threads.add(threading.get_ident())
        self.dead |= {cell for cell, _ in self.kv.pop(sequence, [])}
        self.made_with.pop(sequence, None)

    def length(self, sequence: int) -> int:
        self.threads.add(threading.get_ident())
        return len(self.kv.get(sequence, ()))

    def save(self, sequence: int, most_bytes: int) -> NDArray[np.uint8] | None:
        self.threads.add(threading.get_ident())
        tokens = [token for _, token in self.kv[sequence]]
        if 4 * len(tokens) > most_bytes:
            return None
        self.saved_with[tuple(tokens)] = self.made_with[sequence]
        return np.asarray(tokens, np.int32).view(np.uint8)

    def restore(self, sequence: int, data: NDArray[np.uint8]) -> None:
        self.threads.add(threading.get_ident())
        assert not self.kv.get(sequence), "restored into a slot in use"
        tokens = data.view(np.int32).tolist()
        self.kv[sequence] = [(next(self._cells), token) for token in tokens]
        self.made_with[sequence] = self.saved_with[tuple(tokens)]
        assert self._cells_held() <= self.cells

    def trim(self, sequence: int, length: int) -> None:
        self.threads.add(threading.get_ident())
        held = self.kv[sequence]
        assert length <= len(held)
        self.dead |= {cell for cell, _ in held[length:]}
        del held[length:]

    def collect(self) -> None:
        self.threads.add(threading.get_ident())
        self.dead = set()

    def copy(self, source: int, target: int, length: int) -> None:
        self.threads.add(threading.get_ident())
        assert self.can_share
        assert not self.kv.get(target), "a copy into a slot in use"
        assert length <= len(self.kv[source])
        self.kv[target] = self.kv[source][:length]
        self.made_with[target] = self.made_with[source]

    def describe(self) -> Mapping[str, object]:
        self.threads.add(threading.get_ident())
        return {"backend": "scripted"}

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed = True

    # What tests ask and arrange.

    def hold_at(self, index: int) -> Hold:
        """Make call number `index` wait."""
        hold, earlier = Hold(), self.before
        self._holds.append(hold)

        def before(at: int, call: ModelCall) -> None:
            earlier(at, call)
            if at == index:
                hold.wait()

        self.before = before
        return hold

    def fail_at(self, index: int, error: Exception) -> None:
        """Make call number `index` raise, after it was recorded and before it computed anything."""
        earlier = self.before

        def before(at: int, call: ModelCall) -> None:
            earlier(at, call)
            if at == index:
                raise error

        self.before = before

    def release_all(self) -> None:
        for hold in self._holds:
            hold.release()

    def calls_of(self, script: Script) -> list[int]:
        """Numbers of the calls that had rows of a script."""
        return [i for i, firsts in enumerate(self.first_of_call) if script.prompt[0] in firsts]

    def _first(self, chunk: Chunk) -> int:
        return chunk.tokens[0] if chunk.start == 0 else self.kv[chunk.sequence][0][1]

    def _cells_held(self) -> int:
        return len(self.dead | {cell for held in self.kv.values() for cell, _ in held})

    def _answer(self, held: Sequence[int]) -> NDArray[np.float32]:
        script = self.scripts[held[0]]
        text = (*script.prompt, *script.says)
        logits = np.zeros(self.n_vocab, np.float32)
        # Behind a draft that runs past the script it has nothing to say.
        logits[text[min(len(held), len(text) - 1)]] = 1.0
        return logits


class HashRunner(ScriptedRunner):
    """Logits that depend on every token in the cache: a lost or misplaced one changes all that follows."""

    def _answer(self, held: Sequence[int]) -> NDArray[np.float32]:
        state = np.random.default_rng([len(held), *held])
        return state.normal(0.0, 2.0, self.n_vocab).astype(np.float32)
