"""instructor against kiln: a typed answer, by JSON Schema and by a tool.

    python examples/instructor_answer.py [URL]

Needs a running server and `pip install instructor`.
"""

from __future__ import annotations

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

URL = "http://127.0.0.1:8420"


class Answer(BaseModel):
    answer: int


def main(url: str = URL) -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        plain = OpenAI(base_url=f"{url}/v1/openai", api_key="none")
        client = instructor.from_openai(plain, mode=mode)
        answer = client.chat.completions.create(
            model="tiny-reasoner",
            messages=[{"role": "user", "content": "3+8=? Answer in JSON."}],
            response_model=Answer,
            temperature=0,
            max_retries=0,
        )
        print(f"{mode.name.lower()}:", repr(answer))


if __name__ == "__main__":
    main(*sys.argv[1:2])
