"""The routes of the page, and the server."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from sfumato import __version__
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.certificate.statement import rounded_up
from sfumato.data import DataError
from sfumato.privacy import BudgetExceeded, LedgerError
from sfumato.web.allowed_folders import AllowedFolders
from sfumato.web.authentication import CSRF_FIELD, HEADERS, GuardMiddleware, Sessions, posted
from sfumato.web.plan_chart import describe
from sfumato.web.run_form import DEFAULTS, Previews, choices, read_form
from sfumato.web.runs import FINISHED, RUNNING, RunStore, WebRun
from sfumato.web.uploads import MAX_UPLOAD, check_upload

REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
MAX_FORM = 256 << 10  # bytes
MISTAKES = (DataError, ValueError, BudgetExceeded, LedgerError, ModuleNotFoundError, OSError)
CHECKS_AT_ONCE = 2


class Pages:
    """The endpoints of the web interface.

    - sessions: tokens and sessions.
    - folders: folders that may be read.
    - runs: runs of this server.
    - cookie: name of the session's cookie.
    """

    def __init__(self, sessions: Sessions, folders: AllowedFolders, runs: RunStore, cookie: str) -> None:
        self.sessions, self.folders, self.runs, self.cookie = sessions, folders, runs, cookie
        self._previews = Previews(folders)
        self._checks = 0

    def routes(self) -> list[Route | Mount]:
        """Return all routes. Each POST route checks the token of the session (`posted`), except for `/enter`."""
        return [
            Route("/", self.home),
            Route("/enter", self.enter_page),
            Route("/enter", self.enter, methods=["POST"], max_body_size=MAX_FORM),
            Route("/invite", posted(self.invite), methods=["POST"], max_body_size=MAX_FORM),
            Route("/new", self.new),
            Route("/plan", self.plan),
            Route("/runs", posted(self.start), methods=["POST"], max_body_size=MAX_FORM),
            Route("/runs/{run}", self.run),
            Route("/runs/{run}/status", self.status),
            Route("/runs/{run}/cancel", posted(self.cancel), methods=["POST"], max_body_size=MAX_FORM),
            Route("/runs/{run}/resume", posted(self.resume), methods=["POST"], max_body_size=MAX_FORM),
            Route("/runs/{run}/report.html", self.report),
            Route("/runs/{run}/samples.png", self.samples),
            Route("/runs/{run}/certificate.json", self.certificate),
            Route("/runs/{run}/all.zip", self.download),
            Route("/verify", self.verify_page),
            Route("/verify", posted(self.verify), methods=["POST"], max_body_size=MAX_UPLOAD),
            Mount("/static", StaticFiles(packages=[("sfumato.web", "static")])),
        ]

    # -- coming in ----------------------------------------------------------------------------------------

    def refuse(self, request: Request) -> Response:
        """Return the page for somebody without a session."""
        return self._page(request, "enter.html.j2", status=403, used=False)

    def enter_page(self, request: Request) -> Response:
        return self._page(request, "enter.html.j2", used=False)

    async def enter(self, request: Request) -> Response:
        """Exchange a token for a cookie."""
        async with request.form(max_files=0, max_fields=2, max_part_size=1000) as form:
            secret = self.sessions.enter(str(form.get("token", "")).strip())
        if secret is None:
            return self._page(request, "enter.html.j2", status=403, used=True)
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(self.cookie, secret, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return response

    async def invite(self, request: Request, form: FormData) -> Response:  # noqa: ARG002
        """Make a link for one more person."""
        link = f"{request.url.scheme}://{request.headers['host']}/enter#{self.sessions.new_token()}"
        return self._page(request, "invite.html.j2", link=link)

    # -- planning and starting ----------------------------------------------------------------------------

    def home(self, request: Request) -> Response:
        """Show the runs, and folders to choose from."""
        name = request.query_params.get("folder", "")
        folder, mistake = self.folders.root, None
        try:
            folder = self.folders.find(name) if name else folder
            entries = self.folders.entries(folder)
        except DataError as error:
            folder, entries, mistake = self.folders.root, self.folders.entries(self.folders.root), str(error)
        here = "" if folder == self.folders.root else self.folders.name_of(folder)
        parts = [(part, "/".join(here.split("/")[: n + 1])) for n, part in enumerate(here.split("/")) if part]
        rows = [_row(run) for run in self.runs.list()]
        context: dict[str, Any] = {"entries": entries, "parts": parts, "here": here, "runs": rows, "mistake": mistake}
        return self._page(request, "home.html.j2", status=400 if mistake else 200, **context)

    def new(self, request: Request) -> Response:
        """Show the form of a run and what it would release."""
        return self._form(request, dict(request.query_params))

    def plan(self, request: Request) -> Response:
        """Show what a run would release: a part of the page."""
        planned = self._planned(dict(request.query_params))
        return self._page(request, "plan.html.j2", **planned)

    async def start(self, request: Request, form: FormData) -> Response:
        given = {name: value for name, value in form.items() if isinstance(value, str)}

        def start() -> WebRun:
            wanted = read_form(given, self.folders)
            found, _ = self._previews.preview(wanted)
            if wanted.test is not None:
                self.folders.check_links(wanted.test)
            if wanted.run.budget is not None and (refusal := DatasetBudget(wanted.run.budget).refusal(found.plan)):
                raise BudgetExceeded(refusal)
            source = self.folders.name_of(Path(wanted.data.data))
            about = {"method": found.method, "epsilon": found.plan.epsilon, "delta": found.plan.budget.delta}
            asked = {name: value for name, value in wanted.fields.items() if name not in (CSRF_FIELD, "request")}
            about |= {"unit": found.public.unit, "prior": found.prior, "fields": asked}
            return self.runs.start(given.get("request", ""), source, about, wanted.arguments)

        try:
            run = await run_in_threadpool(start)
        except MISTAKES as error:
            return await run_in_threadpool(self._form, request, given, str(error))
        return RedirectResponse(f"/runs/{run.identifier}", status_code=303)

    def _form(self, request: Request, given: dict[str, Any], mistake: str | None = None) -> Response:
        fields = {**DEFAULTS, **{name: str(value) for name, value in given.items()}}
        planned = self._planned(given)
        if planned["planned"] is not None and not given.get(
            "epsilon"
        ):  # a new form: declare the colour of the first image
            fields["mode"] = "grey" if planned["planned"]["preview"].public.shape[0] == 1 else "rgb"
            planned = self._planned(fields)
        fresh = secrets.token_hex(16)
        context = {"fields": fields, "fresh": fresh, "mistake": mistake, **choices(), **planned}
        earlier = [_row(run) for run in self.runs.list() if run.job["source"] == fields.get("folder", "")]
        return self._page(request, "new.html.j2", status=400 if mistake else 200, earlier=earlier, **context)

    def _planned(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return what a run would release, or the mistake in its options."""
        try:
            found, remarks = self._previews.preview(read_form(given, self.folders))
            return {"planned": describe(found), "remarks": remarks, "problem": None}
        except MISTAKES as error:
            return {"planned": None, "remarks": [], "problem": self._shorten(error)}

    def _shorten(self, error: BaseException) -> str:
        """Return a message with names below the root instead of full paths."""
        return str(error).replace(f"{self.folders.root}/", "")

    # -- watching -----------------------------------------------------------------------------------------

    def run(self, request: Request) -> Response:
        return self._page(request, "run.html.j2", **_details(self._run(request)))

    def status(self, request: Request) -> Response:
        """Show how far a run is: a part of its page."""
        details = _details(self._run(request))
        return self._page(request, "status.html.j2", headers={"x-state": details["state"]}, **details)

    async def cancel(self, request: Request, form: FormData) -> Response:
        run = self._run(request)
        await run_in_threadpool(self.runs.cancel, run, at_once="at_once" in form)
        return RedirectResponse(f"/runs/{run.identifier}", status_code=303)

    async def resume(self, request: Request, form: FormData) -> Response:  # noqa: ARG002
        run = self._run(request)
        try:
            await run_in_threadpool(self.runs.resume, run)
        except DataError as error:
            raise HTTPException(409, str(error)) from None
        return RedirectResponse(f"/runs/{run.identifier}", status_code=303)

    def report(self, request: Request) -> Response:
        """Send the report, as a page that may run nothing."""
        content = self._certified(request, "report.html")
        return HTMLResponse(content, headers={"content-security-policy": REPORT_POLICY})

    def samples(self, request: Request) -> Response:
        return Response(self._certified(request, "samples.png"), media_type="image/png")

    def certificate(self, request: Request) -> Response:
        run = self._run(request)
        if run.certificate is None:
            raise HTTPException(404, "This run has no certificate yet.")
        headers = _attachment(f"{run.output.name}.certificate.json")
        return Response(run.certificate_file, media_type="application/json", headers=headers)

    def download(self, request: Request) -> Response:
        run = self._run(request)
        file = tempfile.TemporaryFile()  # noqa: SIM115  (closed when it was sent)
        try:
            run.write_zip(file)
        except (DataError, OSError) as error:
            file.close()
            raise HTTPException(404, str(error) if isinstance(error, DataError) else "A file is missing.") from None
        length = file.tell()

        def blocks() -> Iterator[bytes]:
            with file:
                file.seek(0)
                while block := file.read(1 << 20):
                    yield block

        headers = {**_attachment(f"{run.output.name}.zip"), "content-length": str(length)}
        return StreamingResponse(blocks(), media_type="application/zip", headers=headers)

    def _run(self, request: Request) -> WebRun:
        try:
            return self.runs.get(request.path_params["run"])
        except DataError as error:
            raise HTTPException(404, str(error)) from None

    def _certified(self, request: Request, name: str) -> bytes:
        try:
            return self._run(request).file(name)
        except DataError as error:
            raise HTTPException(404, str(error)) from None

    # -- verifying ----------------------------------------------------------------------------------------

    def verify_page(self, request: Request) -> Response:
        return self._page(request, "verify.html.j2", results=None, mistake=None, name=None)

    async def verify(self, request: Request, form: FormData) -> Response:
        upload, key = form.get("file"), form.get("key")
        results, mistake, name = None, None, None
        try:
            limits = {limit: float(str(form.get(limit))) for limit in ("max_epsilon", "max_delta") if form.get(limit)}
            if not isinstance(upload, UploadFile) or not upload.size:
                raise DataError("choose a certificate or a zip file")
            if self._checks >= CHECKS_AT_ONCE:
                raise DataError("other files are being checked; try again in a minute")
            name = upload.filename
            signer = key.file if isinstance(key, UploadFile) and key.size else None
            self._checks += 1
            try:
                results = await run_in_threadpool(check_upload, upload.file, signer, limits)
            finally:
                self._checks -= 1
        except (DataError, ValueError) as error:
            mistake = str(error)
        status = 400 if mistake else 200
        return self._page(request, "verify.html.j2", status=status, results=results, mistake=mistake, name=name)

    # -- pages --------------------------------------------------------------------------------------------

    def _page(
        self,
        request: Request,
        template: str,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        **content: Any,
    ) -> Response:
        session = request.scope.get("session")
        given = {"csrf": session.csrf if session else "", "csrf_field": CSRF_FIELD, "path": request.url.path}
        text = _environment().get_template(template).render(**given, inside=session is not None, **content)
        return HTMLResponse(text, status_code=status, headers=headers)

    def explain(self, request: Request, error: Exception) -> Response:
        """Return the page of an error. What went wrong inside the server is not shown."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        text = error.detail if isinstance(error, HTTPException) else "Something went wrong in the server."
        return self._page(request, "message.html.j2", status=status, headers=HEADERS, text=text)


def create_app(root: Path, runs: Path, *, hosts: list[str], port: int, limit: int = 2) -> tuple[Starlette, Sessions]:
    """Return the application and its store of tokens and sessions.

    - root: folder below which data may be chosen.
    - runs: folder of the runs.
    - hosts: names by which the server may be called.
    - port: part of the cookie's name.
    - limit: runs at a time.
    """
    sessions, folders = Sessions(), AllowedFolders(root, runs)
    cookie = f"sfumato-{port}"
    pages = Pages(sessions, folders, RunStore(runs, limit), cookie)
    handlers: dict[Any, Callable[..., Any]] = {HTTPException: pages.explain, Exception: pages.explain}
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        Middleware(GuardMiddleware, sessions=sessions, cookie=cookie, refuse=pages.refuse),
    ]
    return Starlette(routes=pages.routes(), middleware=middleware, exception_handlers=handlers), sessions


def serve(
    root: Path,
    runs: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    names: list[str] | None = None,
    limit: int = 2,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the page until Ctrl-C. Runs go on without the server.

    - root, runs, limit: see `create_app`.
    - host, port: address to listen on; port 0 takes a free one.
    - names: other names of the host.
    - announce: called with the link that lets one person in.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # who opens the link at once has to wait, but is not turned away
    except OSError as error:
        listener.close()
        raise DataError(f"{host}:{port} cannot be used: {error.strerror}; choose another port with --port") from None
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    hosts = list(dict.fromkeys([shown, "127.0.0.1", "localhost", *(names or [])]))
    app, sessions = create_app(root, runs, hosts=hosts, port=port, limit=limit)
    announce(f"http://{shown}:{port}/enter#{sessions.new_token()}")
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        limit_concurrency=100,
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _row(run: WebRun) -> dict[str, Any]:
    job = run.job
    return {"identifier": run.identifier, "state": run.state, **{key: job.get(key) for key in ROW_FIELDS}}


ROW_FIELDS = ("source", "created", "method", "epsilon", "delta", "unit", "prior")


def _details(run: WebRun) -> dict[str, Any]:
    state, certificate = run.state, run.certificate
    return {
        **_row(run),
        "state": state,
        "running": state == RUNNING,
        "finished": state == FINISHED,
        "stages": run.stages,
        "spending": run.spending,
        "log": "" if state in (RUNNING, FINISHED) else run.log,
        "certificate": certificate if state == FINISHED else None,
        "folder": str(run.output),
        "fields": run.job.get("fields", {}),
    }


def _attachment(name: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{name}"'}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sfumato.web", "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["duration"] = _duration
    environment.filters["up"] = lambda value: f"{rounded_up(value, 4):g}"  # what is promised is never understated
    environment.filters["query"] = lambda values: urlencode(values)
    environment.globals["version"] = __version__
    return environment


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
