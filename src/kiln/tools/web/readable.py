"""What a page says, without its menus and markup. Runs in a confined child only: pages may be hostile."""

from __future__ import annotations

import json
import logging


def extract(payload: bytes) -> bytes:
    """From a line of JSON `{"charset", "is_html"}` and the page, JSON `{"title", "text"}`."""
    head, _, content = payload.partition(b"\n")
    about = json.loads(head)
    if about["is_html"]:
        title, text = _read_html(content, about["charset"])
    else:
        title, text = "", _decode(content, about["charset"] or "utf-8")
    return json.dumps({"title": title, "text": text}, ensure_ascii=False).encode("utf-8", "replace")


def _read_html(content: bytes, charset: str | None) -> tuple[str, str]:
    import trafilatura

    logging.disable(logging.CRITICAL)
    # Without a charset in the header, the page's own declaration is looked for.
    page = content if charset is None else _decode(content, charset)
    found = trafilatura.bare_extraction(
        page, favor_recall=True, include_comments=False, include_tables=True, with_metadata=True
    )
    parts = {} if found is None else found if isinstance(found, dict) else found.as_dict()
    # A page too short or too odd to have a main part is read whole.
    return parts.get("title") or "", parts.get("text") or _all_text(page)


def _all_text(page: str | bytes) -> str:
    import lxml.etree
    import lxml.html

    try:
        tree = lxml.html.document_fromstring(page)
    except (lxml.etree.ParserError, ValueError):
        # An empty page, or one with a declaration that contradicts what it is.
        return ""
    lxml.etree.strip_elements(tree, "script", "style", "noscript", "template", with_tail=False)
    lines = (" ".join(line.split()) for line in tree.text_content().splitlines())
    return "\n".join(line for line in lines if line)


def _decode(content: bytes, charset: str) -> str:
    try:
        return content.decode(charset, "replace")
    except LookupError:
        return content.decode("utf-8", "replace")
