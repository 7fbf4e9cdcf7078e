"""llama.cpp through llama-cpp-python's low-level C API. Importing this room loads the native library.

Calls and their costs follow llama.h of the pinned release. A `LlamaModel` is read-only after loading
and may be shared; a `LlamaRunner` is one context over it, owned by one thread.
"""

from kiln.backends.llamacpp.model import LlamaModel
from kiln.backends.llamacpp.runner import LlamaRunner

__all__ = ["LlamaModel", "LlamaRunner"]
