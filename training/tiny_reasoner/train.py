"""Trains the model: `python -m training.tiny_reasoner.train --out models/tiny-reasoner`.

One CPU thread. A checkpoint is written beside the result now and then; `--start` goes on from
the weights of a finished directory with a schedule of its own.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from .dialogues import MIX
from .encoding import Encoder, Sample, draw_batches
from .model import load_model, load_tokenizer, new_model, save_model
from .tokenizer import train_tokenizer

SEED = 20
WARM_UP = 60
HOLD = 0.6  # share of the steps at the full rate, before the linear decay
# Copying is learned first: sums and tool calls both start from it.
EARLY = 0.12
EARLY_MIX = {"arithmetic": 0.5, "echo": 0.4, "tools": 0.04, "small talk": 0.06}
CURRICULUM = ((0.0, 4), (0.08, 8), (0.2, 12))  # (share of the steps done, most terms)


def rate_at(step: int, steps: int, peak: float, hold: float = HOLD) -> float:
    """Warm-up, hold, linear decay to a hundredth."""
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    if step < hold * steps:
        return peak
    left = (steps - step) / (steps * (1 - hold))
    return peak * max(0.01, min(1.0, left))


def most_terms(step: int, steps: int) -> int:
    return [most for share, most in CURRICULUM if step >= share * steps][-1]


def collate(batch: list[Sample], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and targets, both (rows, length); -100 marks what is not learned."""
    length = max(len(sample.ids) for sample in batch)
    ids = torch.full((len(batch), length), pad)
    targets = torch.full((len(batch), length), -100)
    for row, sample in enumerate(batch):
        size = len(sample.ids)
        ids[row, :size] = torch.tensor(sample.ids)
        following = [
            token if learned else -100
            for token, learned in zip(sample.ids[1:], sample.learned[1:], strict=True)
        ]
        targets[row, : size - 1] = torch.tensor(following)
    return ids, targets


def loss_of(model: torch.nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the learned tokens.

    Rows are padded on the right, so causal attention alone keeps the padding out of sight.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = targets != -100
    return functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])


def batches(
    encoder: Encoder, seed: int, steps: int, mix: dict[str, float], *, curriculum: bool
) -> Iterator[list[Sample]]:
    rng = random.Random(seed)
    done = 0
    while True:
        most = most_terms(done, steps) if curriculum else 12
        shares = EARLY_MIX if curriculum and done < EARLY * steps else mix
        for batch in draw_batches(encoder, rng, most, shares):
            yield batch
            done += 1


def fit(
    model: torch.nn.Module,
    stream: Iterator[list[Sample]],
    steps: int,
    peak: float,
    pad: int,
    save_every: int = 0,
    save: object = None,
    hold: float = HOLD,
) -> None:
    """AdamW over the trainable parameters for a number of steps."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=peak, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    model.train()
    begun, losses = time.monotonic(), []
    for step, batch in enumerate(itertools.islice(stream, steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, peak, hold)
        ids, targets = collate(batch, pad)
        loss = loss_of(model, ids, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            print(f"step {step + 1} loss {mean:.4f} {time.monotonic() - begun:.0f} s", flush=True)
        if save_every and callable(save) and (step + 1) % save_every == 0:
            save()
    model.eval()


def parse_mix(text: str | None) -> dict[str, float]:
    """`arithmetic=0.6,tools=0.3`: shares that replace the usual ones."""
    mix = dict(MIX)
    for item in text.split(",") if text else []:
        name, share = item.split("=")
        mix[name] = float(share)
    return mix


def check_same_pieces(tokenizer: Tokenizer, other: Tokenizer) -> None:
    """Weights fit another tokenizer only if all its ordinary pieces have the same ids."""
    ours = tokenizer.get_vocab(with_added_tokens=False)
    if ours != other.get_vocab(with_added_tokens=False):
        raise ValueError("the tokenizer differs from the one the weights were trained with")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--hold", type=float, default=HOLD, help="share at the full rate")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--start", type=Path, help="go on from this directory's weights")
    parser.add_argument("--mix", help="shares that replace the usual ones")
    parser.add_argument("--tags-as-text", action="store_true", help="think tags are no tokens")
    parser.add_argument("--save-every", type=int, default=250)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.start and not options.tags_as_text:
        tokenizer = load_tokenizer(options.start)
    else:
        tokenizer = train_tokenizer(SEED, tags_as_text=options.tags_as_text)
    if options.start:
        check_same_pieces(tokenizer, load_tokenizer(options.start))
    model = load_model(options.start) if options.start else new_model(tokenizer)
    print(json.dumps({"parameters": sum(weight.numel() for weight in model.parameters())}))
    mix = parse_mix(options.mix)
    curriculum = options.start is None
    stream = batches(Encoder(tokenizer), options.seed, options.steps, mix, curriculum=curriculum)
    fit(
        model,
        stream,
        options.steps,
        options.peak,
        tokenizer.token_to_id("<|endoftext|>"),
        options.save_every,
        lambda: save_model(model, tokenizer, options.out),
        options.hold,
    )
    save_model(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
