"""Content hashes of a loaded model: what an RL trainer or an auditor needs to name a policy.

All are `sha256:` and lower-case hex; structured values are hashed as canonical JSON (keys sorted).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from kiln.backends.llamacpp import LlamaModel
from kiln.backends.llamacpp.library import PINNED
from kiln.core.rollout import PolicyIdentity
from kiln.engine.schedule.calls import EXACT_ROWS


@dataclass(frozen=True)
class ModelIdentity:
    """Hashes of one model and the chat template it is served with."""

    model: LlamaModel
    template_source: str

    @cached_property
    def weights(self) -> str:
        """The whole file. Reads it, so call this off the event loop the first time."""
        with self.model.path.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def vocabulary(self) -> str:
        return sha256_of([piece.hex() for piece in self.model.pieces])

    @cached_property
    def tokenizer_config(self) -> str:
        model = self.model
        return sha256_of(
            {
                "vocabulary": self.vocabulary,
                "added": list(model.added_spellings),
                "control": list(model.control_spellings),
                "eos": sorted(model.eos_ids),
                "bos": model.bos_id,
                "scheme": model.metadata.get("tokenizer.ggml.model"),
                "pre": model.metadata.get("tokenizer.ggml.pre"),
            }
        )

    @cached_property
    def chat_template(self) -> str:
        return "sha256:" + hashlib.sha256(self.template_source.encode()).hexdigest()

    @cached_property
    def model_config(self) -> str:
        """The architecture's keys of the file, without tokenizer and descriptions."""
        return sha256_of(
            {
                key: value
                for key, value in self.model.metadata.items()
                if not key.startswith(("tokenizer.", "general.")) or key == "general.architecture"
            }
        )

    def policy(
        self, served_id: str, *, context_length: int, threads: int, exactness: Mapping[str, object]
    ) -> PolicyIdentity:
        """The whole identity. Hashes the weights: call it off the event loop.

        `exactness` says which requests are computed exactly, and what the self-test found.
        """
        # What besides weights and tokenizer decides a draw: the arithmetic, and how the engine is set up.
        inference = {
            "backend": f"llama.cpp through llama-cpp-python {PINNED}",
            "kernels": self.model.system_info,
            "context_length": context_length,
            "threads": threads,
            "exact_rows": EXACT_ROWS,
            "exactness": exactness,
        }
        return PolicyIdentity(
            served_model_id=served_id,
            base_model=self.weights,
            inference_config=sha256_of(inference),
            vocabulary=self.vocabulary,
            tokenizer_config=self.tokenizer_config,
            chat_template=self.chat_template,
            model_config=self.model_config,
            backend="llama.cpp",
        )


def sha256_of(value: object) -> str:
    """The hash of a value's canonical JSON."""
    return "sha256:" + hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()
