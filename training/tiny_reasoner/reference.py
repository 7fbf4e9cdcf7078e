"""Writes the fixtures: held-out problems, reference ids and logits of transformers and PEFT.

`python -m training.tiny_reasoner.reference models/tiny-reasoner --fixtures tests/fixtures`

Ids are greedy, one prompt at a time, with matrices rounded to float16 and computed in float32.
Each case carries its `lead`: the smallest gap between the two best logits on its way. Cases
with a lead below MIN_LEAD are left out, since another order of additions may flip them.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from .dialogue import Dialogue
from .encoding import Encoder
from .evaluate import HELD_OUT_EACH, HELD_OUT_SEED
from .generate import Generator, greedy_alone
from .model import load_model, load_tokenizer, round_to_half
from .problems import Problem, draw_held_out
from .tokenizer import render
from .tools import draw_tool_call

MOST = 160
MIN_LEAD = 0.02
LOGIT_CASES = 3


def user(kind: str, text: str, system: str | None = None) -> Dialogue:
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Dialogue(kind, messages, "", "")


def tool_result(rng: random.Random) -> Dialogue:
    """A request for one call, the call itself, and an invented result."""
    while True:
        dialogue = draw_tool_call(rng)
        if [call["name"] for call in dialogue.calls] == ["add"]:
            break
    call = dialogue.calls[0]
    numbers = call["arguments"]
    dialogue.kind = "tool result"
    dialogue.messages += [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": str(numbers["a"] + numbers["b"])},
    ]
    return dialogue


def cases(problems: Iterable[Problem]) -> Iterator[tuple[int, Iterator[tuple[Dialogue, bool]]]]:
    """How many of each group are wanted, and candidates for it: (dialogue, thinking)."""
    rng = random.Random(17)
    sums = iter(problems)
    talk = ["Hello!", "How are you?", "Who are you?", "Thank you!", "Tell me a joke."]
    talk += ["What can you do?", "Count to 12.", "Say hello in Japanese.", "Send me an emoji."]
    helpful = "You are a helpful assistant."
    yield 14, ((user("arithmetic", f"{p.text}=?"), True) for p in sums)
    yield 4, ((user("arithmetic", f"{p.text}=?", helpful), True) for p in sums)
    yield 6, ((user("arithmetic", f"{p.text}=?"), False) for p in sums)
    yield 6, ((user("json", f"{p.text}=? Answer in JSON."), True) for p in sums)
    yield 2, ((user("json", f"{p.text}=? Answer in JSON."), False) for p in sums)
    yield 6, ((user("small talk", text), True) for text in talk)
    yield 2, ((user("small talk", text), False) for text in talk)
    yield 7, ((draw_tool_call(rng), True) for _ in range(60))
    yield 3, ((tool_result(rng), True) for _ in range(60))


class Writer:
    """Runs one model over candidate prompts."""

    def __init__(self, model: torch.nn.Module, encoder: Encoder) -> None:
        self.model = model
        self.encoder = encoder
        self.generator = Generator(model, encoder.tokenizer)
        self.left_out = 0

    def case(self, dialogue: Dialogue, thinking: bool) -> dict[str, Any]:
        prompt = self.encoder.prompt(dialogue, thinking=thinking)
        written, lead = greedy_alone(self.model, prompt, MOST, self.generator.ends)
        return {
            "kind": dialogue.kind,
            "messages": dialogue.messages,
            "tools": dialogue.tools,
            "template": {"enable_thinking": thinking},
            "text": render(dialogue, thinking=thinking),
            "prompt_ids": prompt,
            "output_ids": written,
            "output_text": self.generator.text(written),
            "lead": round(lead, 4),
        }

    def pick(self, count: int, candidates: Iterator[tuple[Dialogue, bool]]) -> list[dict[str, Any]]:
        picked: list[dict[str, Any]] = []
        while len(picked) < count:
            case = self.case(*next(candidates))
            if case["lead"] >= MIN_LEAD:
                picked.append(case)
            else:
                self.left_out += 1
        return picked

    @torch.inference_mode()
    def logits(self, prompt: list[int]) -> list[float]:
        row = self.model(input_ids=torch.tensor([prompt])).logits[0, -1]
        return [round(value, 5) for value in row.tolist()]


def write(path: Path, cases: list[dict[str, Any]], left_out: int) -> None:
    lines = [json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases]
    head = json.dumps(
        {"model": "tiny-reasoner", "max_tokens": MOST, "min_lead": MIN_LEAD, "left_out": left_out}
    )
    body = ",\n".join(lines)
    path.write_text(f'{head[:-1]}, "cases": [\n{body}\n]}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--fixtures", type=Path, default=Path("tests/fixtures"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.fixtures.mkdir(parents=True, exist_ok=True)

    problems = draw_held_out(HELD_OUT_SEED, HELD_OUT_EACH)
    lines = [
        json.dumps({"prompt": f"{p.text}=?", "answer": p.answer, "terms": len(p.terms)})
        for p in problems
    ]
    body = ",\n".join(lines)
    (options.fixtures / "heldout.json").write_text(f"[\n{body}\n]\n", encoding="utf-8")

    base = load_model(options.folder)
    round_to_half(base)
    encoder = Encoder(load_tokenizer(options.folder))
    writer = Writer(base, encoder)
    found = [case for count, group in cases(problems) for case in writer.pick(count, group)]
    write(options.fixtures / "reference.json", found, writer.left_out)

    if options.adapter:
        sums = iter(problems[100:])
        groups = [
            (20, ((user("arithmetic", f"{p.text}=?"), True) for p in sums)),
            (4, ((user("arithmetic", f"{p.text}=?"), False) for p in sums)),
            (3, ((user("json", f"{p.text}=? Answer in JSON."), True) for p in sums)),
            (3, ((user("small talk", t), True) for t in ("Hello!", "Thank you!", "Who are you?"))),
        ]
        prompts = [
            encoder.prompt(user("", f"{p.text}=?")) for p in problems[100 : 100 + LOGIT_CASES]
        ]
        plain = [writer.logits(prompt) for prompt in prompts]
        adapted = Writer(PeftModel.from_pretrained(base, options.adapter).eval(), encoder)
        found = [case for count, group in groups for case in adapted.pick(count, group)]
        numbers = [
            {"prompt_ids": prompt, "base": before, "adapter": adapted.logits(prompt)}
            for prompt, before in zip(prompts, plain, strict=True)
        ]
        path = options.fixtures / "reference-adapter.json"
        write(path, found, adapted.left_out)
        document = path.read_text(encoding="utf-8").rstrip().removesuffix("}")
        path.write_text(
            f'{document},\n"logits": {json.dumps(numbers, separators=(",", ":"))}}}\n',
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
