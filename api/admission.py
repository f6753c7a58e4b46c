"""How much may be in flight at once, and what a request has reserved.

Owns: Admission - bounds on requests, body bytes and prompt tokens - and Ticket, one request's
share. Does not own: which request runs next (the scheduler), or the size of a single body.

Refusals come before a body is read: 429 when the caller's own share is used up, 503 when the
server is full, loading or draining. What is fetched for a request is charged before it is kept.
Everything runs on the event loop, so there is no lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from api.errors import OverloadedError, TooManyRequestsError


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    max_requests: int
    """Running and queued ones together."""
    max_tokens: int
    """Prompt tokens of all requests in flight."""
    max_media_bytes: int
    """Body bytes being read, images being fetched, and encoded images held for running requests."""
    max_tenant_requests: int | None = None
    """Requests in flight for one API key's tenant; None is no bound of its own."""


class Ticket:
    """What one request holds. `release` gives everything back, once."""

    def __init__(self, admission: Admission, tenant: str):
        self._admission = admission
        self.tenant = tenant
        self._tokens = 0
        self._media_bytes = 0
        self._open = True

    def resize_media(self, nbytes: int) -> None:
        """Holds `nbytes` instead of what was held. Raises OverloadedError, changing nothing."""
        self._admission.change_media(nbytes - self._media_bytes, alone=self._media_bytes)
        self._media_bytes = nbytes

    def add_media(self, nbytes: int) -> None:
        """Holds `nbytes` more. Raises OverloadedError, changing nothing."""
        self.resize_media(self._media_bytes + nbytes)

    def add_tokens(self, tokens: int) -> None:
        self._admission.change_tokens(tokens, alone=self._tokens)
        self._tokens += tokens

    def release(self) -> None:
        if self._open:
            self._open = False
            self._admission.close(self.tenant, self._tokens, self._media_bytes)


class Admission:
    def __init__(self, limits: AdmissionLimits):
        self.limits = limits
        self.requests = 0
        self.tokens = 0
        self.media_bytes = 0
        self._by_tenant: Counter[str] = Counter()
        self.draining = False

    def open(self, tenant: str, declared_bytes: int) -> Ticket:
        """Admits one request whose body declares `declared_bytes`, or raises."""
        limits = self.limits
        if self.draining:
            raise OverloadedError(
                "The server is shutting down. Try another replica.",
                code="draining",
                retry_after_s=5,
            )
        if self.requests >= limits.max_requests:
            raise OverloadedError(
                f"{self.requests} requests are in flight, as many as this server holds. Try "
                "again later.",
                retry_after_s=1,
            )
        share = limits.max_tenant_requests
        if share is not None and self._by_tenant[tenant] >= share:
            raise TooManyRequestsError(
                f"You have {self._by_tenant[tenant]} requests in flight, the limit for one "
                "caller. Wait for one to finish.",
                retry_after_s=1,
            )
        ticket = Ticket(self, tenant)
        ticket.resize_media(declared_bytes)
        self.requests += 1
        self._by_tenant[tenant] += 1
        return ticket

    def change_media(self, more: int, *, alone: int) -> None:
        held_by_others = self.media_bytes - alone
        # A server that holds nothing else takes any body that passed its own size limit.
        if more > 0 and held_by_others and self.media_bytes + more > self.limits.max_media_bytes:
            raise OverloadedError(
                f"{self.media_bytes} bytes of request bodies and images are held; "
                f"{more} more would exceed {self.limits.max_media_bytes}. Try again later.",
                retry_after_s=2,
            )
        self.media_bytes += more

    def change_tokens(self, more: int, *, alone: int) -> None:
        if self.tokens - alone and self.tokens + more > self.limits.max_tokens:
            raise OverloadedError(
                f"{self.tokens} prompt tokens are in flight; {more} more would exceed "
                f"{self.limits.max_tokens}. Try again later.",
                retry_after_s=2,
            )
        self.tokens += more

    def close(self, tenant: str, tokens: int, media_bytes: int) -> None:
        self.requests -= 1
        self.tokens -= tokens
        self.media_bytes -= media_bytes
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def check_invariants(self) -> None:
        """An idle server holds nothing, and no count is negative."""
        counts = (self.requests, self.tokens, self.media_bytes, *self._by_tenant.values())
        if min(counts) < 0 or self.requests != sum(self._by_tenant.values()):
            raise AssertionError(f"admission counts are inconsistent: {counts}")
        if self.requests == 0 and (self.tokens or self.media_bytes):
            raise AssertionError(f"{self.tokens} tokens, {self.media_bytes} bytes held by nobody")
