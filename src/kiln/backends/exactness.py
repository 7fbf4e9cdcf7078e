"""The self-test behind exact requests: it proves the property for the loaded weights on this machine.

Exactness rests on how the CPU kernels behave: calls of at most 63 rows give every row the same bits
whatever the other rows are. That is a property of a build, not a promise, so it is checked at load:
tokens decoded one by one, the same tokens in one prompt call, the same beside other sequences, the same
beside sequences that end half-way, and the same in cells far apart must give identical logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kiln.engine.runner import Chunk, ModelCall, ModelRunner

LENGTH = 12
COMPANY = 3
# From so many cells in use on, llama.cpp adds up the attention of a single row in another order.
FAR = 512


@dataclass(frozen=True, slots=True)
class Exactness:
    """`with_drafts` if it holds as well where drafted tokens are verified and rejected."""

    holds: bool
    detail: str
    with_drafts: bool = False


def prove_exactness(runner: ModelRunner) -> Exactness:
    """Run the self-test on an empty runner; it is empty again afterwards. About 5 x 12 decode steps."""
    if runner.sequences < 2:
        return Exactness(False, "the self-test needs two sequences")
    tokens = np.random.default_rng(1).integers(0, runner.n_vocab, LENGTH).tolist()
    alone = _one_by_one(runner, tokens, company=0)
    company = min(COMPANY, runner.sequences - 1)
    together = _one_by_one(runner, tokens, company=company)
    left_alone = _one_by_one(runner, tokens, company=company, until=LENGTH // 2)
    prompt = runner.execute(ModelCall((Chunk(0, 0, tokens, "all"),), exact=True)).copy()
    runner.drop(0)
    runner.collect()
    compared = [
        ("among other sequences", together),
        ("among sequences that end", left_alone),
        ("in one prompt call", prompt),
    ]
    if runner.can_share and runner.kv_cells >= FAR + 2 * LENGTH:
        compared.append(("over cells far apart", _far_apart(runner, tokens)))
    for name, other in compared:
        if not np.array_equal(alone, other):
            worst = float(np.abs(alone - other).max())
            return Exactness(False, f"decoding alone and {name} differ by up to {worst:.1e} in a logit")
    drafted = _with_drafts(runner, tokens) if runner.can_share else None
    return Exactness(
        True,
        f"{LENGTH} tokens, bit for bit: alone, {', '.join(name for name, _ in compared)}",
        with_drafts=drafted is not None and np.array_equal(alone, drafted),
    )


def _far_apart(runner: ModelRunner, tokens: list[int]) -> NDArray[np.float32]:
    """Logits of `tokens` decoded alone, with the cells of dead sequences between the halves of theirs."""
    runner.execute(ModelCall((Chunk(1, 0, tokens, "last"),), exact=True))
    saved = runner.save(1, sys.maxsize)
    assert saved is not None
    runner.drop(1)
    runner.collect()

    def fill() -> None:
        # A restored sequence takes cells of its own, and dropping it leaves them taken.
        for _ in range(0, FAR, len(tokens)):
            runner.restore(1, saved)
            runner.drop(1)

    return _one_by_one(runner, tokens, company=0, until=LENGTH // 2, in_between=fill)


def _with_drafts(runner: ModelRunner, tokens: list[int]) -> NDArray[np.float32]:
    """Logits of `tokens` decoded with drafts of three tokens, of which 0, 1, 2 and 3 are right in turn."""
    rows: list[NDArray[np.float32]] = []
    while len(rows) < len(tokens):
        start = len(rows)
        draft = tokens[start : start + 4]
        right = 1 + start % 4
        # Anything else than the true token makes the draft wrong from there on.
        draft[right:] = [(token + 1) % runner.n_vocab for token in draft[right:]]
        chunks = (Chunk(1, start, [tokens[start]], "last"), Chunk(0, start, draft, "all"))
        logits = runner.execute(ModelCall(chunks, exact=True))
        kept = min(right, len(draft))
        rows.extend(logits[1 : 1 + kept].copy())
        runner.trim(0, start + kept)
        # The company keeps step.
        for position in range(start + 1, start + kept):
            runner.execute(ModelCall((Chunk(1, position, [tokens[position]], "last"),), exact=True))
    runner.drop(0)
    runner.drop(1)
    runner.collect()
    return np.stack(rows)


def _one_by_one(
    runner: ModelRunner,
    tokens: list[int],
    company: int,
    until: int = LENGTH,
    in_between: Callable[[], None] = lambda: None,
) -> NDArray[np.float32]:
    """Logits of `tokens` decoded in sequence 0, after the rows of `company` others that end at `until`.

    `in_between` is called there as well.
    """
    rows = []
    for position, token in enumerate(tokens):
        # The others' cells come first, so that their end leaves holes below those of sequence 0.
        others = range(1, company + 1) if position < until else ()
        chunks = [Chunk(o, position, [tokens[(position + o) % len(tokens)]], "last") for o in others]
        chunks.append(Chunk(0, position, [token], "last"))
        rows.append(runner.execute(ModelCall(tuple(chunks), exact=True))[-1].copy())
        if position + 1 == until:
            for other in others:
                runner.drop(other)
            in_between()
    runner.drop(0)
    runner.collect()
    return np.stack(rows)
