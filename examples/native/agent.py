"""An agent with a skill, a tool and a memory, asked with httpx.

    kiln serve --model MODEL --config examples/native/kiln.toml &
    python examples/native/agent.py [URL]

The agent is examples/native/agents/shopper.toml: it pins the skill `unit-price`, may call `calc_arithmetic`,
and remembers what it hears under its own name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx

URL = "http://127.0.0.1:8420"
KEY = os.environ.get("KILN_API_KEY")


def events(client: httpx.Client, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The named events of one exchange."""
    with client.stream("POST", "/lmkit/v1/chat", json={**body, "stream": True}) as response:
        if response.is_error:
            response.read()
            raise SystemExit(response.json()["error"])
        name = ""
        for line in response.iter_lines():
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                yield name, json.loads(value)


def ask(client: httpx.Client, messages: list[dict[str, Any]], question: str) -> list[dict[str, Any]]:
    """Ask, print what happens, and give the transcript with what the exchange added."""
    messages = [*messages, {"role": "user", "content": question}]
    print(f"> {question}")
    for name, event in events(client, {"agent": "shopper", "messages": messages}):
        if name == "delta" and event["t"] == "text":
            print(event["d"], end="", flush=True)
        elif name == "skill":
            print(f"[skill {event['name']} {event['status']}]")
        elif name == "tool_use":
            print(f"\n[{event['name']} {event['status']}: {event.get('args') or event.get('result')}]")
        elif name == "done":
            print(f"\n[{event['tokens']} tokens, {event['rate']:.0f} a second, {event['reason']}]\n")
            added = event.get("messages") or [{"role": "assistant", "content": event["text"]}]
            messages = [*messages, *added]
        elif name == "error":
            raise SystemExit(event["error"])
    return messages


def main(url: str = URL) -> None:
    headers = {"authorization": f"Bearer {KEY}"} if KEY else {}
    with httpx.Client(base_url=url, headers=headers, timeout=600) as client:
        ask(client, [], "We are three at home and drink two litres of milk a day.")
        # A new conversation: the agent knows of the first from its memory alone.
        transcript = ask(client, [], "6 litres of milk cost 5.40, and 10 litres 8.50. Which pack for a week?")
        ask(client, transcript, "And if the large pack costs 9.50?")
        facts = client.get("/lmkit/v1/memory/shopper").json()["facts"]
        print("What the agent remembers:", *(fact["text"] for fact in facts), sep="\n- ")


if __name__ == "__main__":
    main(*sys.argv[1:])
