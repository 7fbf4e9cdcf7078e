"""What a child is made to do in the tests."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


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
