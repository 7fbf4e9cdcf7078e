"""Compares llama.cpp's greedy output of the GGUF file with the reference ids of transformers.

`python -m training.tiny_reasoner.parity MODEL.gguf tests/fixtures/reference.json`
Needs llama-cpp-python and no torch.
"""

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


class Greedy:
    """One llama.cpp context that continues a prompt with the likeliest tokens."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise ValueError(f"cannot load {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_threads = 4096, 2048, 1
        context.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.memory = llama_cpp.llama_get_memory(self.context)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        buffer = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), buffer, room, False, True)
        return list(buffer[:count])

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, 256, 0, True)
        return buffer.raw[:size]

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Feeds the tokens; logits after the last one, shape (vocabulary,)."""
        data = (llama_cpp.llama_token * len(tokens))(*tokens)
        status = llama_cpp.llama_decode(
            self.context, llama_cpp.llama_batch_get_one(data, len(tokens))
        )
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        row = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(row, (self.size,)).copy()

    def continue_ids(
        self,
        prompt: list[int],
        most: int,
        close: list[int] | None = None,
        budget: int | None = None,
    ) -> list[int]:
        """Greedy ids up to an end token; `close` is forced once `budget` tokens were thought."""
        llama_cpp.llama_memory_clear(self.memory, True)
        row, written = self.logits(prompt), []
        pending: list[int] = []
        thinking = close is not None and budget is not None
        while len(written) < most:
            token = pending.pop(0) if pending else int(row.argmax())
            if thinking and close is not None and token == close[0] and not pending:
                thinking = False
            elif thinking and close is not None and len(written) == budget:
                token, *pending = close
                thinking = False
            written.append(token)
            if llama_cpp.llama_vocab_is_eog(self.vocab, token):
                break
            row = self.logits([token])
        return written


def compare(greedy: Greedy, cases: list[dict[str, Any]]) -> list[str]:
    """One line for each case that differs."""
    problems = []
    for number, case in enumerate(cases):
        prompt = greedy.tokenize(case["text"])
        if prompt != case["prompt_ids"]:
            problems.append(f"{number}: the prompt tokenizes differently")
            continue
        written = greedy.continue_ids(prompt, case.get("max_tokens", 160))
        if written != case["output_ids"]:
            text = b"".join(map(greedy.piece, written)).decode("utf-8", "replace")
            problems.append(f"{number}: {case['kind']}: {text!r}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("reference", type=Path)
    options = parser.parse_args()
    cases = json.loads(options.reference.read_text(encoding="utf-8"))["cases"]
    problems = compare(Greedy(options.model), cases)
    print(f"{len(cases) - len(problems)} of {len(cases)} identical")
    print("\n".join(problems))


if __name__ == "__main__":
    main()
