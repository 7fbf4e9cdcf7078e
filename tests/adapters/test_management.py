"""The adapter routes over HTTP. Whatever is refused leaves the disk as it was."""

from __future__ import annotations

import errno
import gzip
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from contract.validators import validate_error
from contract_http.api import PROMPT as SUM
from contract_http.api import Body, texts
from kiln.wire import adapters as wire
from servers.process import served_by_process

from .samples import CHEERFUL, CONFIG, WEIGHTS, cheerful, deltas, scaled, tensors_of, write
from .server import ROUTE, AdapterServer, adapter_server, packed, tar_of

STYLE = "You are welcome!"
CONFIG_BYTES = (CHEERFUL / CONFIG).read_bytes()
WEIGHT_BYTES = (CHEERFUL / WEIGHTS).read_bytes()
FILES: list[tuple[str | tarfile.TarInfo, bytes]] = [(CONFIG, CONFIG_BYTES), (WEIGHTS, WEIGHT_BYTES)]


@pytest.fixture
def unchanged(server: AdapterServer) -> Iterator[None]:
    """The disk is afterwards what it was before."""
    server.get()
    before = server.disk()
    yield
    assert server.disk() == before


def refused(response: httpx.Response, status: int = 400) -> Body:
    assert response.status_code == status, response.text[:400]
    body: Body = response.json()
    assert validate_error(body) == []
    error: Body = body["error"]
    return error


def test_listing(server: AdapterServer) -> None:
    listing = server.get()
    assert listing["object"] == "list" and listing["default"] is None
    assert set(listing) == set(wire.AdapterList.__struct_fields__)
    entry = server.entry("cheerful")
    assert set(entry) == set(wire.AdapterEntry.__struct_fields__)
    assert (entry["rank"], entry["alpha"], entry["rslora"]) == (8, 16, False)
    assert entry["size_bytes"] == len(CONFIG_BYTES) + len(WEIGHT_BYTES)
    assert entry["problem"] is None
    assert listing["disk"]["quota_bytes"] is None
    folders = (server.saved / name for name in server.names())
    assert listing["disk"]["used_bytes"] == sum(f.stat().st_size for d in folders for f in d.iterdir())


def test_a_damaged_adapter_is_listed_with_its_problem(server: AdapterServer) -> None:
    folder = cheerful(server.saved / "broken")
    (folder / WEIGHTS).write_bytes(b"")
    entry = server.entry("broken")
    assert "damaged or cut off" in entry["problem"]
    assert "content_sha256" not in entry
    error = refused(server.client.post(f"{ROUTE}/load", json={"name": "broken"}))
    assert (error["code"], error["param"]) == ("invalid_adapter", "name")
    assert server.client.delete(f"{ROUTE}/broken").status_code == 200
    assert "broken" not in server.names()


def test_the_life_of_an_adapter(server: AdapterServer) -> None:
    saved = server.put("new", CHEERFUL)
    assert saved["replaced"] is False
    assert saved["adapter"] == server.entry("new")
    assert sorted(path.name for path in (server.saved / "new").iterdir()) == [CONFIG, WEIGHTS]
    assert STYLE in texts(server.api.chat(SUM, adapter="new"))[0][1]
    assert server.post("/load", {"name": "new"}) == {"default": "new"}
    assert server.get()["default"] == "new" and server.entry("new")["default"] is True
    assert refused(server.client.delete(f"{ROUTE}/new"), 409)["code"] == "adapter_in_use"
    assert server.post("/unload") == {"default": None}
    assert server.client.post(f"{ROUTE}/unload").json() == {"default": None}
    assert server.client.delete(f"{ROUTE}/new").json() == {"name": "new", "deleted": True}
    assert not (server.saved / "new").exists()
    assert refused(server.client.delete(f"{ROUTE}/new"), 404)["param"] == "name"
    assert refused(server.client.post(f"{ROUTE}/load", json={"name": "new"}), 404)["param"] == "name"


def test_an_upload_replaces_and_is_served_at_once(server: AdapterServer, tmp_path: Path) -> None:
    server.put("hot", scaled(tmp_path / "nothing", 0))
    base = texts(server.api.chat(SUM))
    assert texts(server.api.chat(SUM, adapter="hot")) == base
    first = server.entry("hot")["content_sha256"]
    assert server.put("hot", CHEERFUL)["replaced"] is True
    assert texts(server.api.chat(SUM, adapter="hot")) != base
    assert server.entry("hot")["content_sha256"] != first
    server.client.delete(f"{ROUTE}/hot")


def test_what_goes_up_comes_down(server: AdapterServer, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("About.")
    kept = [*FILES, ("README.md", b"About."), ("training_args.bin", b"pickle")]
    files = [("._one", b"mac"), (".DS_Store", b"mac"), *((f"one/{name}", data) for name, data in kept)]
    assert server.upload("carried", tar_of(files)).status_code == 201
    response = server.client.get(f"{ROUTE}/carried/download")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/gzip"
    assert "carried.tar.gz" in response.headers["content-disposition"]
    assert int(response.headers["content-length"]) == len(response.content)
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    assert found == {
        f"carried/{CONFIG}": CONFIG_BYTES,
        f"carried/{WEIGHTS}": WEIGHT_BYTES,
        "carried/README.md": b"About.",
    }
    assert server.client.get(f"{ROUTE}/carried/download").content == response.content
    # What was downloaded can be uploaded.
    assert server.upload("again", response.content).status_code == 201
    assert server.entry("again")["content_sha256"] == server.entry("carried")["content_sha256"]
    for name in ("carried", "again"):
        server.client.delete(f"{ROUTE}/{name}")
    refused(server.client.get(f"{ROUTE}/carried/download"), 404)


@pytest.mark.parametrize("top", ["", "one", ".", "./one"])
def test_one_top_folder_is_allowed(top: str, server: AdapterServer) -> None:
    archive = packed(CHEERFUL, top)
    if top == "one":
        folder = tarfile.TarInfo("one")
        folder.type = tarfile.DIRTYPE
        archive = tar_of([(folder, b""), (f"one/{CONFIG}", CONFIG_BYTES), (f"one/{WEIGHTS}", WEIGHT_BYTES)])
    assert server.upload("nested", archive).status_code == 201
    server.client.delete(f"{ROUTE}/nested")


def special(kind: bytes, name: str = "x", link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.linkname = link
    return entry


def sparse() -> bytes:
    """A GNU sparse entry that claims a tebibyte."""
    entry = tarfile.TarInfo(WEIGHTS)
    entry.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"00000000000\000000000000\0"
    header[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return gzip.compress(bytes(header) + b"\0" * 1024)


def long_header() -> bytes:
    """An extended header of a megabyte, before anything else."""
    entry = tarfile.TarInfo("x")
    entry.type = tarfile.XHDTYPE
    entry.size = 1 << 20
    return gzip.compress(entry.tobuf() + b"\0" * (1 << 20))


def extended_header(line: bytes) -> bytes:
    """An extended header of one line, and an adapter behind it."""
    entry = special(tarfile.XHDTYPE)
    record = next(b"%d %s\n" % (n, line) for n in range(99) if n == len(line) + len(str(n)) + 2)
    entry.size = len(record)
    return gzip.compress(entry.tobuf() + record.ljust(512, b"\0") + tar_of(FILES, "w"))


def header_chain() -> bytes:
    """Headers of headers of headers."""
    entry = tarfile.TarInfo("x")
    entry.type = tarfile.GNUTYPE_LONGNAME
    entry.size = 1
    return gzip.compress((entry.tobuf() + b"y" + b"\0" * 511) * 3000)


BAD_ARCHIVES: list[tuple[str, Callable[[], bytes], str]] = [
    ("empty", lambda: b"", "no .tar.gz"),
    ("no gzip", lambda: b"PK\3\4" + b"x" * 1000, "no .tar.gz"),
    ("no tar", lambda: gzip.compress(b"x" * 5000), "no .tar.gz"),
    ("nothing in it", lambda: tar_of([]), "holds no adapter_config.json"),
    ("plain tar", lambda: tar_of(FILES, "w"), "no .tar.gz"),
    ("truncated", lambda: packed(CHEERFUL)[:-40_000], "cut off"),
    ("last bytes missing", lambda: packed(CHEERFUL)[:-4], "cut off"),
    ("tar truncated in gzip", lambda: gzip.compress(tar_of(FILES, "w")[:50_000]), "cut off"),
    ("10,000 entries", lambda: tar_of([*FILES, *((f"f{i}", b"") for i in range(10_000))]), "256 entries"),
    ("symlink", lambda: tar_of([*FILES, (special(tarfile.SYMTYPE, "l", "/etc/passwd"), b"")]), "plain file"),
    (
        "symlink as weights",
        lambda: tar_of([FILES[0], (special(tarfile.SYMTYPE, WEIGHTS, "/x"), b"")]),
        "plain",
    ),
    ("hard link", lambda: tar_of([*FILES, (special(tarfile.LNKTYPE, "l", CONFIG), b"")]), "plain file"),
    ("device", lambda: tar_of([*FILES, (special(tarfile.CHRTYPE), b"")]), "plain file"),
    ("fifo", lambda: tar_of([*FILES, (special(tarfile.FIFOTYPE), b"")]), "plain file"),
    ("sparse", sparse, "plain file"),
    ("traversal", lambda: tar_of([*FILES, (f"../{CONFIG}", b"{}")]), "leads out"),
    ("traversal inside", lambda: tar_of([*FILES, (f"a/../../{CONFIG}", b"{}")]), "leads out"),
    ("absolute", lambda: tar_of([*FILES, ("/tmp/x", b"{}")]), "leads out"),
    ("backslash", lambda: tar_of([*FILES, ("..\\x", b"{}")]), "leads out"),
    ("control characters", lambda: tar_of([*FILES, ("a\nb", b"{}")]), "leads out"),
    (
        "two folders",
        lambda: tar_of([("a/" + CONFIG, CONFIG_BYTES), ("b/" + WEIGHTS, WEIGHT_BYTES)]),
        "one top",
    ),
    ("folder and none", lambda: tar_of([(CONFIG, CONFIG_BYTES), ("b/" + WEIGHTS, WEIGHT_BYTES)]), "one top"),
    ("too deep", lambda: packed(CHEERFUL, "a/b"), "deeper"),
    ("twice", lambda: tar_of([*FILES, FILES[0]]), "twice"),
    ("long header", long_header, "oversized header"),
    ("chained headers", header_chain, "cut off"),
    ("header that is no number", lambda: extended_header(b"GNU.sparse.size=x"), "no .tar.gz"),
    ("header that is no text", lambda: extended_header(b"hdrcharset=\xa8"), "no .tar.gz"),
    ("pickle", lambda: tar_of([FILES[0], ("adapter_model.bin", b"\x80\x04.")]), "is a pickle"),
    ("no configuration", lambda: tar_of([FILES[1]]), "no adapter_config.json"),
    ("corrupt weights", lambda: tar_of([FILES[0], (WEIGHTS, WEIGHT_BYTES[:5000])]), "damaged"),
    ("random weights", lambda: tar_of([FILES[0], (WEIGHTS, random.Random(0).randbytes(9000))]), "damaged"),
    ("corrupt configuration", lambda: tar_of([(CONFIG, b"{"), FILES[1]]), "not JSON"),
    ("DoRA", lambda: tar_of([(CONFIG, b'{"peft_type": "LORA", "use_dora": true}'), FILES[1]]), "DoRA"),
]


@pytest.mark.parametrize(
    ("make", "named"), [(m, n) for _, m, n in BAD_ARCHIVES], ids=[i for i, *_ in BAD_ARCHIVES]
)
def test_a_bad_archive_is_refused(
    make: Callable[[], bytes], named: str, server: AdapterServer, unchanged: None
) -> None:
    error = refused(server.upload("bad", make()))
    assert error["code"] == "invalid_adapter"
    assert error["param"] == "archive"
    assert named in error["message"]


def test_a_bad_archive_leaves_the_adapter_it_would_have_replaced(
    server: AdapterServer, unchanged: None, tmp_path: Path
) -> None:
    wrong = write(tmp_path / "wrong", {n: np.ascontiguousarray(v[:, :4]) for n, v in tensors_of().items()})
    refused(server.upload("cheerful", packed(wrong)))
    assert STYLE in texts(server.api.chat(SUM, adapter="cheerful"))[0][1]


def test_random_damage_is_never_a_fault_of_the_server(server: AdapterServer, unchanged: None) -> None:
    """Bytes changed anywhere: in the archive, and inside it."""
    draws = random.Random(1)
    plain = tar_of(FILES, "w")
    for round in range(60):
        data = bytearray(packed(CHEERFUL) if round % 2 else plain[: draws.choice((2_000, len(plain)))])
        for _ in range(draws.randint(1, 20)):
            data[draws.randrange(min(len(data), 3000))] = draws.randrange(256)
        response = server.upload("damaged", bytes(data) if round % 2 else gzip.compress(bytes(data), 1))
        if response.status_code == 201:  # a bit of padding, or of a weight
            assert server.client.delete(f"{ROUTE}/damaged").status_code == 200
        else:
            assert response.status_code == 400, response.text


NAMES = [
    "",
    "a/b",
    "..",
    "../up",
    "/etc",
    "a\\b",
    "C:x",
    "a\nb",
    "a\0b",
    "x" * 300,
    ".kiln",
    ".",
    " a",
    "base",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_none_is_refused(name: str, server: AdapterServer, unchanged: None) -> None:
    assert refused(server.upload(name, packed(CHEERFUL)))["param"] == "name"
    body: Body = {"name": name, "method": "concat", "adapters": [{"name": "calm"}]}
    assert refused(server.client.post(f"{ROUTE}/merge", json=body))["param"] == "name"
    if name != "base":
        assert refused(server.client.post(f"{ROUTE}/load", json={"name": name}))["param"] == "name"


@pytest.mark.parametrize(
    "name", ["a%2Fb", "..%2Fcalm", "%2Fetc", "a%5Cb", "a%09b", "a%00b", "x" * 300, "%2e%2e", ".kiln"]
)
def test_a_name_in_the_path_is_checked_too(name: str, server: AdapterServer, unchanged: None) -> None:
    url = httpx.URL(f"{server.api.server.url}{ROUTE}/", raw_path=f"{ROUTE}/{name}".encode())
    assert refused(server.client.delete(url))["param"] == "name"
    url = httpx.URL(url, raw_path=f"{ROUTE}/{name}/download".encode())
    assert refused(server.client.get(url))["param"] == "name"


def test_forms_that_are_none(server: AdapterServer, unchanged: None) -> None:
    def send(**options: Any) -> httpx.Response:
        return server.client.post(f"{ROUTE}/upload", **options)

    archive = {"archive": ("a.tar.gz", packed(CHEERFUL))}
    assert refused(send(files=archive))["param"] == "name"
    assert refused(send(data={"name": "x"}, files={"other": b"x"}))["param"] == "archive"
    assert refused(send(data={"name": "x", "archive": "text"}, files={"other": b"x"}))["param"] == "archive"
    assert refused(send(json={"name": "x"}), 415)["code"] == "unsupported_media_type"
    broken = {"content-type": "multipart/form-data; boundary=x"}
    for content in (
        b"",
        b"--x",
        b"junk",
        b"--x\r\ncontent-disposition: form-data\r\n\r\n",
        b"--x\r\n\r\n\r\n--y",
    ):
        refused(send(content=content, headers=broken))
    refused(send(content=b"x", headers={"content-type": "multipart/form-data"}))
    assert refused(send(data={"name": ["x", "y"]}, files=archive))["param"] == "name"
    many = [("archive", ("a", b"x"))] * 20
    refused(send(data={"name": "x"}, files=many))


def test_no_room_for_an_upload_on_its_way_in(
    server: AdapterServer, unchanged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(tempfile.SpooledTemporaryFile[bytes]):
        def rollover(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("starlette.formparsers.SpooledTemporaryFile", Full)
    error = refused(server.upload("large", random.Random(0).randbytes(3_000_000)), 413)
    assert error["code"] == "adapter_quota_exceeded"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"method": "dare"}, "method"),
        ({"method": None}, "method"),
        ({"adapters": []}, "adapters"),
        ({"adapters": [{"name": "calm"}] * 17}, "adapters"),
        ({"adapters": [{"name": "calm"}, {"name": "a/b"}]}, "adapters[1].name"),
        ({"adapters": [{"name": "calm", "weight": "x"}]}, "adapters[0].weight"),
        ({"method": "weighted_average", "adapters": [{"name": "calm", "weight": 0}]}, "adapters"),
        (
            {"method": "weighted_average", "adapters": [{"name": "calm", "weight": 1.7e308}] * 2},
            "adapters",
        ),
        ({"adapters": [{"name": "calm", "weight": 1e308}]}, "adapters"),
        ({"rank": 4}, "rank"),
        ({"method": "ties", "rank": 0}, "rank"),
        ({"density": 0.5}, "density"),
        ({"method": "ties", "density": 0}, "density"),
        ({"method": "ties", "density": 1.1}, "density"),
    ],
)
def test_merges_that_cannot_be(change: Body, param: str, server: AdapterServer, unchanged: None) -> None:
    body: Body = {"name": "both", "method": "concat", "adapters": [{"name": "calm"}], **change}
    assert refused(server.client.post(f"{ROUTE}/merge", json=body))["param"] == param


def test_merging_what_is_not_there(server: AdapterServer, unchanged: None) -> None:
    body = {"name": "both", "method": "concat", "adapters": [{"name": "calm"}, {"name": "dreary"}]}
    assert refused(server.client.post(f"{ROUTE}/merge", json=body), 404)["param"] == "adapters[1].name"


def test_a_merge_is_an_adapter(server: AdapterServer) -> None:
    parts = [{"name": "calm", "weight": 1.5}, {"name": "cheerful", "weight": 0.25}]
    body = {"name": "both", "method": "concat", "adapters": parts}
    merged = server.post("/merge", body)
    assert (merged["relative_error"], merged["replaced"]) == (0, False)
    assert merged["adapter"]["rank"] == 16
    found, one = deltas(server.saved / "both"), deltas(CHEERFUL)
    for module, delta in found.items():
        np.testing.assert_allclose(delta, one[module], rtol=1e-4, atol=1e-6)
    assert texts(server.api.chat(SUM, adapter="both")) == texts(server.api.chat(SUM, adapter="cheerful"))
    assert server.post("/merge", body)["replaced"] is True
    server.client.delete(f"{ROUTE}/both")


def test_limits(tmp_path: Path) -> None:
    size = len(CONFIG_BYTES) + len(WEIGHT_BYTES)
    saved = tmp_path / "saved"
    with adapter_server(
        saved, model__adapter_max_bytes=size, model__adapter_quota_bytes=2 * size + 10
    ) as running:
        for name in ("one", "two", "two"):
            running.put(name, CHEERFUL)
        before = running.disk()
        error = refused(running.upload("three", packed(CHEERFUL)), 413)
        assert (error["code"], running.get()["disk"]["quota_bytes"]) == (
            "adapter_quota_exceeded",
            2 * size + 10,
        )
        merge = {"name": "three", "method": "concat", "adapters": [{"name": "one"}, {"name": "two"}]}
        assert refused(running.client.post(f"{ROUTE}/merge", json=merge), 413)
        bomb = tar_of([FILES[0], (WEIGHTS, bytes(50 * size))])
        assert len(bomb) < size
        error = refused(running.upload("one", bomb), 413)
        assert error["code"] == "body_too_large" and "unpacks to more" in error["message"]
        assert "adapter_max_bytes" in error["hint"]
        error = refused(running.upload("one", random.Random(0).randbytes(2 * size)), 413)
        assert error["code"] == "body_too_large"
        assert running.disk() == before


def test_a_server_without_a_directory(tmp_path: Path) -> None:
    with adapter_server(tmp_path, model__adapter_dir=None) as running:
        assert running.get() == {
            "object": "list",
            "default": None,
            "data": [],
            "disk": {"used_bytes": 0, "quota_bytes": None},
        }
        error = refused(running.upload("x", packed(CHEERFUL)), 409)
        assert (error["code"], "--adapter-dir" in error["hint"]) == ("adapters_not_served", True)
        refused(running.client.post(f"{ROUTE}/load", json={"name": "x"}), 404)
        refused(running.client.delete(f"{ROUTE}/x"), 404)
        refused(running.client.get(f"{ROUTE}/x/download"), 404)


def test_a_configured_default_is_in_use_from_the_start(tmp_path: Path) -> None:
    cheerful(tmp_path / "saved" / "style")
    with adapter_server(tmp_path / "saved", model__adapter="style") as running:
        assert running.get()["default"] == "style"
        assert STYLE in texts(running.api.chat(SUM))[0][1]


def test_a_server_that_is_killed_leaves_whole_adapters(tmp_path: Path) -> None:
    """Uploads while the server is killed: what is found afterwards is whole, and nothing else."""
    saved = tmp_path / "saved"
    archives = [packed(CHEERFUL), packed(scaled(tmp_path / "half", 0.5))]
    for attempt in range(2):
        with (
            served_by_process(tmp_path, model__adapter_dir=saved) as served,
            httpx.Client(base_url=served.url, timeout=30) as client,
        ):
            for index in range(4 + attempt):
                _send(client, "a", archives[index % 2]).raise_for_status()
            code = f"import os, time; time.sleep({0.01 * attempt}); os.kill({served.process.pid}, 9)"
            killer = subprocess.Popen([sys.executable, "-c", code])
            with suppress(httpx.TransportError):
                while True:
                    _send(client, "b", archives[0])
            killer.wait()
    with adapter_server(saved) as running:
        assert all(entry["problem"] is None for entry in running.get()["data"])
        assert set(running.names()) <= {"a", "b"} and "a" in running.names()
        staged = [path for path in running.disk() if path.startswith((".kiln/staging", ".kiln/replaced"))]
        assert staged == [] and not any(path.endswith(".part") for path in running.disk())


def _send(client: httpx.Client, name: str, archive: bytes) -> httpx.Response:
    return client.post(f"{ROUTE}/upload", data={"name": name}, files={"archive": ("a.tar.gz", archive)})
