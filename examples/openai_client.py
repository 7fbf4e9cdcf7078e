"""The `openai` package against kiln: an answer with its reasoning, a stream, a parsed answer, a tool call.

    python examples/openai_client.py [URL]

Needs a running server and `pip install openai`.
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionToolParam
from pydantic import BaseModel

URL = "http://127.0.0.1:8420"
MODEL = "tiny-reasoner"
ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Answer(BaseModel):
    answer: int


def main(url: str = URL) -> None:
    client = OpenAI(base_url=f"{url}/v1/openai", api_key="none")
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "3+8-2+7=?"}],
        temperature=0,
        extra_body={"thinking_budget_tokens": 64},
    )
    message = reply.choices[0].message
    # The client has no field of its own for the reasoning; it passes on what the server sent.
    print("thought:", (message.model_extra or {})["reasoning_content"].replace("\n", ", "))
    print("answer: ", message.content)
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "5-3+9=?"}], temperature=0, stream=True
    )
    print("stream: ", *(chunk.choices[0].delta.content or "" for chunk in stream), sep="")
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "3+8=? Answer in JSON."}],
        temperature=0,
        response_format=Answer,
    )
    print("parsed: ", repr(parsed.choices[0].message.parsed))
    called = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Add 3 and 4."}],
        temperature=0,
        tools=[ADD],
        tool_choice="required",
    )
    for call in called.choices[0].message.tool_calls or []:
        if call.type == "function":
            print("called: ", call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    main(*sys.argv[1:2])
