"""Who is calling.

Owns: Keyring - API keys, their tenants, and the constant-time comparison.
Does not own: which routes need a key (gate.py: all but /health).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from pathlib import Path


class KeyFileError(Exception):
    """The key file cannot be used; the message names the line and what it should hold."""


def read_keys(path: Path) -> dict[str, str]:
    """key -> tenant from lines of `key tenant`; blank lines and lines starting with # are skipped.

    Raises KeyFileError without repeating a key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise KeyFileError(f"--api-key-file: {path} cannot be read: {reason}.") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"--api-key-file: {path} cannot be read as UTF-8 text.") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != 2:
            raise KeyFileError(f"--api-key-file: line {number} of {path} must be `key tenant`.")
        if fields[0] in keys:
            raise KeyFileError(f"--api-key-file: line {number} of {path} repeats a key.")
        keys[fields[0]] = fields[1]
    if not keys:
        raise KeyFileError(f"--api-key-file: {path} holds no key.")
    return keys


class Keyring:
    """Holds digests of keys only. Without any key everyone is the tenant ""."""

    def __init__(self, keys: dict[str, str]):
        self._tenants = [(self._digest(key), tenant) for key, tenant in keys.items()]

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    @staticmethod
    def _digest(key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

    def tenant(self, authorization: str) -> str | None:
        """The tenant of an Authorization header, or None when it proves nothing.

        `Bearer KEY` is for programs, `Basic` with the key as password for the chat page. Every
        key is compared, so that the time taken says nothing about which one was close.
        """
        if not self.required:
            return ""
        digest = self._digest(self._key(authorization))
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    @staticmethod
    def _key(authorization: str) -> str:
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return value.strip()
        if scheme.lower() == "basic":
            try:
                return base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return ""
        return ""
