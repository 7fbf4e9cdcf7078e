"""Rebuilds everything: `python -m training.tiny_reasoner.build`.

Model, model card figures, GGUF files, adapter, variant with think tags as text, fixtures.
"""

import subprocess
import sys
from pathlib import Path

MODEL = "models/tiny-reasoner"
ADAPTER = "models/tiny-reasoner-cheerful-lora"
VARIANT = "build/multi-close"  # only its GGUF file is kept
FIXTURES = "tests/fixtures"

FIRST, SECOND, THIRD = (f"build/tiny-reasoner-{part}" for part in ("first", "second", "third"))
# Text is copied late and badly, so the later parts of the training have much more of it.
SECOND_MIX = (
    "arithmetic=0.33,second turn=0.11,tools=0.1,text tools=0.22,echo=0.04,long echo=0.1,"
    "small talk=0.05,count=0.015,unknown=0.02,forever=0.015"
)
THIRD_MIX = (
    "arithmetic=0.42,second turn=0.12,tools=0.24,text tools=0.08,echo=0.01,long echo=0.03,"
    "small talk=0.05,count=0.015,unknown=0.02,forever=0.015"
)
FOURTH_MIX = (
    "arithmetic=0.36,second turn=0.08,tools=0.2,text tools=0.05,unit tools=0.22,echo=0,"
    "long echo=0.01,small talk=0.04,count=0.01,unknown=0.02,forever=0.01"
)

STEPS = [
    ["train", "--out", FIRST],
    ["train", "--start", FIRST, "--mix", SECOND_MIX, "--peak", "2e-3", "--hold", "1"]
    + ["--steps", "1750", "--seed", "22", "--out", SECOND],
    ["train", "--start", SECOND, "--mix", THIRD_MIX, "--peak", "2e-3", "--hold", "0.25"]
    + ["--steps", "900", "--seed", "23", "--out", THIRD],
    ["train", "--start", THIRD, "--mix", FOURTH_MIX, "--peak", "1.2e-3", "--hold", "0.1"]
    + ["--steps", "450", "--seed", "24", "--out", MODEL],
    ["gguf_export", MODEL, "src/kiln/models/tiny-reasoner-f16.gguf"],
    ["adapter", MODEL, ADAPTER],
    ["train", "--start", FIRST, "--tags-as-text", "--peak", "1.5e-3", "--hold", "0.3"]
    + ["--steps", "320", "--out", VARIANT],
    ["gguf_export", VARIANT, f"{FIXTURES}/multi-close.gguf", "--name", "multi-close"],
    ["reference", MODEL, "--adapter", ADAPTER, "--fixtures", FIXTURES],
    ["evaluate", MODEL, "--card", f"{MODEL}/README.md"],
    ["evaluate", MODEL, "--adapter", ADAPTER],
]


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    for name, *arguments in STEPS:
        print(name, *arguments, flush=True)
        command = [sys.executable, "-m", f"training.tiny_reasoner.{name}", *arguments]
        subprocess.run(command, cwd=root, check=True)


if __name__ == "__main__":
    main()
