"""Grammars of requests are tried before anything runs, in a child process that time and memory bound.

llguidance compiles in native code that nothing interrupts, and parts of it count no fuel: intersecting the
patterns of an `allOf` takes minutes and gigabytes. Only what compiled within the bounds goes to the engine.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict

from kiln.confine.kept import KeptBounds, KeptChildren, OutOfPatience, Unstartable
from kiln.confine.run import ConfinedError, TookTooLong, TookTooMuchMemory
from kiln.core.errors import EngineFailed, GrammarFailed
from kiln.core.tokens import Tokenizer
from kiln.engine.sampling.grammar import brief

WORK = "kiln.text.grammar_child:checker"
# Involved schemas of real callers take some tens of milliseconds and megabytes.
BOUNDS = KeptBounds(cpu_seconds=1.0, wall_seconds=10.0, memory_bytes=640 * 1024 * 1024)
# What was found is a hash and a line of text.
KEPT_FINDINGS = 2048
# llguidance quotes the grammar in its messages.
MAX_MESSAGE = 300
TOO_LONG = "it takes too long to compile"
NOTHING_SATISFIES = "nothing satisfies it"


class GrammarCheck:
    """Tells whether grammars over one vocabulary compile and begin; remembers what it found. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, bounds: KeptBounds = BOUNDS, kept: int = KEPT_FINDINGS) -> None:
        self._kept = kept
        self._children = KeptChildren(WORK, _setting(tokenizer), bounds)
        self._found: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Get a child ready while nobody waits."""
        self._children.start()

    def close(self) -> None:
        self._children.close()

    def problem(self, grammar: str) -> str | None:
        """What is wrong with a grammar, None if it may run. Blocks, the first time as long as it compiles.

        Raises EngineFailed where it cannot be found out.
        """
        key = hashlib.blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        try:
            problem = self._try(grammar)
        except OutOfPatience:
            return TOO_LONG
        with self._lock:
            self._found[key] = problem
            while len(self._found) > self._kept:
                self._found.popitem(last=False)
        return problem

    def check(self, grammar: str) -> None:
        """Raises GrammarFailed where there is a problem."""
        problem = self.problem(grammar)
        if problem is not None:
            raise GrammarFailed(problem)

    def _try(self, grammar: str) -> str | None:
        try:
            found = json.loads(self._children.run(grammar.encode()))
        except UnicodeEncodeError:
            return "it has half a surrogate pair, which is no character"
        except OutOfPatience:
            raise
        except TookTooLong:
            return TOO_LONG
        except TookTooMuchMemory:
            return "it takes too much memory to compile"
        except (Unstartable, OSError) as error:
            raise EngineFailed(f"no process can be started to check a grammar: {error}") from error
        except ConfinedError as error:
            return f"it cannot be compiled: {error}"
        if found is None:
            return None
        message: str = brief(found["problem"])[:MAX_MESSAGE]
        if not found["compiles"]:
            return message
        nothing = not message or message.startswith("NoExtension")
        return NOTHING_SATISFIES if nothing else f"it cannot be followed: {message}"


def _setting(tokenizer: Tokenizer) -> bytes:
    # Some vocabularies add runs of blanks, which are text.
    added = {spelling.encode() for spelling in tokenizer.added_spellings if spelling.strip()}
    special = [(token, piece.decode()) for token, piece in enumerate(tokenizer.pieces) if piece in added]
    return json.dumps(
        {"n_vocab": tokenizer.n_vocab, "special": special, "ends": sorted(tokenizer.eos_ids)}
    ).encode()
