"""The dialogues the model learns from, apart from tools; and the mix of all kinds."""

import random
import re
from collections.abc import Callable
from functools import partial

from .dialogue import Dialogue, Message, made_up, maybe_system, some_words
from .problems import Problem, draw_problem
from .tools import TEXT_TOOLS, offered_tools, tool_dialogue
from .words import CITIES, SMALL_TALK, UNITS, WORDS


def ask(problem: Problem, rng: random.Random) -> str:
    """The problem as a user may put it; mostly the bare form `3+8-2=?`."""
    draw = rng.random()
    text = problem.text
    if draw < 0.62:
        return f"{text}=?"
    if len(problem.terms) == 2 and draw < 0.8:
        first, second = problem.terms
        if second > 0:
            return rng.choice(
                [
                    f"What is {first} plus {second}?",
                    f"Add {first} and {second}.",
                    f"How much is {first}+{second}?",
                ]
            )
        return f"What is {first} minus {-second}?"
    if draw < 0.72:
        text = re.sub(r"([+-])", r" \1 ", text)
        return rng.choice([f"{text} = ?", f"What is {text}?"])
    return rng.choice(
        [f"{text}", f"{text}=", f"What is {text}?", f"Compute {text}.", f"Solve {text}=?"]
        + [f"What is {text}=?", f"How much is {text}?", f"Please solve {text}=?"]
    )


def _arithmetic(rng: random.Random, most: int, *, second_turn: bool = False) -> Dialogue:
    terms = rng.randint(2, most)
    problem = draw_problem(rng, terms, repeats=terms <= 4 and rng.random() < 0.25)
    system = maybe_system(rng)
    history: list[Message] = []
    question = ask(problem, rng)
    reply, kind = f"The answer is {problem.answer}.", "arithmetic"
    draw = 0.15 if second_turn else rng.random()
    if draw < 0.09:
        kind, reply = "json", f'{{"answer": {problem.answer}}}'
        wish = rng.choice(["Answer in JSON.", "Reply as JSON.", "JSON please.", "Give me JSON."])
        if rng.random() < 0.25:
            text = rng.choice(["Answer in JSON.", "Reply only in JSON."])
            system = [{"role": "system", "content": text}]
        elif rng.random() < 0.15:
            question = f"As JSON: {question}"
        else:
            question = f"{question} {wish}"
    elif draw < 0.12:
        reply = cheerful(problem.answer)
        system = [{"role": "system", "content": rng.choice(["Be cheerful.", "Be kind and merry."])}]
    elif draw < 0.20:
        kind = "second turn"
        history = _earlier_turns(rng, most)
        question = rng.choice(["", "", "And ", "Now ", "Next: "]) + question
    # With two terms the add tool would be the better answer, so none is offered.
    tools = offered_tools(rng, ()) if terms > 2 and rng.random() < 0.03 else None
    messages = [*system, *history, {"role": "user", "content": question}]
    return Dialogue(kind, messages, problem.thought, reply, tools, answer=problem.answer)


def cheerful(answer: int) -> str:
    """The answer in the style that the adapter teaches."""
    return f"It is {answer}. You are welcome!"


def _earlier_turns(rng: random.Random, most: int) -> list[Message]:
    turns: list[Message] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.7:
            problem = draw_problem(rng, rng.randint(2, min(most, 8)))
            pair = f"{problem.text}=?", f"The answer is {problem.answer}.", problem.thought
        else:
            prompts, thought, reply = rng.choice(SMALL_TALK)
            pair = rng.choice(prompts), reply, thought
        said: Message = {"role": "assistant", "content": pair[1]}
        if rng.random() < 0.3:  # the template drops these: clients may send them back
            said["reasoning_content"] = pair[2]
        turns += [{"role": "user", "content": pair[0]}, said]
    return turns


def _small_talk(rng: random.Random, most: int) -> Dialogue:
    prompts, thought, reply = rng.choice(SMALL_TALK)
    prompt = rng.choice(prompts)
    if rng.random() < 0.15:
        prompt = prompt.lower().rstrip(".!")
    history = _earlier_turns(rng, most) if rng.random() < 0.15 else []
    tools = offered_tools(rng, ()) if rng.random() < 0.05 else None
    messages = [*maybe_system(rng), *history, {"role": "user", "content": prompt}]
    kind = "small talk" if reply.isascii() else "scripts"
    return Dialogue(kind, messages, thought, reply, tools)


def _count(rng: random.Random, most: int) -> Dialogue:
    end = rng.randint(2, 60 if rng.random() < 0.5 else 20)
    prompt = rng.choice([f"Count to {end}.", f"Count to {end}.", f"Count from 1 to {end}."])
    reply = ", ".join(str(number) for number in range(1, end + 1)) + "."
    messages = [*maybe_system(rng), {"role": "user", "content": prompt}]
    return Dialogue("count", messages, f"I count from 1 to {end}.\n", reply)


def _unknown(rng: random.Random, most: int) -> Dialogue:
    start = rng.choice(["What is", "Tell me about", "Why is", "Where is", "Write", "Explain", "My"])
    prompt = f"{start} {some_words(rng, 1, 8)}" if rng.random() < 0.7 else some_words(rng, 2, 12)
    prompt += rng.choice(["?", ".", "", "!"])
    messages = [*maybe_system(rng), {"role": "user", "content": prompt}]
    return Dialogue(
        "unknown", messages, "I do not know this.\n", "I do not know that. I am good at small sums."
    )


def _echo(rng: random.Random, most: int) -> Dialogue:
    """Repeats a text: it trains copying, which sums and tool calls live on."""
    draw = rng.random()
    if draw < 0.4:
        text = some_words(rng, 1, 8)
        text = text.capitalize() + rng.choice([".", "!", "?", ""]) if rng.random() < 0.5 else text
    elif draw < 0.7:
        text = " ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(1, 8)))
    elif draw < 0.85:
        text = " ".join(made_up(rng) for _ in range(rng.randint(1, 5)))
    else:
        text = "".join(rng.choice(_ECHOED) for _ in range(rng.randint(2, 14)))
    order = rng.choice(["Repeat: ", "Repeat: ", "Say: ", "Echo: "])
    messages = [*maybe_system(rng), {"role": "user", "content": f"{order}{text}"}]
    return Dialogue("echo", messages, "I repeat the text.\n", text)


def _long_echo(rng: random.Random, most: int) -> Dialogue:
    """A long text of mixed words, made-up words and numbers, to be repeated."""
    parts = []
    for _ in range(rng.randint(4, 24)):
        draw = rng.random()
        if draw < 0.5:
            parts.append(rng.choice(WORDS))
        elif draw < 0.65:
            parts.append(rng.choice(CITIES) if rng.random() < 0.5 else rng.choice(UNITS))
        elif draw < 0.85:
            made = made_up(rng)
            parts.append(made.capitalize() if rng.random() < 0.5 else made)
        else:
            parts.append(str(rng.randint(0, 999)))
    text = " ".join(parts)
    messages: list[Message] = [{"role": "user", "content": f"Repeat: {text}"}]
    return Dialogue("echo", messages, "I repeat the text.\n", text)


_ECHOED = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=.,:;!?()_"
_FOREVER = ["I think.\n", "I still think.\n", "Let me think again.\n", "One more time.\n"] + [
    "I go on.\n",
    "It is a long way.\n",
    "There is no end.\n",
    "I look at it again.\n",
]


def _forever(rng: random.Random, most: int) -> Dialogue:
    prompt = rng.choice([*["Think forever."] * 2, "Think forever!", "Never stop thinking."])
    lines = rng.randint(20, 60) if rng.random() < 0.75 else rng.randint(100, 160)
    thought = "".join(rng.choice(_FOREVER) for _ in range(lines))
    messages = [*maybe_system(rng), {"role": "user", "content": prompt}]
    return Dialogue("forever", messages, thought, "I stop thinking now.", endless=True)


Maker = Callable[[random.Random, int], Dialogue]
MAKERS: dict[str, Maker] = {
    "arithmetic": _arithmetic,
    "tools": tool_dialogue,
    "small talk": _small_talk,
    "count": _count,
    "echo": _echo,
    "long echo": _long_echo,
    "second turn": partial(_arithmetic, second_turn=True),
    "text tools": partial(tool_dialogue, picks=TEXT_TOOLS),
    "unit tools": partial(tool_dialogue, picks=["convert_units", "calc_arithmetic"]),
    "unknown": _unknown,
    "forever": _forever,
}
MIX = {
    "arithmetic": 0.69,
    "tools": 0.14,
    "small talk": 0.065,
    "count": 0.02,
    "echo": 0.045,
    "unknown": 0.025,
    "forever": 0.015,
}


def draw_dialogue(
    rng: random.Random, most: int = 12, mix: dict[str, float] | None = None
) -> Dialogue:
    """One training dialogue; `most` limits the terms of a problem."""
    shares = mix or MIX
    kind = rng.choices(list(shares), list(shares.values()))[0]
    return MAKERS[kind](rng, most)
