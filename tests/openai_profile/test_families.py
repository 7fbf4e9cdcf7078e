"""Tool calls of other model families, through the whole server: the template decides what is looked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servers.scripted import staging

from .conftest import ADD, Profile

# What a template of the family says somewhere.
TEMPLATE = """\
{%%- for message in messages %%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%%- endfor %%}
{%%- if tools %%}{{- %s }}{%%- endif %%}
{{- '<|im_start|>assistant\\n' }}"""
ONE = '{"a": 3, "b": 4}'
TWO = '{"a": 1, "b": 2}'
FAMILIES = {
    "llama3": (
        "'<|python_tag|>'",
        "; ".join(f'{{"name": "add", "parameters": {arguments}}}' for arguments in (ONE, TWO)),
    ),
    "mistral": (
        "'[TOOL_CALLS]'",
        "[TOOL_CALLS]["
        + ", ".join(f'{{"name": "add", "arguments": {arguments}}}' for arguments in (ONE, TWO))
        + "]",
    ),
    "mistral-named": (
        "'[TOOL_CALLS]' + '[ARGS]'",
        f"[TOOL_CALLS]add[ARGS]{ONE}[TOOL_CALLS]add[ARGS]{TWO}",
    ),
    "qwen3-coder": (
        "'<tool_call><function=example><parameter=x>'",
        "".join(
            f"<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n"
            f"<parameter=b>\n{b}\n</parameter>\n</function>\n</tool_call>\n"
            for a, b in ((3, 4), (1, 2))
        ),
    ),
    "harmony": (
        "'<|channel|>commentary<|message|>'",
        f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ONE}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{TWO}<|call|>",
    ),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_calls_through_the_server(family: str, tmp_path: Path) -> None:
    marker, written = FAMILIES[family]
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE % marker, encoding="utf-8")
    with staging(model__chat_template_file=str(template)) as staged:
        profile = Profile(staged.server)
        staged.stage.say(written)
        (choice,) = profile.ask(tools=[ADD])["choices"]
        made = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [(f["name"], json.loads(f["arguments"])) for f in made] == [
            ("add", json.loads(ONE)),
            ("add", json.loads(TWO)),
        ]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"].get("content")
        streamed = profile.stream(tools=[ADD])
        assert [call["index"] for call in streamed.tool_calls] == [0, 1]
        one = profile.ask(tools=[ADD], parallel_tool_calls=False)["choices"][0]
        assert len(one["message"]["tool_calls"]) == 1
        # Without tools the same text is text, channel headers aside.
        plain = profile.ask()["choices"][0]
        assert plain["finish_reason"] == "stop" and "add" in plain["message"]["content"]
        forced = profile.ask(tools=[ADD], tool_choice="required", max_tokens=120)["choices"][0]
        assert forced["finish_reason"] in ("tool_calls", "length")
