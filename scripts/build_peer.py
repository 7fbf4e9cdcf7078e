"""Build the llama-server that kiln is compared with: kiln's release of llama.cpp, with its compiler flags.

    python scripts/build_peer.py FOLDER

fetches the source archive that `install_llama.py` uses, builds its server (about 10 minutes on two
cores), and prints the program's path.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from install_llama import (
    CMAKE_OPTIONS,
    compiler_flags,
    fetch_source,
    require_compiler,
    run,
    say,
    tool,
    unpack,
)

# As for kiln's library, and then what makes a server of it. The last option of a name counts.
SERVER_OPTIONS = (
    *(f"-DLLAMA_BUILD_{part}=ON" for part in ("COMMON", "TOOLS", "SERVER")),
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_BUILD_WEBUI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).resolve()
    require_compiler()
    with tempfile.TemporaryDirectory(prefix="kiln-peer-") as name:
        say("fetching the source")
        source = unpack(fetch_source(Path(name)), Path(name)) / "vendor" / "llama.cpp"
        build_server(source, folder)
    print(folder / "bin" / "llama-server")


def build_server(source: Path, build: Path) -> None:
    flags = compiler_flags()
    options = [*CMAKE_OPTIONS, *SERVER_OPTIONS, f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]
    run(tool("cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja", "-Wno-dev", *options, quiet=True)
    say("building llama-server")
    run(tool("cmake"), "--build", str(build), "--target", "llama-server")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"building the peer failed: {' '.join(map(str, error.cmd))} exited with {error.returncode}")
