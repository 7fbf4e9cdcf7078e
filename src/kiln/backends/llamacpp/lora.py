"""The LoRA adapters of one llama.cpp context: loaded when first used, kept, dropped when there are many.

Adapters hold for a whole context. Setting another set makes llama.cpp plan its graphs anew at the next
call (1 to 2 ms for the bundled model, about 10 ms for one of 30 layers), so it is done only on a change.
"""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as native

from kiln.engine.ports import AdapterSet
from kiln.engine.runner import AdapterFailed


class AdapterShelf:
    """Owned by the context's thread. `errors` is where the library's last complaints are found."""

    def __init__(self, model: Any, context: Any, *, most: int, errors: list[str]) -> None:
        """Keep at most `most` adapters loaded, or as many as one set has."""
        self._model = model
        self._context = context
        self._most = most
        self._errors = errors
        # Least recently used first.
        self._loaded: OrderedDict[str, Any] = OrderedDict()
        self._in_force: AdapterSet = ()

    def use(self, adapters: AdapterSet) -> float:
        """Put a set in force. Returns the seconds that it took, loading included.

        Raises AdapterFailed, and leaves the former one in force.
        """
        if adapters == self._in_force:
            return 0.0
        started = time.monotonic()
        pointers = [self._load(use.path) for use in adapters]
        # llama.cpp adds the deltas in an order that depends on the order of insertion: `adapter_set` sorts.
        count = len(adapters)
        native.llama_set_adapters_lora(
            self._context,
            (native.llama_adapter_lora_p_ctypes * max(count, 1))(*pointers),
            count,
            (ctypes.c_float * max(count, 1))(*(use.scale for use in adapters)),
        )
        self._in_force = adapters
        self._drop_surplus(keep={use.path for use in adapters})
        return time.monotonic() - started

    def close(self) -> None:
        """Free all adapters; before the context and the model are freed."""
        self.use(())
        while self._loaded:
            native.llama_adapter_lora_free(self._loaded.popitem()[1])

    def _load(self, path: str) -> Any:
        pointer = self._loaded.get(path)
        if pointer is not None:
            self._loaded.move_to_end(path)
            return pointer
        if not Path(path).is_file():
            raise AdapterFailed(path, "its file is gone")
        self._errors.clear()
        pointer = native.llama_adapter_lora_init(self._model, path.encode())
        if not pointer:
            # "function: failed to apply lora adapter: what was wrong"
            last = self._errors[-1] if self._errors else "llama.cpp cannot read it"
            raise AdapterFailed(path, last.partition("lora adapter: ")[2] or last)
        if native.llama_adapter_get_alora_n_invocation_tokens(pointer) > 0:
            native.llama_adapter_lora_free(pointer)
            raise AdapterFailed(path, "adapters that wait for invocation tokens (aLoRA) are not supported")
        pointer = ctypes.cast(pointer, native.llama_adapter_lora_p_ctypes)
        self._loaded[path] = pointer
        return pointer

    def _drop_surplus(self, keep: set[str]) -> None:
        for path in [path for path in self._loaded if path not in keep]:
            if len(self._loaded) <= self._most:
                return
            native.llama_adapter_lora_free(self._loaded.pop(path))
