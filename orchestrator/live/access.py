"""Who may see the pages, and from where: a token, a cookie, the names this host is called by, headers of answers.

The server listens on loopback, where every user of the host, and every page in the browser, can reach it. So the
address that is printed carries a random token; who comes with it gets a cookie, and nothing is answered without either.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names by which a browser may call the server. Any other is a foreign name made to point here (DNS rebinding)."""
CSRF_HEADER = "X-Tune-Cluster"
"""Header that every request to do something carries; no form and no foreign page can set it."""
_SITES = ("", "none", "same-origin")
"""What browsers say of requests that come from the pages themselves, or from the address line (``Sec-Fetch-Site``)."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: nothing is loaded from elsewhere, framed, guessed, or left in a cache."""


@dataclass(frozen=True, slots=True)
class Access:
    """The secrets of one server; they end with it."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """What the printed address carries."""
    _session: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """What pages send along in :data:`CSRF_HEADER` when they ask for something to be done."""

    @property
    def cookie_name(self) -> str:
        """Servers on several ports of this host share a browser's cookies."""
        return f"tune_cluster_{self.port}"

    def cookie(self) -> str:
        """The header that gives a browser its cookie: kept from scripts, not sent along from other sites."""
        return f"{self.cookie_name}={self._session}; Path=/; HttpOnly; SameSite=Strict"

    def is_token(self, given: str) -> bool:
        """Whether ``given`` is the token; takes as long for every wrong one."""
        return hmac.compare_digest(given.encode(), self.token.encode())

    def has_cookie(self, header: str | None) -> bool:
        """Whether the request's ``Cookie`` header holds what :meth:`cookie` gave."""
        try:
            found = SimpleCookie(header or "").get(self.cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._session.encode())

    def is_ours(self, headers: Mapping[str, str]) -> bool:
        """Whether a request calls this host by a name of loopback, and comes from no other site; a link there may lead
        to a page."""
        host = headers.get("Host", "")
        if _name(host) not in LOOPBACK_NAMES:
            return False
        origin = headers.get("Origin")
        is_link = headers.get("Sec-Fetch-Mode") == "navigate" and origin is None
        return is_link or (is_from_here(headers) and origin in (None, f"http://{host}"))

    def may_act(self, headers: Mapping[str, str]) -> bool:
        """Whether a request to do something comes from one of the server's own pages."""
        sent = headers.get(CSRF_HEADER, "")
        is_json = headers.get("Content-Type", "").partition(";")[0].strip() == "application/json"
        has_origin = headers.get("Origin") is not None
        return has_origin and is_json and hmac.compare_digest(sent.encode(), self.csrf.encode())


def is_from_here(headers: Mapping[str, str]) -> bool:
    """Whether no page of another site led to this request, so that the browser sends a cookie along at once."""
    return headers.get("Sec-Fetch-Site", "") in _SITES


def _name(host: str) -> str:
    """The name in a ``Host`` header, without the port; empty where it is no such header. Ports are free: a tunnel may
    give the page another one."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    is_plain = not (parts.path or parts.query or parts.fragment or "@" in host)
    return (parts.hostname or "") if is_plain else ""
