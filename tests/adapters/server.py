"""A running server with an adapter directory, and short ways to ask it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from contract_http.api import Api, model_api

from .samples import CONFIG, WEIGHTS

ROUTE = "/v1/adapters"

Body = dict[str, Any]


@dataclass(frozen=True)
class AdapterServer:
    """`saved` is the server's adapter directory."""

    api: Api
    saved: Path

    @property
    def client(self) -> httpx.Client:
        return self.api.server.client

    def get(self, path: str = "") -> Body:
        response = self.client.get(ROUTE + path)
        assert response.status_code == 200, response.text
        body: Body = response.json()
        return body

    def post(self, path: str, body: object = None) -> Body:
        response = self.client.post(ROUTE + path, json={} if body is None else body)
        assert response.status_code in (200, 201), response.text
        answer: Body = response.json()
        return answer

    def names(self) -> list[str]:
        return [entry["name"] for entry in self.get()["data"]]

    def entry(self, name: str) -> Body:
        (entry,) = (e for e in self.get()["data"] if e["name"] == name)
        found: Body = entry
        return found

    def upload(self, name: str, archive: bytes) -> httpx.Response:
        return self.client.post(
            f"{ROUTE}/upload", data={"name": name}, files={"archive": ("adapter.tar.gz", archive)}
        )

    def put(self, name: str, folder: Path) -> Body:
        response = self.upload(name, packed(folder))
        assert response.status_code == 201, response.text
        answer: Body = response.json()
        return answer

    def disk(self) -> Mapping[str, bytes]:
        """Every file below the adapter directory, by its path."""
        files = (path for path in self.saved.rglob("*") if path.is_file())
        return {str(path.relative_to(self.saved)): path.read_bytes() for path in files}


@contextmanager
def adapter_server(saved: Path, **settings: Any) -> Iterator[AdapterServer]:
    with model_api(**{"model__adapter_dir": str(saved), **settings}) as api:
        yield AdapterServer(api, saved)


def packed(folder: Path, top: str = "adapter") -> bytes:
    """The adapter of a folder as a `.tar.gz`."""
    names = (CONFIG, WEIGHTS)
    prefix = f"{top}/" if top else ""
    return tar_of([(prefix + name, (folder / name).read_bytes()) for name in names])


def tar_of(files: Sequence[tuple[str | tarfile.TarInfo, bytes]], mode: str = "w:gz") -> bytes:
    """An archive of these entries: names of plain files, or entries of any kind."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files:
            entry = tarfile.TarInfo(name) if isinstance(name, str) else name
            if entry.isreg():
                entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return target.getvalue()
