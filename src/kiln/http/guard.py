"""Access to every route: who calls, whether they may, and the limits of their key.

Pure ASGI: a request is looked at once, before it reaches its route; its events pass untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kiln.access.book import KeyBook
from kiln.access.limits import Limits
from kiln.access.origin import SAFE_METHODS, is_cross_site, is_rebound
from kiln.core.access import ANONYMOUS, CALLER, Identity
from kiln.core.errors import CrossSiteRefused, InvalidKey, KilnError, MissingKey, ScopeRefused, StoreFailed
from kiln.core.text import shorten
from kiln.http.problems import error_response
from kiln.store.keys import KEY_MARK, Key, looks_like

COOKIE = "kiln_session"

# What anybody may have: nothing here tells of requests or settings. A session is begun and ended
# with a secret of its own.
_OPEN = frozenset({"/health", "/docs", "/openapi.json", "/lmkit/v1/session"})
_OPEN_BELOW = ("/contracts/",)
# Changing what is below these is for admins, reading it is not.
_ADMIN_CHANGES = ("/v1/adapters",)
# What is below these is for admins.
_ADMIN = ("/lmkit/v1/keys",)
# Requests that make others shorter, or cost nothing, are not limited.
_UNLIMITED = frozenset({"/lmkit/v1/chat/skip-thinking"})


def required_scope(method: str, path: str) -> Literal["open", "inference", "admin"]:
    """What a request needs. A path that nobody thought of needs a key."""
    if path in _OPEN or path.startswith(_OPEN_BELOW):
        return "open"
    guarded = _ADMIN if method in SAFE_METHODS else (*_ADMIN, *_ADMIN_CHANGES)
    if any(path == p or path.startswith(f"{p}/") for p in guarded):
        return "admin"
    return "inference"


class AccessPolicy:
    """Who is let in, apart from the keys themselves.

    `open_to_all` lets in callers without a key, and `local` makes them admins for as long as there is no
    admin key. Pages of `trusted_origins` may act in a browser user's name.
    """

    def __init__(
        self, book: KeyBook, *, open_to_all: bool, local: bool, trusted_origins: Iterable[str] = ()
    ) -> None:
        self.book = book
        self.limits = Limits()
        self.open_to_all = open_to_all
        self.trusted_origins = frozenset(trusted_origins)
        self._local = local

    async def caller(self, method: str, headers: Headers) -> tuple[Identity, Key | None]:
        """Who sends a request. Raises MissingKey, InvalidKey, CrossSiteRefused or StoreFailed."""
        secret = sent_secret(headers)
        if secret is not None:
            key = await self.book.key_of(secret)
            if key is not None:
                return identity_of_key(key), key
            # Programs send a made-up key where none is needed; one that was revoked is no such thing.
            if not self.open_to_all or looks_like(KEY_MARK, secret):
                raise InvalidKey("the API key is not in force")
        # From here on a browser may send the request without its user's knowledge.
        if is_cross_site(method, headers, self.trusted_origins):
            origin = shorten(headers.get("origin", "another site"))
            raise CrossSiteRefused(f"the request was sent by a page of {origin}")
        session = session_secret(headers)
        if session is not None:
            found = await self.book.session_of(session)
            if found is not None:
                return identity_of_key(found[1]), found[1]
        if self.open_to_all:
            host = headers.get("host", "")
            if self._local and is_rebound(host, self.trusted_origins):
                raise CrossSiteRefused(f"this server is not known by the name {shorten(host)}")
            return Identity(ANONYMOUS, is_admin=await self._admits_all()), None
        raise MissingKey("an API key is needed" if session is None else "the session has ended")

    async def _admits_all(self) -> bool:
        """Whether callers without a key are admins."""
        if not self._local:
            return False
        try:
            await self.book.refresh()
        except StoreFailed:
            # The book has logged it. Who needs no key is served all the same.
            return False
        return not self.book.has_admin_key


def identity_of_key(key: Key) -> Identity:
    return Identity(key.name, is_admin=key.scope == "admin")


def sent_secret(headers: Headers) -> str | None:
    """The API key that a request carries: a bearer token, else `x-api-key`."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None


def session_secret(headers: Headers) -> str | None:
    """The session that a request's cookie names."""
    cookies = headers.get("cookie")
    if cookies is None:
        return None
    try:
        morsel = SimpleCookie(cookies).get(COOKIE)
    except CookieError:
        return None
    return morsel.value if morsel is not None else None


class Guard:
    """The middleware. Routes find the caller in `request.state.identity`, the chat room in CALLER."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        needed = required_scope(scope["method"], scope["path"])
        if needed == "open":
            await self._app(scope, receive, send)
            return
        policy: AccessPolicy = scope["app"].state.kiln.access
        try:
            identity, leave = await _admit(policy, scope, needed)
        except KilnError as error:
            await error_response(Request(scope), error)(scope, receive, send)
            return
        scope.setdefault("state", {})["identity"] = identity
        # Read by what runs in this request's task and in those that it starts.
        CALLER.set(identity)
        try:
            await self._app(scope, receive, send)
        finally:
            leave()


async def _admit(policy: AccessPolicy, scope: Scope, needed: str) -> tuple[Identity, Callable[[], None]]:
    identity, key = await policy.caller(scope["method"], Headers(scope=scope))
    if needed == "admin" and not identity.is_admin:
        raise ScopeRefused("this needs a key of scope admin")
    if key is None or scope["method"] != "POST" or scope["path"] in _UNLIMITED:
        return identity, _nothing
    return identity, policy.limits.enter(key)


def _nothing() -> None:
    pass


def caller_of(request: Request) -> Identity:
    """Who sent the request of a guarded route."""
    identity: Identity = request.state.identity
    return identity
