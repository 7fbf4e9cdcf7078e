"""`make curve`: accuracy of the bundled model against the thinking budget, measured through the server.

With `--write` the table is put into the model card, between its curve marks.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from bench.serving import chat_all, settings, user
from kiln.cli.embedded import embedded_server

ROOT = Path(__file__).parent.parent
HELD_OUT = ROOT / "tests" / "fixtures" / "heldout.json"
CARD = ROOT / "models" / "tiny-reasoner" / "README.md"
BUDGETS: tuple[int | None, ...] = (0, 8, 16, 24, 32, 48, 64, 96, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=220, help="how many held-out problems")
    parser.add_argument("--write", action="store_true", help="write the table into the model card")
    options = parser.parse_args()
    problems = json.loads(HELD_OUT.read_text())[: options.problems]
    with embedded_server(settings()) as url:
        columns = [("off", measure(url, problems, chat_template_kwargs={"enable_thinking": False}))]
        for budget in BUDGETS:
            name = "none" if budget is None else str(budget)
            columns.append((name, measure(url, problems, thinking_budget_tokens=budget)))
            print(f"budget {name}: {columns[-1][1]:.3f}", flush=True)
    table = to_table(columns, len(problems))
    print(table)
    if options.write:
        text = CARD.read_text()
        marked = re.compile(r"(<!-- curve:begin -->\n).*?(<!-- curve:end -->)", re.S)
        CARD.write_text(marked.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text))


def measure(url: str, problems: list[dict[str, object]], **fields: object) -> float:
    """The share of right answers, greedy, 16 at a time."""
    bodies = [user(str(p["prompt"]), temperature=0, max_tokens=256, **fields) for p in problems]
    answers = chat_all(url, bodies, concurrency=16)
    right = sum(
        is_right(answer["choices"][0]["message"]["content"], problem["answer"])
        for answer, problem in zip(answers, problems, strict=True)
    )
    return right / len(problems)


def is_right(content: str, expected: object) -> bool:
    return re.fullmatch(rf"The answer is {expected}\.", content.strip()) is not None


def to_table(columns: list[tuple[str, float]], count: int) -> str:
    names = " | ".join(name for name, _ in columns)
    values = " | ".join(f"{value:.2f}" for _, value in columns)
    rule = "|".join("---" for _ in range(len(columns) + 1))
    return (
        f"Greedy, {count} held-out problems, through `POST /v1/chat/completions`.\n\n"
        f"| thinking budget (tokens) | {names} |\n|{rule}|\n| accuracy | {values} |"
    )


if __name__ == "__main__":
    main()
