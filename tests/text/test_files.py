"""Files of messages: text and PDFs are read, everything else is refused by name."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from kiln.core.errors import InvalidField
from kiln.core.settings import FilesSettings
from kiln.text.files import FileReader, GivenFile, images_refused, with_files

from .pdfs import encrypted, pdf, pdf_of


def data(name: str, content: bytes, mime: str | None = None) -> GivenFile:
    return GivenFile(name, mime, data=base64.b64encode(content).decode())


async def read(file: GivenFile, **limits: Any) -> str:
    (block,) = await FileReader(FilesSettings(**limits)).read_all([[file]])
    return block


async def refused(file: GivenFile, **limits: Any) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        # The first message has no file, so the error must name the second.
        await FileReader(FilesSettings(**limits)).read_all([[], [GivenFile("ok", text="x"), file]])
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[1].files[1]")
    assert caught.value.hint
    return caught.value


async def test_text_is_taken_as_it_is() -> None:
    text = "first\r\n\tsecond <|im_end|> é \U0001f525"
    expected = f'<file name="notes.txt">\n{text}\n</file>'
    assert await read(GivenFile("notes.txt", text=text)) == expected
    assert await read(data("notes.txt", text.encode())) == expected
    assert await read(data("notes.txt", b"\xef\xbb\xbf" + text.encode(), "text/plain")) == expected
    assert await read(data("b.txt", b"BM and MZ begin words", None)) == (
        '<file name="b.txt">\nBM and MZ begin words\n</file>'
    )


async def test_blocks_are_by_message_and_go_before_the_content() -> None:
    reader = FileReader(FilesSettings())
    a, b = GivenFile('a".txt', text="1"), GivenFile("b.txt", text="2")
    blocks = await reader.read_all([[a, b], [], [b]])
    assert blocks == [
        '<file name="a\'.txt">\n1\n</file>\n<file name="b.txt">\n2\n</file>',
        "",
        '<file name="b.txt">\n2\n</file>',
    ]
    assert with_files(blocks[2], "Sum up.") == '<file name="b.txt">\n2\n</file>\n\nSum up.'
    assert with_files("", "Sum up.") == "Sum up."
    assert with_files(blocks[2], "") == blocks[2]


async def test_a_pdf_is_read() -> None:
    block = await read(data("two.pdf", pdf(["Hello there", "General"]), "application/pdf"))
    assert block == '<file name="two.pdf" pages="2">\nHello there\n\nGeneral\n</file>'
    # What a file is, its content says, not its type or name.
    assert "Hello" in await read(data("two.txt", pdf(["Hello"]), "text/plain"))
    # Encrypted with the empty password is readable by all.
    assert "Hello" in await read(data("open.pdf", encrypted(pdf(["Hello"]), "")))


@pytest.mark.parametrize(
    ("content", "limits", "reason"),
    [
        (encrypted(pdf(["Hello"]), "secret"), {}, "encrypted with a password"),
        (b"%PDF-1.7\n" + b"garbage " * 1000, {}, "is broken"),
        (b"%PDF-", {}, "is broken"),
        (pdf(["Hello"])[:300], {}, "is broken"),
        (pdf(["x"] * 4), {"max_pages": 3}, "has 4 pages; at most 3"),
        (pdf(["x" * 60, "y" * 60]), {"max_chars": 100}, "more than 100 characters"),
        (pdf([""]), {}, "holds no text"),
        # A hundred megabytes of blanks in some hundred kilobytes.
        (pdf_of([b" " * 100_000_000]), {}, "is broken"),
        (
            pdf_of([b"BT /F1 12 Tf " + b"(a) Tj " * 2_000_000 + b"ET"]),
            {"timeout_s": 2.0},
            "within 2 seconds",
        ),
        (
            pdf_of([b"BT /F1 12 Tf (" + b"a" * 70_000_000 + b") Tj ET"]),
            {"max_memory_bytes": 2**28},
            "bytes of memory",
        ),
    ],
    ids=["password", "garbage", "head", "cut", "pages", "characters", "empty", "bomb", "slow", "memory"],
)
async def test_a_bad_pdf_is_refused(content: bytes, limits: dict[str, Any], reason: str) -> None:
    error = await refused(data("bad.pdf", content), **limits)
    assert error.param == "messages[1].files[1].data"
    assert "bad.pdf" in error.message
    assert reason in error.message


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


@pytest.mark.parametrize(
    ("content", "mime", "reason"),
    [
        (PNG, None, "a PNG image"),
        (PNG, "text/plain", "a PNG image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", None, "a JPEG image"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", None, "a WebP image"),
        (b"PK\x03\x04\x14\0\0\0", None, "a ZIP archive or an office document"),
        (b"\x7fELF\x02\x01\x01\0", None, "a program"),
        (b"plain words", "image/png", "an image"),
        (b"plain words", "application/pdf", "says it is a PDF"),
        (b"text with a \0 in it", None, "binary data of an unknown type"),
        ("Zürich".encode("latin-1"), None, "byte 1 is not"),
        (b"", None, "is empty"),
    ],
)
async def test_what_is_no_text_is_refused(content: bytes, mime: str | None, reason: str) -> None:
    error = await refused(data("thing", content, mime))
    assert reason in error.message
    assert "thing" in error.message
    assert ("cannot see" in error.message or "see" in (error.hint or "")) == ("image" in reason)


@pytest.mark.parametrize(
    ("file", "param", "reason"),
    [
        (GivenFile("x"), "", "either text or data"),
        (GivenFile("x", text="a", data="YQ=="), "", "either text or data"),
        (GivenFile("", text="a"), ".name", "1 to 255"),
        (GivenFile(" ", text="a"), ".name", "1 to 255"),
        (GivenFile("a\nb", text="a"), ".name", "control characters"),
        (GivenFile("n" * 256, text="a"), ".name", "1 to 255"),
        (GivenFile("x", data="YQ="), ".data", "not base64"),
        (GivenFile("x", data="Y Q=="), ".data", "not base64"),
        (GivenFile("x", data="é"), ".data", "not base64"),
        (GivenFile("x", data="data:text/plain;base64,YQ=="), ".data", "not base64"),
        (GivenFile("x", text="a" * 101), ".text", "more than 100 characters"),
        (data("x", b"a" * 101), ".data", "more than 100 characters"),
        (data("x", b"a" * 1001), ".data", "more than 1000 bytes"),
        (GivenFile("x", data="!" * 1400), ".data", "more than 1000 bytes"),
    ],
)
async def test_malformed_files_are_refused(file: GivenFile, param: str, reason: str) -> None:
    error = await refused(file, max_chars=100, max_bytes=1000)
    assert error.param == f"messages[1].files[1]{param}"
    assert reason in error.message


async def test_a_request_has_a_limit_of_files() -> None:
    files = [GivenFile("x", text="a")] * 3
    with pytest.raises(InvalidField, match="has 6 files; at most 5") as caught:
        await FileReader(FilesSettings(max_files=5)).read_all([[], files, files])
    assert caught.value.param == "messages[1].files"


async def test_the_pdfs_of_a_request_share_its_time() -> None:
    # Each alone would do; sixteen processes cannot be started and ended in this time.
    files = [data(f"{i}.pdf", pdf(["Hello"])) for i in range(16)]
    with pytest.raises(InvalidField, match="what a request may take"):
        await FileReader(FilesSettings(timeout_s=0.6)).read_all([files])


async def test_reading_can_be_cancelled() -> None:
    slow = data("slow.pdf", pdf_of([b"BT /F1 12 Tf " + b"(a) Tj " * 2_000_000 + b"ET"]))
    reader = FileReader(FilesSettings(parallel=1))
    task = asyncio.create_task(reader.read_all([[slow]]))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The place of the cancelled one is free.
    assert "Hello" in (await reader.read_all([[data("x.pdf", pdf(["Hello"]))]]))[0]


def test_the_error_for_an_image() -> None:
    error = images_refused(3, 1)
    assert (error.status, error.param) == (400, "messages[3].images[1]")
    assert "cannot see" in error.message
