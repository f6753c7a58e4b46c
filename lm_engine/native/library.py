"""From C++ sources to a loaded library.

Owns: finding a compiler, compiling for this very CPU, the cache of compiled libraries, and the
reason when there is none. Does not own: the kernels, or what is done without them.

Compiling on the spot (a few seconds, once) is what lets one source use whatever vectors the CPU
has; a machine without a compiler runs torch's kernels instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCES = ("attention.cpp", "linear.cpp", "layer.cpp")
_HEADERS = ("vectors.h", "attention.h", "attention_few.h", "attention_lanes.h")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_COMPILE_TIMEOUT_S = 120


class NativeUnavailableError(RuntimeError):
    """There is no library here; the message says why, and what would help."""


@cache
def load() -> ctypes.CDLL:
    """The library, compiled first if this source has not been compiled here before.

    torch must be imported before it: both then share one OpenMP runtime, and so one team of
    threads. Raises NativeUnavailableError.
    """
    if platform.system() != "Linux":
        raise NativeUnavailableError(f"native kernels are built on Linux, not {platform.system()}")
    compiler = _compiler()
    sources = [Path(__file__).with_name(name) for name in _SOURCES]
    headers = [Path(__file__).with_name(name) for name in _HEADERS]
    name = f"kernels-{_digest(compiler, [*sources, *headers])}.so"
    for folder in _folders():
        library = folder / name
        if not _is_ours(folder):
            continue
        if not library.exists():
            _compile(compiler, sources, library)
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            # Damaged, or mounted so that code may not be run from it: the next folder may do, and
            # the next start compiles anew.
            library.unlink(missing_ok=True)
    raise NativeUnavailableError(
        f"compiled kernels can be kept in none of {', '.join(map(str, _folders()))}; set "
        "LONGLENS_CACHE to a folder of your own that is writable and may hold programs"
    )


def _is_ours(folder: Path) -> bool:
    """Whether the folder is there, or can be made, and nobody else can put a library into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
    except OSError:
        return False
    safe = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return stat.S_ISDIR(found.st_mode) and safe and os.access(folder, os.W_OK)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NativeUnavailableError("there is no C++ compiler; install g++ (or set CXX)")


def cache_folder() -> Path:
    """LONGLENS_CACHE, or `longlens` under the user's cache folder; it may not be there yet."""
    own, base = os.environ.get("LONGLENS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own or (Path(base or Path.home() / ".cache") / "longlens")).expanduser()


def _folders() -> tuple[Path, ...]:
    return cache_folder() / "native", Path(tempfile.gettempdir()) / f"longlens-native-{os.getuid()}"


def _digest(compiler: str, sources: list[Path]) -> str:
    """Of everything that the machine code depends on: the CPU too, since home folders travel."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sources:
        digest.update(source.read_bytes())
    digest.update(repr((_FLAGS, compiler, os.stat(compiler).st_mtime_ns, _cpu())).encode())
    return digest.hexdigest()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    seen = dict.fromkeys(line for line in lines if line.startswith(wanted))
    return "\n".join([platform.machine(), *seen])


def _compile(compiler: str, sources: list[Path], library: Path) -> None:
    handle, partial = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [compiler, *_FLAGS, "-o", partial, *map(str, sources), "-lm"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["nothing"])[0]
            raise NativeUnavailableError(f"{compiler} failed to compile the kernels: {said}")
        os.replace(partial, library)
    except OSError as error:
        raise NativeUnavailableError(f"{compiler} cannot be run: {error}") from error
    except subprocess.TimeoutExpired:
        raise NativeUnavailableError(
            f"{compiler} did not compile the kernels in {_COMPILE_TIMEOUT_S} s"
        ) from None
    finally:
        Path(partial).unlink(missing_ok=True)
