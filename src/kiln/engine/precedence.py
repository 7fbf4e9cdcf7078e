"""Who has the processor first, where the server and its engine share one: the engine.

Decoding splits every matrix over all threads, and all wait for the last one. A server that wakes up for
each token and takes a thread's place there delays the whole step by more than it computes itself. Linux'
SCHED_BATCH gives the same share of the processor, but who wakes up waits for a pause instead of
interrupting (sched(7)); decoding pauses hundreds of times a step, where its threads meet.
"""

from __future__ import annotations

import contextlib
import os


def give_way() -> None:
    """The calling thread, and what it starts, interrupts nobody from now on."""
    _choose("SCHED_BATCH")


def take_precedence() -> None:
    """The calling thread, and what it starts, is scheduled as usual, whatever it inherited."""
    _choose("SCHED_OTHER")


def _choose(policy: str) -> None:
    # Other systems have no such policies, and a sandbox may refuse them: it works without, a little slower.
    if hasattr(os, policy):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
