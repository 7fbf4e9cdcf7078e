"""The adapter routes of a running server, as the commands use them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import httpx

ROUTE = "/v1/adapters"
# Reading and merging large adapters takes the server a while.
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)

# Called with the bytes that are done and how many there are, None where nobody knows.
Report = Callable[[int, int | None], None]


class CommandFailed(Exception):
    """The server refused, or is not there."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class AdaptersClient:
    """Every method raises CommandFailed."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT)

    def close(self) -> None:
        self._http.close()

    def list(self) -> dict[str, Any]:
        return self._send("GET", "")

    def load(self, name: str) -> dict[str, Any]:
        return self._send("POST", "/load", json={"name": name})

    def unload(self) -> dict[str, Any]:
        return self._send("POST", "/unload")

    def delete(self, name: str) -> dict[str, Any]:
        return self._send("DELETE", f"/{quote(name, safe='')}")

    def merge(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._send("POST", "/merge", json=body)

    def upload(self, name: str, archive: IO[bytes], report: Report) -> dict[str, Any]:
        """Send a `.tar.gz`."""
        archive.seek(0, 2)
        size = archive.tell()
        archive.seek(0)
        files = {"archive": ("adapter.tar.gz", _Watched(archive, size, report), "application/gzip")}
        return self._send("POST", "/upload", data={"name": name}, files=files)

    def download(self, name: str, target: IO[bytes], report: Report) -> None:
        """Write the adapter's `.tar.gz`."""
        path = f"{ROUTE}/{quote(name, safe='')}/download"
        with self._failures(), self._http.stream("GET", path) as response:
            if response.status_code != 200:
                response.read()
                raise _refusal(response)
            length = response.headers.get("content-length")
            total = int(length) if length is not None else None
            done = 0
            for chunk in response.iter_raw():
                target.write(chunk)
                done += len(chunk)
                report(done, total)

    def _send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._failures():
            response = self._http.request(method, ROUTE + path, **options)
            if not response.is_success:
                raise _refusal(response)
            body: dict[str, Any] = response.json()
            return body

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise CommandFailed(
                f"no server answers at {self._url}", "Start one with `kiln serve --adapter-dir DIRECTORY`."
            ) from None
        except (httpx.HTTPError, ValueError) as error:
            raise CommandFailed(f"the exchange with {self._url} failed: {error}") from None


@contextmanager
def archive_of(path: Path) -> Iterator[IO[bytes]]:
    """An adapter as a `.tar.gz`: the file itself, or a folder packed. Raises CommandFailed."""
    # Imported late: other commands have no use for what reads weights.
    from kiln.adapters.archive import pack
    from kiln.adapters.config import CONFIG_FILE
    from kiln.adapters.storage import KEPT_FILES

    if path.is_dir():
        try:
            files = {name: (path / name).read_bytes() for name in KEPT_FILES if (path / name).is_file()}
        except OSError as error:
            raise CommandFailed(f"cannot read {error.filename}: {error.strerror}") from None
        if CONFIG_FILE not in files:
            raise CommandFailed(f"{path} holds no {CONFIG_FILE}", "Name the folder that PEFT saved.")
        with tempfile.TemporaryFile() as packed:
            pack(path.resolve().name, files, packed)
            yield packed
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise CommandFailed(f"cannot read {path}: {error.strerror}") from None
    with file:
        yield file


class _Watched:
    """A file that tells how much of it was read."""

    def __init__(self, file: IO[bytes], size: int, report: Report) -> None:
        self._file = file
        self._size = size
        self._report = report

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._report(self._file.tell(), self._size)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _refusal(response: httpx.Response) -> CommandFailed:
    try:
        error = response.json()["error"]
        return CommandFailed(error["message"], error.get("hint"))
    except (ValueError, KeyError, TypeError):
        return CommandFailed(f"the server answered with status {response.status_code}")
