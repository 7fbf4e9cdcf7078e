from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.loadgen.quantiles import quantile, spread, summarize

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(values, st.floats(0, 1))
def test_quantile_is_definition_7_as_numpy_has_it(sample: list[float], q: float) -> None:
    assert quantile(sorted(sample), q) == pytest.approx(float(np.quantile(sample, q)), abs=1e-6)


def test_quantile_interpolates_between_ranks() -> None:
    assert quantile([10, 20, 30, 40], 0.5) == 25
    assert quantile([10, 20, 30, 40], 0.9) == pytest.approx(37)
    assert quantile([7], 0.99) == 7


@pytest.mark.parametrize(("sample", "q"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_quantile_refuses_what_has_none(sample: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile(sample, q)


def test_no_values_are_no_summary_and_no_zero() -> None:
    assert summarize([]) is None
    assert spread([]) is None


def test_summary_and_spread() -> None:
    summary = summarize([4, 1, 3, 2])
    assert summary is not None
    assert (summary.count, summary.mean, summary.p50, summary.max) == (4, 2.5, 2.5, 4)
    found = spread([3, 1, 2, 5, 4])
    assert found is not None
    assert (found.low, found.q1, found.median, found.q3, found.high) == (1, 2, 3, 4, 5)
