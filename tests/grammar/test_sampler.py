"""Logit bias and grammar masks in the sampler, against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kiln.core.sampling import SamplingParams
from kiln.engine.ports import GenerationRequest
from kiln.engine.sampling.sampler import Allowed, SequenceSampler

SIZE = 700
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


def sampler(params: SamplingParams, seed: int = 1, bias: dict[int, float] | None = None) -> SequenceSampler:
    return SequenceSampler(GenerationRequest((0,), 99, params, seed, logit_bias=bias))


def noise(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, SIZE).astype(np.float32)


def only(*ids: int) -> Allowed:
    allowed = np.zeros(SIZE, np.bool_)
    allowed[list(ids)] = True
    return Allowed(allowed)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 1, 5, 900]),
    top_p=st.sampled_from([1.0, 0.9, 0.1]),
    min_p=st.sampled_from([0.0, 0.05]),
)


@given(
    params, st.integers(0, 50), st.dictionaries(st.integers(0, SIZE - 1), st.floats(-100, 100), max_size=9)
)
def test_bias_is_added_to_the_logits(params: SamplingParams, seed: int, bias: dict[int, float]) -> None:
    logits = noise(seed)
    moved = logits.copy()
    for token, value in bias.items():
        moved[token] += np.float32(value)
    before = logits.copy()
    assert sampler(params, seed, bias).pick(logits) == sampler(params, seed).pick(moved)
    assert np.array_equal(logits, before), "the runner's logits are not ours to change"


def test_bias_bans_and_forces() -> None:
    logits = noise(3)
    best = int(logits.argmax())
    assert sampler(GREEDY, bias={best: -100}).pick(logits)[0] != best
    for seed in range(50):
        token, logprob = sampler(PLAIN, seed, {7: 100}).pick(logits)
        assert token == 7 and logprob == pytest.approx(0, abs=1e-6)
        assert sampler(PLAIN, seed, {best: -100}).pick(logits)[0] != best


def test_bias_comes_before_the_penalties() -> None:
    """A repetition penalty divides what is positive after the bias: 1 + 3 = 4, halved 2, below 2.5."""
    logits = np.full(SIZE, -9, np.float32)
    logits[1], logits[2] = 1.0, 2.5
    request = GenerationRequest((1,), 9, SamplingParams(temperature=0.0, repetition_penalty=2.0), 0)
    biased = GenerationRequest((1,), 9, request.sampling, 0, logit_bias={1: 3.0})
    assert SequenceSampler(biased).pick(logits)[0] == 2
    assert (
        SequenceSampler(GenerationRequest((5,), 9, request.sampling, 0, logit_bias={1: 3.0})).pick(logits)[0]
        == 1
    )


@given(params, st.integers(0, 50), st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE))
def test_only_allowed_tokens_are_drawn_by_the_renormalised_rest(
    params: SamplingParams, seed: int, ids: set[int]
) -> None:
    logits, order = noise(seed), sorted(ids)
    place, logprob = sampler(params, seed).pick(logits[order])
    token, drawn = sampler(params, seed).pick(logits, only(*ids))
    assert token == order[place] and drawn == pytest.approx(logprob, abs=1e-5)


def test_the_log_probability_is_that_among_the_allowed() -> None:
    logits = noise(4)
    token, logprob = sampler(PLAIN, 5).pick(logits, only(3, 4, 600))
    total = sum(math.exp(float(logits[i])) for i in (3, 4, 600))
    assert logprob == pytest.approx(float(logits[token]) - math.log(total), abs=1e-6)


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(temperature=1.0, top_k=600)])
@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_no_rounding_draws_what_is_not_allowed(
    params: SamplingParams, draw: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.0 is never drawn, but what is cumulated in two ways may fall short of itself."""
    monkeypatch.setattr("kiln.engine.sampling.sampler.uniform", lambda *key: draw)
    allowed = only(*range(100, 200), *range(300, 310))
    for seed in range(100):
        token, logprob = sampler(params).pick(noise(seed), allowed)
        assert allowed.mask[token] and logprob > -60


def test_another_attempt_is_an_independent_draw() -> None:
    flat = np.zeros(SIZE, np.float32)
    draws = {sampler(PLAIN, 1).pick(flat, attempt=attempt)[0] for attempt in range(40)}
    assert len(draws) > 30
    assert sampler(PLAIN, 1).pick(flat, attempt=0) == sampler(PLAIN, 1).pick(flat)


def test_one_allowed_token_is_certain() -> None:
    for settings in (GREEDY, PLAIN, SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.2)):
        assert sampler(settings, bias={9: -100}).pick(noise(1), only(9)) == (9, 0.0)
