"""Config files: options of a command in TOML, `--config run.toml`, and the options of a run written back as one.

Keys are the long names of options (`epsilon = 1.0`, `label-column = "finding"`) and arguments (`data = "scans/"`); the
table `[set]` holds parameters of the method. What is given on the command line wins.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from sfumato.cli_options import RUN, parse_assignments

SET = "set"
NEVER_WRITTEN = frozenset({"config", "resume", "json"})


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a config file as defaults of the options of this command."""
    if path is None or context.resilient_parsing:
        return path
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}") from None
    names = _names(context)
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name not in names or name in NEVER_WRITTEN:
            near = difflib.get_close_matches(name, names, 1)
            raise typer.BadParameter(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        defaults[names[name]] = _assignments(value) if name == SET and isinstance(value, dict) else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def write_config(context: typer.Context, path: Path, **resolved: Any) -> Path:
    """Write the options that were given, with other values for `resolved` ones, so that the run can be repeated."""
    given = {
        name: context.params[parameter]
        for name, parameter in _names(context).items()
        if name not in NEVER_WRITTEN and _was_given(context, parameter)
    }
    values = {**given, **resolved}
    params = parse_assignments(values.pop(SET, None))
    lines = [f"# sfumato {context.info_name} --config {path.name}"]
    lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
    lines += ["", f"[{SET}]", *(f"{name} = {_toml(value)}" for name, value in params.items())] if params else []
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def _names(context: typer.Context) -> dict[str, str]:
    """Return the parameters of the command by the long names of their options."""
    found = {}
    for parameter in context.command.params:
        longest = max(parameter.opts, key=len).lstrip("-") if parameter.opts else parameter.name
        if parameter.name is not None and longest is not None:
            found[longest.replace("_", "-")] = parameter.name
    return found


def _was_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name not in ("DEFAULT", "ENVIRONMENT")


def _assignments(values: dict[str, Any]) -> list[str]:
    return [f"{name}={value if isinstance(value, str) else _literal(value)}" for name, value in values.items()]


def _literal(value: Any) -> str:
    return "1e999" if value == math.inf else repr(value)


def _toml(value: Any) -> str:
    """Return a value as TOML: what JSON writes is TOML, except for infinity and tables."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return json.dumps(value if isinstance(value, bool | int | float | str) else str(value), ensure_ascii=False)


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=read_config,
        is_eager=True,
        help="Read options from this TOML file; what is given on the command line wins.",
        rich_help_panel=RUN,
    ),
]
