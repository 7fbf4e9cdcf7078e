"""Bodies of the adapter routes. Requests ignore fields they do not know; responses are closed."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kiln.wire.common import NonNegative, NonNegativeNumber, Positive, Sha256

MAX_MERGED = 16
MergeMethod = Literal["weighted_average", "ties", "concat"]


class AdapterName(Struct, kw_only=True):
    """Body of POST /v1/adapters/load."""

    name: str


class AdapterWeight(Struct, kw_only=True):
    """An adapter to merge, and the weight of its delta."""

    name: str
    weight: float = 1.0


class AdapterMerge(Struct, kw_only=True):
    """Body of POST /v1/adapters/merge.

    `rank` (of `weighted_average` and `ties`) is the largest of the adapters' when it is left out;
    `density` (of `ties`) is the share of each delta's entries that is kept.
    """

    name: str
    method: MergeMethod
    adapters: Annotated[list[AdapterWeight], Meta(min_length=1, max_length=MAX_MERGED)]
    rank: Annotated[int, Meta(ge=1, le=4096)] | None = None
    density: Annotated[float, Meta(gt=0, le=1)] | None = None


class AdapterEntry(Struct, kw_only=True, forbid_unknown_fields=True):
    """One saved adapter. With a `problem`, the other fields are of the last good revision, or absent.

    `modified` is in Unix seconds, `size_bytes` of configuration and weights.
    """

    name: str
    default: bool
    problem: str | None
    content_sha256: Sha256 | UnsetType = UNSET
    rank: Positive | UnsetType = UNSET
    alpha: float | UnsetType = UNSET
    rslora: bool | UnsetType = UNSET
    target_modules: list[str] | None | UnsetType = UNSET
    base_model: str | None | UnsetType = UNSET
    size_bytes: NonNegative | UnsetType = UNSET
    modified: NonNegativeNumber | UnsetType = UNSET


class AdapterDisk(Struct, kw_only=True, forbid_unknown_fields=True):
    """What all adapters take and may take; no quota is null."""

    used_bytes: NonNegative
    quota_bytes: NonNegative | None


class AdapterList(Struct, kw_only=True, forbid_unknown_fields=True):
    """All saved adapters by name. `default` is null where requests get the base model."""

    object: Literal["list"] = "list"
    default: str | None
    data: list[AdapterEntry]
    disk: AdapterDisk


class AdapterDefault(Struct, kw_only=True, forbid_unknown_fields=True):
    """What requests now get that name no adapter."""

    default: str | None


class AdapterSaved(Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter that was saved; `replaced` says whether one of that name was there before."""

    adapter: AdapterEntry
    replaced: bool


class AdapterMerged(Struct, kw_only=True, forbid_unknown_fields=True):
    """A merged adapter. `relative_error` is what the rank has cost, as a share of the exact merge's norm."""

    adapter: AdapterEntry
    replaced: bool
    relative_error: NonNegativeNumber


class AdapterDeleted(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    deleted: bool = True
