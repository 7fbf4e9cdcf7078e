"""Which addresses a tool may connect to: those of the public internet, judged where the connection is made.

A name is resolved, every address it has is judged, and the connection goes to one of those very addresses.
There is no second look-up in between whose answer could be another.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpcore
import httpx
from httpcore import SOCKET_OPTION, AsyncNetworkBackend, AsyncNetworkStream

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

CONNECT_S = 5.0
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Public by their number, but none of them leads to a page: local NAT64, the relays and addresses of 6to4,
# IPv4-compatible addresses, site-local ones, and a metadata service that a cloud put on a public address.
REFUSED = tuple(
    ipaddress.ip_network(text)
    for text in ("64:ff9b:1::/48", "192.88.99.0/24", "2002::/16", "::/96", "fec0::/10", "168.63.129.16/32")
)
ISATAP_MARKS = (0x00005EFE, 0x02005EFE)
# A host whose last label is a number is an address to every system's resolver, in whatever spelling.
_NUMERIC = re.compile(r"(?:.*\.)?(?:0[xX][0-9a-fA-F]*|[0-9]+)\.?")


class Forbidden(Exception):
    """An address that a tool must not connect to. The message names it."""


def is_public(address: Address) -> bool:
    """Whether this is an ordinary address of the public internet. Those that wrap an IPv4 address in an
    IPv6 one are not, but for NAT64, where the wrapped address decides."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        is_isatap = (int(address) >> 32) & 0xFFFFFFFF in ISATAP_MARKS
        if address.ipv4_mapped is not None or address.teredo is not None or is_isatap:
            return False
    if any(address in network for network in REFUSED if network.version == address.version):
        return False
    # Multicast and reserved addresses count as global, so each kind is asked for by name.
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


def check_host(host: str) -> None:
    """Refuse addresses in spellings that only resolvers know: decimal, octal, hexadecimal, shortened."""
    if _NUMERIC.fullmatch(host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise Forbidden(f"{host} is not an address in the usual spelling") from None


class Resolver:
    """The system's resolver, on threads of its own: one that hangs holds up nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kiln-resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        def look_up() -> list[str]:
            return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]

        return await asyncio.get_running_loop().run_in_executor(self._threads, look_up)


@cache
def tls_context() -> ssl.SSLContext:
    """What certificates are believed, read from disk once. SSL_CERT_FILE names others than certifi's."""
    return httpx.create_ssl_context()


class GuardedNetwork(AsyncNetworkBackend):
    """Connects like httpcore does, but to public addresses only.

    The name of a host goes on to TLS and the Host header unchanged; only the socket is opened by number.
    `exempt` are pairs of address and port that are allowed all the same. It is for tests with a server on
    loopback; no setting leads to it.
    """

    def __init__(self, resolve: Resolve | None = None, exempt: Iterable[tuple[str, int]] = ()) -> None:
        self._resolve: Resolve = resolve or Resolver()
        self._exempt = frozenset(exempt)
        self._inner = httpcore.AnyIOBackend()

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses to connect to. Raises Forbidden if any is not public, ConnectError for none."""
        check_host(host)
        try:
            found = await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise httpcore.ConnectError(f"the name {host} cannot be resolved") from None
        for text in found:
            # A scope, as in fe80::1%eth0, is not part of the number.
            if (
                not is_public(ipaddress.ip_address(text.partition("%")[0]))
                and (text, port) not in self._exempt
            ):
                raise Forbidden(f"{host} leads to {text}, which is not a public address")
        if not found:
            raise httpcore.ConnectError(f"the name {host} has no address")
        return list(dict.fromkeys(found))

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        failure: Exception = httpcore.ConnectError(f"{host} cannot be reached")
        for address in (await self.addresses(host, port))[:4]:
            try:
                # An address that never answers must not use up the time of those behind it.
                wait = CONNECT_S if timeout is None else min(timeout, CONNECT_S)
                return await self._inner.connect_tcp(address, port, wait, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(self, *arguments: Any, **more: Any) -> AsyncNetworkStream:
        raise Forbidden("a socket of this machine is not a public address")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
