"""Build llama.cpp and install its Python bindings into the running environment.

`pip install llama-cpp-python` builds the whole of llama.cpp (about 7 minutes on two cores). kiln
uses only libllama and ggml, so this builds those two from the same source archive (about 3 minutes)
and lays them beside the bindings. Library and bindings must be of one release: their structs have
no version of their own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

VERSION = "0.3.36"
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")),
    "-DLLAMA_CURL=OFF",
)
# ggml's AMX kernels die of an illegal instruction on worker threads of some virtual machines, and
# give a row other bits in another company, which exact requests cannot have.
X86_FLAGS = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
LIBRARY_PATTERNS = ("*.so", "*.so.*", "*.dylib", "*.dll")


def main() -> None:
    if is_installed():
        print(f"llama-cpp-python {VERSION} is installed")
        return
    require_compiler()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kiln-llama-") as folder:
        work = Path(folder)
        say(f"fetching the source of llama-cpp-python {VERSION}")
        archive = fetch_source(work)
        source = unpack(archive, work)
        say("building libllama; about 3 minutes on two cores")
        build = build_library(source / "vendor" / "llama.cpp", work / "build")
        say("installing the bindings")
        pip("install", "--no-deps", str(source), environment={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"})
        lay_beside_bindings(build)
    say(f"done in {time.monotonic() - started:.0f} s")


def is_installed() -> bool:
    try:
        distribution = importlib.metadata.distribution("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return False
    libraries = Path(str(distribution.locate_file("llama_cpp"))) / "lib"
    return distribution.version == VERSION and any(libraries.glob("*llama.*"))


def require_compiler() -> None:
    """Stop with a plain message where the build cannot work."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++", "cl")):
        advice = {
            "Darwin": "run `xcode-select --install`",
            "Windows": "install the Visual Studio build tools with C++",
        }.get(platform.system(), "install one, for example `apt-get install g++` or `dnf install gcc-c++`")
        sys.exit(f"kiln compiles llama.cpp once, and no C++ compiler was found: {advice}, then try again.")
    missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    if missing:
        say(f"fetching {' and '.join(missing)}")
        pip("install", *missing)


def fetch_source(work: Path) -> Path:
    pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(work), f"llama-cpp-python=={VERSION}")
    return next(work.glob("llama_cpp_python-*.tar.gz"))


def unpack(archive: Path, work: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def build_library(source: Path, build: Path) -> Path:
    """Configure and build the target `llama`; ninja shows how far it is."""
    flags = compiler_flags()
    options = [*CMAKE_OPTIONS, f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]
    run(tool("cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja", "-Wno-dev", *options, quiet=True)
    run(tool("cmake"), "--build", str(build), "--target", "llama")
    return build


def compiler_flags() -> str:
    """No warnings, and no AMX where the compiler knows it."""
    if platform.machine().lower() not in ("x86_64", "amd64") or sys.platform == "win32":
        return "-w"
    compiler = os.environ.get("CXX") or next(c for c in ("c++", "g++", "clang++") if shutil.which(c))
    probe = [compiler, *X86_FLAGS.split(), "-x", "c++", "-fsyntax-only", "-"]
    known = subprocess.run(probe, input=b"", capture_output=True).returncode == 0
    # Warnings of code that is not ours would hide how far the build is.
    return f"{X86_FLAGS} -w" if known else "-w"


def lay_beside_bindings(build: Path) -> None:
    package = importlib.metadata.distribution("llama-cpp-python").locate_file("llama_cpp")
    target = Path(str(package)) / "lib"
    target.mkdir(exist_ok=True)
    for pattern in LIBRARY_PATTERNS:
        for library in (build / "bin").glob(pattern):
            shutil.copy2(library, target / library.name, follow_symlinks=True)


def tool(name: str) -> str:
    """A tool on the path, or the one pip put into this environment."""
    return shutil.which(name) or str(Path(sys.executable).parent / name)


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    subprocess.run(command, check=True, env={**os.environ, **(environment or {})})


def run(*command: str, quiet: bool = False) -> None:
    # pip may have put ninja into this environment only.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    output = subprocess.DEVNULL if quiet else None
    subprocess.run(command, check=True, stdout=output, env={**os.environ, "PATH": path})


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        sys.exit(f"setting up llama.cpp failed: {command} exited with {error.returncode}")
