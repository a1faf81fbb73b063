"""The command `sfumato serve`."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

MODULES = ("starlette", "uvicorn", "python_multipart")  # of the extra


def serve(
    root: Annotated[
        Path, typer.Option(help="Let people choose folders below this one.", show_default="the current folder")
    ] = Path(),
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the runs to this folder.", show_default="sfumato-runs in the root"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port; 0 takes a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Listen on this address. Others than 127.0.0.1 let the network in, unencrypted.")
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None, typer.Option(help="Accept this host name, too, for example that of a proxy; repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Run at most this many runs at a time.")] = 2,
) -> None:
    """Serve a page to plan, start and watch runs, and to verify certificates. Print a link for one person."""
    if not root.is_dir():
        raise typer.BadParameter(f"--root: {root} is not a folder")
    if any(find_spec(module) is None for module in MODULES):
        raise ModuleNotFoundError("sfumato serve needs the extra 'web': pip install 'sfumato[web]'")
    from sfumato import console
    from sfumato.data.folders import RUNS_FOLDER
    from sfumato.web.server import serve as run_server

    def announce(link: str) -> None:
        console.out.print(f"folders below  {escape(str(root.resolve()))}", soft_wrap=True)
        console.out.print(f"runs           {escape(str(runs.resolve()))}", soft_wrap=True)
        if host not in ("127.0.0.1", "::1", "localhost"):
            console.print_warnings([f"{host} is reachable from the network, and the connection is not encrypted"])
        console.out.print(
            "Open this link. It works once; the page makes further ones. Ctrl-C stops the server.", soft_wrap=True
        )
        print(link, flush=True)

    runs = root / RUNS_FOLDER if out is None else out
    with suppress(KeyboardInterrupt):
        run_server(root, runs, host=host, port=port, names=name, limit=limit, announce=announce)
    console.out.print("stopped. Runs that are under way go on; start the server again to see them.")
