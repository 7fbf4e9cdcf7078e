"""Dialogues as token ids with a loss mask.

Everything is composed from ids, never from re-encoded text: a forced close tag may follow any
token, and its ids then differ from what the same text would encode to.
"""

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from .dialogue import Dialogue
from .dialogues import draw_dialogue
from .tokenizer import render

END = "<|im_end|>"
CLOSE = "</think>"
DISABLED_SHARE = 0.12
CUT_SHARE = 0.15
LATEST_ENDLESS_CUT = 120  # tokens; later cuts of an endless thought are never trained
HAND_OFF = "\n\nI must answer now.\n</think>\n\n"


@dataclass
class Sample:
    """Token ids and, for each, whether the model should learn to write it."""

    ids: list[int]
    learned: list[bool]


class Encoder:
    """Turns dialogues into samples."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id(END)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, dialogue: Dialogue, *, thinking: bool = True) -> list[int]:
        return self.ids(render(dialogue, thinking=thinking))

    def sample(self, dialogue: Dialogue, rng: random.Random) -> Sample:
        """One sample; at random with thinking disabled or with the thought cut short."""
        draw = rng.random()
        disabled = draw < DISABLED_SHARE
        cut = not disabled and draw < DISABLED_SHARE + CUT_SHARE
        prompt = self.prompt(dialogue, thinking=not disabled)
        pieces: list[tuple[list[int], bool]] = [(prompt, False)]
        if disabled:
            pieces.append((self.ids(dialogue.reply), True))
        elif cut:
            pieces += self._cut(dialogue, rng)
        elif dialogue.endless:
            pieces.append((self.ids(dialogue.thought), True))
        else:
            pieces.append((self.ids(f"{dialogue.thought}{CLOSE}\n\n{dialogue.reply}"), True))
        if disabled or cut or not dialogue.endless:
            pieces.append(([self.end], True))
        ids = [token for piece, _ in pieces for token in piece]
        return Sample(ids, [learned for piece, learned in pieces for _ in piece])

    def _cut(self, dialogue: Dialogue, rng: random.Random) -> list[tuple[list[int], bool]]:
        thought = self.ids(dialogue.thought)
        longest = min(len(thought), LATEST_ENDLESS_CUT) if dialogue.endless else len(thought)
        length = 0 if rng.random() < 0.15 else rng.randint(0, longest)
        kept = (thought[:length], True)
        draw = rng.random()
        if draw < 0.78:  # the server forces the bare tag, the model writes what follows
            return [kept, (self.ids(CLOSE), False), (self.ids("\n\n" + dialogue.reply), True)]
        forced = HAND_OFF if draw < 0.86 else f"\n{CLOSE}\n\n" if draw < 0.93 else f"{CLOSE}\n\n"
        return [kept, (self.ids(forced), False), (self.ids(dialogue.reply), True)]


def draw_batches(
    encoder: Encoder,
    rng: random.Random,
    most: int,
    mix: dict[str, float],
    tokens: int = 2048,
    pool: int = 512,
) -> list[list[Sample]]:
    """A pool of samples sorted by length and packed into padded batches of at most `tokens`."""
    samples = [encoder.sample(draw_dialogue(rng, most, mix), rng) for _ in range(pool)]
    samples.sort(key=lambda sample: len(sample.ids))
    batches: list[list[Sample]] = [[]]
    for sample in samples:
        if batches[-1] and len(sample.ids) * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(sample)
    rng.shuffle(batches)
    return batches
