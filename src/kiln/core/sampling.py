"""Sampling parameters as the engine uses them, after resolution."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's resolved sampling policy.

    temperature >= 0 (0 is argmax); top_p and min_p in 0..1; top_k >= 0 (0 switches it off);
    presence and frequency penalties in -2..2 over generated tokens; repetition_penalty > 0 over
    prompt and generated tokens, as in transformers' RepetitionPenaltyLogitsProcessor.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 20
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """What a request, a preset or the configuration says; None leaves the dimension to the next source."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def of(cls, source: object) -> SamplingOverrides:
        """What a request or a section of the settings has in fields of the same names."""
        return cls(**{name: getattr(source, name) for name in cls.__slots__})


SAMPLING_FIELDS = tuple(SamplingOverrides.__slots__)


def merge_sampling(*sources: SamplingOverrides) -> SamplingOverrides:
    """The first source that states a dimension decides it."""
    stated = {
        name: next((v for source in sources if (v := getattr(source, name)) is not None), None)
        for name in SAMPLING_FIELDS
    }
    return SamplingOverrides(**stated)


def resolve_sampling(*sources: SamplingOverrides) -> SamplingParams:
    """Fold sources, the weightier first, over kiln's own defaults and clamp to the effective ranges.

    Ranges follow the rulings for `/v1`: any finite number is accepted, the effective value is clamped.
    """
    merged = merge_sampling(*sources, SamplingOverrides.of(SamplingParams()))
    values = {name: getattr(merged, name) for name in SAMPLING_FIELDS}
    repetition = float(values["repetition_penalty"])
    # Temperature and repetition divide and multiply single-precision logits: keep them where that is finite.
    return SamplingParams(
        temperature=_clamp(float(values["temperature"]), 0.0, 1e6),
        top_p=_clamp(float(values["top_p"]), 0.0, 1.0),
        top_k=max(0, int(values["top_k"])),
        min_p=_clamp(float(values["min_p"]), 0.0, 1.0),
        presence_penalty=_clamp(float(values["presence_penalty"]), -2.0, 2.0),
        frequency_penalty=_clamp(float(values["frequency_penalty"]), -2.0, 2.0),
        repetition_penalty=_clamp(repetition, 1e-3, 1e3) if repetition > 0 else 1.0,
    )


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
