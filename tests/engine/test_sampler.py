"""The sampler against a slow reference, and the independence of its draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kiln.core.sampling import MAX_SEED, SamplingParams
from kiln.engine.ports import GenerationRequest
from kiln.engine.sampling.sampler import SequenceSampler, final_distribution, uniform

Logits = NDArray[np.float32]

PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
# Sums are compared with a cut-off; within this distance of it either side is right.
SLACK = 1e-9


def sampler(
    params: SamplingParams, *, seed: int = 1, choice: int = 0, prompt: Sequence[int] = (0,)
) -> SequenceSampler:
    return SequenceSampler(GenerationRequest(tuple(prompt), 99, params, seed, choice))


def row(*values: float) -> Logits:
    return np.array(values, np.float32)


# The final distribution.


def reference(
    logits: Logits, temperature: float, top_k: int, min_p: float, top_p: float
) -> list[tuple[int, float]]:
    """Token ids with their probabilities, most likely first: the definition, one token at a time."""
    values = [float(v) for v in logits]
    best = max(values)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    weights = [math.exp((values[i] - best) / temperature) for i in order]
    kept = list(zip(order, weights, strict=True))
    if top_k > 0:
        kept = kept[:top_k]
    kept = [(i, w) for i, w in kept if w >= min_p]
    total = math.fsum(w for _, w in kept)
    nucleus: list[tuple[int, float]] = []
    mass = 0.0
    for i, w in kept:
        if nucleus and mass >= top_p:
            break
        nucleus.append((i, w))
        mass += w / total
    total = math.fsum(w for _, w in nucleus)
    return [(i, w / total) for i, w in nucleus]


# Few distinct values make ties common.
values = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]) | st.floats(-30, 30, width=32)
rows = st.lists(values, min_size=1, max_size=12).map(lambda v: row(*v))
shares = st.sampled_from([0.0, 0.05, 0.25, 0.5, 0.9, 0.99, 1.0])


@settings(max_examples=150, deadline=None)
@given(rows, st.sampled_from([0.1, 0.5, 1.0, 1.7, 50.0]), st.integers(0, 14), shares, shares)
def test_final_distribution(
    logits: Logits, temperature: float, top_k: int, min_p: float, top_p: float
) -> None:
    ids, logprobs = final_distribution(logits, temperature, top_k=top_k, min_p=min_p, top_p=top_p)
    got = [int(i) for i in ids]
    least = reference(logits, temperature, top_k, min_p + SLACK if min_p else 0.0, top_p - SLACK)
    most = reference(logits, temperature, top_k, min_p - SLACK, top_p + SLACK)
    # Without any truncation the order is free.
    order = [i for i, _ in most]
    if not 0 < top_k < len(logits) and min_p == 0.0 and top_p == 1.0:
        assert sorted(got) == list(range(len(logits)))
    else:
        assert len(least) <= len(got) <= len(most)
        assert got == order[: len(got)]
    weights = {i: p for i, p in most}
    total = math.fsum(weights[i] for i in got)
    for token, logprob in zip(got, logprobs, strict=True):
        assert math.isclose(logprob, math.log(weights[token] / total), rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(math.fsum(np.exp(logprobs)), 1.0, rel_tol=1e-12)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([255, 256, 257, 700, 1500]),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.booleans(),
    st.sampled_from([0.2, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 5, 20, 256, 699, 1499]),
    st.sampled_from([0.0, 1e-6, 0.05]),
    st.sampled_from([0.0, 0.3, 0.95, 0.999999, 1.0]),
)
def test_final_distribution_of_a_large_vocabulary(
    seed: int,
    n_vocab: int,
    spread: float,
    rounded: bool,
    temperature: float,
    top_k: int,
    min_p: float,
    top_p: float,
) -> None:
    logits = np.random.default_rng(seed).normal(0.0, spread, n_vocab).astype(np.float32)
    if rounded:
        logits = np.round(logits * 4) / np.float32(4)  # many ties
    ids, logprobs = final_distribution(logits, temperature, top_k=top_k, min_p=min_p, top_p=top_p)
    got = [int(i) for i in ids]
    # Masses over a whole vocabulary are single precision: the cut may lie a millionth off.
    least = reference(logits, temperature, top_k, min_p + SLACK if min_p else 0.0, top_p - 1e-6)
    most = reference(logits, temperature, top_k, min_p - SLACK, top_p + 1e-6)
    assert len(least) <= len(got) <= len(most)
    if (0 < top_k < n_vocab) or min_p > 0.0 or top_p < 1.0:
        assert got == [i for i, _ in most][: len(got)]
    weights = dict(most)
    total = math.fsum(weights[i] for i in got)
    expected = [math.log(weights[i] / total) for i in got]
    assert logprobs.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert math.isclose(math.fsum(np.exp(logprobs)), 1.0, rel_tol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 256, 1500]), st.sampled_from([0.3, 1.0, 8.0]))
def test_an_untruncated_pick_is_the_inverse_of_the_distribution(
    seed: int, n_vocab: int, temperature: float
) -> None:
    logits = np.random.default_rng(seed).normal(0.0, 3.0, n_vocab).astype(np.float32)
    logits[: n_vocab // 3] = -np.inf
    params = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
    token, logprob = sampler(params, seed=seed).pick(logits)
    weights = [math.exp((float(v) - float(logits.max())) / temperature) for v in logits]
    total = math.fsum(weights)
    assert logprob == pytest.approx(math.log(weights[token] / total), abs=1e-6)
    # The draw lies within the token's share of the mass, in id order.
    below = math.fsum(weights[:token]) / total
    draw = uniform(seed, 0, 0)
    assert below - 1e-6 <= draw <= below + weights[token] / total + 1e-6


@pytest.mark.parametrize(
    ("top_k", "min_p", "top_p", "kept"),
    [
        (1, 0.0, 1.0, [1]),
        (2, 0.0, 1.0, [1, 2]),
        (3, 0.0, 1.0, [1, 2, 4]),
        (0, 1.0, 1.0, [1, 2, 4]),
        (0, 0.3, 1.0, [1, 2, 4, 0]),
        (0, 0.0, 0.0, [1]),
        (0, 0.0, 0.25, [1]),
        (0, 0.0, 0.35, [1, 2]),
        (4, 0.0, 0.35, [1, 2]),
        (99, 0.0, 0.99, [1, 2, 4, 0]),
        (99, 0.0, 0.999, [1, 2, 4, 0, 3]),
    ],
)
def test_truncation_and_ties(top_k: int, min_p: float, top_p: float, kept: list[int]) -> None:
    # Tokens 1, 2 and 4 share the top: 0.2985 each; 0 has 0.1098 and 3 has 0.0055.
    logits = row(1.0, 2.0, 2.0, -2.0, 2.0)
    ids, _ = final_distribution(logits, 1.0, top_k=top_k, min_p=min_p, top_p=top_p)
    assert ids.tolist() == kept


def test_truncations_work_on_what_the_earlier_one_left() -> None:
    # Of all tokens the best has 0.41; of the two that top-k leaves it has 0.5, which fills top_p.
    logits = row(3.0, 3.0, 2.0, 1.0)
    assert final_distribution(logits, 1.0, top_k=2, min_p=0.0, top_p=0.49)[0].tolist() == [0]
    assert final_distribution(logits, 1.0, top_k=0, min_p=0.0, top_p=0.49)[0].tolist() == [0, 1]


def test_a_nucleus_that_is_full_takes_no_more() -> None:
    assert final_distribution(row(1.0, 1.0), 1.0, top_k=0, min_p=0.0, top_p=0.5)[0].tolist() == [0]


def test_min_p_acts_after_temperature() -> None:
    logits = row(1.0, 0.0)
    assert final_distribution(logits, 1.0, top_k=0, min_p=0.5, top_p=1.0)[0].tolist() == [0]
    assert final_distribution(logits, 2.0, top_k=0, min_p=0.5, top_p=1.0)[0].tolist() == [0, 1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300])
@pytest.mark.parametrize(
    ("top_k", "min_p", "top_p"), [(0, 0.0, 1.0), (3, 0.0, 1.0), (0, 0.1, 0.9), (0, 0.0, 0.9)]
)
def test_tiny_temperatures_take_the_best(temperature: float, top_k: int, min_p: float, top_p: float) -> None:
    logits = row(1.0, -40.0, 2.0, float("-inf"))
    ids, logprobs = final_distribution(logits, temperature, top_k=top_k, min_p=min_p, top_p=top_p)
    assert not np.isnan(logprobs).any()
    assert ids[logprobs.argmax()] == 2
    assert logprobs.max() == 0.0
    assert math.fsum(np.exp(logprobs)) == 1.0


def test_tiny_temperatures_share_among_the_best() -> None:
    ids, logprobs = final_distribution(row(0.0, 5.0, 5.0), 1e-300, top_k=0, min_p=0.1, top_p=1.0)
    assert ids.tolist() == [1, 2]
    assert np.exp(logprobs).tolist() == pytest.approx([0.5, 0.5], abs=1e-15)


def test_masked_tokens_and_a_top_p_near_one() -> None:
    # A masked token is never within reach: the search must end all the same.
    logits = np.array([0.0, -np.inf, 1.0, -3.0], np.float32)
    ids, _ = final_distribution(logits, 1.0, top_k=0, min_p=0.0, top_p=0.999999)
    assert ids.tolist() == [2, 0, 3]


def test_a_huge_temperature_overflows_nothing() -> None:
    logits = np.array([0.0, 1.0], np.float32)
    assert final_distribution(logits, 1e39, top_k=0, min_p=0.1, top_p=1.0)[0].tolist() == [1, 0]


def test_masked_tokens_are_never_drawn() -> None:
    logits = row(float("-inf"), 0.0, float("-inf"), 0.0)
    s = sampler(PLAIN)
    for _ in range(50):
        token, logprob = s.pick(logits)
        s.record(token)
        assert token in (1, 3)
        assert logprob == pytest.approx(math.log(0.5), abs=1e-12)


# Picking.


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(0, MAX_SEED))
def test_temperature_zero_is_argmax_with_the_lowest_id_first(logits: Logits, seed: int) -> None:
    params = SamplingParams(temperature=0.0, top_p=0.1, top_k=1, min_p=0.9)
    best = max(float(v) for v in logits)
    assert sampler(params, seed=seed).pick(logits) == ([float(v) for v in logits].index(best), 0.0)


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(0, MAX_SEED), st.integers(0, 3), st.integers(0, 6), shares, shares)
def test_a_pick_is_a_survivor_with_its_own_log_probability(
    logits: Logits, seed: int, choice: int, top_k: int, min_p: float, top_p: float
) -> None:
    params = SamplingParams(temperature=0.7, top_k=top_k, min_p=min_p, top_p=top_p)
    ids, logprobs = final_distribution(logits, 0.7, top_k=top_k, min_p=min_p, top_p=top_p)
    before = logits.copy()
    token, logprob = sampler(params, seed=seed, choice=choice).pick(logits)
    assert logprob <= 0.0
    # Over a whole vocabulary the weights are single precision; the contract asks for 1e-6.
    assert logprob == pytest.approx(logprobs[ids.tolist().index(token)], abs=5e-7)
    assert (logits == before).all()


def test_frequencies_follow_the_distribution() -> None:
    logits = row(2.0, 0.0, 1.0, 1.5, -1.0, 1.0)
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.99, min_p=0.01)
    ids, logprobs = final_distribution(logits, 0.8, top_k=5, min_p=0.01, top_p=0.99)
    s = sampler(params, seed=20240131)
    draws = 6000
    seen = dict.fromkeys(ids.tolist(), 0)
    for _ in range(draws):
        token, _ = s.pick(logits)
        s.record(token)
        seen[token] += 1
    expected = np.exp(logprobs) * draws
    statistic = sum((seen[i] - e) ** 2 / e for i, e in zip(ids.tolist(), expected, strict=True))
    # Degrees of freedom 4: 18.5 is the 99.9th percentile; the seed is fixed, so this never flickers.
    assert len(ids) == 5
    assert statistic < 18.5


# Penalties.


def penalised(
    logits: Logits, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    """Penalties as the contract words them, one token at a time."""
    out = []
    for token, value in enumerate(float(v) for v in logits):
        if token in prompt or token in generated:
            repetition = params.repetition_penalty
            value = value / repetition if value > 0 else value * repetition
        count = list(generated).count(token)
        if count:
            value -= params.presence_penalty + count * params.frequency_penalty
        out.append(value)
    return out


tokens = st.lists(st.integers(0, 5), max_size=6)
penalties = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 2.0])


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.floats(-10, 10, width=32), min_size=6, max_size=6),
    tokens.filter(len),
    tokens,
    penalties,
    penalties,
    st.sampled_from([0.5, 1.0, 1.3, 2.0]),
)
def test_penalties(
    numbers: list[float],
    prompt: list[int],
    generated: list[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    params = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    s = sampler(params, prompt=prompt)
    for token in generated:
        s.record(token)
    logits = row(*numbers)
    before = logits.copy()
    token, logprob = s.pick(logits)
    assert (logits == before).all()
    expected = penalised(logits, params, prompt, generated)
    total = math.fsum(math.exp(v) for v in expected)
    assert logprob == pytest.approx(expected[token] - math.log(total), abs=1e-4)


def test_repetition_counts_the_prompt_the_others_do_not() -> None:
    logits = row(1.0, 1.1)
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    assert sampler(greedy, prompt=[1]).pick(logits)[0] == 0
    greedy = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert sampler(greedy, prompt=[1]).pick(logits)[0] == 1


def test_repetition_is_applied_before_the_subtractions() -> None:
    # 2 / 2 - 1.5 = -0.5 loses to -0.4; (2 - 1.5) / 2 = 0.25 would win.
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.5)
    s = sampler(params, prompt=[2])
    s.record(0)
    assert s.pick(row(2.0, -0.4, -9.0))[0] == 1


def test_penalised_masked_tokens_stay_masked() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=-2.0)
    s = sampler(params, prompt=[0])
    s.record(0)
    assert s.pick(row(float("-inf"), 0.0)) == (1, 0.0)


# Draws.


def philox(seed: int, choice: int, counter: int) -> int:
    """The first 64-bit word of Philox4x64-10, as its authors define it (Salmon et al., 2011)."""
    low = 2**64 - 1
    c = [counter, 0, 0, 0]
    k0, k1 = seed, choice
    for _ in range(10):
        p0, p1 = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [(p1 >> 64) ^ c[1] ^ k0, p1 & low, (p0 >> 64) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & low, (k1 + 0xBB67AE8584CAA73B) & low
    return c[0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, MAX_SEED), st.integers(0, 127), st.integers(0, 10**6))
def test_draws_are_philox(seed: int, choice: int, index: int) -> None:
    # numpy steps the counter before it generates, so token 0 is drawn from block 1.
    assert uniform(seed, choice, index) == (philox(seed, choice, index + 1) >> 11) * 2.0**-53


def test_keys_are_told_apart() -> None:
    keys = [(s, c, i) for s in (0, 1, MAX_SEED - 1, MAX_SEED) for c in (0, 1, 2) for i in (0, 1, 2)]
    assert len({uniform(*key) for key in keys}) == len(keys)


LOGITS = np.linspace(0.0, 1.0, 64, dtype=np.float32)


def stream(s: SequenceSampler, count: int) -> list[int]:
    out = []
    for _ in range(count):
        token, _ = s.pick(LOGITS)
        s.record(token)
        out.append(token)
    return out


@pytest.mark.parametrize("seed", [0, 1, 2**63, MAX_SEED])
def test_a_seed_gives_the_same_stream_again(seed: int) -> None:
    assert stream(sampler(PLAIN, seed=seed), 20) == stream(sampler(PLAIN, seed=seed), 20)


def test_choices_and_seeds_give_different_streams() -> None:
    streams = [stream(sampler(PLAIN, seed=s, choice=c), 20) for s in (0, 1, MAX_SEED) for c in (0, 1)]
    assert len({tuple(s) for s in streams}) == len(streams)


def test_draws_do_not_depend_on_company() -> None:
    alone = [stream(sampler(PLAIN, seed=seed), 12) for seed in range(4)]
    company = [sampler(PLAIN, seed=seed) for seed in range(4)]
    together: list[list[int]] = [[] for _ in company]
    for _ in range(12):
        for s, out in zip(company, together, strict=True):
            out.extend(stream(s, 1))
    assert together == alone


def test_picking_without_recording_is_the_same_draw() -> None:
    s = sampler(PLAIN, seed=5)
    assert s.pick(LOGITS) == s.pick(LOGITS)


def test_a_forced_token_takes_its_index() -> None:
    # The draw of token 3 is the same whether token 2 was sampled or forced.
    free, gated = sampler(PLAIN, seed=9), sampler(PLAIN, seed=9)
    expected = stream(free, 6)
    assert stream(gated, 2) == expected[:2]
    gated.record(63)
    assert stream(gated, 3) == expected[3:]
