"""Find the model file that a reference means: a path on this machine, or a file on a model hub.

Downloading is huggingface_hub's work, into its own cache, so that files are shared with other
programs. What is added here: which GGUF file of a repository is meant, and failures in plain words.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiln.core.errors import DownloadError, ModelLoadError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

TIMEOUT_S = 10.0
MAX_RESTARTS = 3

# Called with the file's name, the bytes there so far and the bytes in all (None if not known).
Report = Callable[[str, int, int | None], None]

_REFERENCE = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<asked>[^:]+))?", re.ASCII)
_PART = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_HINT = "Check the network and the reference, or give the path of a .gguf file on this machine."
_ACCESS_HINT = "Accept the model's terms on its page and set HF_TOKEN, or run `hf auth login`."


@dataclass(frozen=True, slots=True)
class HubReference:
    """`owner/name`, and which file of it: None, a quantization such as `Q4_K_M`, or a file name."""

    repo: str
    asked: str | None


def resolve_model(reference: str, *, progress: Report | None = None, cache_dir: Path | None = None) -> Path:
    """The path of the model file; a hub reference is downloaded unless the cache holds it already.

    `reference` is a path, `owner/name`, `owner/name:Q4_K_M` or `owner/name:file.gguf`, the last three
    with or without `hf://` before them. The hub's address is HF_ENDPOINT where that is set. Of a split
    model all parts are downloaded, and the path is that of the first. Raises ModelLoadError where no
    such file is and the reference cannot be a hub's, DownloadError where the hub does not deliver.
    """
    found = parse_reference(reference)
    if isinstance(found, Path):
        return found
    api = _api()
    try:
        info = api.model_info(found.repo, files_metadata=True, timeout=TIMEOUT_S)
    except Exception as error:
        cached = _from_cache(found, cache_dir) if _is_unreachable(error) else None
        if cached is not None:
            return cached
        raise _explain(found.repo, error) from error
    sizes = {s.rfilename: s.size or 0 for s in info.siblings or ()}
    parts = choose_files(found, sizes)
    return _download(found, parts, sizes, info, progress, cache_dir)


def is_hub_reference(reference: str) -> bool:
    """Whether the reference names a file on a hub. Raises ModelLoadError where it can be neither."""
    return isinstance(parse_reference(reference), HubReference)


def parse_reference(reference: str) -> Path | HubReference:
    """An existing file or a hub reference; ModelLoadError where it can be neither."""
    path = Path(reference).expanduser()
    if not reference.startswith("hf://"):
        if path.is_file():
            return path
        if path.is_dir():
            raise ModelLoadError(f"{path} is a directory", hint="Name the .gguf file itself.")
    match = _REFERENCE.fullmatch(reference)
    looks_local = reference.startswith((".", "/", "~")) or (
        reference.lower().endswith(".gguf") and ":" not in reference
    )
    if match is None or looks_local:
        raise ModelLoadError(
            f"there is no model file {reference}",
            hint="Give the path of a .gguf file, or a hub reference such as owner/name:Q4_K_M.",
        )
    return HubReference(match["repo"], match["asked"])


def choose_files(reference: HubReference, names: Iterable[str]) -> list[str]:
    """The files to download, the one to open first, out of all file names of the repository.

    Raises DownloadError, listing the names there are, where none or several fit.
    """
    models = _group_parts(reference.repo, names)
    if not models:
        raise DownloadError(
            f"{reference.repo} holds no GGUF file",
            hint="Choose a repository with GGUF files; their names often end in -GGUF.",
        )
    fitting = _fitting(list(models), reference.asked)
    if len(fitting) != 1:
        asked = reference.asked
        what = "several GGUF files" if asked is None else f"{len(fitting) or 'no'} GGUF files for {asked}"
        listed = ", ".join(fitting or models)
        raise DownloadError(
            f"{reference.repo} holds {what}: {listed}",
            hint=f"Name one of them, as {reference.repo}:{next(iter(fitting or models))}",
        )
    return models[fitting[0]]


def _group_parts(repo: str, names: Iterable[str]) -> dict[str, list[str]]:
    """First file -> all files of each model; a split model has many. Projectors are not models."""
    ggufs = sorted(n for n in names if n.lower().endswith(".gguf"))
    ggufs = [n for n in ggufs if not n.rpartition("/")[2].lower().startswith("mmproj")]
    models: dict[str, list[str]] = {}
    for name in ggufs:
        part = _PART.fullmatch(name)
        if part is None:
            models[name] = [name]
        elif int(part["index"]) == 1:
            wanted = [
                f"{part['stem']}-{i:05}-of-{part['count']}.gguf" for i in range(1, int(part["count"]) + 1)
            ]
            missing = sorted(set(wanted) - set(ggufs))
            if missing:
                raise DownloadError(f"{repo} lacks parts of a split model: {', '.join(missing)}", hint=_HINT)
            models[name] = wanted
    return models


def _fitting(names: list[str], asked: str | None) -> list[str]:
    if asked is None:
        return names
    if asked.lower().endswith(".gguf"):
        return [n for n in names if n == asked] or [n for n in names if n.rpartition("/")[2] == asked]
    # A whole word wins over a part of one, so that F16 is not BF16 and Q4_K is not Q4_K_M.
    word = re.compile(rf"(^|[-./]){re.escape(asked)}([-./]|$)", re.IGNORECASE)
    return [n for n in names if word.search(n)] or [n for n in names if asked.lower() in n.lower()]


def _endpoint() -> str | None:
    # huggingface_hub reads the variable once, at import.
    return os.environ.get("HF_ENDPOINT") or None


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=_endpoint(), library_name="kiln")


def _download(
    reference: HubReference,
    parts: list[str],
    sizes: Mapping[str, int],
    info: ModelInfo,
    progress: Report | None,
    cache_dir: Path | None,
) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    # One revision for all parts, even if the repository changes meanwhile.
    pinned: dict[str, Any] = {"repo_id": reference.repo, "revision": info.sha, "cache_dir": cache_dir}
    absent = [p for p in parts if not isinstance(try_to_load_from_cache(filename=p, **pinned), str)]
    _check_space(reference.repo, sum(sizes[p] for p in absent), cache_dir)
    paths = []
    for part in parts:
        try:
            path = hf_hub_download(
                filename=part,
                endpoint=_endpoint(),
                library_name="kiln",
                etag_timeout=TIMEOUT_S,
                tqdm_class=_bar_class(part, progress),
                **pinned,
            )
        except DownloadError:
            raise
        except Exception as error:
            raise _explain(reference.repo, error) from error
        paths.append(Path(path))
    return paths[0]


def _cache_root(cache_dir: Path | None) -> Path:
    from huggingface_hub import constants

    return cache_dir or Path(constants.HF_HUB_CACHE)


def _check_space(repo: str, needed: int, cache_dir: Path | None) -> None:
    """Refuse before the download what the disk cannot hold."""
    root = _cache_root(cache_dir).absolute()
    there = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise DownloadError(
            f"{repo} needs {_gigabytes(needed)} but {there} has {_gigabytes(free)} free",
            hint="Free some space, or set HF_HOME to a larger disk.",
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _from_cache(reference: HubReference, cache_dir: Path | None) -> Path | None:
    """What an earlier download left, for use without a network."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir(_cache_root(cache_dir)).repos
    except CacheNotFound:
        return None
    revisions = (
        r for c in repos if c.repo_id == reference.repo and c.repo_type == "model" for r in c.revisions
    )
    for revision in sorted(revisions, key=lambda r: r.last_modified, reverse=True):
        paths = {
            f.file_path.relative_to(revision.snapshot_path).as_posix(): f.file_path for f in revision.files
        }
        try:
            return paths[choose_files(reference, paths)[0]]
        except DownloadError:
            continue
    return None


def _bar_class(name: str, progress: Report | None) -> Any:
    """A class that huggingface_hub uses like tqdm's, and that reports instead of drawing."""

    class Bar:
        def __init__(self, *_: object, total: int | None = None, initial: int = 0, **__: object) -> None:
            self.n = initial
            self.total = total
            self._restarts = 0
            self.update(0)

        def update(self, count: int | None = 1) -> None:
            # A negative count means that the server cannot resume and all begins again. The hub's
            # client would go on so for ever, since each attempt brings some bytes.
            if count is not None and count < 0:
                self._restarts += 1
                if self._restarts > MAX_RESTARTS:
                    raise DownloadError(f"the download of {name} broke off again and again", hint=_HINT)
            self.n += count or 0
            if progress is not None:
                progress(name, self.n, self.total)

        def update_transfer(self, count: int | None = 1) -> None:
            """Bytes on the wire; those on the disk, which `update` counts, are the ones shown."""

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

        def refresh(self, *_: object, **__: object) -> None: ...

        def close(self) -> None: ...

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

    return Bar


def _is_unreachable(error: BaseException) -> bool:
    """Whether the hub gave no answer, or none of its own."""
    from huggingface_hub.errors import HfHubHTTPError

    return not isinstance(error, HfHubHTTPError) or error.response.status_code >= 500


def _explain(repo: str, error: Exception) -> DownloadError:
    """The failure in plain words."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        if isinstance(cause, GatedRepoError) or status == 403:
            return DownloadError(f"access to {repo} is not granted ({status})", hint=_ACCESS_HINT)
        if status in (401, 404):
            return DownloadError(
                f"{repo} does not exist, or is private ({status})",
                hint="Check the spelling. For a private or gated model set HF_TOKEN, or run `hf auth login`.",
            )
        return DownloadError(f"the hub refused {repo} with status {status}", hint="Try again later.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"the disk is full; {repo} does not fit", hint="Free some space, or set HF_HOME to a larger disk."
        )
    if isinstance(error, OfflineModeIsEnabled) or isinstance(cause, OfflineModeIsEnabled):
        return DownloadError(f"{repo} is not in the cache, and HF_HUB_OFFLINE is set", hint=_HINT)
    where = _endpoint() or "the hub"
    first_line = next(iter(str(cause).strip().splitlines()), "")
    return DownloadError(
        f"{repo} could not be downloaded from {where}: {first_line or type(cause).__name__}", hint=_HINT
    )
