"""What crosses the socket between the server and the engine's process.

One frame each way a step: a four-byte length, then msgpack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kiln.core.errors import KilnError, error_of_code
from kiln.engine.messages import Command, EngineLimits, StepReport

LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """How the child makes its runner."""

    model_path: str
    sequences: int
    kv_cells: int
    threads: int
    adapters: int
    limits: EngineLimits
    log_level: str


class Ready(msgspec.Struct, tag=True):
    """The child serves. `facts` go to `/v1/config`."""

    facts: dict[str, Any]


class Refused(msgspec.Struct, tag=True):
    """The child could not start."""

    code: str
    message: str
    hint: str | None


class Reported(msgspec.Struct, tag=True):
    report: StepReport


FromChild = Ready | Refused | Reported


class ToChild(msgspec.Struct):
    """A command, or None for the end."""

    command: Command | None


def encode_frame(message: object) -> bytes:
    """A message with its length before it. Errors inside travel as code and message."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _to_plain(value: object) -> object:
    if isinstance(value, KilnError):
        return [value.code, value.message]
    if isinstance(value, frozenset):
        return sorted(value)
    raise NotImplementedError(type(value))


def _from_plain(kind: type, value: Any) -> Any:
    if issubclass(kind, KilnError):
        code, message = value
        return error_of_code(code, message)
    raise NotImplementedError(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
from_child = msgspec.msgpack.Decoder(FromChild, dec_hook=_from_plain)
to_child = msgspec.msgpack.Decoder(ToChild, dec_hook=_from_plain)
plan_decoder = msgspec.msgpack.Decoder(RunnerPlan)
