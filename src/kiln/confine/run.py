"""Run one function in a child process of its own, within bounds.

For parsers that may be slow, greedy or broken on what strangers send: what happens to the child is an
error here, and nothing of it is left when `run_confined` returns, raises or is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import dataclass

FAILED, OUT_OF_MEMORY, RESULT = b"E", b"M", b"R"
# What Python needs to find its modules; secrets of the server's environment stay with the server.
PASSED_VARIABLES = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
    "TZDIR",
)


class ConfinedError(Exception):
    """The work came to no result. The message says why and is fit for a caller."""


class TookTooLong(ConfinedError):
    pass


class TookTooMuchMemory(ConfinedError):
    pass


@dataclass(frozen=True, slots=True)
class Bounds:
    timeout_s: float
    memory_bytes: int
    output_bytes: int


async def run_confined(work: str, payload: bytes, bounds: Bounds) -> bytes:
    """The result of `work`, written as `package.module:function`, a function from bytes to bytes.

    Raises TookTooLong, TookTooMuchMemory, or ConfinedError if the work died or raised.
    """
    command = [sys.executable, "-B", "-P", "-m", "kiln.confine.child", work, *_child_bounds(bounds)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
        # A Ctrl-C at the server's terminal is the server's to answer.
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(bounds.timeout_s):
            output, _ = await asyncio.gather(
                _read(process, bounds.output_bytes + len(RESULT)), _write(process, payload)
            )
    except TimeoutError:
        raise TookTooLong(f"it took longer than {bounds.timeout_s:g} seconds") from None
    finally:
        await _end(process)
    return _result(output, bounds)


def _child_bounds(bounds: Bounds) -> list[str]:
    # Processor time bounds the child also when the server is killed and nobody waits for it.
    return [str(bounds.memory_bytes), str(int(bounds.timeout_s) + 2)]


async def _write(process: asyncio.subprocess.Process, payload: bytes) -> None:
    assert process.stdin is not None
    # A child that dies early closes the pipe; its output tells why.
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(payload)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, most: int) -> bytes:
    assert process.stdout is not None
    parts: list[bytes] = []
    size = 0
    while size <= most:
        part = await process.stdout.read(65536)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    # A second cancellation must not leave a zombie.
    await asyncio.shield(asyncio.ensure_future(_reap(process)))


async def _reap(process: asyncio.subprocess.Process) -> None:
    # wait() also waits for the end of the output, which comes only if what is left in the pipe is read.
    assert process.stdout is not None
    while await process.stdout.read(65536):
        pass
    await process.wait()


def _result(output: bytes, bounds: Bounds) -> bytes:
    kind, body = output[:1], output[1:]
    if len(body) > bounds.output_bytes:
        raise ConfinedError(f"its result has more than {bounds.output_bytes} bytes")
    if kind == RESULT:
        return body
    if kind == OUT_OF_MEMORY:
        raise TookTooMuchMemory(f"it needs more than {bounds.memory_bytes} bytes of memory")
    if kind == FAILED:
        raise ConfinedError(f"it cannot be read ({body.decode('utf-8', 'replace')})")
    raise ConfinedError("reading it ended the process that did")
