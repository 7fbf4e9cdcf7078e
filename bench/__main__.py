"""`make bench`: run the benchmarks and print their tables. ARGS="name ..." picks some.

A name is that of a module here, with dashes. What a benchmark takes comes from the environment:

    KILN_BENCH_MODEL   memory, second-turn, skip-latency, speculation, standing: a GGUF file
                       instead of the bundled model
    KILN_BENCH_CELLS   memory, standing: size of the KV cache (8192)
    KILN_BENCH_CTX     memory, standing: longest context of a request (4096)
    KILN_BENCH_PEER    standing: base URL of a server to compare with
    KILN_BENCH_ROUNDS  standing: rounds of each workload (7)
    KILN_BENCH_ONLY    standing: only workloads whose name holds this text

`python -m bench.second_turn --help` and `python -m bench.speculation --help` have more.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from pathlib import Path

NAMES = (
    "budget-cost",
    "overshoot",
    "grammar-cost",
    "sampler-cost",
    "event-path",
    "ledger-cost",
    "memory",
    "scoring-memory",
    "second-turn",
    "skip-latency",
    "speculation",
    "standing",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(f"  {name:15} {summary(name)}" for name in NAMES),
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="a benchmark; without any, all run")
    names = parser.parse_args().names or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    for name in names:
        print(f"\n## {name}", flush=True)
        importlib.import_module(f"bench.{module_name(name)}").main()


def module_name(name: str) -> str:
    return name.replace("-", "_")


def summary(name: str) -> str:
    """The first sentence of a benchmark's module, read without importing what it measures."""
    source = Path(__file__).with_name(f"{module_name(name)}.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    return text.split("\n\n")[0].split(". ")[0].replace("\n", " ").rstrip(".")


if __name__ == "__main__":
    main()
