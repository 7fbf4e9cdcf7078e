"""`date_time`: the present time, conversions between time zones, and arithmetic with dates."""

from __future__ import annotations

import asyncio
import calendar
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Meta

from kiln.tools.tool import Arguments, Category, ToolResult

MOST = 10_000_000
Amount = Annotated[int, Meta(ge=-MOST, le=MOST)]


class BadTime(Exception):
    """A time, a zone or an operation that makes no sense; the message says which and why."""


class DateTimeArguments(msgspec.Struct, forbid_unknown_fields=True):
    operation: Annotated[
        Literal["now", "convert", "add", "difference"],
        Meta(
            description="now: the present time in `timezone`. convert: `time` in `to_timezone`."
            " add: `time` plus the amounts, which may be negative. difference: from `time` to `until`."
        ),
    ] = "now"
    timezone: Annotated[
        str, Meta(description="IANA time zone such as Europe/Paris; that of a time without an offset.")
    ] = "UTC"
    time: Annotated[
        str | None,
        Meta(description="ISO 8601 date or time such as 2026-05-04T15:30; absent, the present time."),
    ] = None
    to_timezone: Annotated[str | None, Meta(description="IANA time zone of the result.")] = None
    until: Annotated[str | None, Meta(description="ISO 8601 date or time; absent, the present time.")] = None
    years: Amount = 0
    months: Amount = 0
    weeks: Amount = 0
    days: Amount = 0
    hours: Amount = 0
    minutes: Amount = 0
    seconds: Amount = 0


class DateTime:
    name = "date_time"
    category: Category = "pure"
    description = (
        "The present date and time in any time zone, conversion between time zones,"
        " adding to a date, and the time between two dates."
    )
    _arguments = Arguments(DateTimeArguments)
    parameters = _arguments.schema

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        given = self._arguments.read(arguments)
        if isinstance(given, ToolResult):
            return given
        try:
            # Zones are read from disk.
            return ToolResult(json.dumps(await asyncio.to_thread(self._answer, given)))
        except BadTime as error:
            return ToolResult.failed(f"{error}.")
        except (OverflowError, ValueError):
            return ToolResult.failed("The result lies outside the years 1 to 9999.")

    def _answer(self, given: DateTimeArguments) -> dict[str, Any]:
        zone = zone_of(given.timezone)
        if given.operation == "now":
            return describe(self._clock().astimezone(zone))
        time = self._time(given.time, zone)
        if given.operation == "difference":
            return describe_difference(time, self._time(given.until, zone))
        if given.operation == "convert":
            if given.to_timezone is None:
                raise BadTime("convert needs to_timezone")
            return describe(time.astimezone(zone_of(given.to_timezone)))
        moved = add(time, given)
        return describe(moved if given.to_timezone is None else moved.astimezone(zone_of(given.to_timezone)))

    def _time(self, text: str | None, zone: tzinfo) -> datetime:
        return self._clock().astimezone(zone) if text is None else parse_time(text, zone)


def zone_of(name: str) -> tzinfo:
    if name in ("UTC", "Z"):
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        # Unknown, a path out of the database, or a directory in it.
        raise BadTime(
            f"There is no time zone named {name[:64]!r}; write an IANA name such as Europe/Paris"
        ) from None


def parse_time(text: str, zone: tzinfo) -> datetime:
    """An ISO 8601 date or time; one without an offset is in `zone`, and a date is its midnight there."""
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise BadTime(f"{text[:64]!r} is not an ISO 8601 date or time such as 2026-05-04T15:30") from None
    return time if time.tzinfo is not None else _real(time.replace(tzinfo=zone))


def add(time: datetime, by: DateTimeArguments) -> datetime:
    """Years to days move the calendar and keep the time of day; hours to seconds are time that passes."""
    month = time.year * 12 + time.month - 1 + by.years * 12 + by.months
    year, month = divmod(month, 12)
    if not 1 <= year <= 9999:
        raise OverflowError
    # A day that the month lacks becomes its last: 31 January plus a month is the end of February.
    day = min(time.day, calendar.monthrange(year, month + 1)[1])
    date = time.replace(year=year, month=month + 1, day=day) + timedelta(days=by.days, weeks=by.weeks)
    passed = timedelta(hours=by.hours, minutes=by.minutes, seconds=by.seconds)
    return (_real(date).astimezone(UTC) + passed).astimezone(time.tzinfo)


def _real(time: datetime) -> datetime:
    """The same moment on a clock that exists: one in the hour that a change of the clock skips moves on."""
    return time.astimezone(UTC).astimezone(time.tzinfo)


def describe(time: datetime) -> dict[str, Any]:
    """`{"time", "timezone", "weekday", "unix"}`; `time` in ISO 8601 to the second, `unix` in seconds."""
    return {
        "time": time.isoformat(timespec="seconds"),
        "timezone": str(time.tzinfo),
        "weekday": calendar.day_name[time.weekday()],
        "unix": int(time.timestamp()),
    }


def describe_difference(start: datetime, end: datetime) -> dict[str, Any]:
    """`{"total_seconds", "days", "hours", "minutes", "seconds", "calendar", "past"}`.

    days to seconds are the time that passes, in one sum; `calendar` counts whole years, months and days
    between the two dates as an age is counted. Both are without a sign; `past` tells that `until` is earlier.
    """
    is_past = end < start
    first, last = (end, start) if is_past else (start, end)
    total = int((last - first).total_seconds())
    minutes, seconds = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    return {"total_seconds": total, **parts, "calendar": _calendar_parts(first, last), "past": is_past}


def _calendar_parts(first: datetime, last: datetime) -> dict[str, int]:
    last = last.astimezone(first.tzinfo)
    months = (last.year - first.year) * 12 + last.month - first.month
    reached = _months_later(first, months)
    if reached > last.replace(tzinfo=None):
        months -= 1
        reached = _months_later(first, months)
    days = (last.replace(tzinfo=None) - reached).days
    return {"years": months // 12, "months": months % 12, "days": days}


def _months_later(time: datetime, months: int) -> datetime:
    year, month = divmod(time.year * 12 + time.month - 1 + months, 12)
    day = min(time.day, calendar.monthrange(year, month + 1)[1])
    return time.replace(year=year, month=month + 1, day=day, tzinfo=None)
