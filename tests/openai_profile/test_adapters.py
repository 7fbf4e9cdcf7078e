"""LoRA adapters through the profile: what answers, and what scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.samples import cheerful
from servers.server import PROMPT, serving_model

from .conftest import Profile

TURN = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profile]:
    saved = tmp_path_factory.mktemp("adapters")
    cheerful(saved / "cheerful")
    with serving_model(model__adapter_dir=str(saved)) as running:
        yield Profile(running)


@pytest.mark.parametrize(
    "fields", [{"adapter": "cheerful"}, {"adapters": [{"name": "cheerful", "scale": 1.0}]}]
)
def test_an_adapter_answers(adapted: Profile, fields: dict[str, Any]) -> None:
    plain = adapted.ask()["choices"][0]["message"]["content"]
    assert adapted.ask(adapter=None)["choices"][0]["message"]["content"] == plain
    assert adapted.ask(**fields)["choices"][0]["message"]["content"] != plain


def test_an_adapter_scores_the_prompt_that_it_continues(adapted: Profile) -> None:
    def scores(**fields: Any) -> list[float]:
        body = {"prompt": TURN + "The answer is 16.", "echo": True, "logprobs": 0, "max_tokens": 0}
        answer = adapted.post("completions", **body, **fields).json()
        found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
        return found

    plain = scores()
    assert scores(adapter=None) == plain
    assert scores(adapter="cheerful") != plain


def test_an_unknown_adapter(adapted: Profile) -> None:
    response = adapted.chat(adapter="gloomy")
    assert response.status_code == 404 and response.json()["error"]["param"] == "adapter"
