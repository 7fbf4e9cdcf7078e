"""Requests that nobody would think of: every one is answered as described or refused, none is a 5xx.

KILN_FUZZ_EXAMPLES asks for more of them; they are the same every time unless KILN_FUZZ_RANDOM is set.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servers.traffic import native_stream_problems

from .api import CHAT, SKIP, Native

EXAMPLES = int(os.environ.get("KILN_FUZZ_EXAMPLES", "250"))

words = st.sampled_from(
    [
        "",
        "1+1=?",
        "</think>",
        "<|im_end|>",
        "<tool_call>{",
        "\x00",
        "é漢\U0001f600",
        "{{ 1 }}",
        "a" * 300,
        "add",
    ]
)
text = words | st.text(max_size=12)  # lone surrogates included
number = (
    st.sampled_from([0, 1, -1, 0.5, 2, 8, 1e-30, 1e30, -100, 100, 2**31, 2**32, 2**64])
    | st.floats()
    | st.integers(-(2**70), 2**70)
)
anything = st.recursive(
    st.none() | st.booleans() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def either(likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what belongs there, sometimes anything at all."""
    return st.one_of(likely, likely, likely, anything)


call = st.fixed_dictionaries(
    {"name": either(text), "arguments": either(st.sampled_from(["{}", '{"a": 1}', "{"]) | st.just({}))}
)
file = st.fixed_dictionaries({"name": either(text)}, optional={"text": either(text), "data": either(text)})
message = st.fixed_dictionaries(
    {"role": either(st.sampled_from(["user", "assistant", "system", "tool"]))},
    optional={
        "content": either(text),
        "files": either(st.lists(file, max_size=2)),
        "images": either(st.just([])),
        "thinking": either(text),
        "tool_calls": either(st.lists(call, max_size=2)),
        "tool_call_id": either(text),
        "name": either(text),
    },
)
tool = st.fixed_dictionaries(
    {"name": either(st.sampled_from(["add", "f", "activate_skill"]))},
    optional={"description": either(text), "parameters": either(st.just({"type": "object"}))},
)
names = st.lists(st.sampled_from(["add", "search", "forbidden", "nope"]) | text, max_size=3)
flag = st.booleans()
small = st.integers(0, 6)
share = st.floats(0, 1)
requests = st.fixed_dictionaries(
    # A limit is nearly always there, so that no example takes long.
    {
        "messages": st.lists(message, min_size=1, max_size=3).map(lambda m: [*m, {"role": "user"}])
        | either(st.lists(message, max_size=3)),
        "max_tokens": small,
    },
    optional={
        "model": either(st.sampled_from(["", " ", "tiny-reasoner"])),
        "system": either(text),
        "temperature": either(share),
        "top_p": either(share),
        "top_k": either(small),
        "min_p": either(share),
        "seed": either(st.integers(0, 2**32 - 1)),
        "n": either(st.integers(1, 3)),
        "logprobs": either(flag),
        "top_logprobs": either(small),
        "logit_bias": either(st.dictionaries(text | st.sampled_from(["1", "767"]), st.integers(-100, 100))),
        "stop": either(st.lists(text, max_size=2)),
        "frequency_penalty": either(share),
        "presence_penalty": either(share),
        "repeat_penalty": either(st.floats(0.5, 2)),
        "reasoning": either(st.sampled_from(["none", "low", "medium", "high"])),
        "response_format": either(st.sampled_from([{"type": "text"}, {"type": "json_object"}])),
        "tools": either(st.lists(tool, max_size=2)),
        "server_tools": either(names),
        "tool_choice": either(st.sampled_from(["auto", "none", "required"]) | tool),
        "stream": either(flag),
        "request_id": either(st.sampled_from(["a", "b"])),
        "skill": either(text),
        "skills": either(names),
        "skill_inputs": either(st.dictionaries(text, text, max_size=2)),
        "memory": either(st.just("mine")),
        "memory_store": either(st.just("default")),
        "agent": either(text),
        "thinking_budget_tokens": either(small),
        "thinking_budget_ms": either(small),
        "unknown": anything,
    },
)

fuzzing = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="KILN_FUZZ_RANDOM" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@fuzzing
@given(body=requests)
def test_chat(native: Native, body: dict[str, Any]) -> None:
    # The escapes of lone surrogates, and NaN, go out as Python writes them.
    content = json.dumps(body).encode()
    response = native.server.client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        assert native_stream_problems(response.content) == []


@fuzzing
@given(body=anything | st.fixed_dictionaries({"request_id": anything}))
def test_skip(native: Native, body: Any) -> None:
    content = json.dumps(body).encode()
    response = native.server.client.post(SKIP, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404), response.text
