"""The configured content filter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kiln.cli.assembly import create_app
from kiln.core.errors import ConfigError
from kiln.core.settings import BadValue
from servers.scripted import Stage, staging
from servers.server import settings_of

from . import hooks
from .conftest import Profile

HOOKS = "openai_profile.hooks"


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[Profile, Stage]]:
    with staging(openai__content_filter=f"{HOOKS}:no_nines") as staged:
        yield Profile(staged.server), staged.stage


def test_what_is_let_through_is_whole(watched: tuple[Profile, Stage]) -> None:
    profile, stage = watched
    stage.say("9 is thought of", "</think>", "\n\n", "all is well", ".")
    hooks.calls.clear()
    whole = profile.ask()["choices"][0]
    assert whole["message"]["content"] == "all is well." and whole["finish_reason"] == "stop"
    assert hooks.calls == [("all is well.", True)]
    streamed = profile.stream(logprobs=True)
    assert streamed.content == "all is well." and streamed.finish_reason == "stop"
    assert streamed.reasoning == "9 is thought of"
    scored = [token for c in streamed.choices for token in c.get("logprobs", {}).get("content", [])]
    assert len(scored) == streamed.usage["completion_tokens"]
    assert hooks.calls[-1] == ("all is well.", True) and len(hooks.calls) > 2


def test_what_is_refused_is_not_shown(watched: tuple[Profile, Stage]) -> None:
    profile, stage = watched
    stage.say("thought", "</think>", "\n\n", "the number is ", "1", "9", " and on it goes. ")
    whole = profile.ask()["choices"][0]
    assert whole["message"]["content"] == "" and whole["finish_reason"] == "content_filter"
    assert whole["message"]["reasoning_content"] == "thought"
    stage.repeat("more. ")
    streamed = profile.stream(logprobs=True, max_tokens=4000)
    assert streamed.content == "the number is " and streamed.finish_reason == "content_filter"
    scored = [token for c in streamed.choices for token in c.get("logprobs", {}).get("content", [])]
    assert not any("9" in token["token"] for token in scored)
    profile.server.wait_idle()


def test_text_completions_are_filtered(watched: tuple[Profile, Stage]) -> None:
    profile, stage = watched
    stage.say("it is 9", ".")
    body = {"prompt": ["a", "b"], "max_tokens": 20}
    choices = profile.post("completions", **body).json()["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("", "content_filter")] * 2
    streamed = profile.post("completions", **body, stream=True).text
    assert '"text":"9' not in streamed and "it is 9" not in streamed
    assert streamed.count("content_filter") == 2


def test_a_hook_that_fails_shows_nothing() -> None:
    with staging(openai__content_filter=f"{HOOKS}:broken") as staged:
        staged.stage.say("thought", "</think>", "\n\n", "secret")
        profile = Profile(staged.server)
        response = profile.chat()
        assert response.status_code == 500 and "secret" not in response.text
        streamed = profile.stream()
        assert streamed.error is not None and streamed.content == "" and not streamed.done


@pytest.mark.parametrize("name", [f"{HOOKS}:nothing", "no.such.module:f", f"{HOOKS}:not_a_function"])
def test_a_hook_that_is_none_stops_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=r"openai\.content_filter"):
        create_app(settings_of(openai__content_filter=name))


def test_a_hook_has_a_module_and_a_name() -> None:
    with pytest.raises(BadValue):
        settings_of(openai__content_filter="filter.py")
