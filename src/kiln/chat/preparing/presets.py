"""Named sampling presets of the Kiln contract (seed 000, SamplingPreset)."""

from __future__ import annotations

from kiln.core.sampling import SamplingOverrides

_FALLBACK = "qwen3-thinking-general"


def _preset(temperature: float, top_p: float, top_k: int, presence_penalty: float) -> SamplingOverrides:
    return SamplingOverrides(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=0.0,
        presence_penalty=presence_penalty,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
    )


PRESETS = {
    "qwen3-thinking-general": _preset(1.0, 0.95, 20, 1.5),
    "qwen3-thinking-coding": _preset(0.6, 0.95, 20, 0.0),
    "qwen3-non-thinking-general": _preset(0.7, 0.8, 20, 1.5),
    "qwen3-non-thinking-reasoning": _preset(1.0, 1.0, 40, 2.0),
    "greedy": _preset(0.0, 1.0, 0, 0.0),
}


def preset(name: str | None) -> SamplingOverrides:
    """The preset of a name. An unknown name is the general thinking one, as the contract says."""
    if name is None:
        return SamplingOverrides()
    return PRESETS.get(name, PRESETS[_FALLBACK])
