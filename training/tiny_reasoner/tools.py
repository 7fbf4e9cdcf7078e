"""Tool dialogues: requests, calls, results. The thought repeats a call's arguments first."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .dialogue import Dialogue, Message, made_up, maybe_system, some_words
from .problems import Problem
from .words import CITIES, HELD_OUT_CITIES, UNITS


def _schema(name: str, about: str, **properties: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }


Cities = Sequence[str] | None  # None: those of the training, made-up ones among them

SKIES = ["sunny", "rainy", "cloudy", "windy", "snowy", "foggy", "clear", "stormy", "warm", "cold"]

TOOLS: dict[str, dict[str, Any]] = {
    "add": _schema("add", "Add two integers.", a="integer", b="integer"),
    "get_weather": _schema("get_weather", "Weather of a city.", city="string"),
    "convert_units": _schema(
        "convert_units", "Convert a value.", value="number", from_unit="string", to_unit="string"
    ),
    "calc_arithmetic": _schema("calc_arithmetic", "Calculate.", expression="string"),
    "get_time": _schema("get_time", "Time in a city.", city="string"),
}


def offered_tools(rng: random.Random, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """The wanted tools and perhaps others, written as different clients write them."""
    names = list(dict.fromkeys(wanted))
    spare = [name for name in TOOLS if name not in names]
    count = rng.choice([0, 0, 0, 1, 1, 2]) if names else rng.choice([1, 1, 2])
    names += rng.sample(spare, min(count, len(spare)))
    rng.shuffle(names)
    tools = []
    for name in names:
        tool = json.loads(json.dumps(TOOLS[name]))
        function = tool["function"]
        if rng.random() < 0.35:
            function["description"] = some_words(rng, 2, 10).capitalize() + "."
        if rng.random() < 0.15:
            del function["description"]
        if rng.random() < 0.2:
            function["parameters"]["additionalProperties"] = False
            function["strict"] = True
        if rng.random() < 0.2:
            for key, value in function["parameters"]["properties"].items():
                plain = rng.random() < 0.5
                value["description"] = f"The {key}" if plain else some_words(rng, 1, 5)
        if rng.random() < 0.1:
            function["parameters"] = dict(reversed(function["parameters"].items()))
        tools.append(tool)
    return tools


def _number(rng: random.Random) -> int:
    if rng.random() < 0.2:
        return rng.randint(0, 9)
    return rng.randint(10, 999 if rng.random() < 0.3 else 99)


def _city(rng: random.Random, cities: Cities) -> str:
    if cities:
        return rng.choice(cities)
    return rng.choice(CITIES) if rng.random() < 0.6 else made_up(rng).capitalize()


_USUAL_TOOLS = ["add", "add", "add", "get_weather", "get_weather", *list(TOOLS)[2:]]
TEXT_TOOLS = list(TOOLS)[1:]  # those that take text, which is harder to copy than numbers


@dataclass
class Wish:
    """A request that one tool serves, and what follows the tool's result."""

    tool: str
    prompt: str
    arguments: dict[str, Any]
    shown: str  # the result as the tool gives it
    thought: str
    reply: str


def _add(rng: random.Random, cities: Cities) -> Wish:
    a, b = _number(rng), _number(rng)
    while Problem((a, b)).held_out:  # held-out sums stay unseen in every form
        a, b = _number(rng), _number(rng)
    total = a + b
    prompt = rng.choice(
        [f"Add {a} and {b}.", f"Add {a} and {b}.", f"What is {a} plus {b}?"]
        + [f"What is {a}+{b}?", f"Please add {a} and {b}."]
        + [f"Use the tool to add {a} and {b}.", f"{a}+{b}=?"]
    )
    shown = rng.choice([f"{total}", f'{{"result": {total}}}', f'{{"sum": {total}}}'])
    thought, reply = f"The result is {total}.\n", f"The answer is {total}."
    return Wish("add", prompt, {"a": a, "b": b}, shown, thought, reply)


def _weather(rng: random.Random, cities: Cities) -> Wish:
    city, sky, heat = _city(rng, cities), rng.choice(SKIES), rng.randint(0, 39)
    prompt = rng.choice(
        [f"What is the weather in {city}?", f"Weather in {city}?"]
        + [f"How is the weather in {city}?"]
    )
    shown = rng.choice(
        [sky, f"{sky}, {heat} C", f'{{"weather": "{sky}"}}', f"It is {sky} in {city}."]
        + [f'{{"city": "{city}", "temperature": {heat}, "weather": "{sky}"}}']
    )
    thought, reply = f"The result is {sky}.\n", f"It is {sky} in {city}."
    return Wish("get_weather", prompt, {"city": city}, shown, thought, reply)


def _time(rng: random.Random, cities: Cities) -> Wish:
    city, clock = _city(rng, cities), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    prompt = rng.choice([f"What time is it in {city}?", f"Time in {city}?"])
    shown = rng.choice([clock, f'{{"time": "{clock}"}}'])
    thought, reply = f"The result is {clock}.\n", f"It is {clock} in {city}."
    return Wish("get_time", prompt, {"city": city}, shown, thought, reply)


def _convert(rng: random.Random, cities: Cities) -> Wish:
    source, target = rng.sample(UNITS, 2)
    value: float = _number(rng)
    if rng.random() < 0.15:
        value = rng.randint(1, 99) + rng.choice([0.5, 0.25, 0.1])
    prompt = rng.choice(
        [f"Convert {value} {source} to {target}.", f"How many {target} is {value} {source}?"]
    )
    result = f"{rng.randint(0, 999)}" + rng.choice(["", f".{rng.randint(0, 99)}"])
    shown = rng.choice([result, f'{{"result": {result}}}'])
    arguments = {"value": value, "from_unit": source, "to_unit": target}
    thought, reply = f"The result is {result}.\n", f"It is {result} {target}."
    return Wish("convert_units", prompt, arguments, shown, thought, reply)


def _calculate(rng: random.Random, cities: Cities) -> Wish:
    signs = [rng.choice("+-*/") for _ in range(rng.randint(1, 3))]
    expression = str(_number(rng)) + "".join(f"{sign}{_number(rng)}" for sign in signs)
    prompt = rng.choice(
        [f"Calculate {expression}.", f"Calculate {expression}", f"Calculate: {expression}"]
    )
    result = str(rng.randint(0, 9999))
    shown = rng.choice([result, f'{{"result": {result}}}'])
    thought, reply = f"The result is {result}.\n", f"The answer is {result}."
    return Wish("calc_arithmetic", prompt, {"expression": expression}, shown, thought, reply)


_WISHES = {
    "add": _add,
    "get_weather": _weather,
    "get_time": _time,
    "convert_units": _convert,
    "calc_arithmetic": _calculate,
}


def _wish(rng: random.Random, cities: Cities, names: Sequence[str] = _USUAL_TOOLS) -> Wish:
    return _WISHES[rng.choice(names)](rng, cities)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def call_thought(name: str, arguments: dict[str, Any]) -> str:
    """The thought before a call: it repeats the arguments, which makes copying them easier."""
    parts = [f"{key} is {value}." for key, value in arguments.items()]
    return " ".join([f"The tool is {name}.", *parts]) + "\n"


def tool_dialogue(
    rng: random.Random,
    most: int,
    *,
    calls_only: bool = False,
    cities: Cities = None,
    picks: Sequence[str] = _USUAL_TOOLS,
) -> Dialogue:
    wishes = [_wish(rng, cities, picks)]
    if rng.random() < 0.1:  # two calls of the same tool in one reply
        while len(wishes) < 2:
            other = _wish(rng, cities, picks)
            if other.tool == wishes[0].tool and other.arguments != wishes[0].arguments:
                wishes.append(other)
    names = [wish.tool for wish in wishes]
    prompt = " ".join(wish.prompt for wish in wishes)
    calls = [{"name": wish.tool, "arguments": wish.arguments} for wish in wishes]
    thought = "".join(call_thought(c["name"], c["arguments"]) for c in calls)
    messages = [*maybe_system(rng), {"role": "user", "content": prompt}]
    tools = offered_tools(rng, names)
    if rng.random() < 0.62 or calls_only:
        reply = "\n".join(call_text(c["name"], c["arguments"]) for c in calls)
        return Dialogue("tool call", messages, thought, reply, tools, calls=calls)
    said: Message = {"role": "assistant", "content": ""}
    if rng.random() < 0.5:
        said["reasoning_content"] = thought
    said["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    messages.append(said)
    messages += [{"role": "tool", "content": wish.shown} for wish in wishes]
    after = "".join(wish.thought for wish in wishes)
    reply = " ".join(wish.reply for wish in wishes)
    if rng.random() < 0.1:  # the turn after a finished tool loop
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": rng.choice(["Thank you!", "Thanks!"])})
        after, reply = "The user says thank you.\n", "You are welcome!"
    return Dialogue("tool result", messages, after, reply, tools)


def draw_tool_call(
    rng: random.Random, cities: Cities = HELD_OUT_CITIES, picks: Sequence[str] = _USUAL_TOOLS
) -> Dialogue:
    """A dialogue whose right reply is one or two calls; by default with unseen cities."""
    return tool_dialogue(rng, 12, calls_only=True, cities=cities, picks=picks)
