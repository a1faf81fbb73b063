"""Keeps the package in order: one direction of imports, one name for one thing, small and documented constructors."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest

import sfumato as sf
from sfumato.cli import app
from sfumato.methods.base import Synthesizer
from sfumato.methods.registry import METHODS
from sfumato.privacy import Budget

PACKAGE = Path(sf.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
BUILT_IN = {key: method for key, method in METHODS.items() if method.__module__.startswith("sfumato.")}

# A module imports only from layers above its own line here; the root is `sfumato/__init__.py`.
LAYERS = (
    ("progress", "threads"),
    ("data",),
    ("privacy",),
    ("engine",),
    ("cluster",),
    ("nets",),
    ("features",),
    ("priors",),
    ("certificate",),
    ("methods",),
    ("advice", "evaluate", "testing"),
    ("audit", "preview"),
    ("root",),
    ("report",),
    ("synthesize",),
    ("sweep",),
    ("console", "demo"),
    ("cli_options",),
    ("web",),
    ("cli_audit", "cli_config", "cli_check", "cli_doctor", "cli_evaluate", "cli_prior", "cli_report", "cli_serve"),
    ("cli_compare", "cli_tune"),
    ("cli",),
    ("__main__",),
)
LAYER = {part: number for number, layer in enumerate(LAYERS) for part in layer}
ONLY = {
    "privacy": set[str](),
    "features": {"data", "engine", "nets", "progress"},
    "nets": {"data", "engine", "progress"},
    "priors": {"data", "engine", "nets", "features", "progress"},
}
SHARED_BY_METHODS = {
    *("base", "generator_method", "condensation", "kernel_painter", "teacher"),
    *("parameters", "class_counts", "warm_start", "registry", "checkpoints", "score_matching"),
    *("painter_choice", "prior_painter", "curriculum_painter", "embedding_painter"),
}
MAX_PARAMETERS = 15
FREE_TEXT = {
    "device",
    "encoder",
    "residual",
    "preset",
    "prior",
    "base",
    "grid",
}  # names or files
INTERFACES = (
    "privacy",
    "engine",
    "certificate",
    "data",
    "report",
    "threads",
)  # a reader of a method takes these as they are documented
MAX_FILES_OF_A_RUN = 25  # outside of these
MAX_FILES_IN_ALL = 65  # with these. It stops silent growth; it does not say that 65 are few


# -- imports ----------------------------------------------------------------------------------------------


def part_of(module: str) -> str:
    """Return the sub-package or top-level module that `module` belongs to."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "root"


def imports(module: str, source: str) -> Iterator[str]:
    """Yield the modules of the package that a source imports; `from sfumato import data` is `sfumato.data`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "sfumato")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            if origin.split(".")[0] == "sfumato":
                inside = {f"{origin}.{alias.name}" for alias in node.names}
                yield from sorted(inside & MODULES.keys()) or [origin]


def wrong_direction(module: str, source: str) -> list[str]:
    """List the imports that go against the order of the layers."""
    own, found = part_of(module), []
    if own not in LAYER:
        return [f"{module} is in no layer; add {own!r} to LAYERS"]
    for imported in imports(module, source):
        part = part_of(imported)
        if part == own and own != "root":
            continue
        below = LAYER.get(part, len(LAYERS)) < LAYER[own]
        if not below or (own in ONLY and part not in ONLY[own]):
            found.append(f"{module} imports {imported}")
    return found


def foreign_methods(module: str, source: str) -> list[str]:
    """List the imports of a method module by another one: only the registry and `__init__` know all methods.

    A published form may import its sound form.
    """
    known = ("sfumato.methods", "sfumato.methods.registry")
    if part_of(module) != "methods" or module in known or module.startswith("sfumato.methods.as_published"):
        return []
    found = [each for each in imports(module, source) if part_of(each) == "methods"]
    return [
        f"{module} imports {each}" for each in found if each.removeprefix("sfumato.methods.") not in SHARED_BY_METHODS
    ]


def runtime_use_of_methods(module: str, source: str) -> list[str]:
    """List what `evaluate` takes from `methods`, except names from `methods.base` that annotations alone mention."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    found, types = [], set()
    for node in nodes:
        origin = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        names = [origin] if origin else [alias.name for alias in node.names]
        if origin == "sfumato.methods.base":
            types |= {alias.asname or alias.name for alias in node.names}
        else:
            found += [f"{module} imports {name}" for name in names if name.startswith("sfumato.methods")]
    annotations = {id(part) for each in _annotations(tree) for part in ast.walk(each)}
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in annotations]
    return found + [f"{module} uses {name} at run time" for name in sorted(types.intersection(used))]


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def test_imports_go_one_way() -> None:
    assert not [line for module, source in MODULES.items() for line in wrong_direction(module, source)]


def test_no_method_imports_another() -> None:
    assert not [line for module, source in MODULES.items() for line in foreign_methods(module, source)]


def test_evaluate_needs_methods_for_types_only() -> None:
    evaluate = {module: source for module, source in MODULES.items() if part_of(module) == "evaluate"}
    assert not [line for module, source in evaluate.items() for line in runtime_use_of_methods(module, source)]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sfumato.data.load", "from sfumato.privacy import Budget"),
        ("sfumato.privacy.vault", "import sfumato.data"),
        ("sfumato.privacy.vault", "from ..progress import bar"),
        ("sfumato.engine.layers", "from sfumato.methods.base import Synthesizer"),
        ("sfumato.certificate.issue", "def f():\n    from sfumato.evaluate import evaluate"),
        ("sfumato.nets.flow", "from sfumato.privacy import Release"),
        ("sfumato.nets.flow", "from sfumato.features import scattering"),
        ("sfumato.nets.unet", "from sfumato import features"),
        ("sfumato.features.perceptual", "from sfumato.priors import load_prior"),
        ("sfumato.priors.prior", "from sfumato.privacy import Release"),
        ("sfumato.methods.base", "from sfumato import evaluate"),
        ("sfumato.methods.base", "import sfumato as sf"),
        ("sfumato.evaluate.ood", "from sfumato.synthesize import synthesize"),
        ("sfumato.synthesize", "from sfumato.cli import app"),
        ("sfumato.new_module", "import math"),
        ("sfumato.data.load", "from sfumato.new_module import anything"),
    ],
)
def test_an_import_against_the_order_is_found(module: str, source: str) -> None:
    assert wrong_direction(module, source)


def test_imports_in_order_are_accepted() -> None:
    assert not wrong_direction(
        "sfumato.methods.pge", "from sfumato.nets import flow\nfrom sfumato.privacy import Release"
    )
    assert not wrong_direction("sfumato.features.kernels", "import torch\nfrom sfumato.engine import layers")
    assert not wrong_direction("sfumato.privacy.vault", "from sfumato.privacy.ledger import Ledger")
    assert not wrong_direction("sfumato.cli", "import sfumato as sf")


def test_a_method_that_imports_another_is_found() -> None:
    assert foreign_methods("sfumato.methods.pge", "from sfumato.methods.dp_merf import MeanEmbedding")
    assert foreign_methods("sfumato.methods.pge", "from sfumato.methods import atelier")
    assert foreign_methods("sfumato.methods.pge", "from .dp_kernel import KernelGenerator")
    assert foreign_methods("sfumato.methods.base", "import sfumato.methods.dp_kernel")
    assert not foreign_methods("sfumato.methods.pge", "from sfumato.methods.base import Synthesizer")
    assert not foreign_methods("sfumato.methods.registry", "from sfumato.methods.dp_merf import MeanEmbedding")


def test_a_method_used_by_evaluate_is_found() -> None:
    types = "from sfumato.methods.base import Synthesizer\n"
    assert runtime_use_of_methods("sfumato.evaluate.ood", "from sfumato.methods.registry import create")
    assert runtime_use_of_methods("sfumato.evaluate.ood", "import sfumato.methods")
    assert runtime_use_of_methods("sfumato.evaluate.ood", types + "def f(x):\n    return isinstance(x, Synthesizer)")
    assert not runtime_use_of_methods("sfumato.evaluate.ood", types + "def f(x: Synthesizer) -> None: ...")


# -- names ------------------------------------------------------------------------------------------------


def repeated_modules(modules: dict[str, str]) -> list[str]:
    """List the file names that two modules share; packages do not count."""
    packages = {module.rpartition(".")[0] for module in modules}
    names = Counter(module.rpartition(".")[2] for module in modules if module not in packages)
    return sorted(name for name, number in names.items() if number > 1)


def repeated_classes(modules: dict[str, str]) -> list[str]:
    """List the class names that are defined twice in the package."""
    nodes = (node for source in modules.values() for node in ast.walk(ast.parse(source)))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, number in names.items() if number > 1)


def test_no_two_modules_or_classes_share_a_name() -> None:
    assert not repeated_modules(MODULES)
    assert not repeated_classes(MODULES)


def test_a_repeated_name_is_found() -> None:
    twice = {"sfumato": "", "sfumato.a": "", "sfumato.a.layers": "class One: ...", "sfumato.layers": "class Two: ..."}
    assert repeated_modules(twice) == ["layers"]
    assert not repeated_classes(twice)
    assert repeated_classes({**twice, "sfumato.b": "def f():\n    class Two: ..."}) == ["Two"]


# -- docstrings -------------------------------------------------------------------------------------------

NO_VERBS = {
    *("A", "An", "The", "What", "How", "Why", "Whether", "Which", "Who", "One", "Some", "All", "Each", "For", "After"),
    *("Before", "This", "It", "Its", "Expected", "Images", "Features", "Different"),
}
PROPERTIES = {"property", "cached_property"}


def without_verb(module: str, source: str) -> list[str]:
    """List the functions whose docstring begins with a word that is no verb. A property may be described by a noun."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
        words = re.findall(r"\w+", ast.get_docstring(node) or "Return")
        if not decorators & PROPERTIES and (words[0] in NO_VERBS or not words[0][0].isupper()):
            found.append(f"{module}.{node.name}: {words[0]}")
    return found


def crowded_bullets(module: str, source: str) -> list[str]:
    """List the bullets of class docstrings that describe a second field after a full stop or semicolon."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        names = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        for bullet in re.findall(r"^- .*(?:\n  .*)*", ast.get_docstring(node) or "", re.MULTILINE):
            second = set(re.findall(r"[.;]\s+(\w+): ", bullet)) & names
            found += [f"{module}.{node.name}: {name}" for name in sorted(second)]
    return found


def test_docstrings_begin_with_a_verb() -> None:
    assert not [line for module, source in MODULES.items() for line in without_verb(module, source)]
    assert without_verb("m", 'def f():\n    """The mean of x."""') == ["m.f: The"]
    assert without_verb("m", 'def f():\n    """q, the probability."""') == ["m.f: q"]
    assert not without_verb("m", 'def f():\n    """Return x."""\n@property\ndef g():\n    """The mean."""')


def test_a_field_has_its_own_bullet() -> None:
    own = {module: source for module, source in MODULES.items() if part_of(module) not in ("cluster", "privacy")}
    assert not [line for module, source in own.items() for line in crowded_bullets(module, source)]
    planted = 'class A:\n    """Two.\n\n    - a: first. b: second.\n    """\n\n    a: int\n    b: int'
    assert crowded_bullets("m", planted) == ["m.A: b"]


# -- the map of the code ----------------------------------------------------------------------------------


def rows_out_of_order(page: str) -> list[str]:
    """List the rows of the first table of a page whose modules are in another order than `LAYERS`, or unknown."""
    found, last = [], 0
    rows = re.findall(r"^\| (.*?) \|", page.split("\n\n| package")[1].split("\n\n")[0], re.MULTILINE)
    exact = {name for row in rows for name in re.findall(r"`([\w]+)(?:\.py|/)`", row)}
    for row in rows:
        names = [name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([^`]+)`", row)]
        parts = [part for name in names for part in LAYER if part == name]
        parts += [part for name in names if "*" in name for part in LAYER if fnmatch(part, name) and part not in exact]
        if not parts or min(LAYER[part] for part in parts) < last:
            found.append(row)
        last = max([last, *(LAYER[part] for part in parts)])
    return found


def test_the_map_of_the_code_follows_the_layers() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    assert rows_out_of_order(page) == []
    named = re.findall(r"`([\w*]+)(?:\.py|/)`", page)
    assert [part for part in LAYER if not any(fnmatch(part, name) for name in (*named, "root", "__main__"))] == []
    head = "x\n\n| package | what |\n|---|---|\n"
    assert rows_out_of_order(head + "| `privacy/` | a |\n| `data/` | b |\n\ny") == ["`data/`"]
    assert rows_out_of_order(head + "| `data/` | a |\n| `nowhere/` | b |\n\ny") == ["`nowhere/`"]


# -- parameters of methods --------------------------------------------------------------------------------


def parameters(method: type[Synthesizer]) -> list[str]:
    """List the names that the constructor takes."""
    return [field.name for field in fields(method) if field.init]


def undocumented(method: type[Synthesizer]) -> list[str]:
    """List the parameters without a bullet `- name: ...` in the docstring of the class or of one of its bases."""
    texts = [inspect.cleandoc(vars(base).get("__doc__") or "") for base in method.__mro__]
    bullets = {name for text in texts for name in re.findall(r"^- (\w+): \S", text, re.MULTILINE)}
    return [name for name in parameters(method) if name not in bullets]


def untyped_words(method: type[Synthesizer]) -> list[str]:
    """List the parameters that take one of a few words and are not typed `Literal` with the default among them."""
    hints, found = get_type_hints(method), []
    for field in fields(method):
        if not field.init or field.name in FREE_TEXT or not isinstance(field.default, str):
            continue
        hint = hints[field.name]
        if get_origin(hint) is not Literal or field.default not in get_args(hint):
            found.append(field.name)
    return found


@pytest.mark.parametrize("key", BUILT_IN)
def test_a_method_has_few_parameters_and_a_bullet_for_each(key: str) -> None:
    assert len(parameters(BUILT_IN[key])) <= MAX_PARAMETERS, parameters(BUILT_IN[key])
    assert not undocumented(BUILT_IN[key])
    assert not untyped_words(BUILT_IN[key])


@pytest.mark.parametrize("key", BUILT_IN)
def test_create_is_the_constructor(key: str) -> None:
    model = sf.create(key)
    assert type(model) is BUILT_IN[key]
    assert model.get_params() == type(model)().get_params()


@dataclass(kw_only=True, eq=False)
class Documented(Synthesizer):
    """A base class.

    - width: channels, default 8.
    """

    key: ClassVar[str] = "planted"
    width: int = 8


@dataclass(kw_only=True, eq=False)
class Planted(Documented):
    """The words depth: and loss: are here, and a bullet that names nothing.

    - something: that is no parameter.
    - form: one word of two.
    """

    depth: int = 8
    loss: str = "square"
    form: Literal["a", "b"] = "a"
    shape: Literal["round", "flat"] = "square"  # type: ignore[assignment]


def test_an_undocumented_parameter_or_a_word_without_literal_is_found() -> None:
    assert {"depth", "loss", "shape"} <= set(undocumented(Planted))
    assert not {"width", "form"} & set(undocumented(Planted))
    assert untyped_words(Planted) == ["loss", "shape"]
    assert parameters(Planted)[-5:] == ["width", "depth", "loss", "form", "shape"]


# -- one run ----------------------------------------------------------------------------------------------


def files_called(run: Callable[[], Any]) -> list[str]:
    """List the files of the package in which a function is called during `run`; importing a module is no call."""
    found: set[str] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(f"{PACKAGE}/"):
            found.add(code.co_filename)

    before = sys.getprofile(), threading.getprofile()
    sys.setprofile(watch)
    threading.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    found.discard(str(PACKAGE / "__init__.py"))  # it imports names on their first use, whichever test that is in
    return sorted(str(Path(name).relative_to(PACKAGE)) for name in found)


def test_a_run_goes_through_few_files(tmp_path: Path) -> None:
    """Whoever reads along with one `synth` has to open few files."""
    command = ["synth", "digits", "--method", "atelier", "--out", str(tmp_path / "out"), "--number", "20", "--set"]
    found = files_called(lambda: app([*command, "steps=1", "--device", "cpu"], standalone_mode=False))
    assert (tmp_path / "out" / "certificate.json").exists()
    own = [name for name in found if not name.startswith(INTERFACES)]
    assert len(own) <= MAX_FILES_OF_A_RUN, f"{len(own)} files:\n" + "\n".join(own)
    assert len(found) <= MAX_FILES_IN_ALL, f"{len(found)} files:\n" + "\n".join(found)


def test_the_files_of_a_run_are_found() -> None:
    assert files_called(lambda: None) == []
    assert files_called(lambda: Budget(1.0)) == ["privacy/budget.py"]
    later = threading.Thread(target=lambda: Budget(1.0))
    assert files_called(lambda: (later.start(), later.join())) == ["privacy/budget.py"]


# -- community files --------------------------------------------------------------------------------------


def test_all_files_state_the_same_version() -> None:
    root = PACKAGE.parent
    stated = [
        re.findall(rf"^version{sign}(\S+)$", (root / name).read_text("utf-8"), re.MULTILINE)
        for name, sign in (("pyproject.toml", ' = "?'), ("CITATION.cff", ": "))
    ]
    assert [[version.strip('"') for version in versions] for versions in stated] == [[sf.__version__]] * 2
    assert "cff-version: 1.2.0\n" in (root / "CITATION.cff").read_text("utf-8")  # of the format, not of the package
