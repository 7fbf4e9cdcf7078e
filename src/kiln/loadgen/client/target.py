"""The server under load: its address, and plain words for what can be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kiln.core.errors import ConfigError
from kiln.loadgen.client.trace import Failure

ROUTES = {"chat": "/chat/completions", "completions": "/completions"}
DEFAULT_BASE = "/v1"
KILN_OPENAI_BASE = "/v1/openai"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible API. `base` is the path that its routes begin with, as `/v1`.

    `timeout_s` bounds each request from its start to its last byte.
    """

    host: str
    port: int
    tls: bool
    base: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.base}"


def parse_target(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Target:
    """The target at a URL; its scheme may be left out for http, its path for `/v1`; a route is cut off.

    Raises ConfigError for what is no http(s) address.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{url!r} is no address", hint="Write it as http://host:port or http://host:port/v1."
        )
    if not parts.path.isascii() or any(c.isspace() for c in url):
        raise ConfigError(f"{url!r} is no address: its path must be ASCII without spaces")
    base = parts.path.rstrip("/")
    for route in ROUTES.values():
        base = base.removesuffix(route)
    tls = parts.scheme == "https"
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key holds characters that a header cannot carry")
    port = port or (443 if tls else 80)
    return Target(parts.hostname, port, tls, base or DEFAULT_BASE, model, api_key, timeout_s)


HINTS = {
    "connect": "Start it, or correct host and port.",
    "timeout": "Raise --timeout, or ask for fewer tokens.",
    "malformed": "Give the base path of an OpenAI-compatible API, as http://host:port/v1.",
    "http_401": "Give the server's key with --api-key.",
    "http_403": "Give the server's key with --api-key.",
    "http_404": "Give the API's base path, as http://host:port/v1, a --model the server has, or --endpoint.",
    "http_429": "Lower --concurrency or --rate, or try again later.",
    "http_503": "Lower --concurrency or --rate, or try again later.",
}
REFUSED = "Check --model, --body, --prompt-tokens and --output-tokens against what the server takes."
BROKEN = "Look into the server's own log."


# kiln's `/v1/completions` only scores prompts, and refuses what `kiln bench` asks for with one of these.
SCORES_ONLY = ("http_400", "http_422")


def explain(failure: Failure, target: Target, route: str) -> ConfigError:
    """The error to end with when nothing can be measured: one line, and what would mend it."""
    kind, message = failure.kind, failure.message
    hint = HINTS.get(kind, REFUSED if kind.startswith("http_4") else BROKEN)
    if route == ROUTES["completions"] and kind in SCORES_ONLY and target.base == DEFAULT_BASE:
        openai = target.url.removesuffix(DEFAULT_BASE) + KILN_OPENAI_BASE
        hint = f"For kiln give {openai}: its {DEFAULT_BASE}/completions only scores prompts. Else: {hint}"
    if kind == "connect":
        return ConfigError(f"no server answers at {target.url}: {message}", hint=hint)
    if kind.startswith("http_"):
        return ConfigError(f"{target.url}{route} answered {kind[5:]}: {message}", hint=hint)
    return ConfigError(f"{target.url}{route}: {message}", hint=hint)
