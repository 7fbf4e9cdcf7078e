"""Prints the transcripts of docs/native.md: the bundled model, answered by a server that this starts.

The model knows a tool named `add`, so the server gets one beside its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx

from kiln.cli.assembly import create_app
from kiln.cli.embedded import serve_app
from kiln.core.settings import Settings
from kiln.tools.tool import Category, ToolResult
from kiln.tools.toolbox import Toolbox

CHAT = "/lmkit/v1/chat"
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}


class Add:
    name = "add"
    category: Category = "pure"
    description = "Add two numbers"
    parameters: dict[str, Any] = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(str(arguments["a"] + arguments["b"]))


def show(client: httpx.Client, title: str, **body: Any) -> dict[str, Any]:
    """Print a request and its answer; runs of events of one kind are cut short."""
    print(f"## {title}\n\nPOST {CHAT}\n{json.dumps(body)}\n")
    response = client.post(CHAT, json=body)
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer: dict[str, Any] = response.json()
        print(f"{response.status_code}\n{json.dumps(answer)}\n")
        return answer
    before, run = "", 0
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\ndata: ")
        kind = name + json.loads(data).get("t", "")
        run = run + 1 if kind == before else 1
        before = kind
        if run < 3:
            print(f"{event}\n")
        elif run == 3:
            print("…\n")
    return {}


def main() -> None:
    app = create_app(Settings.default())
    with serve_app(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        app.state.kiln = replace(app.state.kiln, toolbox=Toolbox([Add()]))
        ask = {"messages": [{"role": "user", "content": "3+8-2+7=?"}], "temperature": 0}
        add = {"messages": [{"role": "user", "content": "What is 3+4?"}], "temperature": 0}
        show(client, "stream", **ask, reasoning="low", stream=True)
        show(client, "whole", **ask, reasoning="low")
        show(client, "server tool", **add, server_tools=["add", "web_search"], stream=True)
        tool = {"name": "add", "description": "Add two numbers", "parameters": Add.parameters}
        first = show(client, "client tool", **add, tools=[tool])["result"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "7"}
        messages = [*add["messages"], *first["messages"], result]  # type: ignore[misc]
        show(client, "its result", messages=messages, temperature=0, tools=[tool])
        show(client, "error", **ask, top_p=7)


if __name__ == "__main__":
    main()
