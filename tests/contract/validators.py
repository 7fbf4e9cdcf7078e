"""Holds instances, and whole streams, against the contracts. For use by every test that sees traffic.

assert validate("ChatCompletionResponse", response.json()) == []
assert validate_chat_stream(response.content) == []
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from kiln import contracts
from kiln.wire.problems import ErrorResponse

# Timings are rounded on the wire, so sums of them may be off by this much.
MILLISECONDS_TOLERANCE = 0.01


@cache
def schemas() -> dict[str, Any]:
    """Both schemas by file name."""
    return {
        name: json.loads(contracts.load(name)) for name in (contracts.INFERENCE, contracts.THINKING_BUDGET)
    }


def definitions() -> dict[str, str]:
    """Every definition's name and the file that has it."""
    return {name: file for file, schema in schemas().items() for name in schema["$defs"]}


@cache
def _registry() -> Any:
    return Registry().with_resources(
        (schema["$id"], Resource.from_contents(schema)) for schema in schemas().values()
    )


@cache
def _validator(definition: str) -> Draft202012Validator:
    base = schemas()[definitions()[definition]]["$id"]
    return Draft202012Validator({"$ref": f"{base}#/$defs/{definition}"}, registry=_registry())


def validate(definition: str, instance: object) -> list[str]:
    """Everything wrong with `instance` as that definition; [] when it holds. KeyError: no such definition.

    Beyond the schema, the arithmetic that it states in words is checked: sums of usage, the ids of a
    provenance, delays of a timing.
    """
    errors = [f"{_place(e.absolute_path)}: {e.message}" for e in schema_errors(definition, instance)]
    return errors or list(_arithmetic(instance, "$"))


def is_valid(definition: str, instance: object) -> bool:
    return not validate(definition, instance)


def validate_error(instance: object) -> list[str]:
    """The one error body of `/v1`."""
    try:
        msgspec.convert(instance, ErrorResponse)
    except msgspec.ValidationError as error:
        return [str(error)]
    assert isinstance(instance, dict)
    expected = {"message", "type", "param", "code", "hint"}
    if set(instance) != {"error"} or set(instance["error"]) != expected:
        return [f"an error body holds exactly error with {sorted(expected)}, not {instance}"]
    return []


def validate_chat_stream(
    raw_sse: bytes, *, include_usage: bool | None = None, include_performance: bool | None = None
) -> list[str]:
    """Everything wrong with the body of a streamed chat completion, its order included.

    A stream that ends in the error event is valid too. `include_usage` and `include_performance`, where
    given, say whether the stream must have a usage chunk, or timings and performance metadata.
    """
    try:
        payloads = list(_data_events(raw_sse))
    except ValueError as error:
        return [str(error)]
    stream = _Stream()
    for number, payload in enumerate(payloads):
        stream.read(number, payload)
    stream.finish()
    if not stream.failed:
        stream.expect("usage chunk", include_usage, stream.usages > 0)
        stream.expect("token timing", include_performance, stream.timings > 0)
        stream.expect("performance metadata", include_performance, stream.has_performance)
    return stream.errors


def stream_events(raw_sse: bytes) -> list[dict[str, Any]]:
    """The decoded data events of a stream, without `[DONE]`."""
    return [json.loads(p) for p in _data_events(raw_sse) if p != "[DONE]"]


class _Stream:
    """What was seen of a stream so far."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.failed = False
        self.usages = 0
        self.timings = 0
        self.has_performance = False
        self._done = False
        self._finished = False
        self._identity: tuple[object, ...] | None = None
        self._last_token = -1

    def read(self, number: int, payload: str) -> None:
        where = f"event {number}"
        if self._done or self.failed:
            self._wrong(where, "comes after the end of the stream")
        if payload == "[DONE]":
            self._done = True
            return
        try:
            event = json.loads(payload)
        except ValueError as error:
            self._wrong(where, f"is not JSON: {error}")
            return
        if not isinstance(event, dict):
            self._wrong(where, "is not an object")
        elif "error" in event:
            self.failed = True
            self._all(where, validate_error(event))
        elif event.get("object") == "kiln.token_timing":
            self._timing(where, event)
        else:
            self._chunk(where, event)

    def finish(self) -> None:
        if not self.failed and not self._finished:
            self._wrong("stream", "has no finish_reason")
        if not self.failed and not self._done:
            self._wrong("stream", "does not end in data: [DONE]")

    def expect(self, what: str, wanted: bool | None, seen: bool) -> None:
        if wanted is not None and wanted != seen:
            self._wrong("stream", f"has {'no' if wanted else 'an unasked'} {what}")

    def _chunk(self, where: str, chunk: dict[str, Any]) -> None:
        problems = validate("ChatCompletionChunk", chunk)
        self._all(where, problems)
        if problems:
            return
        identity = (chunk["id"], chunk["created"], chunk["model"])
        if self._identity not in (None, identity):
            self._wrong(where, f"has another id, created or model than {self._identity}")
        self._identity = identity
        if not chunk["choices"]:
            self._usage_chunk(where, chunk)
            return
        if "usage" in chunk:
            self._wrong(where, "has usage beside choices")
        if self._finished:
            self._wrong(where, "has choices after the finish chunk")
        if len(chunk["choices"]) > 1 or chunk["choices"][0]["index"] != 0:
            self._wrong(where, "must hold choice 0 alone: streams have one choice")
        ends = any("finish_reason" in choice for choice in chunk["choices"])
        if ends != ("metadata" in chunk):
            self._wrong(where, "must have metadata exactly where it has finish_reason")
        self._finished = self._finished or ends
        self.has_performance = self.has_performance or "performance" in chunk.get("metadata", {})

    def _usage_chunk(self, where: str, chunk: dict[str, Any]) -> None:
        self.usages += 1
        if "usage" not in chunk or "metadata" in chunk:
            self._wrong(where, "has no choices, so it must hold usage and no metadata")
        if not self._finished or self.usages > 1:
            self._wrong(where, "is a usage chunk; one may come, after the finish chunk")

    def _timing(self, where: str, timing: dict[str, Any]) -> None:
        self.timings += 1
        problems = validate("StreamingTokenTiming", timing)
        self._all(where, problems)
        if problems:
            return
        if timing["token_index"] <= self._last_token:
            self._wrong(where, "has a token_index that does not rise")
        self._last_token = timing["token_index"]

    def _wrong(self, where: str, problem: str) -> None:
        self.errors.append(f"{where} {problem}")

    def _all(self, where: str, problems: list[str]) -> None:
        self.errors.extend(f"{where} {problem}" for problem in problems)


def _data_events(raw_sse: bytes) -> Iterator[str]:
    text = raw_sse.decode("utf-8")
    if text and not text.endswith("\n\n"):
        raise ValueError("the stream does not end with an empty line")
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not any(lines):
            continue
        if len(lines) != 1 or not lines[0].startswith("data: "):
            raise ValueError(f"an event is one line that begins with `data: `, not {block!r}")
        yield lines[0].removeprefix("data: ")


def schema_errors(definition: str, instance: object) -> Iterator[Any]:
    """Errors at their deepest, so that a broken composition names the field."""
    for error in _validator(definition).iter_errors(instance):
        yield from _deepest(error)


def _deepest(error: Any) -> Iterator[Any]:
    if not error.context or error.validator in ("oneOf", "anyOf"):
        yield error
        return
    for inner in error.context:
        yield from _deepest(inner)


def _place(path: Any) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def _arithmetic(value: object, where: str) -> Iterator[str]:
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _arithmetic(item, f"{where}[{i}]")
    if not isinstance(value, dict):
        return
    if set(value) == {"prompt_tokens", "completion_tokens", "total_tokens"}:
        if value["total_tokens"] != value["prompt_tokens"] + value["completion_tokens"]:
            yield f"{where}.total_tokens is not the sum"
    if value.get("object") == "kiln.token_timing":
        yield from _timing_sums(value, where)
    if value.get("schema") == "kiln.rollout-provenance.v1":
        yield from _provenance(value, where)
    for key, item in value.items():
        if key not in ("tool_calls", "tools", "tool_choice", "template_kwargs"):
            yield from _arithmetic(item, f"{where}.{key}")


def _timing_sums(timing: dict[str, Any], where: str) -> Iterator[str]:
    points = [
        timing[k] for k in ("ready_ms", "producer_delivered_ms", "handler_received_ms", "body_enqueued_ms")
    ]
    if points != sorted(points):
        yield f"{where}: the points in time do not rise: {points}"
    gap = timing["response_delivery_ms"] + timing["handler_queue_ms"] - timing["queue_delay_ms"]
    if abs(gap) > MILLISECONDS_TOLERANCE:
        yield f"{where}.queue_delay_ms is not the sum"
    for key, start, end in (
        ("response_delivery_ms", 0, 1),
        ("handler_queue_ms", 1, 2),
        ("client_delivery_ms", 2, 3),
    ):
        if abs(points[end] - points[start] - timing[key]) > MILLISECONDS_TOLERANCE:
            yield f"{where}.{key} is not the difference of its points in time"


def _provenance(value: dict[str, Any], where: str) -> Iterator[str]:
    ids, actions, prompt = value["input_token_ids"], value["action_tokens"], value["prompt_token_count"]
    if prompt > len(ids):
        yield f"{where}.prompt_token_count exceeds the ids"
    if [a["sequence_index"] for a in actions] != list(range(prompt, len(ids))):
        yield f"{where}.action_tokens do not index every generated id in order"
    elif [a["token_id"] for a in actions] != ids[prompt:]:
        yield f"{where}.action_tokens differ from input_token_ids"
    if all(a["source"] == "forced" for a in actions):
        yield f"{where}.action_tokens hold no sampled token"
    closing = value["sampling"].get("thinking_budget", {}).get("close_token_ids", [])
    if any(a["source"] == "forced" and a["token_id"] not in closing for a in actions):
        yield f"{where}.action_tokens hold a forced id outside close_token_ids"
    if len(json.dumps(value.get("template_invocation", {})).encode()) > 1_048_576:
        yield f"{where}.template_invocation is too large"
    if sum(len(text.encode()) for text in value["sampling"]["stop"]) > 16384:
        yield f"{where}.sampling.stop is too large"
    policy = value["behavior_policy"]
    names = (policy["served_model_id"], policy["implementation"], policy.get("adapter", {}).get("name", "-"))
    if any(text != text.strip() or len(text.encode()) > 256 for text in names):
        yield f"{where}.behavior_policy has an identity text with outer space or over 256 bytes"
