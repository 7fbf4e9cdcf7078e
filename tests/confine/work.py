"""What a child is made to do in the tests."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_kept: list[bytearray] = []


def echo(payload: bytes) -> bytes:
    return payload[::-1]


def environment(payload: bytes) -> bytes:
    return json.dumps(sorted(os.environ)).encode()


def hang(payload: bytes) -> bytes:
    Path(os.fsdecode(payload)).symlink_to(str(os.getpid()))
    time.sleep(600)
    return b""


def hog(payload: bytes) -> bytes:
    return bytes(int(payload))


def flood(payload: bytes) -> bytes:
    while True:
        sys.stdout.buffer.write(b"x" * 65536)


def die(payload: bytes) -> bytes:
    os._exit(1)


def complain(payload: bytes) -> bytes:
    raise LookupError("a secret")


def write(payload: bytes) -> bytes:
    Path(os.fsdecode(payload)).write_bytes(b"x")
    return b"written"


def kept(setting: bytes) -> Callable[[bytes], bytes]:
    """The work of a kept child: what the first word of a payload says."""

    def act(payload: bytes) -> bytes:
        name, _, rest = payload.partition(b" ")
        result: bytes = {**globals(), "setting": lambda _: setting}[name.decode()](rest)
        return result

    return act


def pid(_: bytes) -> bytes:
    return str(os.getpid()).encode()


def spin(_: bytes) -> bytes:
    """Native code that lets no other thread, and no handler of a signal, run."""
    return str(pow(3, 3**18)).encode()


def swell(payload: bytes) -> bytes:
    """Succeed with most of the memory."""
    return str(sum(bytearray(b"\1" * int(payload)))).encode()


def keep(payload: bytes) -> bytes:
    """Succeed, and leave so much behind."""
    _kept.append(bytearray(int(payload)))
    return b"kept"


def fault(_: bytes) -> bytes:
    """As native code that overruns its stack."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return b""


def crash(_: bytes) -> bytes:
    os.abort()
