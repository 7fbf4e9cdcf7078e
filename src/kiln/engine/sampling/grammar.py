"""Grammars at decode time: compiled once, then a mask of the tokens that may come next.

llguidance parses byte by byte over the model's own vocabulary, so a text may be cut into tokens as the
model likes. Control and other added tokens are no text to it: they come only where a grammar names them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from kiln.core.errors import GrammarFailed, KilnError
from kiln.core.tokens import Tokenizer
from kiln.engine.sampling.sampler import Allowed

log = logging.getLogger(__name__)

# Compiled grammars kept for requests to come. One takes from some kilobytes to a few megabytes.
KEPT_GRAMMARS = 64
COMPILE_THREADS = 2
_PLACE = re.compile(r"^(?:ERROR: )?(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")


class GrammarState:
    """Where one sequence stands in its grammar. Used on the engine thread only."""

    __slots__ = ("_address", "_bits", "_coming", "_foreseen", "_has_begun", "_matcher", "_vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._bits = np.zeros(4 * vocabulary.mask_words, np.uint8)
        self._address = self._bits.ctypes.data
        self._has_begun = False
        # While the model runs, another thread finds out what may come next.
        self._coming: Future[None] | None = None
        self._foreseen: Allowed | GrammarFailed | None = None

    @property
    def is_complete(self) -> bool:
        """Nothing can follow: the sequence ends here."""
        return self._has_begun and self._matcher.is_stopped()

    @property
    def while_thinking(self) -> Allowed:
        """What may come before the grammar begins: all but the end, as there is no answer yet."""
        return self._vocabulary.endless

    def allowed(self) -> Allowed:
        """Which tokens may come next. Raises GrammarFailed if there are none, or that is too hard to tell."""
        if self._coming is None:
            return self._compute()
        if self._foreseen is None:
            self._coming.result()
        foreseen, self._coming, self._foreseen = self._foreseen, None, None
        assert foreseen is not None
        if isinstance(foreseen, GrammarFailed):
            raise foreseen
        return foreseen

    def _foresee(self) -> None:
        try:
            self._foreseen = self._compute()
        except GrammarFailed as error:
            self._foreseen = error

    def _compute(self) -> Allowed:
        self._matcher.unsafe_compute_mask_ptr(self._address, len(self._bits))
        self._check()
        bits = np.unpackbits(self._bits, bitorder="little", count=self._vocabulary.n_vocab)
        allowed = Allowed(bits.view(np.bool_))
        if allowed.ids is not None and not len(allowed.ids):
            raise GrammarFailed("the grammar leaves no token that could come next")
        return allowed

    def accept(self, token: int) -> None:
        """Take the token that was chosen among the allowed ones."""
        self._has_begun = True
        if not self._matcher.consume_token(token):
            self._check()

    def can_begin_with(self, text: bytes) -> bool:
        """Whether the grammar may begin with `text`, the rest of the token that closed the thinking."""
        tokens = self._vocabulary.cut(text)
        return self._matcher.validate_tokens(tokens) == len(tokens)

    def begin_with(self, text: bytes) -> None:
        """Take the rest of the token that closed the thinking."""
        for token in self._vocabulary.cut(text):
            self.accept(token)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar cannot be followed: {brief(self._matcher.get_error())}")


def foresee(states: Sequence[GrammarState], pool: Executor) -> None:
    """Begin to find out what `allowed` will say of each; nothing else may be asked of them before that."""
    # A sequence that was preempted has not used what was found out for it.
    asked = [state for state in states if state._coming is None]

    def compute() -> None:
        for state in asked:
            state._foresee()

    if asked:
        coming = pool.submit(compute)
        for state in asked:
            state._coming = coming


class GrammarVocabulary:
    """A tokenizer as llguidance sees it.

    Building it takes a second for a large vocabulary, and no other Python thread runs meanwhile.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Some vocabularies add runs of blanks, which are text.
        added = {spelling.encode() for spelling in tokenizer.added_spellings if spelling.strip()}
        self.n_vocab = tokenizer.n_vocab
        self.tokens = list(tokenizer.pieces)
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if piece in added]
        self._special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizer
        self.bos_token_id = None
        ends = sorted(tokenizer.eos_ids)
        if not ends:
            # llguidance wants an end token. This one is behind the vocabulary, where no model can draw it.
            ends = [len(self.tokens)]
            self.tokens.append(b"</s>")
            self.special_token_ids.append(ends[0])
        self.eos_token_id = ends[0]
        self.mask_words = (len(self.tokens) + 31) // 32
        all_but_ends = np.ones(self.n_vocab, np.bool_)
        all_but_ends[[token for token in ends if token < self.n_vocab]] = False
        self.endless = Allowed(all_but_ends)
        # Most grammars are JSON, whose strings these prepared parts of the vocabulary are for.
        slices = LLTokenizer.json_slices()
        self.native = LLTokenizer(TokenizerWrapper(self), eos_token=ends, slices=slices)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a plain text, as llguidance asks for them where a grammar leaves one text only.

        The model's own where they spell just that: some tokenizers put a blank first, and those of llama.cpp
        find user-defined tokens in plain text too.
        """
        data = text if isinstance(text, bytes) else text.encode()
        tokens = self._tokenizer.encode(data.decode("utf-8", "replace"), parse_special=False)
        spelled = b"".join(self.tokens[token] for token in tokens)
        if spelled != data or not self._special.isdisjoint(tokens):
            return self.native.greedy_tokenize(data.decode("utf-8", "replace"))
        return tokens

    def cut(self, text: bytes) -> list[int]:
        """Some tokens that spell `text`."""
        return self.native.greedy_tokenize(text.decode("utf-8", "replace")) if text else []


class GrammarCompiler:
    """Compiles grammars over one vocabulary and keeps the last ones. Thread-safe.

    Nothing ends it: `chat/structured/check` tries callers' grammars before, in a process that can be ended.
    """

    def __init__(self, tokenizer: Tokenizer, kept: int = KEPT_GRAMMARS) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()

    def state(self, grammar: str) -> GrammarState:
        """A new state of a grammar. Slow the first time: not for the engine thread, nor the event loop.

        Raises GrammarFailed.
        """
        return self.kept_state(grammar) or self._compile(grammar)

    def prepare(self) -> None:
        """Look through the vocabulary now, while nobody waits."""
        try:
            with self._vocabulary_lock:
                _ = self._vocabulary
        except GrammarFailed as error:
            log.warning("%s", error.message)

    def kept_state(self, grammar: str) -> GrammarState | None:
        """A new state if the grammar is compiled already."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                return None
            self._compiled.move_to_end(grammar)
            return GrammarState(matcher.deep_copy(), self._vocabulary)

    def _compile(self, grammar: str) -> GrammarState:
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary.native, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarFailed(brief(matcher.get_error()))
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), vocabulary)

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        try:
            return GrammarVocabulary(self._tokenizer)
        except Exception as error:
            raise GrammarFailed(f"no grammar can be followed with this vocabulary: {error}") from error


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a waiting sequence is compiled, or cannot be."""

    key: int
    result: GrammarState | KilnError


class GrammarThreads:
    """What is done beside the engine thread: grammars are compiled, and masks made while the model runs."""

    def __init__(self, compiler: GrammarCompiler, publish: Callable[[GrammarReady], None]) -> None:
        """`publish` is called on a compiling thread."""
        self._compiler = compiler
        self._publish = publish
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="kiln-grammar")
        self._mask_pool = ThreadPoolExecutor(1, thread_name_prefix="kiln-masks")

    def ask(self, key: int, grammar: str) -> GrammarState | None:
        """A state at once if the grammar is known; else None, and a GrammarReady later."""
        state = self._compiler.kept_state(grammar)
        if state is None:
            self._pool.submit(self._compile, key, grammar)
        return state

    def foresee(self, states: Sequence[GrammarState]) -> None:
        """Have the masks of the next step computed while the model runs."""
        foresee(states, self._mask_pool)

    def close(self) -> None:
        for pool in (self._pool, self._mask_pool):
            pool.shutdown(wait=True, cancel_futures=True)

    def _compile(self, key: int, grammar: str) -> None:
        try:
            self._publish(GrammarReady(key, self._compiler.state(grammar)))
        except KilnError as error:
            self._publish(GrammarReady(key, error))
        except Exception as error:
            self._publish(GrammarReady(key, GrammarFailed(f"the grammar cannot be compiled: {error}")))


def brief(message: str) -> str:
    """llguidance's message in one line, without its place in our grammar and the text quoted from it."""
    first, *rest = _PLACE.sub("", message.strip()).splitlines() or [""]
    # The regex parser quotes the pattern first, and says behind it what is wrong.
    reason = next((line.removeprefix("error: ") for line in rest if line.startswith("error: ")), None)
    return first if reason is None else f"{first} {reason}"
