"""Which adapters a request runs with, what it is called in responses, and what must not be shared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kiln.adapters.names import BASE
from kiln.adapters.revision import Revision
from kiln.core.errors import InvalidField
from kiln.core.rollout import AdapterIdentity

MAX_IDENTITY_BYTES = 256


@dataclass(frozen=True, slots=True)
class Selection:
    """The adapters of one request. While it lives, the files of its revisions stay.

    `uses` are converted files and the factors of their deltas, each file once, in an order that does not
    depend on the request's. `scope` differs for everything that computes another KV cache.
    """

    name: str = BASE
    identity: AdapterIdentity | None = None
    uses: tuple[tuple[str, float], ...] = ()
    scope: str = ""
    revisions: tuple[Revision, ...] = ()


NO_ADAPTER = Selection()


def compose(parts: Sequence[tuple[Revision, float]], field: str) -> Selection:
    """The sum of scaled adapters, in request order; the same one twice adds up.

    Raises InvalidField, naming `field`, where scales add up to no finite number or the name gets too long.
    """
    if not parts:
        return NO_ADAPTER
    factors: dict[tuple[str, str], float] = {}
    for revision, scale in parts:
        key = (revision.content_sha256, str(revision.path))
        factors[key] = factors.get(key, 0.0) + scale
    if not all(math.isfinite(factor) for factor in factors.values()):
        raise InvalidField("the scales of one adapter add up to no finite number", param=field)
    used = sorted((key, factor) for key, factor in factors.items() if factor != 0.0)
    identity = _identify(parts, field)
    return Selection(
        name=identity.name,
        identity=identity,
        uses=tuple((path, factor) for (_, path), factor in used),
        scope="+".join(f"{content}*{factor!r}" for (content, _), factor in used),
        revisions=tuple(revision for revision, _ in parts),
    )


def _identify(parts: Sequence[tuple[Revision, float]], field: str) -> AdapterIdentity:
    """One adapter at scale 1 is itself; anything else is named by its pairs, and hashed over them."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return AdapterIdentity(parts[0][0].name, parts[0][0].content_sha256)
    name = "+".join(f"{revision.name}*{_show(scale)}" for revision, scale in parts)
    if len(name.encode()) > MAX_IDENTITY_BYTES:
        raise InvalidField(
            f"the name of this composition has more than {MAX_IDENTITY_BYTES} bytes",
            param=field,
            hint="Merge some of its adapters into one, or use shorter names.",
        )
    pairs = [[revision.content_sha256, scale] for revision, scale in parts]
    return AdapterIdentity(name, "sha256:" + hashlib.sha256(msgspec.json.encode(pairs)).hexdigest())


def _show(scale: float) -> str:
    """The shortest text that reads back as the number; whole ones without a fraction."""
    return repr(scale).removesuffix(".0")
