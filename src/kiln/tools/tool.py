"""What a tool is, and what a call of one gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

Category = Literal["pure", "network", "mcp"]
Status = Literal["done", "error", "denied"]


@dataclass(frozen=True, slots=True)
class Source:
    """A page that a result rests on."""

    title: str
    url: str
    snippet: str

    def to_dict(self) -> dict[str, str]:
        return {"title": self.title, "url": self.url, "snippet": self.snippet}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool has to say. With `is_error`, `text` tells the model what went wrong and what to do."""

    text: str
    sources: tuple[Source, ...] = ()
    is_error: bool = False
    timed_out: bool = False

    @staticmethod
    def failed(text: str) -> ToolResult:
        return ToolResult(text, is_error=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call ended. `text` is what the model gets to read, `seconds` how long the tool ran.

    A call that was stopped at its time limit is an `error` that `timed_out`.
    """

    name: str
    status: Status
    text: str
    seconds: float = 0.0
    sources: tuple[Source, ...] = ()
    timed_out: bool = False


class ServerTool(Protocol):
    """One tool. `parameters` is the JSON Schema of the arguments, an object.

    `run` never raises for what the model wrote or the world did: that is a `ToolResult` with `is_error`.
    It does not compute on the event loop, and cancelling it frees all it holds.
    """

    @property
    def name(self) -> str: ...
    @property
    def category(self) -> Category: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> dict[str, Any]: ...

    async def run(self, arguments: dict[str, Any]) -> ToolResult: ...


A = TypeVar("A", bound=msgspec.Struct)


class Arguments(Generic[A]):
    """The arguments of a tool as a msgspec struct: their JSON Schema, and the way from JSON values."""

    def __init__(self, cls: type[A]) -> None:
        self._cls = cls
        schema = msgspec.json.schema(cls)
        # A template shows the schema to the model, so it stands there whole instead of by reference.
        body: dict[str, Any] = schema["$defs"][cls.__name__]
        body.pop("title", None)
        body.pop("description", None)
        self.schema = body

    def read(self, values: dict[str, Any]) -> A | ToolResult:
        """The arguments, or what is wrong with them in words for the model."""
        try:
            # Models put numbers into quotes now and then; that is understood.
            return msgspec.convert(values, self._cls, strict=False)
        except msgspec.ValidationError as error:
            return ToolResult.failed(
                f"The arguments do not fit: {error}. They are: {', '.join(self._names)}."
            )

    @property
    def _names(self) -> list[str]:
        required = set(self.schema.get("required", ()))
        return [name if name in required else f"{name} (optional)" for name in self.schema["properties"]]
