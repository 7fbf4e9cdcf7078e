"""Measures a trained directory: `python -m training.tiny_reasoner.evaluate models/tiny-reasoner`.

Greedy, weights rounded to float16 as the GGUF file holds them, computed in float32, on
held-out sums and freshly drawn requests. `--card` writes the tables into a model card.
"""

import argparse
import json
import random
import re
import statistics
from pathlib import Path
from typing import Any

import torch

from .dialogue import Dialogue
from .dialogues import draw_dialogue
from .encoding import Encoder
from .generate import Generator
from .model import load_model, load_tokenizer, round_to_half
from .problems import (
    Problem,
    draw_held_out,
    draw_problem,
    json_form,
    parse_answer,
    parse_calls,
)
from .tools import TOOLS, draw_tool_call
from .words import CITIES, HELD_OUT_CITIES

HELD_OUT_SEED = 7
HELD_OUT_EACH = 22
BUDGETS = (0, 8, 16, 24, 32, 48, 64, 96)
ROOM = 60  # tokens left for the answer after a forced close


def user(text: str) -> Dialogue:
    return Dialogue("plain", [{"role": "user", "content": text}], "", "")


class Measure:
    """All measurements of one model."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        model: torch.nn.Module = load_model(folder)
        round_to_half(model)
        if adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter).eval()
        tokenizer = load_tokenizer(folder)
        self.encoder = Encoder(tokenizer)
        self.generator = Generator(model, tokenizer)

    def answers(
        self, questions: list[str], *, thinking: bool = True, budget: int | None = None
    ) -> list[str]:
        prompts = [self.encoder.prompt(user(text), thinking=thinking) for text in questions]
        most = 200 if budget is None else budget + ROOM
        return self.generator.texts(prompts, most, budget)

    def right(self, problems: list[Problem], texts: list[str]) -> float:
        hits = [parse_answer(t) == p.answer for p, t in zip(problems, texts, strict=True)]
        return sum(hits) / len(hits)

    def curve(self, problems: list[Problem]) -> dict[str, Any]:
        """Share of right answers by budget, and the natural thinking lengths in tokens."""
        questions = [f"{problem.text}=?" for problem in problems]
        rows: dict[str, float] = {}
        ended = 0
        rows["off"] = self.right(problems, self.answers(questions, thinking=False))
        for budget in BUDGETS:
            texts = self.answers(questions, budget=budget)
            rows[str(budget)] = self.right(problems, texts)
            ended += sum(text.endswith("<|im_end|>") for text in texts)
        texts = self.answers(questions)
        rows["none"] = self.right(problems, texts)
        lengths = [len(self.encoder.ids(text.split("</think>")[0])) for text in texts]
        return {
            "problems": len(problems),
            "curve": rows,
            "ended after a forced close": ended / len(problems) / len(BUDGETS),
            "thinking tokens": [min(lengths), statistics.median(lengths), max(lengths)],
        }

    def exact_calls(self, wanted: list[Dialogue], *, thinking: bool = True) -> tuple[float, float]:
        """Shares of replies with exactly the wanted calls, and with readable calls only."""
        prompts = [self.encoder.prompt(dialogue, thinking=thinking) for dialogue in wanted]
        made = [parse_calls(text) for text in self.generator.texts(prompts)]
        exact = _share(calls == w.calls for calls, w in zip(made, wanted, strict=True))
        return exact, _share(bool(calls) and all(calls) for calls in made)

    def tools(self, count: int) -> dict[str, Any]:
        """Exact calls on fresh requests in the training's mix of tools, and tool by tool."""
        rng = random.Random(11)
        usual = [draw_tool_call(rng, CITIES) for _ in range(count)]
        exact, readable = self.exact_calls(usual)
        result: dict[str, Any] = {
            "requests": count,
            "exact": exact,
            "readable": readable,
            "exact, thinking disabled": self.exact_calls(usual, thinking=False)[0],
        }
        for name in TOOLS:
            ones = [d for d in usual if len(d.calls) == 1 and d.calls[0]["name"] == name]
            result[name] = [self.exact_calls(ones)[0], len(ones)] if ones else [0.0, 0]
        twos = [dialogue for dialogue in usual if len(dialogue.calls) == 2]
        result["two calls"] = [self.exact_calls(twos)[0], len(twos)]
        cities = ["get_weather", "get_time"]
        unseen = [draw_tool_call(rng, HELD_OUT_CITIES, cities) for _ in range(count // 4)]
        result["unseen cities"] = [self.exact_calls(unseen)[0], len(unseen)]
        return result

    def replies(self, kind: str, count: int) -> float:
        """Share of replies written exactly as wanted, on fresh dialogues of a kind."""
        rng = random.Random(13)
        wanted: list[Dialogue] = []
        mix = {"tools": 1.0} if kind == "tool result" else {"small talk": 1.0}
        while len(wanted) < count:
            dialogue = draw_dialogue(rng, 12, mix)
            if dialogue.kind == kind:
                wanted.append(dialogue)
        texts = self.generator.texts([self.encoder.prompt(dialogue) for dialogue in wanted], 300)
        return _share(
            text.split("</think>\n\n")[-1] == f"{dialogue.reply}<|im_end|>"
            for text, dialogue in zip(texts, wanted, strict=True)
        )

    def json_answers(self, count: int) -> dict[str, float]:
        rng = random.Random(12)
        problems = [draw_problem(rng, rng.randint(2, 12), held_out=True) for _ in range(count)]
        wishes = ["Answer in JSON.", "Reply as JSON.", "JSON please."]
        texts = self.answers([f"{p.text}=? {rng.choice(wishes)}" for p in problems])
        visible = [text.replace("<|im_end|>", "") for text in texts]
        return {
            "requests": count,
            "right form": _share(map(json_form, visible)),
            "right answer": self.right(problems, visible),
        }

    def second_turn(self, count: int) -> float:
        rng = random.Random(14)
        pairs = [
            [draw_problem(rng, rng.randint(2, 12), held_out=True) for _ in range(2)]
            for _ in range(count)
        ]
        prompts = []
        for first, second in pairs:
            dialogue = user(f"{first.text}=?")
            dialogue.messages += [
                {"role": "assistant", "content": f"The answer is {first.answer}."},
                {"role": "user", "content": f"{second.text}=?"},
            ]
            prompts.append(self.encoder.prompt(dialogue))
        return self.right([second for _, second in pairs], self.generator.texts(prompts))

    def endless(self) -> dict[str, Any]:
        prompt = [self.encoder.prompt(user("Think forever."))]
        free = self.generator.ids(prompt, 1500)[0]
        after = {}
        for budget in (0, 16, 64, 100, 300, 600):
            text = self.generator.texts(prompt, budget + ROOM, budget)[0]
            after[str(budget)] = text.split("</think>", 1)[-1][:60]
        close = set(self.generator.close)
        return {"tokens unclosed": len(free) if not close & set(free) else 0, "after close": after}

    def style(self, count: int) -> dict[str, float]:
        """Share of answers in the adapter's style, and of right ones."""
        problems = draw_held_out(HELD_OUT_SEED, HELD_OUT_EACH)[:count]
        texts = self.answers([f"{problem.text}=?" for problem in problems])
        pattern = re.compile(r"\n\nIt is -?\d+\. You are welcome!<\|im_end\|>$")
        return {
            "problems": count,
            "in style": _share(bool(pattern.search(text)) for text in texts),
            "right": self.right(problems, texts),
        }


def _share(hits: Any) -> float:
    found = list(hits)
    return sum(found) / len(found) if found else 0.0


def measure_all(folder: Path, *, quick: bool = False) -> dict[str, Any]:
    measure = Measure(folder)
    problems = draw_held_out(HELD_OUT_SEED, 8 if quick else HELD_OUT_EACH)
    small = 60 if quick else 200
    return {
        "arithmetic": measure.curve(problems),
        "tool calls": measure.tools(small),
        "tool results": measure.replies("tool result", small),
        "json": measure.json_answers(small),
        "second turn": measure.second_turn(small),
        "small talk": measure.replies("small talk", small),
        "other scripts": measure.replies("scripts", 24),
        "think forever": measure.endless(),
    }


def curve_table(result: dict[str, Any]) -> str:
    """The accuracy-by-budget table in Markdown."""
    rows = result["arithmetic"]["curve"]
    head = "| thinking budget (tokens) | " + " | ".join(rows) + " |"
    line = "|---" * (len(rows) + 1) + "|"
    body = "| right answers | " + " | ".join(f"{share:.1%}" for share in rows.values()) + " |"
    return "\n".join([head, line, body])


def rewrite_section(text: str, name: str, body: str) -> str:
    """Replaces what stands between `<!-- name:begin -->` and `<!-- name:end -->`."""
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{body}\n{found[2]}", text)


def figures_table(result: dict[str, Any]) -> str:
    """The other figures in Markdown."""
    tools, answers, sums = result["tool calls"], result["json"], result["arithmetic"]
    low, middle, high = sums["thinking tokens"]
    rows = [
        ("arithmetic, full thinking", sums["curve"]["none"], sums["problems"]),
        ("arithmetic, thinking disabled", sums["curve"]["off"], sums["problems"]),
        ("arithmetic in a second turn", result["second turn"], answers["requests"]),
        ("tool calls, name and all arguments exact", tools["exact"], tools["requests"]),
        *((f"… `{name}`", *tools[name]) for name in TOOLS),
        ("… two calls in one reply", *tools["two calls"]),
        ("… cities never seen in training", *tools["unseen cities"]),
        ("… readable calls", tools["readable"], tools["requests"]),
        ("… exact with thinking disabled", tools["exact, thinking disabled"], tools["requests"]),
        ("JSON on request, right form", answers["right form"], answers["requests"]),
        ("JSON on request, right answer", answers["right answer"], answers["requests"]),
        ("reply to a tool result, exact", result["tool results"], tools["requests"]),
    ]
    lines = ["| what | share | cases |", "|---|---|---|"]
    lines += [f"| {name} | {share:.1%} | {count} |" for name, share, count in rows]
    lines += ["", f"Thinking takes {low} to {high} tokens, {middle:g} in the median."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapter", type=Path, help="measure this adapter's style only")
    parser.add_argument("--card", type=Path, help="model card to write the tables into")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.adapter:
        print(json.dumps(Measure(options.folder, options.adapter).style(40), indent=1))
        return
    result = measure_all(options.folder, quick=options.quick)
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if options.card:
        text = options.card.read_text(encoding="utf-8")
        text = rewrite_section(text, "curve", curve_table(result))
        text = rewrite_section(text, "figures", figures_table(result))
        options.card.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
