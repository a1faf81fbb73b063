"""The folder `privacy` imports nothing else of the package and stays small; nothing patches PyTorch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sfumato

PACKAGE = Path(sfumato.__file__).parent
PRIVACY = sorted((PACKAGE / "privacy").glob("*.py"))
EVERYTHING = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 1400
NOISE = {"standard_normal", "normal", "randn", "randn_like", "make_gaussian", "normal_", "laplace", "make_laplace"}


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def outside_imports(source: str) -> list[str]:
    """List the imports of a source file from the rest of the package."""
    found = list(imported(ast.parse(source)))
    return [each for each in found if each.startswith((".", "sfumato")) and not each.startswith("sfumato.privacy")]


@pytest.mark.parametrize("path", PRIVACY, ids=name)
def test_it_imports_nothing_from_the_rest_of_the_package(path: Path) -> None:
    assert not outside_imports(path.read_text())


def test_the_folder_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in PRIVACY) <= MAX_LINES


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for such an expression, and an empty string for others."""
    if isinstance(node, ast.Attribute):
        inside = dotted(node.value)
        return f"{inside}.{node.attr}" if inside else ""
    return node.id if isinstance(node, ast.Name) else ""


def patches(source: str) -> list[str]:
    """List assignments to attributes of torch's modules and classes, under any import name."""
    tree = ast.parse(source)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names if _torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and _torch(node.module or ""):
            names |= {alias.asname or alias.name for alias in node.names}
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
            found += [ast.unparse(node)] if dotted(node.args[0]).split(".")[0] in names else []
        flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        found += [
            ast.unparse(each)
            for each in flat
            if isinstance(each, ast.Attribute) and dotted(each.value).split(".")[0] in names
        ]
    return found


def _torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_nothing_patches_pytorch(path: Path) -> None:
    assert not patches(path.read_text())


def noise_calls(source: str) -> list[str]:
    tree = ast.parse(source)
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [
        ast.unparse(call)
        for call in calls
        if isinstance(call, ast.Attribute | ast.Name) and _function_name(call) in NOISE
    ]


def _function_name(call: ast.expr) -> str:
    return call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")


def has_call(source: str, function: str) -> bool:
    return any(
        isinstance(node, ast.Call) and _function_name(node.func) == function for node in ast.walk(ast.parse(source))
    )


@pytest.mark.parametrize("path", PRIVACY, ids=name)
def test_only_the_mechanisms_draw_noise(path: Path) -> None:
    """`sampling` draws standard normal numbers for records, which are not privacy noise."""
    if path.name not in ("mechanisms.py", "sampling.py"):
        assert not noise_calls(path.read_text())
    if path.name == "mechanisms.py":
        assert noise_calls(path.read_text())


def test_generators_and_mechanisms_are_called_in_their_files_only() -> None:
    def where(function: str) -> set[str]:
        return {name(path) for path in EVERYTHING if has_call(path.read_text(), function)}

    for generator in ("host_generator", "device_generator"):
        assert where(generator) <= {"privacy/mechanisms.py", "privacy/sampling.py", "privacy/records.py"}
    for mechanism in ("add_gaussian", "add_discrete_gaussian"):
        assert where(mechanism) == {"privacy/vault.py"}
    assert where("poisson_sample") == {"privacy/records.py"}


def broad_handlers(source: str) -> list[int]:
    """List the lines with an `except` for all exceptions."""
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    kinds = {"Exception", "BaseException"}
    return [
        each.lineno
        for each in handlers
        if each.type is None or kinds & {getattr(part, "id", "") for part in ast.walk(each.type)}
    ]


@pytest.mark.parametrize("path", PRIVACY, ids=name)
def test_no_error_is_swallowed(path: Path) -> None:
    """Only `_void_on_failure` catches all exceptions; it voids the guarantee."""
    tree = ast.parse(path.read_text())
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_void_on_failure"]
    allowed = [line for guard in guards for line in broad_handlers(ast.unparse(guard))]
    assert len(broad_handlers(path.read_text())) == len(allowed) <= (path.name == "vault.py")


def test_these_tests_can_fail() -> None:
    assert outside_imports("from sfumato.data import ImageSet") == ["sfumato.data"]
    assert outside_imports("from ..engine import calibrate")
    assert outside_imports("import sfumato.engine.layers")
    assert not outside_imports("from sfumato.privacy.ledger import Ledger\nimport torch")
    for patch in (
        "import torch\ntorch.Tensor.__repr__ = None",
        "import torch.nn.functional as f\nf.linear = 3",
        "from torch import nn\nnn.Linear.forward = None",
        "import torch\nsetattr(torch.nn, 'Linear', None)",
        "from torch.nn import Linear\nLinear.forward, x = 1, 2",
    ):
        assert patches(patch)
    assert not patches("import torch\nself.x = torch.zeros(3)\nx = torch.ones(2)\nx.grad = None")
    assert noise_calls("import torch\nx = torch.randn(3)")
    assert noise_calls("host_generator().standard_normal(3)")
    assert broad_handlers("try:\n    pass\nexcept (ValueError, Exception):\n    pass")
    assert broad_handlers("try:\n    pass\nexcept:\n    pass")
    assert not broad_handlers("try:\n    pass\nexcept ValueError:\n    pass")
