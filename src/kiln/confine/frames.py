"""Frames between a kept child and its parent: one letter, the length, the bytes."""

from __future__ import annotations

import struct
from typing import BinaryIO

_HEAD = struct.Struct(">cI")


def write_frame(stream: BinaryIO, kind: bytes, body: bytes) -> None:
    stream.write(_HEAD.pack(kind, len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """The next frame, None where the stream has ended, also in the middle of one."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, size = _HEAD.unpack(head)
    body = stream.read(size)
    return (kind, body) if len(body) == size else None
