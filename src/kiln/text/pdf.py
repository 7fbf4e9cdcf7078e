"""The text of a PDF. Runs in a confined child only: nothing here bounds what a hostile file costs."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pypdf


def extract(payload: bytes) -> bytes:
    """From a line of JSON `{"max_pages", "max_chars"}` and the file, JSON `{"pages", "text"}` or, for what
    is wrong with the file, `{"error"}`."""
    head, _, content = payload.partition(b"\n")
    # pypdf warns of every oddity it repairs.
    logging.disable(logging.CRITICAL)
    try:
        answer = _read(content, **json.loads(head))
    except (pypdf.errors.PyPdfError, pypdf.errors.DependencyError) as error:
        answer = {"error": f"is broken: {error}"[:300]}
    except (MemoryError, SystemExit):
        raise
    except Exception as error:
        # A broken file makes pypdf raise whatever its code happens to meet.
        answer = {"error": f"is broken: {type(error).__name__}"}
    return json.dumps(answer).encode()


def _read(content: bytes, max_pages: int, max_chars: int) -> dict[str, Any]:
    reader = pypdf.PdfReader(io.BytesIO(content))
    # Many files are encrypted with the empty password: everybody may read them.
    if reader.is_encrypted and not reader.decrypt(""):
        return {"error": "is encrypted with a password"}
    pages = len(reader.pages)
    if pages > max_pages:
        return {"error": f"has {pages} pages; at most {max_pages} are read"}
    texts: list[str] = []
    size = 0
    for page in reader.pages:
        text = "".join(char for char in page.extract_text() if char in "\n\t" or char.isprintable()).strip()
        size += len(text)
        if size > max_chars:
            return {"error": f"holds more than {max_chars} characters of text"}
        texts.append(text)
    if size == 0:
        return {"error": "holds no text; scanned pages are not read"}
    return {"pages": pages, "text": "\n\n".join(text for text in texts if text)}
