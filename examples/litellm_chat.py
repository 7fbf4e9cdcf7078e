"""LiteLLM against kiln: an answer with its reasoning, a stream, a tool call.

    python examples/litellm_chat.py [URL]

Needs a running server and `pip install litellm`.
"""

from __future__ import annotations

import json
import os
import sys

# LiteLLM fetches a table of prices when it is imported, unless it is told to use its own.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm

URL = "http://127.0.0.1:8420"
ADD = {
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


def main(url: str = URL) -> None:
    server = {"model": "openai/tiny-reasoner", "api_base": f"{url}/v1/openai", "api_key": "none"}
    question = [{"role": "user", "content": "3+8-2+7=?"}]
    reply = litellm.completion(**server, messages=question, temperature=0)
    print("thought:", reply.choices[0].message.reasoning_content.replace("\n", ", "))
    print("answer: ", reply.choices[0].message.content)
    stream = litellm.completion(**server, messages=question, temperature=0, stream=True)
    print("stream: ", *(chunk.choices[0].delta.content or "" for chunk in stream), sep="")
    called = litellm.completion(
        **server,
        messages=[{"role": "user", "content": "Add 3 and 4."}],
        temperature=0,
        tools=[ADD],
        tool_choice="required",
    )
    for call in called.choices[0].message.tool_calls:
        print("called: ", call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    main(*sys.argv[1:2])
