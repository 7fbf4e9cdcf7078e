"""The native library: started once a process, checked against its bindings, its log passed on."""

from __future__ import annotations

import logging
import threading
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as native

from kiln.core.errors import ModelLoadError

log = logging.getLogger("kiln.llamacpp")

PINNED = "0.3.36"

# The library warns about many harmless things; only its errors concern an operator.
_GGML_LEVELS = {3: logging.INFO, 4: logging.ERROR}
# The library's last complaints, newest last: for the message of whatever fails next.
recent_errors: list[str] = []
_backend_lock = threading.Lock()
_backend_ready = False


@native.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: Any) -> None:
    line = text.decode("utf-8", "replace").strip()
    if not line:
        return
    if level >= 4:
        recent_errors.append(line)
        del recent_errors[:-8]
    log.log(_GGML_LEVELS.get(level, logging.DEBUG), "%s", line)


def start_backend() -> None:
    """Initialise the library once, and check that bindings and library are of one release.

    A struct that differs in layout reads wrong values silently, so known defaults are compared.
    """
    global _backend_ready
    with _backend_lock:
        if _backend_ready:
            return
        defaults = native.llama_context_default_params()
        layout = (
            defaults.n_batch,
            defaults.n_ubatch,
            defaults.n_seq_max,
            defaults.swa_full,
            defaults.no_perf,
        )
        if llama_cpp.__version__ != PINNED or layout != (2048, 512, 1, True, True):
            raise ModelLoadError(
                f"llama-cpp-python {llama_cpp.__version__} with context defaults {layout} is not the pinned "
                f"{PINNED}: bindings and library must be of one release",
                hint=f"Install llama-cpp-python=={PINNED} again, as `make setup` does.",
            )
        native.llama_log_set(_on_log, None)
        native.llama_backend_init()
        _backend_ready = True
