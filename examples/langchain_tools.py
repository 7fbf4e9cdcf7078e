"""LangChain's ChatOpenAI against kiln: a stream, a tool call, structured output.

    python examples/langchain_tools.py [URL]

Needs a running server and `pip install langchain-openai`.
"""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

URL = "http://127.0.0.1:8420"


class Answer(BaseModel):
    """The answer to a sum."""

    answer: int


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def main(url: str = URL) -> None:
    model = ChatOpenAI(
        model="tiny-reasoner", base_url=f"{url}/v1/openai", api_key=SecretStr("none"), temperature=0
    )
    print("stream:    ", *(piece.content for piece in model.stream("3+8-2+7=?")), sep="")
    message = model.bind_tools([add]).invoke("Add 3 and 4.")
    for call in message.tool_calls:
        print("called:    ", call["name"], call["args"], "->", add(**call["args"]))
    structured = model.with_structured_output(Answer, method="json_schema")
    print("structured:", repr(structured.invoke("3+8=?")))


if __name__ == "__main__":
    main(*sys.argv[1:2])
