"""What every answer under `/v1/openai` must keep to, whoever asked."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from kiln import contracts

CHAT = "/v1/openai/chat/completions"
TEXT = "/v1/openai/completions"


@cache
def _chunk_validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(contracts.load(contracts.OPENAI_CHUNK)))


def problems(path: str, asked: Any, body: Any, *, streamed: bool) -> list[str]:
    """Everything wrong with a successful answer. `body` is its JSON, or the bytes of its stream."""
    if path == CHAT:
        return stream_problems(asked, body) if streamed else response_problems(asked, body)
    if path == TEXT and streamed and not events(body)[1]:
        return ["a stream without its end mark"]
    return [] if streamed else nulls(body) if path != TEXT else []


def response_problems(asked: Any, body: Any) -> list[str]:
    found = nulls(body)
    if [choice["index"] for choice in body["choices"]] != list(range(asked.get("n") or 1)):
        found.append("choices are not those asked for, in order")
    for choice in body["choices"]:
        message = choice["message"]
        if choice["finish_reason"] == "tool_calls" and "tool_calls" not in message:
            found.append("finish_reason tool_calls without calls")
        if ("logprobs" in choice) != bool(asked.get("logprobs")):
            found.append("logprobs come exactly when asked for")
        for call in message.get("tool_calls", []):
            json.loads(call["function"]["arguments"])
    found += _usage_problems(body["usage"])
    if ("service_tier" in body) != (asked.get("service_tier") is not None):
        found.append("service_tier is echoed exactly when sent")
    return found


def stream_problems(asked: Any, raw: bytes) -> list[str]:
    chunks, done = events(raw)
    if chunks and "error" in chunks[-1]:
        return ["a failed stream with an end mark"] if done else []
    found = [] if done else ["no end mark"]
    for chunk in chunks:
        found += [f"{e.json_path}: {e.message}" for e in _chunk_validator().iter_errors(chunk)]
    if found:
        return found
    if len({(c["id"], c["created"], c["model"]) for c in chunks}) != 1:
        found.append("chunks differ in id, created or model")
    return found + _order_problems(asked, chunks)


def _order_problems(asked: Any, chunks: list[Any]) -> list[str]:
    found = []
    wants_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
    ended: set[int] = set()
    cut: set[int] = set()
    calls: dict[tuple[int, int], str] = {}
    begun: set[int] = set()
    for number, chunk in enumerate(chunks):
        if "usage" in chunk or not chunk["choices"]:
            if chunk["choices"] or number != len(chunks) - 1 or not wants_usage:
                found.append("usage comes last, without choices, and when asked for")
            found += _usage_problems(chunk["usage"])
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice["delta"]
            if index in ended:
                found.append(f"choice {index} goes on after its end")
            if ("role" in delta) != (index not in begun):
                found.append(f"choice {index}: the role comes with the first chunk")
            begun.add(index)
            if "finish_reason" in choice:
                ended.add(index)
                if choice["finish_reason"] == "length":
                    cut.add(index)
            if "logprobs" in choice and not asked.get("logprobs"):
                found.append("logprobs were not asked for")
            for call in delta.get("tool_calls", []):
                place = (index, call["index"])
                if ("id" in call) != (place not in calls) or ("name" in call["function"]) != ("id" in call):
                    found.append(f"call {place}: id and name come once, with its first piece")
                calls[place] = calls.get(place, "") + call["function"].get("arguments", "")
    if wants_usage and (not chunks or "usage" not in chunks[-1]):
        found.append("no usage chunk")
    if ended != set(range(asked.get("n") or 1)):
        found.append(f"the choices {ended} ended")
    for (index, _), text in calls.items():
        # Of a call that streams live a limit may leave a part.
        if index not in cut:
            json.loads(text)
    for index in begun:
        positions = [position for i, position in calls if i == index]
        if positions != list(range(len(positions))):
            found.append(f"choice {index} counts its calls {positions}")
    return found


def _usage_problems(usage: Any) -> list[str]:
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        return [f"usage does not add up: {usage}"]
    details = usage["prompt_tokens_details"]
    if details["cached_tokens"] + details["cache_write_tokens"] > usage["prompt_tokens"]:
        return [f"more prompt tokens cached and written than there are: {usage}"]
    if usage["completion_tokens_details"]["reasoning_tokens"] > usage["completion_tokens"]:
        return [f"more thought than generated: {usage}"]
    return []


def nulls(value: Any, where: str = "$") -> list[str]:
    """Every null in a JSON value."""
    if value is None:
        return [f"{where} is null"]
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in nulls(inner, f"{where}.{key}")]
    if isinstance(value, list):
        return [found for i, inner in enumerate(value) for found in nulls(inner, f"{where}[{i}]")]
    return []


def events(raw: bytes) -> tuple[list[Any], bool]:
    """The data events of a stream, and whether it ended with the end mark."""
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    done = events[-1:] == [b"[DONE]"]
    return [json.loads(event) for event in events[: len(events) - done]], done
