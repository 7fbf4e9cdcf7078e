"""Reading an operator's files: bounded, regular files only, and never outside their folder."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

# Neither a link that was put in place after the check nor a pipe may hold the reader up.
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a file. `line` counts from 1; None where no line is to blame."""

    message: str
    line: int | None = None

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


class Faulty(Exception):
    """A file cannot be used, for these reasons."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Signature:
    """What changes when a file does."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def read_within(root: Path, path: Path, limit: int) -> tuple[bytes, Signature]:
    """At most `limit` bytes of a regular file that lies, links followed, inside `root`.

    The signature is of the opened file, taken before its bytes; its `size` is the whole file's.
    Raises FileNotFoundError, and Faulty for anything else that is in the way.
    """
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(root.resolve(strict=True)):
            raise Faulty(Fault("it is a link that leads out of its folder"))
        descriptor = os.open(real, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path.name) from None
    except OSError as error:
        raise Faulty(Fault(f"it cannot be opened: {os.strerror(error.errno or 0)}")) from None
    except RuntimeError:  # a loop of links, before Python 3.13
        raise Faulty(Fault("it is a link that leads to itself")) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Faulty(Fault("it is not a regular file"))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit), Signature.of(status)
    except OSError as error:
        raise Faulty(Fault(f"it cannot be read: {os.strerror(error.errno or 0)}")) from None
    finally:
        os.close(descriptor)


def read_text(root: Path, path: Path, limit: int) -> tuple[str, Signature]:
    """A whole UTF-8 file, with `\\n` ends of lines and no byte order mark. Raises as `read_within` does,
    and Faulty for a file that is larger than `limit` bytes, which is then not read further."""
    data, signature = read_within(root, path, limit + 1)
    if max(len(data), signature.size) > limit:
        raise Faulty(Fault(f"it has {max(len(data), signature.size)} bytes; at most {limit} are allowed"))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Faulty(Fault("it is not UTF-8", line)) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        raise Faulty(Fault("it holds a NUL character", text.count("\n", 0, text.index("\0")) + 1))
    return text, signature
