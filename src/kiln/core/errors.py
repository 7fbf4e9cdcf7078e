"""Every error kiln raises on purpose.

    KilnError
    ├── RequestError                 the caller can mend it
    │   ├── InvalidJson              400 invalid_json
    │   ├── InvalidField             400 invalid_field
    │   ├── MalformedHttp            400 malformed_http
    │   ├── InvalidAdapter           400 invalid_adapter
    │   ├── TemplateFailed           400 chat_template_failed
    │   ├── KeyRefused               400 key_refused
    │   ├── EmptyPrompt              400 empty_prompt
    │   ├── ContextExceeded          400 context_length_exceeded
    │   ├── CloseCannotFit           400 thinking_close_cannot_fit
    │   ├── StopOverlapsClose        400 stop_overlaps_thinking_close
    │   ├── GrammarFailed            400 grammar_failed
    │   ├── MissingKey               401 missing_api_key
    │   ├── InvalidKey               401 invalid_api_key
    │   ├── ScopeRefused             403 insufficient_scope
    │   ├── MemoryOff                403 memory_off
    │   ├── CrossSiteRefused         403 cross_site_request
    │   ├── ModelNotFound            404 model_not_found
    │   ├── AdapterNotFound          404 adapter_not_found
    │   ├── AdapterUnusable          400 adapter_unusable
    │   ├── SkillNotFound            404 skill_not_found
    │   ├── AgentNotFound            404 agent_not_found
    │   ├── ExchangeNotFound         404 exchange_not_found
    │   ├── KeyNotFound              404 key_not_found
    │   ├── MemoryStoreNotFound      404 memory_store_not_found
    │   ├── FactNotFound             404 fact_not_found
    │   ├── RouteNotFound            404 route_not_found
    │   ├── MethodNotAllowed         405 method_not_allowed
    │   ├── CannotSkip               409 cannot_skip
    │   ├── AdapterInUse             409 adapter_in_use
    │   ├── AdaptersNotServed        409 adapters_not_served
    │   ├── SkillInvalid             409 skill_invalid
    │   ├── AgentInvalid             409 agent_invalid
    │   ├── RequestIdInUse           409 request_id_in_use
    │   ├── BodyTooSlow              408 body_too_slow
    │   ├── HeadTooSlow              408 head_too_slow
    │   ├── BodyTooLarge             413 body_too_large
    │   ├── AdapterQuotaExceeded     413 adapter_quota_exceeded
    │   ├── UnsupportedMediaType     415 unsupported_media_type
    │   ├── HeadTooLarge             431 head_too_large
    │   ├── QueueFull                429 queue_full
    │   ├── TooManyAtOnce            429 concurrency_limit_exceeded
    │   └── TooManyPerMinute         429 rate_limit_exceeded
    ├── ServiceError                 the server's fault or state
    │   ├── EngineFailed             503 engine_failed
    │   ├── ModelUnavailable         503 model_unavailable
    │   ├── RequestTimedOut          504 request_timed_out
    │   ├── TooManyConnections       503 too_many_connections
    │   ├── ShuttingDown             503 shutting_down
    │   ├── StoreFailed              503 store_failed
    │   └── InternalError            500 internal_error
    └── SetupError                   stops start-up; never crosses HTTP
        ├── ConfigError
        ├── ModelLoadError
        └── DownloadError

One type has one code, one status and one default hint; `param` names the offending request field.
"""

from __future__ import annotations


class KilnError(Exception):
    """Base of all errors raised on purpose.

    `message` says what is wrong, `param` which request field, `hint` what would mend it, and
    `retry_after_s` after how many seconds the same request may succeed.
    """

    status = 500
    code = "internal_error"
    type = "server_error"
    hint: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if hint is not None:
            self.hint = hint


class RequestError(KilnError):
    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class InvalidJson(RequestError):
    code = "invalid_json"
    hint = "Send one JSON object, encoded as UTF-8."


class InvalidField(RequestError):
    code = "invalid_field"
    hint = "Correct the named field; GET /docs lists every field with its type and bounds."


class MalformedHttp(RequestError):
    code = "malformed_http"
    hint = "Send requests in HTTP/1.1, with a content-length that is right."


class InvalidAdapter(RequestError):
    code = "invalid_adapter"
    hint = "Save the adapter with PEFT's save_pretrained, as a plain LoRA of the served model."


class TemplateFailed(RequestError):
    code = "chat_template_failed"
    hint = "Check the messages, tools and chat_template_kwargs against what the model's template accepts."


class EmptyPrompt(RequestError):
    code = "empty_prompt"
    hint = "Send at least one token, or a message that renders to text."


class ContextExceeded(RequestError):
    code = "context_length_exceeded"
    hint = "Shorten the prompt or serve the model with a larger --ctx-size."


class CloseCannotFit(RequestError):
    code = "thinking_close_cannot_fit"
    hint = "Raise max_tokens, shorten the prompt, or set both thinking budgets to null."


class StopOverlapsClose(RequestError):
    code = "stop_overlaps_thinking_close"
    hint = "Choose a stop string that shares no edge with the closing tag, or lift the thinking budget."


class GrammarFailed(RequestError):
    code = "grammar_failed"
    hint = "Simplify the schema or the pattern that the answer has to keep to."


class KeyRefused(RequestError):
    code = "key_refused"
    hint = "Correct the named value."


class MissingKey(RequestError):
    status = 401
    code = "missing_api_key"
    type = "authentication_error"
    hint = "Send `Authorization: Bearer KEY`; `kiln keys create NAME` makes a key."


class InvalidKey(RequestError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"
    hint = "Check the key; `kiln keys list` shows which are in force."


class ScopeRefused(RequestError):
    status = 403
    code = "insufficient_scope"
    type = "permission_error"
    hint = "Use a key made with `kiln keys create NAME --scope admin`."


class MemoryOff(RequestError):
    status = 403
    code = "memory_off"
    type = "permission_error"
    hint = "Set store.memory to true."


class CrossSiteRefused(RequestError):
    status = 403
    code = "cross_site_request"
    type = "permission_error"
    hint = "Send an API key, or list the page's origin in server.cors_origins."


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"
    hint = "GET /v1/models lists what is served; leave `model` out to use the default."


class AdapterNotFound(RequestError):
    status = 404
    code = "adapter_not_found"
    hint = "GET /v1/adapters lists what there is; send null to use the base model."


class SkillNotFound(RequestError):
    status = 404
    code = "skill_not_found"
    hint = "GET /lmkit/v1/skills lists the skills of this server."


class AgentNotFound(RequestError):
    status = 404
    code = "agent_not_found"
    hint = "GET /lmkit/v1/agents lists the agents of this server."


class AdapterUnusable(RequestError):
    code = "adapter_unusable"
    hint = "Use an adapter that was trained for the served model, or leave the adapter out."


class ExchangeNotFound(RequestError):
    status = 404
    code = "exchange_not_found"
    hint = "Send the id of an exchange that is still running."


class KeyNotFound(RequestError):
    status = 404
    code = "key_not_found"
    hint = "`kiln keys list` shows which keys are in force."


class MemoryStoreNotFound(RequestError):
    status = 404
    code = "memory_store_not_found"
    hint = "Name a store that the settings have as [memory.<name>], or leave it out."


class FactNotFound(RequestError):
    status = 404
    code = "fact_not_found"
    hint = "GET /lmkit/v1/memory/{memory_id} lists the facts that are there."


class RouteNotFound(RequestError):
    status = 404
    code = "route_not_found"
    hint = "Check the path; the inference routes begin with /v1."


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"
    hint = "Use the method named in the Allow header."


class CannotSkip(RequestError):
    status = 409
    code = "cannot_skip"
    hint = (
        "Its record would name a policy that did not choose the closing tokens; cancel the request instead."
    )


class AdapterInUse(RequestError):
    status = 409
    code = "adapter_in_use"
    hint = "Take it out of use with POST /v1/adapters/unload first."


class AdaptersNotServed(RequestError):
    status = 409
    code = "adapters_not_served"
    hint = "Start the server with --adapter-dir."


class RequestIdInUse(RequestError):
    status = 409
    code = "request_id_in_use"
    hint = "Give every running exchange an id of its own, or leave `request_id` out."


class SkillInvalid(RequestError):
    status = 409
    code = "skill_invalid"
    hint = "Correct the SKILL.md on the server as `kiln skills check` says; it is read again at once."


class AgentInvalid(RequestError):
    status = 409
    code = "agent_invalid"
    hint = "Correct the agent's file on the server; it is read again at once."


class BodyTooSlow(RequestError):
    status = 408
    code = "body_too_slow"
    hint = "Send the body at once, or raise server.body_timeout_s."


class HeadTooSlow(RequestError):
    status = 408
    code = "head_too_slow"
    hint = "Send the header fields at once, or raise server.header_timeout_s."


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"
    hint = "Send a smaller request, or raise server.max_body_bytes."


class AdapterQuotaExceeded(RequestError):
    status = 413
    code = "adapter_quota_exceeded"
    hint = "Delete adapters, or raise model.adapter_quota_bytes."


class UnsupportedMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"
    hint = "Send the header `content-type: application/json`."


class HeadTooLarge(RequestError):
    status = 431
    code = "head_too_large"
    hint = "Send fewer or shorter header fields and a shorter URL, or raise server.max_header_bytes."


class QueueFull(RequestError):
    status = 429
    code = "queue_full"
    type = "rate_limit_error"
    retry_after_s = 1
    hint = "Retry after the time in the Retry-After header."


class TooManyAtOnce(RequestError):
    status = 429
    code = "concurrency_limit_exceeded"
    type = "rate_limit_error"
    retry_after_s = 1
    hint = "Wait for a request of this key to end."


class TooManyPerMinute(RequestError):
    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"
    retry_after_s = 1
    hint = "Retry after the time in the Retry-After header."


class ServiceError(KilnError):
    pass


class EngineFailed(ServiceError):
    status = 503
    code = "engine_failed"
    # A successor takes about so long to come up, and what is sent meanwhile waits for it.
    retry_after_s = 1
    hint = "The request may be sent again."


class ModelUnavailable(ServiceError):
    status = 503
    code = "model_unavailable"
    hint = "Ask for another model, or look into the server's log; the other models are served on."


_WAITED = "Send fewer requests at a time, or raise engine.parallel or engine.request_timeout_s."


class RequestTimedOut(ServiceError):
    status = 504
    code = "request_timed_out"
    hint = "Ask for fewer tokens, or raise engine.request_timeout_s."

    @classmethod
    def after(cls, seconds: float, *, waited_s: float = 0.0, has_begun: bool = True) -> RequestTimedOut:
        """`seconds` were allowed; for `waited_s` of them the request waited for a place in the engine."""
        if not has_begun:
            return cls(
                f"the request waited {waited_s:.1f} seconds for a place, and had none when its"
                f" {seconds:g} seconds were over",
                hint=_WAITED,
            )
        ran = f"the request ran for more than {seconds:g} seconds"
        if waited_s < seconds / 10:
            return cls(ran)
        hint = _WAITED if waited_s > seconds / 2 else None
        return cls(f"{ran}, of which it waited {waited_s:.1f} for a place", hint=hint)


class TooManyConnections(ServiceError):
    status = 503
    code = "too_many_connections"
    retry_after_s = 1
    hint = "Close connections that are not needed, or raise server.max_connections."


class ShuttingDown(ServiceError):
    status = 503
    code = "shutting_down"
    hint = "Send the request to another instance, or again once the server is back."


class StoreFailed(ServiceError):
    status = 503
    code = "store_failed"
    hint = "Check the file that store.path names; the server's log says more."


class InternalError(ServiceError):
    hint = "This is a defect of the server; its log holds the details."


class SetupError(KilnError):
    type = "setup_error"


class ConfigError(SetupError):
    code = "invalid_configuration"


class ModelLoadError(SetupError):
    code = "model_load_failed"


class DownloadError(SetupError):
    code = "download_failed"


def error_of_code(code: str, message: str, *, hint: str | None = None) -> KilnError:
    """The error of a code that another process sent."""
    kinds: list[type[KilnError]] = [KilnError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    found = next((kind for kind in kinds if kind.code == code), InternalError)
    return found(message, hint=hint)
