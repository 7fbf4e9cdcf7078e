"""The examples run as they stand, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.server import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
# Whatever asks for another machine finds nobody there.
NOWHERE = "http://127.0.0.1:9"
SAID = {
    "openai_client.py": ["answer:  The answer is 16.", "parsed:  Answer(answer=11)", "'a': 3, 'b': 4"],
    "langchain_tools.py": ["The answer is 16.", "-> 7", "Answer(answer="],
    "litellm_chat.py": ["answer:  The answer is 16.", "'a': 3, 'b': 4"],
    "pydantic_ai_agent.py": ["called: add(3, 4)", "stream: The answer is 16.", "Answer(answer="],
    "rollout.py": ["largest difference: "],
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_an_example(profile_server: Server, name: str) -> None:
    environment = {**os.environ, "HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name, profile_server.url],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    for said in SAID[name]:
        assert said in ran.stdout, ran.stdout
