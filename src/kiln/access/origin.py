"""Requests that another site's page makes a browser send."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache

# Names that nobody can have registered, so that no page can have been given this server's address.
_PRIVATE_ENDINGS = (".localhost", ".local", ".lan", ".internal", ".home.arpa", ".test", ".invalid")
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


@lru_cache(256)
def is_rebound(host: str, trusted: frozenset[str]) -> bool:
    """Whether a request to a server on a loopback address names a public host.

    A page may have its own name lead to 127.0.0.1 (DNS rebinding); to the browser the server is then the
    page's own site. Numbers, names without a dot and private names cannot be used for that.
    """
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.lower().rstrip(".")
    if any(origin.partition("://")[2] == host for origin in trusted):
        return False
    return "." in name and not _is_number(name) and not name.endswith(_PRIVATE_ENDINGS)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
