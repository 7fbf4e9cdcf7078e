"""The error tree: what its drawing says is what its classes are."""

from __future__ import annotations

import re

from kiln.core import errors
from kiln.core.errors import KilnError, RequestError, SetupError


def subclasses(cls: type[KilnError]) -> list[type[KilnError]]:
    return [c for sub in cls.__subclasses__() for c in (sub, *subclasses(sub))]


# Only the tree of this module: tests and other rooms may derive their own.
ALL = [c for c in subclasses(KilnError) if c.__module__ == errors.__name__]
LEAVES = [c for c in ALL if not c.__subclasses__()]


def test_the_drawing_names_every_error_with_its_status_and_code() -> None:
    drawn = dict(re.findall(r"── (\w+) +(\d{3} \w+)$", errors.__doc__ or "", re.MULTILINE))
    served = [c for c in LEAVES if not issubclass(c, SetupError)]
    assert drawn == {c.__name__: f"{c.status} {c.code}" for c in served}


def test_every_error_has_a_code_of_its_own_and_those_of_requests_a_hint() -> None:
    assert len({c.code for c in LEAVES}) == len(LEAVES)
    for c in LEAVES:
        assert issubclass(c, SetupError) or c.hint
        assert issubclass(c, RequestError) == (400 <= c.status < 500)


def test_a_hint_given_replaces_the_default_of_that_error_only() -> None:
    error = errors.InvalidField("no", param="top_p", hint="Use 1.")
    assert (str(error), error.message, error.param, error.hint) == ("no", "no", "top_p", "Use 1.")
    assert errors.InvalidField("no").hint == errors.InvalidField.hint != "Use 1."
