"""Sampling parameters: which source decides, and the clamp to the effective ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.core.sampling import SAMPLING_FIELDS, SamplingOverrides, SamplingParams, resolve_sampling

finite = st.none() | st.floats(allow_nan=False, allow_infinity=False)
overrides = st.builds(
    SamplingOverrides,
    temperature=finite,
    top_p=finite,
    top_k=st.none() | st.integers(-9, 2**40),
    min_p=finite,
    presence_penalty=finite,
    frequency_penalty=finite,
    repetition_penalty=finite,
)


def test_without_sources_the_defaults_hold() -> None:
    assert resolve_sampling() == SamplingParams(1.0, 0.95, 20, 0.0, 0.0, 0.0, 1.0)
    assert resolve_sampling(SamplingOverrides()) == SamplingParams()


@given(overrides, overrides)
def test_each_field_comes_from_the_weightiest_source_that_states_it(
    strong: SamplingOverrides, weak: SamplingOverrides
) -> None:
    merged = SamplingOverrides(
        **{
            name: getattr(strong, name) if getattr(strong, name) is not None else getattr(weak, name)
            for name in SAMPLING_FIELDS
        }
    )
    assert resolve_sampling(strong, weak) == resolve_sampling(merged)


@given(st.lists(overrides, max_size=3))
def test_resolved_values_are_in_range(sources: list[SamplingOverrides]) -> None:
    params = resolve_sampling(*sources)
    assert params.temperature >= 0.0
    assert params.top_k >= 0
    assert 0.0 <= params.top_p <= 1.0 and 0.0 <= params.min_p <= 1.0
    assert -2.0 <= params.presence_penalty <= 2.0 and -2.0 <= params.frequency_penalty <= 2.0
    assert params.repetition_penalty > 0.0


@pytest.mark.parametrize(
    ("name", "stated", "effective"),
    [
        ("temperature", 0, 0.0),
        ("temperature", -1.5, 0.0),
        ("temperature", 7.5, 7.5),
        ("temperature", 1e300, 1e6),
        ("top_p", 0.0, 0.0),
        ("top_p", 1.5, 1.0),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("min_p", -0.1, 0.0),
        ("presence_penalty", -3.0, -2.0),
        ("frequency_penalty", 2.5, 2.0),
        ("repetition_penalty", 0.0, 1.0),
        ("repetition_penalty", -2.0, 1.0),
        ("repetition_penalty", 0.5, 0.5),
        ("repetition_penalty", 1e-300, 1e-3),
        ("repetition_penalty", 1e300, 1e3),
    ],
)
def test_clamping(name: str, stated: float, effective: float) -> None:
    stating: dict[str, Any] = {name: stated}
    resolved: dict[str, Any] = {name: effective}
    params = resolve_sampling(SamplingOverrides(**stating))
    assert params == replace(SamplingParams(), **resolved)
