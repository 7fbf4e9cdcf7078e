"""Fields that chat and text completions share: out of range is refused here, never clamped."""

from __future__ import annotations

import math

from msgspec import UNSET, UnsetType

from kiln.core.errors import InvalidField
from kiln.core.sampling import MAX_SEED, SamplingOverrides
from kiln.dialects.kiln import MAX_STOP_BYTES, MAX_STOPS, adapters_of, check_adapters
from kiln.dialects.validate import require_range, text_list
from kiln.wire.openai_chat import ProfileFields, Tier

MAX_TEMPERATURE = 2.0
_BOUNDS = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


def read_sampling(request: ProfileFields) -> SamplingOverrides:
    """Raises InvalidField for a number out of its range."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise InvalidField(f"{name} must be between {low:g} and {high:g}, not {value:g}", param=name)
    repetition = request.repetition_penalty
    if repetition is not None and not (math.isfinite(repetition) and repetition > 0):
        raise InvalidField(
            f"repetition_penalty must be above 0, not {repetition:g}", param="repetition_penalty"
        )
    require_range("seed", request.seed, 0, MAX_SEED)
    return SamplingOverrides.of(request)


def check_limits(**limits: object) -> None:
    """Token and time limits fit 64 bits; absent ones are not looked at."""
    for name, value in limits.items():
        if isinstance(value, int):
            require_range(name, value, 0, MAX_SEED)


def read_bias(request: ProfileFields) -> tuple[tuple[int | str, float], ...]:
    """OpenAI's map of token ids in decimal to numbers; their range is checked against the model."""
    entries = []
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidField(
                f"logit_bias has the key {key[:40]!r}, which is no token id",
                param="logit_bias",
                hint="Keys are token ids in decimal; POST /v1/openai/tokenize tells them.",
            )
        entries.append((int(key), value))
    return tuple(entries)


def read_stops(request: ProfileFields) -> tuple[str, ...]:
    stops = text_list("stop", request.stop)
    if any(text == "" for text in stops):
        raise InvalidField("stop must not hold an empty string", param="stop")
    if len(stops) > MAX_STOPS or sum(len(text.encode("utf-8", "replace")) for text in stops) > MAX_STOP_BYTES:
        raise InvalidField(
            f"stop holds at most {MAX_STOPS} strings of {MAX_STOP_BYTES} bytes in all", param="stop"
        )
    return stops


def read_adapters(request: ProfileFields) -> tuple[tuple[tuple[str, float], ...] | UnsetType, str]:
    """Names and scales of LoRA adapters, UNSET for the server's choice, and the field they came from."""
    if isinstance(request.adapters, list) and request.adapter is not UNSET:
        raise InvalidField("adapter and adapters exclude each other", param="adapters")
    check_adapters(request)
    return adapters_of(request), "adapters" if isinstance(request.adapters, list) else "adapter"


def check_stream(request: ProfileFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidField("stream_options needs stream=true", param="stream_options")


def named_tier(request: ProfileFields) -> Tier | None:
    """The tier to be echoed, where the request names one."""
    if request.service_tier is None:
        return None
    return "priority" if read_tier(request.service_tier) else "default"


def read_tier(tier: str | None) -> bool:
    """Whether a request is of the priority tier. Raises InvalidField for a tier that is not served."""
    if tier in (None, "auto", "default"):
        return False
    if tier == "priority":
        return True
    raise InvalidField(
        f"service_tier {tier[:40]!r} is not served" if tier else "service_tier is empty",
        param="service_tier",
        hint="Send default or priority.",
    )
