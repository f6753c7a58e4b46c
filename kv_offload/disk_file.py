"""One superblock as one file: its form, and why a file is not believed.

Owns: the header, writing under another name and renaming, reading and checking. Does not own: which
files there are (disk_tier.py). Imports no torch.

A file is a header (magic, the layout's fingerprint, the key, the length and the SHA-256 digest of
the rest) and the superblock's bytes. Nothing is flushed: what a power cut leaves half-written does
not check out, like everything that is truncated, damaged, renamed by hand or of another model.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

from kv_offload.disk_key import KEY_BYTES

SUFFIX, UNFINISHED = ".kv", ".part"
HEADER = struct.Struct(f"<8s32s{KEY_BYTES}sQ32s")
_MAGIC = b"LLKV0002"


def path_of(folder: Path, key: bytes) -> Path:
    return folder / (key.hex() + SUFFIX)


def key_of(name: str) -> bytes | None:
    """The key that a finished or unfinished file is named by; None for strangers' files."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix not in (SUFFIX, UNFINISHED) or len(stem) != 2 * KEY_BYTES:
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None


def write(path: Path, fingerprint: bytes, key: bytes, body: memoryview) -> None:
    """The whole file or none. Raises OSError; nothing is left of it then."""
    header = HEADER.pack(_MAGIC, fingerprint, key, len(body), hashlib.sha256(body).digest())
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with open(unfinished, "wb", opener=_private) as file:
            file.write(header)
            file.write(body)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read(path: Path, fingerprint: bytes, key: bytes, body: memoryview) -> str | None:
    """Fills `body` and returns None, or returns what is wrong with the file; `body` then holds
    anything. Raises OSError when it cannot be read at all."""
    with open(path, "rb", buffering=0) as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            return f"it ends after {len(head)} bytes, within its header"
        magic, made_for, named, length, digest = HEADER.unpack(head)
        if magic != _MAGIC:
            return "it is no file of this kind and version"
        if made_for != fingerprint:
            return "it is of another KV format or block layout"
        if named != key:
            return f"it holds the key {named.hex()}"
        if length != len(body):
            return f"it says that it holds {length} bytes, a superblock has {len(body)}"
        got = 0
        while got < length and (count := file.readinto(body[got:])):
            got += count
        if got < length:
            return f"it is truncated: {got} of {length} bytes"
        if file.read(1):
            return "it goes on after its end"
    if hashlib.sha256(body).digest() != digest:
        return "its bytes do not match their digest"
    return None


def _private(path: str, flags: int) -> int:
    """KV is made of prompts: nobody else may read it."""
    return os.open(path, flags, 0o600)
