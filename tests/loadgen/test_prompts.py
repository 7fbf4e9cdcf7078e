"""Seeded draws and prompts: equal seeds ask equal things, and no prompt comes twice."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from kiln.core.errors import ConfigError
from kiln.loadgen.distributions import (
    Fixed,
    Lognormal,
    Uniform,
    parse_lengths,
    poisson_arrivals,
)
from kiln.loadgen.prompts import (
    BodyOptions,
    Prompt,
    PromptShape,
    encode_body,
    generate_prompts,
    read_dataset,
    recorded_prompts,
)


def take(count: int, shape: PromptShape, seed: int | str) -> list[Prompt]:
    return list(itertools.islice(generate_prompts(shape, seed), count))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128", Fixed(128)),
        ("uniform:64:512", Uniform(64, 512)),
        ("lognormal:256:0.8", Lognormal(256, 0.8)),
        ("lognormal:256:0.8:2048", Lognormal(256, 0.8, 2048)),
    ],
)
def test_lengths_are_read(text: str, expected: object) -> None:
    assert parse_lengths(text, "--prompt-tokens") == expected


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "x", "uniform:5", "uniform:9:3", "lognormal:0:1", "lognormal:9:nan", "gamma:1:2", "²"],
)
def test_wrong_lengths_name_the_flag_and_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="--output-tokens") as caught:
        parse_lengths(text, "--output-tokens")
    assert "uniform:LOW:HIGH" in str(caught.value.hint)


def test_draws_keep_to_their_distribution() -> None:
    rng = random.Random(1)
    uniform = [Uniform(3, 5).draw(rng) for _ in range(200)]
    assert set(uniform) == {3, 4, 5}
    skewed = [Lognormal(100, 0.5, 400).draw(rng) for _ in range(4000)]
    assert 95 < sum(skewed) / len(skewed) < 105
    assert min(skewed) >= 1 and max(skewed) <= 400
    assert Lognormal(1, 10).draw(rng) >= 1


def test_poisson_arrivals_are_seeded_and_of_the_rate() -> None:
    arrivals = list(itertools.islice(poisson_arrivals(50, 7), 5000))
    assert arrivals == list(itertools.islice(poisson_arrivals(50, 7), 5000))
    assert arrivals != list(itertools.islice(poisson_arrivals(50, 8), 5000))
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    # Of an exponential distribution, the deviation is the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


def test_prompts_are_seeded_and_never_repeat() -> None:
    shape = PromptShape(Uniform(4, 9), Fixed(3))
    prompts = take(300, shape, "s")
    assert prompts == take(300, shape, "s")
    assert prompts != take(300, shape, "t")
    assert len({prompt.text for prompt in prompts}) == 300
    assert {len(str(prompt.text).split()) for prompt in prompts} == set(range(4, 10))
    assert {prompt.max_tokens for prompt in prompts} == {3}


def test_a_shared_prefix_comes_before_each_prompts_own_words() -> None:
    prompts = take(3, PromptShape(Fixed(5), Fixed(1), shared_prefix=20), 0)
    words = [str(prompt.text).split() for prompt in prompts]
    assert all(len(one) == 25 for one in words)
    assert words[0][:20] == words[1][:20] == words[2][:20]
    assert words[0][20:] != words[1][20:]
    assert take(1, PromptShape(Fixed(5), Fixed(1), shared_prefix=20), 1)[0].text != prompts[0].text


def test_words_are_fewer_where_each_is_more_tokens() -> None:
    (prompt,) = take(1, PromptShape(Fixed(30), Fixed(1), tokens_per_word=3.0), 0)
    assert len(str(prompt.text).split()) == 10


def body_of(prompt: Prompt, options: BodyOptions, **arguments: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode_body(prompt, options, **arguments))
    return body


def test_bodies_hold_what_was_asked_for_and_nothing_else() -> None:
    prompt = Prompt(None, "hi", 9)
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    assert body_of(prompt, BodyOptions()) == {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        **streaming,
    }
    options = BodyOptions("completions", "m", 0.0, True, {"thinking_budget_tokens": None, "max_tokens": 4})
    assert body_of(prompt, options) == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        "thinking_budget_tokens": None,
        **streaming,
    }
    assert "stream" not in body_of(prompt, BodyOptions(), stream=False)


def test_datasets_are_read_in_order_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    chat = {"messages": [{"role": "user", "content": "a\u2028b"}]}
    lines = [json.dumps({"prompt": "one", "max_tokens": 5}), "", json.dumps(chat, ensure_ascii=False)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    prompts = read_dataset(path)
    assert prompts == [Prompt(None, "one", 5), Prompt(({"role": "user", "content": "a\u2028b"},), None, None)]
    cycled = list(itertools.islice(recorded_prompts(prompts, PromptShape(output_tokens=Fixed(7)), 0), 3))
    assert [prompt.max_tokens for prompt in cycled] == [5, 7, 5]
    with pytest.raises(ConfigError, match="--endpoint completions"):
        encode_body(prompts[1], BodyOptions("completions"))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "5",
        "{}",
        '{"messages": []}',
        '{"messages": [1]}',
        '{"prompt": 5}',
        '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}',
        '{"prompt": "a", "max_tokens": 0}',
        '{"prompt": "a", "max_tokens": true}',
    ],
)
def test_a_bad_line_of_a_dataset_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_dataset(path)


def test_a_dataset_must_be_there_and_hold_something(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dataset(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="no prompt"):
        read_dataset(tmp_path / "empty.jsonl")
