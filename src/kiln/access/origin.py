"""Requests that another site's page makes a browser send."""

from __future__ import annotations

from collections.abc import Mapping

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_cross_site(method: str, headers: Mapping[str, str], trusted: frozenset[str]) -> bool:
    """Whether a request may have been sent by a page of another origin than the server's.

    Browsers say so in `Sec-Fetch-Site`, older ones in `Origin`; what sends neither is no browser.
    Methods that change nothing pass: the page cannot read the answer.
    """
    origin = headers.get("origin")
    if method in SAFE_METHODS or (origin is not None and origin in trusted):
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != headers.get("host")
