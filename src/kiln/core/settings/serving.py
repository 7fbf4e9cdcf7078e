"""The settings of the server, its models and their engines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kiln.core.settings.declare import BadValue, setting


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The HTTP side and the defaults of a request."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8420, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    served_model_id: str | None = setting(
        None, "Model ID the API answers to; unset, it is derived from the model.", high=256
    )
    default_thinking_budget_tokens: int | None = setting(
        None, "Thinking tokens a request may use when it names no limit itself.", low=0, unlimited=True
    )
    default_thinking_budget_ms: int | None = setting(
        None,
        "Milliseconds of thinking a request may use when it names no limit itself.",
        low=0,
        unlimited=True,
    )
    default_thinking_enabled: bool | None = setting(
        None, "Whether requests think unless they say otherwise; unset, the chat template decides."
    )
    reasoning_low_tokens: int | None = setting(
        512, "Thinking tokens of the reasoning effort `low`.", low=0, unlimited=True
    )
    reasoning_medium_tokens: int | None = setting(
        2048, "Thinking tokens of the reasoning effort `medium`.", low=0, unlimited=True
    )
    reasoning_high_tokens: int | None = setting(
        None, "Thinking tokens of the reasoning effort `high`.", low=0, unlimited=True
    )
    fold_reasoning_into_content: bool = setting(
        False, "Copy the reasoning into the content too, unless the request says otherwise."
    )
    include_performance: bool = setting(
        False, "Report performance metadata, unless the request says otherwise."
    )
    include_config_hashes: bool = setting(
        False, "Report configuration hashes, unless the request says otherwise."
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Origins whose pages may call the server from a browser, as https://chat.example; `*` is all."
    )
    max_body_bytes: int = setting(8_388_608, "Largest request body in bytes.", low=1)
    body_timeout_s: float = setting(60.0, "Seconds that a client may take to send a JSON body.", above=0)
    max_header_bytes: int = setting(
        65_536, "Largest request head in bytes: URL and header fields together.", low=1024
    )
    header_timeout_s: float = setting(
        30.0, "Seconds that a connection may take to bring a whole request head.", above=0
    )
    max_connections: int = setting(4096, "Connections open at once; one more is answered with 503.", low=1)
    shutdown_grace_s: float = setting(
        10.0, "Seconds that running requests get to finish at shutdown before they are cut.", low=0
    )
    log_level: str = setting(
        "info", "Least severe log messages shown.", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if origin != "*" and re.fullmatch(r"https?://[^/\s?#@,*]+", origin) is None:
                raise BadValue(
                    f"server.cors_origins names {origin}: an origin is as https://chat.example:8443"
                )


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model is served, and how its reasoning is told from its answer."""

    path: str | None = setting(
        None,
        "A .gguf file, or a hub reference `owner/name[:quant-or-file]`; unset, the bundled model.",
    )
    reasoning_open: str | None = setting(
        None, "Tag that opens reasoning; unset, found in the chat template. Goes with reasoning_close."
    )
    reasoning_close: str | None = setting(
        None, "Tag that closes reasoning; unset, found in the chat template. Goes with reasoning_open."
    )
    seed_open_tag: str = setting(
        "auto",
        "Whether kiln writes the open tag when thinking is on: `auto` where the template leaves it out.",
        choices=("auto", "always", "never"),
    )
    chat_template_file: str | None = setting(
        None, "File with a Jinja chat template to use instead of the model's own."
    )
    memory_limit_mb: int | None = setting(
        None,
        "Megabytes that all loaded models may take, weights and KV in both memories; unset, no bound."
        " The model idle longest makes room.",
        low=1,
        high=2**31 - 1,
    )
    adapter_dir: str | None = setting(
        None, "Directory of LoRA adapters in PEFT format, one folder each; unset, there are none."
    )
    adapter: str | None = setting(
        None, "Adapter of requests that name none; unset, they get the base model.", high=128
    )
    adapter_cache_dir: str | None = setting(
        None, "Where converted adapters are kept; unset, inside adapter_dir."
    )
    adapter_max_bytes: int = setting(1_073_741_824, "Largest adapter in bytes, packed or not.", low=1)
    adapter_quota_bytes: int | None = setting(
        None, "Bytes that all adapters may take together.", low=0, unlimited=True
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the model is run."""

    threads: int | None = setting(
        None, "CPU threads that compute; unset, the number of physical cores.", low=1, high=1024
    )
    mode: str = setting(
        "process",
        "Where the engine runs: `process`, supervised, so that the server outlives it; `inline` on a thread.",
        choices=("process", "inline"),
    )
    parallel: int = setting(16, "Sequences decoded together at most.", low=1, high=128)
    ctx_size: int | None = setting(
        None,
        "Tokens of context, prompt and completion, that one request may use;"
        " unset, the model's own size up to 32768.",
        low=16,
        high=2**31 - 1,
    )
    kv_size: int | None = setting(
        None,
        "Tokens that the KV cache holds for all requests together; unset, derived.",
        low=16,
        high=2**31 - 1,
    )
    step_tokens: int = setting(512, "Prompt tokens evaluated in one engine step at most.", low=1, high=2048)
    stall_tokens: int = setting(
        128,
        "The same while other requests decode: what a long prompt may delay them."
        " Never more than step_tokens.",
        low=1,
        high=2048,
    )
    retain_tokens: int = setting(
        0,
        "Tokens of ended requests that the KV cache keeps while others run; each makes decoding slower.",
        low=0,
    )
    adapter_turn_steps: int = setting(
        4,
        "Engine steps in a row for requests with the same adapters while requests with others wait.",
        low=1,
        high=1024,
    )
    adapters_loaded: int = setting(
        8, "Adapters kept in memory; the least recently used one beyond that is dropped.", low=1
    )
    speculation: bool = setting(
        False,
        "Draft tokens by looking up what followed before; answers are the same, repetitive ones come faster.",
    )
    speculation_tokens: int = setting(8, "Tokens drafted at once for one request at most.", low=1, high=32)
    host_cache_mib: int | None = setting(
        None,
        "MiB of memory that keep prefixes beyond retain_tokens, to be copied back when they are needed;"
        " unset, an eighth of model.memory_limit_mb or of the machine's memory, 8192 at most.",
        low=0,
    )
    exact: str = setting(
        "auto",
        "Which requests are computed exactly, whatever runs beside them: `auto` those with a seed, rollouts"
        " with provenance, scored prompts and what the completion cache keeps; `always` all; `never` none, so"
        " that a seed repeats only while nothing else is served.",
        choices=("auto", "always", "never"),
    )
    max_queue: int = setting(
        256,
        "Requests that may wait for a free sequence at most; one that needs more places by itself is a 400.",
        low=0,
    )
    completion_cache: int = setting(
        0, "Finished greedy or seeded generations kept to be given again; 0 computes each anew.", low=0
    )
    openmp_wait_policy: str = setting(
        "passive",
        "How idle compute threads wait: `active` spins, `passive` sleeps.",
        choices=("active", "passive"),
    )
    checks_books: bool = setting(
        False, "Compare the KV book-keeping with the model's cache whenever the engine is idle."
    )
    hang_timeout_s: float | None = setting(
        180.0,
        "Seconds of silence after which a working engine process is replaced; longer than any step takes.",
        above=0,
        unlimited=True,
    )
    request_timeout_s: float | None = setting(
        None, "Seconds from arrival after which a request is ended; unset, never.", above=0
    )


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling of requests that leave a parameter out. Unset, the model's own generation settings
    decide where it carries them, else kiln's defaults."""

    temperature: float | None = setting(None, "Sampling temperature; 0 always takes the best.", low=0)
    top_p: float | None = setting(None, "Smallest set of tokens with this probability mass.", low=0, high=1)
    top_k: int | None = setting(None, "Number of best tokens kept; 0 keeps all.", low=0)
    min_p: float | None = setting(
        None, "Least probability kept, as a share of the best token's.", low=0, high=1
    )
    presence_penalty: float | None = setting(
        None, "Taken off the logits of tokens that were generated before.", low=-2, high=2
    )
    frequency_penalty: float | None = setting(
        None, "Taken off the logits of generated tokens, once for each occurrence.", low=-2, high=2
    )
    repetition_penalty: float | None = setting(
        None, "Divides the positive logits of tokens seen in prompt or completion; 1 is off.", above=0
    )
    max_tokens: int | None = setting(None, "Completion tokens of a request at most.", low=0)


@dataclass(frozen=True)
class _CatalogModelKeys:
    """The keys of `[models.<id>]` beside those of `[sampling]`."""

    path: str | None = setting(None, "A .gguf file, or a hub reference `owner/name[:quant-or-file]`.")
    ctx_size: int | None = setting(
        None, "Tokens of context that one request may use; unset, the model's own.", low=16, high=2**31 - 1
    )
    kv_size: int | None = setting(
        None, "Tokens that its KV cache holds; unset, derived.", low=16, high=2**31 - 1
    )
    parallel: int | None = setting(None, "Sequences decoded together at most.", low=1, high=128)
    reasoning_open: str | None = setting(None, "Tag that opens reasoning. Goes with reasoning_close.")
    reasoning_close: str | None = setting(None, "Tag that closes reasoning. Goes with reasoning_open.")
    chat_template_file: str | None = setting(
        None, "File with a Jinja chat template to use instead of the model's own."
    )


# Fields of the last base come first. Only one of two bases can have slots.
@dataclass(frozen=True)
class CatalogModelSettings(SamplingSettings, _CatalogModelKeys):
    """A model that is loaded when a request names it. What is unset is as for the default model."""

    def __post_init__(self) -> None:
        if self.path is None:
            raise BadValue("path must be set")
        if (self.reasoning_open is None) != (self.reasoning_close is None):
            raise BadValue("reasoning_open and reasoning_close must be set both or neither")
