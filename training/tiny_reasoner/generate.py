"""Greedy generation with a thinking budget, for measuring and for reference ids."""

from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache

from .encoding import CLOSE, END

ROWS = 64  # prompts computed together


@dataclass
class _Row:
    """One prompt's progress. `budget` None means no limit, or no thinking at all."""

    prompt: list[int]
    budget: int | None
    written: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    closed: bool = False
    ended: bool = False


class Generator:
    """Writes greedily; closes the thought by the bare tag's ids once a budget is spent."""

    def __init__(self, model: torch.nn.Module, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.close = list(tokenizer.encode(CLOSE, add_special_tokens=False).ids)
        self.pad = tokenizer.token_to_id("<|endoftext|>")
        self.ends = {tokenizer.token_to_id(END), self.pad}

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def texts(
        self, prompts: list[list[int]], most: int = 200, budget: int | None = None
    ) -> list[str]:
        return [self.text(ids) for ids in self.ids(prompts, most, budget)]

    def ids(
        self, prompts: list[list[int]], most: int = 200, budget: int | None = None
    ) -> list[list[int]]:
        """The written ids of each prompt, its end token included."""
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        results: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), ROWS):
            places = order[start : start + ROWS]
            rows = [_Row(prompts[place], budget) for place in places]
            self._run(rows, most)
            for place, row in zip(places, rows, strict=True):
                results[place] = row.written
        return results

    def _accept(self, row: _Row, likeliest: int) -> int:
        """The next id: the likeliest one, unless the thought must be closed now."""
        if row.ended:
            return self.pad
        token = likeliest
        if row.pending:
            token = row.pending.pop(0)
        elif row.budget is not None and not row.closed:
            natural = token == self.close[0] and len(self.close) == 1
            if not natural and len(row.written) >= row.budget:
                token, *row.pending = self.close
                row.closed = True
        row.written.append(token)
        row.ended = token in self.ends
        # A tag of several pieces is seen as text: its last piece may merge with what follows.
        row.closed = row.closed or CLOSE in self.text(row.written[-6:])
        return token

    @torch.inference_mode()
    def _run(self, rows: list[_Row], most: int) -> None:
        length = max(len(row.prompt) for row in rows)
        ids = torch.tensor([[self.pad] * (length - len(r.prompt)) + r.prompt for r in rows])
        mask = torch.tensor([[0] * (length - len(r.prompt)) + [1] * len(r.prompt) for r in rows])
        cache = DynamicCache()
        places = (mask.cumsum(1) - 1).clamp(min=0)
        for _ in range(most):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            likeliest = output.logits[:, -1].argmax(-1).tolist()
            chosen = [self._accept(row, token) for row, token in zip(rows, likeliest, strict=True)]
            if all(row.ended for row in rows):
                break
            ids = torch.tensor(chosen)[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            places = places[:, -1:] + 1


@torch.inference_mode()
def greedy_alone(
    model: torch.nn.Module, prompt: list[int], most: int, ends: set[int]
) -> tuple[list[int], float]:
    """One prompt without padding: the written ids and the smallest lead of the best logit."""
    cache, ids, written, lead = DynamicCache(), torch.tensor([prompt]), [], float("inf")
    while len(written) < most:
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        written.append(int(best.indices[0]))
        if written[-1] in ends:
            break
        ids = torch.tensor([[written[-1]]])
    return written, lead
