"""`convert_units`: pint, behind a grammar for units that no expression gets through."""

from __future__ import annotations

import asyncio
import math
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from kiln.tools.tool import Arguments, Category, ToolResult

if TYPE_CHECKING:
    import pint

UNIT_CHARS = 64
# pint computes numbers it finds in a unit, so a power is a small whole number right behind a name.
_NAME = r"(?:[A-Za-zµμΩ°Åℓ%][A-Za-z_µμΩ°Å]*[0-9]{0,2})"
_FACTOR = rf"\(*{_NAME}(?:\s*(?:\^|\*\*)\s*-?[1-9])?\)*"
_UNIT = re.compile(rf"(?:1\s*/\s*)?{_FACTOR}(?:\s*(?:[*/·]|\bper\b|\s)\s*{_FACTOR})*")
_TEMPERATURES = {
    "c": "degC",
    "°c": "degC",
    "celsius": "degC",
    "f": "degF",
    "°f": "degF",
    "fahrenheit": "degF",
    "k": "kelvin",
}


class BadConversion(Exception):
    """There is no such conversion; the message says why."""


def convert(value: float, from_unit: str, to_unit: str) -> str:
    """For example `5 mile = 8.04672 kilometer`. Raises BadConversion."""
    # Importing it and reading its list of units takes so long that it waits for the first conversion.
    import pint

    source, target = _pair(from_unit, to_unit)
    try:
        start = _registry().Quantity(value, source)
        result = start.to(target)
    except pint.DimensionalityError:
        if source.dimensionality == target.dimensionality:
            raise BadConversion("a difference of temperatures is not a temperature") from None
        raise BadConversion(
            f"{from_unit!r} is {_dimension(source)} and {to_unit!r} is {_dimension(target)},"
            " which cannot be converted into each other"
        ) from None
    except (OverflowError, ZeroDivisionError, ValueError, pint.PintError) as error:
        raise BadConversion(f"{from_unit!r} cannot be converted to {to_unit!r}: {error}") from None
    number = float(result.magnitude)
    if not math.isfinite(number):
        raise BadConversion("the result is too large")
    if start.check("[temperature]") and start.to("kelvin").magnitude < -1e-9:
        raise BadConversion("the temperature is below absolute zero")
    return f"{value:.12g} {source} = {number:.12g} {target}"


@cache
def _registry() -> pint.UnitRegistry[float]:
    import pint

    return pint.UnitRegistry(autoconvert_offset_to_baseunit=True)


def _pair(from_unit: str, to_unit: str) -> tuple[pint.Unit, pint.Unit]:
    first, second = (_TEMPERATURES.get(unit.strip().lower()) for unit in (from_unit, to_unit))
    # C and F are coulomb and farad, which nobody converts into each other: together they are temperatures.
    if first is not None and second is not None:
        return _unit(first), _unit(second)
    return _unit(from_unit), _unit(to_unit)


def _unit(text: str) -> pint.Unit:
    import pint

    text = text.strip()
    if len(text) > UNIT_CHARS:
        raise BadConversion(f"a unit has at most {UNIT_CHARS} characters")
    if not _UNIT.fullmatch(text) or text.count("(") != text.count(")"):
        raise BadConversion(f"{text!r} is not a unit; write one such as km, kg*m/s^2 or miles per hour")
    plain = text.replace("·", "*").replace("μ", "µ")
    try:
        try:
            return _registry().parse_units(plain)
        except pint.UndefinedUnitError:
            # Perhaps KM for km, or m2 for m^2.
            powers = re.sub(r"(?<=[A-Za-z])([23])(?![0-9])", r"**\1", plain)
            return _registry().parse_units(powers, case_sensitive=powers != plain)
    except pint.UndefinedUnitError as error:
        names = error.unit_names
        unknown = names if isinstance(names, str) else ", ".join(names)
        raise BadConversion(f"there is no unit named {unknown!r}") from None
    except Exception:
        # What pint raises for malformed text is not one family of errors.
        raise BadConversion(f"{text!r} is not a unit") from None


def _dimension(unit: pint.Unit) -> str:
    return "a plain number" if unit.dimensionless else str(unit.dimensionality)


class ConvertUnitsArguments(msgspec.Struct, forbid_unknown_fields=True):
    value: Annotated[float, Meta(description="The number to convert.")]
    from_unit: Annotated[
        str, Meta(description="Its unit, such as mile, degC, km/h or kg*m/s^2.", max_length=UNIT_CHARS)
    ]
    to_unit: Annotated[str, Meta(description="The unit wanted.", max_length=UNIT_CHARS)]


class ConvertUnits:
    name = "convert_units"
    category: Category = "pure"
    description = "Convert a value from one unit of measurement to another. Knows no currencies."
    _arguments = Arguments(ConvertUnitsArguments)
    parameters = _arguments.schema

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        given = self._arguments.read(arguments)
        if isinstance(given, ToolResult):
            return given
        if not math.isfinite(given.value):
            return ToolResult.failed("The value is not a finite number.")
        try:
            return ToolResult(await asyncio.to_thread(convert, given.value, given.from_unit, given.to_unit))
        except BadConversion as error:
            return ToolResult.failed(f"There is no such conversion: {error}.")
