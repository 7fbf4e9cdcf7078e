"""Files that come with messages, as text the model can read.

`FileReader.read_all` takes the files of every message of a request and gives each message's block, to be
put before its content (`with_files`). Text is taken as it is, PDFs are extracted in a confined child,
anything else is refused by name. All errors are InvalidField and name `messages[i].files[j]`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kiln.confine.run import Bounds, ConfinedError, TookTooLong, run_confined
from kiln.core.errors import InvalidField
from kiln.core.settings import FilesSettings

NAME_CHARS = 255
# Kinds that people do send, told by their first bytes, so that the refusal can name them.
SIGNATURES = (
    (b"\x89PNG\r\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"PK\x03\x04", "a ZIP archive or an office document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xd0\xcf\x11\xe0", "an old office document"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"OggS", "an audio or video file"),
    (b"ID3", "an audio file"),
)
ACCEPTED = "Send text encoded as UTF-8, or a PDF."
BLIND = "Describe the image in words, or serve a model that can see."


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A file as a request has it: `text`, or `data` in base64."""

    name: str
    mime: str | None = None
    text: str | None = None
    data: str | None = None


class _Clock:
    """What is left of the time that a request has for its PDFs; it runs inside `with`."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds
        self._began = 0.0

    async def __aenter__(self) -> None:
        self._began = time.monotonic()

    async def __aexit__(self, *error: object) -> None:
        self.left_s = max(0.0, self.left_s - (time.monotonic() - self._began))


class FileReader:
    """Reads the files of requests within the limits of the settings. One a server."""

    def __init__(self, limits: FilesSettings) -> None:
        self._limits = limits
        self._children = asyncio.Semaphore(limits.parallel)

    async def read_all(self, messages: Sequence[Sequence[GivenFile]]) -> list[str]:
        """The block of every message, empty for one without files. Cancelling it ends the children."""
        total = sum(len(files) for files in messages)
        if total > self._limits.max_files:
            first = next(i for i, files in enumerate(messages) if files)
            raise InvalidField(
                f"the request has {total} files; at most {self._limits.max_files} are read",
                param=f"messages[{first}].files",
                hint="Send fewer files, or raise files.max_files.",
            )
        clock = _Clock(self._limits.timeout_s)
        blocks = []
        for i, files in enumerate(messages):
            found = [
                await self._block(file, f"messages[{i}].files[{j}]", clock) for j, file in enumerate(files)
            ]
            blocks.append("\n".join(found))
        return blocks

    async def _block(self, file: GivenFile, param: str, clock: _Clock) -> str:
        _check_name(file.name, param)
        if (file.text is None) == (file.data is None):
            raise InvalidField(f"{param} must have either text or data", param=param)
        if file.text is not None:
            self._check_length(file.text, file.name, f"{param}.text")
            return show_file(file.name, file.text)
        content = await asyncio.to_thread(self._decode, file, f"{param}.data")
        if content[:1024].lstrip().startswith(b"%PDF-"):
            pages, text = await self._read_pdf(content, file.name, f"{param}.data", clock)
            return show_file(file.name, text, pages)
        text = await asyncio.to_thread(_as_text, content, file, f"{param}.data")
        self._check_length(text, file.name, f"{param}.data")
        return show_file(file.name, text)

    def _decode(self, file: GivenFile, param: str) -> bytes:
        assert file.data is not None
        # Base64 has four characters for three bytes: too much is seen before it is decoded.
        if len(file.data) > (self._limits.max_bytes + 2) // 3 * 4:
            raise self._too_large(file.name, param)
        try:
            content = base64.b64decode(file.data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidField(
                f"{param} ({file.name}) is not base64: {error}",
                param=param,
                hint="Send the file's bytes in base64 with padding and without line breaks.",
            ) from None
        if len(content) > self._limits.max_bytes:
            raise self._too_large(file.name, param)
        if not content:
            raise InvalidField(f"{param} ({file.name}) is empty", param=param)
        return content

    def _too_large(self, name: str, param: str) -> InvalidField:
        return InvalidField(
            f"{param} ({name}) has more than {self._limits.max_bytes} bytes",
            param=param,
            hint="Send a smaller file, or raise files.max_bytes.",
        )

    def _check_length(self, text: str, name: str, param: str) -> None:
        most = self._limits.max_chars
        if len(text) > most:
            raise InvalidField(
                f"{param} ({name}) holds more than {most} characters of text",
                param=param,
                hint="Send a part of the file, or raise files.max_chars.",
            )

    async def _read_pdf(self, content: bytes, name: str, param: str, clock: _Clock) -> tuple[int, str]:
        limits = {"max_pages": self._limits.max_pages, "max_chars": self._limits.max_chars}
        bounds = Bounds(
            timeout_s=clock.left_s,
            memory_bytes=self._limits.max_memory_bytes,
            # A character takes at most twelve bytes as a pair of escapes in JSON.
            output_bytes=12 * self._limits.max_chars + 1024,
        )
        payload = json.dumps(limits).encode() + b"\n" + content
        try:
            # Waiting for a turn is not the request's fault and does not count.
            async with self._children, clock:
                output = await run_confined("kiln.text.pdf:extract", payload, bounds)
        except TookTooLong:
            seconds = f"{self._limits.timeout_s:g} seconds, what a request may take for its PDFs"
            raise _bad_pdf(name, param, f"cannot be read within {seconds}") from None
        except ConfinedError as error:
            raise _bad_pdf(name, param, f"cannot be read: {error}") from None
        answer: dict[str, Any] = await asyncio.to_thread(json.loads, output)
        if "error" in answer:
            raise _bad_pdf(name, param, answer["error"])
        return answer["pages"], answer["text"].encode("utf-8", "replace").decode()


def with_files(block: str, content: str) -> str:
    """A message's content with its files before it."""
    return f"{block}\n\n{content}" if block and content else block or content


def show_file(name: str, text: str, pages: int | None = None) -> str:
    """A file as the model reads it: its name, its pages if it has some, and its text between tags."""
    plain = name.replace('"', "'")
    count = "" if pages is None else f' pages="{pages}"'
    return f'<file name="{plain}"{count}>\n{text}\n</file>'


def images_refused(message: int, image: int = 0) -> InvalidField:
    """The error for an image in a message to a model that reads text only."""
    param = f"messages[{message}].images[{image}]"
    return InvalidField(f"{param}: the model reads text and cannot see images", param=param, hint=BLIND)


def _check_name(name: str, param: str) -> None:
    is_plain = not any(
        char < " " or "\x7f" <= char <= "\x9f" or "\ud800" <= char <= "\udfff" for char in name
    )
    if not name.strip() or len(name) > NAME_CHARS or not is_plain:
        raise InvalidField(
            f"{param}.name must have 1 to {NAME_CHARS} characters and no control characters",
            param=f"{param}.name",
        )


def _as_text(content: bytes, file: GivenFile, param: str) -> str:
    kind = _kind_of(content, file.mime)
    if kind is None and b"\0" not in content:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            kind = f"neither a PDF nor text in UTF-8 (byte {error.start} is not)"
    image = kind is not None and "image" in kind
    raise InvalidField(
        f"{param} ({file.name}) is {kind or 'binary data of an unknown type'}, which is not read",
        param=param,
        hint=f"{BLIND} {ACCEPTED}" if image else ACCEPTED,
    )


def _kind_of(content: bytes, mime: str | None) -> str | None:
    """What the content is, in words, if it is something known that is not text."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "a WebP image"
    # Two letters begin many a text; with a NUL behind them it is none.
    if b"\0" in content[:4096]:
        for signature, kind in SIGNATURES:
            if content.startswith(signature):
                return kind
    if mime is not None and mime.lower().startswith("image/") and "svg" not in mime.lower():
        return "an image"
    return "a file that says it is a PDF but is none" if mime == "application/pdf" else None


def _bad_pdf(name: str, param: str, reason: str) -> InvalidField:
    return InvalidField(
        f"{param} ({name}), a PDF, {reason}",
        param=param,
        hint="Send the text of the document itself, or a smaller or repaired file without a password.",
    )
