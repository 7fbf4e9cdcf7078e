"""MCP servers that misbehave, spoken by hand: `python mcp_odd.py BEHAVIOUR`.

silent          never says a word
exit            ends at once
garbage         answers everything with lines that are no JSON
nonsense        answers everything with JSON that makes no sense
stubborn        silent, and deaf to the end of its input and to SIGTERM
hang            works, but its tool never answers and then nothing does
die             works, but its tool ends the process
invalid         works, but its tool answers with something that is no result
names           works, and has tools with odd names
endless-line    writes one line without end
endless-lines   writes lines that are no messages, without end
banner          works, after it has written some lines that are no messages
parent          works, and its tool starts a process that outlives it, and tells its number
changes         works, and its tool gets another description with every call, which it tells
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

BEHAVIOUR = sys.argv[1]
CALLS: list[str] = []


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def answer(request: dict[str, Any], result: Any) -> None:
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}))


def tools() -> list[dict[str, Any]]:
    names = ["act", "pid"]
    if BEHAVIOUR == "names":
        names += ["files.read", "no\u00fc", "x" * 80, "files/read"]
    description = f"Called {len(CALLS)} times."
    return [{"name": n, "description": description, "inputSchema": {"type": "object"}} for n in names]


def call(request: dict[str, Any]) -> None:
    CALLS.append(request["params"]["name"])
    if BEHAVIOUR == "changes":
        say(json.dumps({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}))
    if request["params"]["name"] != "act" or BEHAVIOUR in ("names", "changes"):
        text = str(os.getpid()) if request["params"]["name"] == "pid" else request["params"]["name"]
        answer(request, {"content": [{"type": "text", "text": text}]})
    elif BEHAVIOUR == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        answer(request, {"content": [{"type": "text", "text": str(child.pid)}]})
    elif BEHAVIOUR == "hang":
        time.sleep(600)
    elif BEHAVIOUR == "die":
        os._exit(3)
    elif BEHAVIOUR == "invalid":
        answer(request, {"content": "none"})


def handle(request: dict[str, Any]) -> None:
    method = request.get("method")
    if BEHAVIOUR == "garbage":
        say("\x00\x01 garbage }{")
    elif BEHAVIOUR == "nonsense":
        answer(request, ["nonsense"])
    elif method == "initialize":
        told = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        answer(request, {**told, "serverInfo": {"name": "odd", "version": "1"}})
    elif method == "tools/list":
        answer(request, {"tools": tools()})
    elif method == "tools/call":
        call(request)
    else:
        error = {"code": -32601, "message": "Method not found"}
        say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}))


def main() -> None:
    if BEHAVIOUR == "exit":
        return
    if BEHAVIOUR == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if BEHAVIOUR in ("silent", "stubborn"):
        for _ in sys.stdin:
            pass
        time.sleep(600 if BEHAVIOUR == "stubborn" else 0)
        return
    while BEHAVIOUR.startswith("endless"):
        sys.stdout.write("x" * 65536 if BEHAVIOUR == "endless-line" else "stray\n" * 10_000)
    if BEHAVIOUR == "banner":
        say("Welcome!\n\n{}")
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            handle(request)


main()
