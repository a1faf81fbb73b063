"""Authentication: one-time tokens, sessions, and checks of every request.

A token is printed once, in the part of the link after `#`, which browsers send to no server: it is in no log and no
Referer. It is exchanged for a cookie (HttpOnly, SameSite=Strict) and does not work twice.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.datastructures import FormData, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_SECONDS = 12 * 3600
OPEN_PATHS = ("/enter", "/static/")  # without a session
SAFE_METHODS = ("GET", "HEAD")
CSRF_FIELD = "csrf"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True)
class Session:
    """A signed-in browser. Every form of this session must contain `csrf`."""

    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    ends: float = field(default_factory=lambda: time.monotonic() + SESSION_SECONDS)


class Sessions:
    """Store unused one-time tokens and open sessions, as hashes only."""

    def __init__(self) -> None:
        self._tokens: set[str] = set()
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def new_token(self) -> str:
        """Return a token for one person."""
        token = secrets.token_urlsafe(32)
        self._tokens.add(_hash(token))
        return token

    def enter(self, token: str) -> str | None:
        """Exchange a token for the secret of a new session, or return None. The token is used up."""
        with self._lock:
            if (name := _hash(token)) not in self._tokens:
                return None
            self._tokens.remove(name)
            secret = secrets.token_urlsafe(32)
            self._sessions[_hash(secret)] = Session()
            return secret

    def session(self, secret: str | None) -> Session | None:
        """Return the session of a cookie, or None."""
        found = self._sessions.get(_hash(secret or ""))
        return found if found is not None and time.monotonic() < found.ends else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class GuardMiddleware:
    """Refuse requests without a session and those that come from other sites; set headers of every response.

    - sessions: of the browsers.
    - cookie: name of the cookie.
    - refuse: returns the page for a request without a session.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, cookie: str, refuse: Callable[[Request], Response]) -> None:
        self._app, self._store, self._cookie, self._refuse = app, sessions, cookie, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # there are no web sockets here
            raise RuntimeError("only HTTP is served")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        session = self._store.session(request.cookies.get(self._cookie))
        scope["session"] = session
        if request.method not in SAFE_METHODS and not _same_origin(request):
            response = Response("The request comes from another site.", status_code=403, media_type="text/plain")
            return await response(scope, receive, send_with_headers)
        if session is None and not request.url.path.startswith(OPEN_PATHS):
            return await self._refuse(request)(scope, receive, send_with_headers)
        await self._app(scope, receive, send_with_headers)


def _same_origin(request: Request) -> bool:
    """Return whether a page of this server sent the request. The Host header was checked before."""
    origin = request.headers.get("origin")
    if origin is not None:
        return origin == f"{request.url.scheme}://{request.headers.get('host', '')}"
    return request.headers.get("sec-fetch-site") == "same-origin"


def posted(
    handle: Callable[[Request, FormData], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint for a form. A form without the token of the session is refused."""

    async def endpoint(request: Request) -> Response:
        async with request.form(max_files=2, max_fields=60, max_part_size=20_000) as form:
            session, given = request.scope["session"], form.get(CSRF_FIELD)
            if session is None or not isinstance(given, str):
                raise HTTPException(403, "The form has no token. Reload the page and try again.")
            if not hmac.compare_digest(session.csrf.encode(), given.encode()):
                raise HTTPException(403, "The form belongs to another session. Reload the page and try again.")
            return await handle(request, form)

    return endpoint
