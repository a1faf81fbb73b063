"""Compilation on a GPU only, and the way out where it fails. `torch.compile` and the GPU are simulated here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sfumato.engine.compiled import Compiled


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Compiler:
    """In place of `torch.compile`: counts compilations and calls; raises `error`, if any, at a call."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.compiled, self.calls = error, 0, 0

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        self.compiled += 1
        assert options == {"dynamic": False}

        def run(*inputs: Any) -> Any:
            self.calls += 1
            if self.error is not None:
                raise self.error
            return function(*inputs)

        return run


def doubled(x: torch.Tensor, times: int = 1) -> torch.Tensor:
    return 2 * x * times


def on_gpu() -> torch.Tensor:
    return torch.ones(3).as_subclass(OnGPU)


def install(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> Compiler:
    compiler = Compiler(error)
    monkeypatch.setattr(torch, "compile", compiler)
    return compiler


def failure(message: str = "Failed to find C compiler\n\nSet TORCHDYNAMO_VERBOSE=1") -> Exception:
    import torch._dynamo.exc  # slow, so that it is not imported with the module

    class NoCompiler(torch._dynamo.exc.TorchDynamoException):
        pass

    return NoCompiler(message)


def test_on_a_cpu_the_function_itself_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = install(monkeypatch)
    function = Compiled(doubled)
    assert function(torch.ones(3), 2).tolist() == [4, 4, 4]
    assert compiler.calls == 0


def test_on_a_gpu_the_compiled_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = install(monkeypatch)
    function = Compiled(doubled)
    for _ in range(3):
        assert function(on_gpu(), 2).tolist() == [4, 4, 4]
    assert (compiler.compiled, compiler.calls) == (1, 3)
    function(torch.ones(3), 2)
    assert compiler.calls == 3


def test_one_input_on_a_gpu_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = install(monkeypatch)
    Compiled(lambda network, x: x)("a network", on_gpu())
    assert compiler.calls == 1


def test_a_failed_compilation_is_stated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = install(monkeypatch, failure())
    function = Compiled(doubled)
    with pytest.warns(UserWarning, match="^doubled runs uncompiled, slower: Failed to find C compiler$"):
        first = function(on_gpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = function(on_gpu())
    assert first.tolist() == second.tolist() == [2, 2, 2]
    assert compiler.calls == 1  # not tried again


def test_an_error_of_the_function_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: an `except Exception` would run a wrong function twice and blame the compiler."""
    install(monkeypatch, ValueError("the shapes differ"))
    with pytest.raises(ValueError, match="the shapes differ"):
        Compiled(doubled)(on_gpu())


@pytest.mark.gpu
def test_a_compiled_function_equals_the_plain_one() -> None:
    x = torch.randn(1000, device="cuda")
    assert torch.allclose(Compiled(torch.nn.functional.silu)(x), torch.nn.functional.silu(x), atol=1e-6)
