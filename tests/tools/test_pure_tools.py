"""calc_arithmetic, date_time and convert_units: what they answer, and what they refuse without effort."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.tools.arithmetic import BITS, BadExpression, CalcArithmetic, evaluate, show
from kiln.tools.clock import DateTime
from kiln.tools.tool import ServerTool
from kiln.tools.units import BadConversion, ConvertUnits, convert

NOW = datetime(2026, 3, 28, 12, 0, 30, tzinfo=UTC)


async def calc(expression: str) -> tuple[bool, str]:
    result = await CalcArithmetic().run({"expression": expression})
    return result.is_error, result.text


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2 ** 5", "224"),
        ("2^10", "1024"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 5", "2"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** -1", "0.5"),
        ("6 × 7 − 2 ÷ 2", "41"),
        ("sqrt(2) ** 2", "2"),
        ("log(8, 2) + log10(1000) + ln(e)", "7"),
        ("log(1000, 10)", "3"),
        ("sin(π / 2)", "1"),
        ("factorial(20)", "2432902008176640000"),
        ("comb(10, 3) - gcd(12, 18)", "114"),
        ("round(7.456, 2)", "7.46"),
        ("mean(1, 2, 6) + max(1, 5) + sum(1, 2, 3)", "14"),
        ("0xff | 1 << 8", "511"),
        ("-2 ** 2", "-4"),
        ("2 ** 2000 - 2 ** 2000 + 1", "1"),
        ("1_000 * 3", "3000"),
        ("1e300 * 1e-300", "1"),
    ],
)
async def test_calc_answers(expression: str, value: str) -> None:
    assert await calc(expression) == (False, value)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9", "too large"),
        ("9**9**9**9", "too large"),
        ("3999999 ** 3999999", "too large"),
        ("1 << 99999999999", "too large"),
        ("2 ** 5000", "too large"),
        ("10 ** 1000 * 10 ** 1000", "too large"),
        ("1e308 * 10", "too large"),
        ("10 ** 400 / 3", "too large"),
        ("10 ** 400 * 1.5", "too large"),
        ("pow(9, 9 ** 9)", "too large"),
        ("factorial(factorial(9))", "too large"),
        ("comb(10 ** 9, 10 ** 8)", "too large"),
        ("1e999 - 1e999", "too large"),
        ("round(1, -1000000000)", "400 digits"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("sqrt(-1)", "math domain"),
        ("(-8) ** (1 / 3)", "not a real number"),
        ("1.5 << 2", "unsupported operand"),
        ("factorial(2.5)", "not a whole number"),
        ("sin(1, 2)", "exactly one argument"),
        ("mean()", "division by zero"),
        ("1,000", "thousands separators"),
        ("3(4)", "write * between"),
        ("2 +", "not an expression"),
        ("1 2", "not an expression"),
        ("", "empty"),
        ("   ", "empty"),
        ("x + 1", "x is not known"),
        ("nan", "nan is not known"),
        ("1or 2", "or is not known"),
        ("lambda: 1", "lambda is not known"),
        ("__import__(1)", "__import__ is not known"),
        ("'a' * 9", "no place"),
        ("().__class__", "no place"),
        ("1; 2", "no place"),
        ("1 if 1 else 2", "if is not known"),
        ("sin", "not a number"),
        ("True", "True is not known"),
        ("(" * 240 + "1" + ")" * 240, "not an expression"),
        ("-" * 499 + "1", "nested too deeply"),
    ],
)
async def test_calc_refuses(expression: str, reason: str) -> None:
    is_error, text = await calc(expression)
    assert is_error
    assert reason in text


def test_no_step_of_a_calculation_is_long() -> None:
    """The costliest expressions that pass: every operand as wide as it may be, as often as it fits."""
    wide = "*".join([f"2**{BITS - 2}"] + ["1"] * 40)
    began = time.process_time()
    for expression in (wide, "lcm(" + ",".join(["factorial(400)"] * 30) + ")", "perm(2000, 300)"):
        evaluate(expression)
    # A bound of another order than the milliseconds this takes: 9**9**9 would compute for minutes.
    assert time.process_time() - began < 5


@given(st.text(alphabet="0123456789.+-*/%()^,<>|&~e pisqrtlogfacmx_", max_size=60))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    try:
        value = evaluate(text)
    except BadExpression as error:
        assert str(error)
    else:
        assert float(value) == float(value) if isinstance(value, float) else value.bit_length() <= BITS
        assert show(value)


async def test_calc_arguments_are_checked() -> None:
    for arguments in ({}, {"expression": 5}, {"expression": "1", "more": 1}, {"expression": "1" * 501}):
        result = await CalcArithmetic().run(arguments)
        assert result.is_error
        assert "The arguments do not fit" in result.text


async def clock(**arguments: Any) -> Any:
    result = await DateTime(lambda: NOW).run(arguments)
    return result.text if result.is_error else json.loads(result.text)


async def test_now_in_a_zone() -> None:
    assert await clock() == {
        "time": "2026-03-28T12:00:30+00:00",
        "timezone": "UTC",
        "weekday": "Saturday",
        "unix": int(NOW.timestamp()),
    }
    tokyo = await clock(timezone="Asia/Tokyo")
    assert (tokyo["time"], tokyo["timezone"]) == ("2026-03-28T21:00:30+09:00", "Asia/Tokyo")


async def test_conversion_between_zones() -> None:
    shown = await clock(
        operation="convert", time="2026-07-01T12:00", timezone="Europe/Paris", to_timezone="America/New_York"
    )
    assert shown["time"] == "2026-07-01T06:00:00-04:00"
    # An offset in the time outweighs the zone.
    shown = await clock(
        operation="convert", time="2026-07-01T12:00+05:30", timezone="Europe/Paris", to_timezone="UTC"
    )
    assert shown["time"] == "2026-07-01T06:30:00+00:00"


@pytest.mark.parametrize(
    ("arguments", "time"),
    [
        ({"time": "2024-01-31", "months": 1}, "2024-02-29T00:00:00+00:00"),
        ({"time": "2024-02-29", "years": -1}, "2023-02-28T00:00:00+00:00"),
        ({"days": 1, "timezone": "Europe/Paris"}, "2026-03-29T13:00:30+02:00"),
        # A day on the calendar and a day of 24 hours differ where the clocks change.
        ({"time": "2026-03-28T12:00", "days": 1, "timezone": "Europe/Paris"}, "2026-03-29T12:00:00+02:00"),
        ({"time": "2026-03-28T12:00", "hours": 24, "timezone": "Europe/Paris"}, "2026-03-29T13:00:00+02:00"),
        # 02:30 does not exist that night.
        ({"time": "2026-03-28T02:30", "days": 1, "timezone": "Europe/Paris"}, "2026-03-29T03:30:00+02:00"),
        ({"time": "2026-01-01", "weeks": 1, "minutes": -1}, "2026-01-07T23:59:00+00:00"),
        ({"time": "2026-01-01", "to_timezone": "Asia/Tokyo"}, "2026-01-01T09:00:00+09:00"),
    ],
)
async def test_adding(arguments: dict[str, Any], time: str) -> None:
    assert (await clock(operation="add", **arguments))["time"] == time


async def test_differences() -> None:
    age = await clock(operation="difference", time="2000-02-29", until="2026-03-01T06:00")
    assert age["calendar"] == {"years": 26, "months": 0, "days": 1}
    assert (age["days"], age["hours"], age["past"]) == (9497, 6, False)
    back = await clock(operation="difference", time="2026-03-01", until="2026-01-31")
    assert (back["days"], back["total_seconds"], back["past"]) == (29, 29 * 86400, True)
    left = await clock(operation="difference", until="2026-03-28T13:00:30")
    assert left["total_seconds"] == 3600


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"timezone": "../../etc/passwd"}, "no time zone"),
        ({"timezone": "/etc/passwd"}, "no time zone"),
        ({"timezone": "America"}, "no time zone"),
        ({"timezone": "\0"}, "no time zone"),
        ({"timezone": ""}, "no time zone"),
        ({"timezone": "Mars/Base"}, "no time zone"),
        ({"operation": "convert"}, "needs to_timezone"),
        ({"operation": "add", "time": "tomorrow"}, "not an ISO 8601"),
        ({"operation": "add", "time": "9999-01-01", "years": 1}, "outside the years"),
        ({"operation": "add", "days": 10_000_000}, "outside the years"),
        ({"operation": "add", "days": 10_000_001}, "do not fit"),
        ({"operation": "undo"}, "do not fit"),
        ({"zone": "UTC"}, "do not fit"),
        (
            {"operation": "convert", "time": "0001-01-01", "timezone": "Asia/Tokyo", "to_timezone": "UTC"},
            "outside",
        ),
    ],
)
async def test_times_that_make_no_sense(arguments: dict[str, Any], reason: str) -> None:
    assert reason in await clock(**arguments)


@given(
    st.sampled_from(["now", "convert", "add", "difference"]),
    st.one_of(st.none(), st.datetimes().map(datetime.isoformat), st.text(max_size=30)),
    st.one_of(st.sampled_from(["UTC", "Asia/Tokyo", "America/New_York"]), st.text(max_size=30)),
    st.integers(-10_000_000, 10_000_000),
)
def test_any_question_of_time_has_an_answer(operation: str, time: str | None, zone: str, amount: int) -> None:
    arguments = {"operation": operation, "time": time, "timezone": zone, "to_timezone": zone, "days": amount}
    result = asyncio.run(DateTime(lambda: NOW).run({**arguments, "months": amount % 1000, "until": time}))
    assert result.is_error or json.loads(result.text)


@pytest.mark.parametrize(
    ("value", "source", "target", "answer"),
    [
        (5, "mile", "km", "5 mile = 8.04672 kilometer"),
        (100, "degC", "degF", "100 degree_Celsius = 212 degree_Fahrenheit"),
        (98.6, "F", "C", "98.6 degree_Fahrenheit = 37 degree_Celsius"),
        (-40, "celsius", "fahrenheit", "-40 degree_Celsius = -40 degree_Fahrenheit"),
        (0, "C", "K", "0 degree_Celsius = 273.15 kelvin"),
        (0, "kelvin", "degC", "0 kelvin = -273.15 degree_Celsius"),
        (3, "miles per hour", "km/h", "3 mile / hour = 4.828032 kilometer / hour"),
        (1, "kg m^2 / s^2", "J", "1 kilogram * meter ** 2 / second ** 2 = 1 joule"),
        (1, "m2", "cm^2", "1 meter ** 2 = 10000 centimeter ** 2"),
        (1, "MB", "kB", "1 megabyte = 1000 kilobyte"),
        (10, "%", "dimensionless", "10 percent = 0.1 dimensionless"),
        (2, "1/s", "Hz", "2 1 / second = 2 hertz"),
    ],
)
def test_conversions(value: float, source: str, target: str, answer: str) -> None:
    assert convert(value, source, target) == answer


@pytest.mark.parametrize(
    ("value", "source", "target", "reason"),
    [
        (1, "m", "kg", r"'m' is \[length\] and 'kg' is \[mass\]"),
        (1, "m", "dimensionless", "a plain number"),
        (1, "florp", "km", "no unit named 'florp'"),
        (1, "km", "USD", "no unit named 'USD'"),
        (1, "", "km", "not a unit"),
        (1, "5 km", "m", "not a unit"),
        (1, "m**9**9**9", "km", "not a unit"),
        (1, "m^99", "km", "not a unit"),
        (1, "9**9**9", "km", "not a unit"),
        (1, "(m^9)^9", "km", "not a unit"),
        (1, "m)(", "km", "not a unit"),
        (1, "__class__", "km", "not a unit"),
        (1, "m; import os", "km", "not a unit"),
        (1, "k" * 65, "km", "at most 64"),
        (1e308, "km", "nm", "too large"),
        (-500, "degC", "K", "below absolute zero"),
        (1, "delta_degC", "degF", "difference of temperatures"),
    ],
)
def test_conversions_that_make_no_sense(value: float, source: str, target: str, reason: str) -> None:
    with pytest.raises(BadConversion, match=reason):
        convert(value, source, target)


@given(st.text(max_size=64))
def test_any_text_is_a_unit_or_is_refused(text: str) -> None:
    try:
        convert(1, text, text)
    except BadConversion as error:
        assert str(error)


async def test_conversion_arguments_are_checked() -> None:
    result = await ConvertUnits().run({"value": 1, "from_unit": "km"})
    assert result.is_error
    assert "to_unit" in result.text
    assert not (await ConvertUnits().run({"value": "1.5", "from_unit": "km", "to_unit": "m"})).is_error
    result = await ConvertUnits().run({"value": float("inf"), "from_unit": "km", "to_unit": "m"})
    assert result.is_error


@pytest.mark.parametrize("tool", [CalcArithmetic(), DateTime(), ConvertUnits()])
def test_the_schemas_are_closed_objects(tool: ServerTool) -> None:
    jsonschema.Draft202012Validator.check_schema(tool.parameters)
    assert tool.parameters["type"] == "object"
    assert tool.parameters["additionalProperties"] is False
    assert "$ref" not in json.dumps(tool.parameters)
