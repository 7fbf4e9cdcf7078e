"""`adapter_config.json` of PEFT: the fields that decide what an adapter computes, and refusals by name.

An adapter that asks for something kiln does not compute is refused, never served approximately.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kiln.core.errors import InvalidAdapter
from kiln.core.text import shorten

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 4096

# Fields that change what is computed, and what they mean. Empty, false and null are fine.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "modules_to_save": "modules trained in full",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "biases of the adapter",
    "layer_replication": "replicated layers",
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "retrained tokens",
    "alora_invocation_tokens": "activated LoRA",
    "megatron_config": "Megatron layers",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
# Initialisations that also rewrite the base model, so that the adapter fits another one.
_REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PATTERN_KEY = re.compile(r"\^?[\w.\-]+")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What of the configuration decides the delta of a module: `scaling_of(m) * B @ A`.

    `targets` are module names or their last parts; None says that a regular expression chose them.
    """

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | None
    base_model: str | None

    def rank_of(self, module: str) -> int:
        key = _matching(module, self.rank_pattern)
        return self.rank if key is None else self.rank_pattern[key]

    def scaling_of(self, module: str) -> float:
        """The factor of a module's delta: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        key = _matching(module, self.alpha_pattern)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def is_target(self, module: str) -> bool:
        return self.targets is None or any(
            module == target or module.endswith("." + target) for target in self.targets
        )


def parse_config(data: bytes) -> LoraConfig:
    """Raises InvalidAdapter, naming the field that is wrong or asks for what is not supported."""
    fields = _load(data)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapter(f"{CONFIG_FILE}: peft_type is {shorten(kind)}, only LORA is supported")
    _refuse_unsupported(fields)
    rank_pattern = _pattern(fields, "rank_pattern")
    for key, rank in rank_pattern.items():
        _check_rank(rank, f"rank_pattern[{key!r}]")
    alpha_pattern = _pattern(fields, "alpha_pattern")
    for key, alpha in alpha_pattern.items():
        _check_alpha(alpha, f"alpha_pattern[{key!r}]")
    base = fields.get("base_model_name_or_path")
    return LoraConfig(
        rank=_check_rank(fields.get("r"), "r"),
        alpha=_check_alpha(fields.get("lora_alpha"), "lora_alpha"),
        rslora=_flag(fields, "use_rslora"),
        rank_pattern=rank_pattern,
        alpha_pattern={key: float(alpha) for key, alpha in alpha_pattern.items()},
        targets=_targets(fields.get("target_modules")),
        base_model=base if isinstance(base, str) else None,
    )


def config_json(
    *,
    rank: int,
    alpha: float,
    targets: Iterable[str],
    rank_pattern: Mapping[str, int],
    alpha_pattern: Mapping[str, float],
    base_model: str | None,
) -> bytes:
    """The `adapter_config.json` of a plain adapter, as PEFT reads it."""
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
        "rank_pattern": dict(rank_pattern),
        "alpha_pattern": dict(alpha_pattern),
    }
    return json.dumps(fields, indent=2).encode()


def _load(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidAdapter(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidAdapter(f"{CONFIG_FILE} is not a JSON object")
    return fields


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, meaning in _REFUSED.items():
        if fields.get(name):
            raise InvalidAdapter(f"{CONFIG_FILE}: {name} is set, {meaning} is not supported")
    if fields.get("bias", "none") != "none":
        raise InvalidAdapter(f"{CONFIG_FILE}: bias is {shorten(fields['bias'])}, only none is supported")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REWRITES_BASE):
        raise InvalidAdapter(
            f"{CONFIG_FILE}: init_lora_weights is {shorten(start)}, which rewrites the base model",
            hint="Save it with path_initial_model_for_weight_conversion, which makes a plain LoRA of it.",
        )
    for name, value in fields.items():
        # A switch that came after this was written: it may change what is computed.
        if name.startswith("use_") and name != "use_rslora" and value:
            raise InvalidAdapter(f"{CONFIG_FILE}: {shorten(name)} is set, which is not supported")


def _check_rank(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise InvalidAdapter(f"{CONFIG_FILE}: {name} must be a whole number from 1 to {MAX_RANK}")
    return value


def _check_alpha(value: Any, name: str) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidAdapter(f"{CONFIG_FILE}: {name} must be a finite number")
    return number


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidAdapter(f"{CONFIG_FILE}: {name} must be true or false")
    return value is True


def _targets(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return None
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(sorted(value))
    raise InvalidAdapter(f"{CONFIG_FILE}: target_modules must be a list of module names, or a text")


def _pattern(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A map from module names to numbers. PEFT allows regular expressions as keys, kiln names only."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidAdapter(f"{CONFIG_FILE}: {name} must be an object")
    for key in value:
        if _PATTERN_KEY.fullmatch(key) is None:
            raise InvalidAdapter(
                f"{CONFIG_FILE}: the key {shorten(key)} of {name} is a regular expression, which is not"
                " supported",
                hint="Name the modules in full.",
            )
    return value


def _matching(module: str, pattern: Mapping[str, object]) -> str | None:
    """The first key that is the module's name or its end, as PEFT looks it up; ^ asks for the whole."""
    for key in pattern:
        name = key.removeprefix("^")
        if module == name or (name == key and module.endswith("." + name)):
            return key
    return None
