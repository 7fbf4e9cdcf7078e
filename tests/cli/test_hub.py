"""Model references, and downloads from a small hub on a real loopback socket."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from kiln.backends.hub import HubReference, choose_files, parse_reference, resolve_model
from kiln.cli.common import with_model_file
from kiln.cli.configuration import load_settings
from kiln.core.errors import DownloadError, ModelLoadError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BYTES = bytes(range(256)) * 40


class Hub:
    """What the server holds and how it behaves. `cut` truncates that many file responses."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refuse: dict[str, tuple[int, str]] = {}
        self.cut = 0
        self.ranges = True
        self.size_said: int | None = None
        self.requests: list[str] = []

    def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
                api = re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)
                file = re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path)
                match = api or file
                repo = match[1] if match else ""
                if repo in hub.refuse:
                    status, code = hub.refuse[repo]
                    self.reply(status, b"{}", {"X-Error-Code": code} if code else {})
                elif repo not in hub.repos:
                    self.reply(401, b"{}", {})
                elif api:
                    siblings = [
                        {"rfilename": name, "size": hub.size_said or len(data)}
                        for name, data in hub.repos[repo].items()
                    ]
                    self.reply(
                        200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode(), {}
                    )
                elif file:
                    self.send_file(hub.repos[repo][file[2]])

            def send_file(self, data: bytes) -> None:
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
                start = 0
                wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                if wanted and hub.ranges:
                    start = int(wanted[1])
                    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                cut = self.command == "GET" and hub.cut > 0
                hub.cut -= cut
                self.reply(
                    206 if start else 200, data[start:], headers, len(data[start:]) // 2 if cut else None
                )

            def reply(
                self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None
            ) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body if sent is None else body[:sent])
                self.close_connection = sent is not None

        return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub.handler())
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(reference: str, cache: Path) -> Path:
    return resolve_model(reference, cache_dir=cache)


def test_a_local_file_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize(
    "reference",
    ["m.gguf", "./a/b", "/no/where", "dir/m.gguf", "word", "a/b/c", "a/b:", "a b/c", "hf://a"],
)
def test_what_is_neither_file_nor_reference_names_it(reference: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(reference)):
        parse_reference(reference)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a directory"):
        parse_reference(str(tmp_path))


def test_references_are_parsed() -> None:
    assert parse_reference("a/b") == HubReference("a/b", None)
    assert parse_reference("hf://a/b-GGUF:Q4_K_M") == HubReference("a/b-GGUF", "Q4_K_M")
    assert parse_reference("a/b.c:dir/f.gguf") == HubReference("a/b.c", "dir/f.gguf")


NAMES = [
    "README.md",
    "mmproj-F16.gguf",
    "m-BF16.gguf",
    "m-F16.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "big/m-Q8_0-00002-of-00002.gguf",
    "big/m-Q8_0-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("F16", ["m-F16.gguf"]),
        ("bf16", ["m-BF16.gguf"]),
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("m-Q4_K_S.gguf", ["m-Q4_K_S.gguf"]),
        ("Q8_0", ["big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf"]),
        ("m-Q8_0-00001-of-00002.gguf", ["big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_the_asked_file_is_chosen(asked: str, expected: list[str]) -> None:
    assert choose_files(HubReference("a/b", asked), NAMES) == expected


@pytest.mark.parametrize(
    ("names", "asked", "words"),
    [
        (["README.md", "mmproj-F16.gguf"], None, "holds no GGUF file"),
        (NAMES, None, "several GGUF files: big/m-Q8_0-00001-of-00002.gguf, m-BF16.gguf, m-F16.gguf"),
        (NAMES, "Q4_K", "2 GGUF files for Q4_K: m-Q4_K_M.gguf, m-Q4_K_S.gguf"),
        (NAMES, "Q2", "no GGUF files for Q2: big/m-Q8_0"),
        (["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"], None, "lacks parts.*: m-00002-of-00003.gguf"),
    ],
)
def test_no_or_several_fitting_files_are_listed(names: list[str], asked: str | None, words: str) -> None:
    with pytest.raises(DownloadError, match=words):
        choose_files(HubReference("a/b", asked), names)


def test_a_download_with_progress_and_then_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    hub.repos["a/b"] = {"m.gguf": BYTES, "README.md": b"x"}
    seen: list[tuple[str, int, int | None]] = []
    path = resolve_model("hf://a/b", progress=lambda *told: seen.append(told), cache_dir=tmp_path)
    assert path.name == "m.gguf"
    assert path.read_bytes() == BYTES
    assert seen[-1] == ("m.gguf", len(BYTES), len(BYTES))
    gets = [r for r in hub.requests if r.startswith("GET /a/b/")]
    assert fetch("a/b", tmp_path) == path
    assert [r for r in hub.requests if r.startswith("GET /a/b/")] == gets


def test_all_parts_of_a_split_model_come(hub: Hub, tmp_path: Path) -> None:
    hub.repos["a/b"] = {f"m-0000{i}-of-00003.gguf": BYTES + bytes([i]) for i in (1, 2, 3)}
    path = fetch("a/b", tmp_path)
    assert path.name == "m-00001-of-00003.gguf"
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(hub.repos["a/b"])


def test_without_a_network_the_cache_serves(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["a/b"] = {"m-Q4_0.gguf": BYTES, "m-Q8_0.gguf": b"other"}
    path = fetch("a/b:Q4_0", tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch("a/b:Q4_0", tmp_path).read_bytes() == path.read_bytes()
    with pytest.raises(DownloadError, match="could not be downloaded from http://127.0.0.1:9"):
        fetch("a/b:Q8_0", tmp_path)


def test_a_broken_connection_is_resumed(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    hub.repos["a/b"] = {"m.gguf": BYTES}
    hub.cut = 1
    assert fetch("a/b", tmp_path).read_bytes() == BYTES
    assert any(f"bytes={len(BYTES) // 2}-" in r for r in hub.requests)


def test_a_hub_that_always_breaks_off_is_given_up(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub's client waits a second before each attempt.
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _s: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    hub.repos["a/b"] = {"m.gguf": BYTES}
    hub.cut = 10**6
    hub.ranges = False
    with pytest.raises(DownloadError, match="broke off again and again"):
        fetch("a/b", tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("status", "code", "words", "hint"),
    [
        (401, "GatedRepo", "access to a/b is not granted", "HF_TOKEN"),
        (403, "GatedRepo", "access to a/b is not granted", "HF_TOKEN"),
        (403, "", "access to a/b is not granted", "HF_TOKEN"),
        (404, "RepoNotFound", "a/b does not exist, or is private", "spelling"),
        (401, "", "a/b does not exist, or is private", "HF_TOKEN"),
        (429, "", "refused a/b with status 429", "later"),
        (500, "", "refused a/b with status 500", "later"),
    ],
)
def test_refusals_are_told_at_once(
    hub: Hub, tmp_path: Path, status: int, code: str, words: str, hint: str
) -> None:
    hub.refuse["a/b"] = (status, code)
    began = time.monotonic()
    with pytest.raises(DownloadError, match=words) as caught:
        fetch("a/b", tmp_path)
    assert hint in (caught.value.hint or "")
    assert time.monotonic() - began < 20


def test_what_the_disk_cannot_hold_is_not_begun(hub: Hub, tmp_path: Path) -> None:
    hub.repos["a/b"] = {"m.gguf": BYTES}
    hub.size_said = 10**18
    with pytest.raises(DownloadError, match="1000000000.00 GB"):
        fetch("a/b", tmp_path)
    assert not [r for r in hub.requests if "/resolve/" in r]


def test_a_full_disk_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    hub.repos["a/b"] = {"m.gguf": BYTES}
    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(DownloadError, match="the disk is full"):
        fetch("a/b", tmp_path)


def test_a_page_in_place_of_a_hub_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["a/b"] = {}
    monkeypatch.setattr(json, "dumps", lambda *_a, **_k: "<html>login</html>")
    with pytest.raises(DownloadError, match="could not be downloaded"):
        fetch("a/b", tmp_path)


def test_the_settings_get_the_path_of_the_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub.repos["a/b"] = {"m.gguf": BYTES}
    settings = load_settings(
        config_path=None, environment={"KILN_CONFIG": "/dev/null"}, flags={"model.path": "a/b"}
    )
    console = Console(stderr=True, width=200)
    found = with_model_file(settings, console)
    assert found.model.path is not None
    assert Path(found.model.path).read_bytes() == BYTES
    assert found.sources["model.path"] == "flag"
    assert capsys.readouterr().err.splitlines() == ["looking up a/b", "downloading m.gguf"]
