"""An incremental parser of one HTTP/1.1 response, made for many small chunks at little cost (RFC 9112)."""

from __future__ import annotations

from enum import Enum, auto

MAX_HEAD_BYTES = 65_536
MAX_SIZE_LINE_BYTES = 256
MAX_CHUNK_BYTES = 2**31


class BadResponse(Exception):
    """The bytes are no HTTP/1.1 response; the message says what is wrong."""


class _State(Enum):
    HEAD = auto()
    SIZED = auto()
    UNTIL_CLOSE = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    TRAILERS = auto()
    COMPLETE = auto()


class ResponseParser:
    """Feed it what the socket gives; `status` and `headers` (names in lower case) are there once known."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._version = ""
        self._state = _State.HEAD
        self._rest = b""
        self._ended = False  # the peer sends no more
        self._left = 0  # bytes of the body, or of the chunk and its line end, that are still to come

    @property
    def complete(self) -> bool:
        return self._state is _State.COMPLETE

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        if not self.complete or self._rest or self._ended:
            return False
        connection = self.headers.get("connection", "").lower()
        return "close" not in connection and (self._version == "HTTP/1.1" or "keep-alive" in connection)

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`. Raises BadResponse."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        position = 0
        if self._state is _State.HEAD:
            position = self._take_head(data)
        if self._state is _State.CHUNK_SIZE or self._state is _State.CHUNK_DATA:
            return self._take_chunks(data, position)
        if self._state is _State.SIZED:
            body = data[position : position + self._left]
            self._left -= len(body)
            self._rest = data[position + len(body) :]
            if self._left == 0:
                self._state = _State.COMPLETE
            return body
        if self._state is _State.UNTIL_CLOSE:
            return data[position:]
        if self._state is _State.TRAILERS:
            self._take_trailers(data, position)
        else:
            self._rest = data[position:]
        return b""

    def end_of_input(self) -> None:
        """The peer closed; this ends a body that has no other end."""
        self._ended = True
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.COMPLETE

    def _take_head(self, data: bytes) -> int:
        """Take the head, and interim (1xx) ones before it; gives where the body begins."""
        position = 0
        while True:
            end = data.find(b"\r\n\r\n", position)
            if end < 0:
                if len(data) - position > MAX_HEAD_BYTES:
                    raise BadResponse("the head of the response has no end")
                if not b"HTTP/1.".startswith(data[position : position + 7]):
                    raise BadResponse("the answer is no HTTP")
                return position
            self._read_head(data[position:end])
            position = end + 4
            if self.status >= 200:
                self._choose_framing()
                return position

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()):
            raise BadResponse("the answer is no HTTP/1.1")
        self._version = version
        self.status = int(code)
        self.headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadResponse(f"a header line has no colon: {line[:80]!r}")
            self.headers[name.strip().lower()] = value.strip()

    def _choose_framing(self) -> None:
        if self.status in (204, 304):
            self._state = _State.COMPLETE
        elif self.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._state = _State.CHUNK_SIZE
        elif (length := self.headers.get("content-length")) is not None:
            if not (length.isascii() and length.isdigit()):
                raise BadResponse(f"content-length is {length[:80]!r}")
            self._left = int(length)
            self._state = _State.SIZED if self._left > 0 else _State.COMPLETE
        else:
            self._state = _State.UNTIL_CLOSE

    def _take_chunks(self, data: bytes, position: int) -> bytes:
        parts = []
        size = len(data)
        while position < size:
            if self._state is _State.CHUNK_SIZE:
                end = data.find(b"\r\n", position)
                if end < 0:
                    if size - position > MAX_SIZE_LINE_BYTES:
                        raise BadResponse("a chunk has no size")
                    self._rest = data[position:]
                    break
                length = _chunk_size(data[position:end])
                position = end + 2
                if length == 0:
                    self._state = _State.TRAILERS
                    self._take_trailers(data, position)
                    break
                self._left = length + 2
                self._state = _State.CHUNK_DATA
            # The line end after the data counts as part of the chunk, and is cut off here.
            end = min(position + self._left, size)
            text_end = min(end, position + self._left - 2)
            if text_end > position:
                parts.append(data[position:text_end])
            self._left -= end - position
            position = end
            if self._left == 0:
                self._state = _State.CHUNK_SIZE
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take_trailers(self, data: bytes, position: int) -> None:
        """Skip header lines after the last chunk, up to an empty line."""
        while (end := data.find(b"\r\n", position)) >= 0:
            empty = end == position
            position = end + 2
            if empty:
                self._state = _State.COMPLETE
                break
        self._rest = data[position:]
        if len(self._rest) > MAX_HEAD_BYTES:
            raise BadResponse("the trailers of the response have no end")


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    try:
        size = int(digits, 16)
    except ValueError:
        raise BadResponse(f"a chunk's size is {line[:80]!r}") from None
    if not 0 <= size <= MAX_CHUNK_BYTES:
        raise BadResponse(f"a chunk's size is {line[:80]!r}")
    return size
