"""States of networks, optimizers and generators: round trips through a file, exact continuation, crashes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from sfumato.engine.state import entries_below, flat, read_tensors, restore, state_of, write_tensors


def network(seed: int = 0, channels_last: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3))
    return layers.to(memory_format=torch.channels_last) if channels_last else layers  # type: ignore[call-overload]


class Run:
    """A network, Adam, a generator, a tensor and a list: all kinds of parts."""

    def __init__(self, seed: int = 0, fused: bool = False, channels_last: bool = False) -> None:
        self.network = network(seed, channels_last)
        # Two groups: the numbers of the parameters go on through the groups.
        groups: list[dict[str, Any]] = [{"params": part.parameters(), "lr": 0.1} for part in self.network]
        self.optimizer = torch.optim.Adam(groups, fused=fused)
        self.generator = torch.Generator().manual_seed(seed)
        self.count, self.seen = torch.zeros((), dtype=torch.int64), [torch.zeros(2), torch.zeros(3)]

    def state_parts(self) -> dict[str, Any]:
        return vars(self)

    def step(self) -> None:
        self.optimizer.zero_grad()
        images = torch.randn(4, 2, 8, 8, generator=self.generator)
        (self.network(images) - 1).square().mean().backward()
        self.optimizer.step()
        self.count += 1
        self.seen[0] += images.mean()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in state_of(self).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_file_keeps_tensors_and_note(tmp_path: Path) -> None:
    tensors = {
        "a/weight": torch.randn(3, 4).T,  # not contiguous
        "half": torch.randn(5).half(),
        "brain": torch.randn(5).bfloat16(),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "step": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    note = {"step": 3, "nested": {"names": ["ä", "b"], "rate": 0.1, "none": None}}
    write_tensors(tmp_path / "x.safetensors", tensors, note)
    read, read_note = read_tensors(tmp_path / "x.safetensors")
    assert same(read, tensors)
    assert all(read[name].dtype == value.dtype for name, value in tensors.items())
    assert read_note == note
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_crash_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "x.safetensors"
    old, new = {"a": torch.zeros(1000)}, {"a": torch.ones(2000)}
    write_tensors(path, old, "old")

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(OSError, match="no space"):
            write_tensors(path, new, "new")
    tensors, note = read_tensors(path)
    assert (same(tensors, old), note) == (True, "old")
    write_tensors(path, new, "new")  # what the crash left does not disturb
    tensors, note = read_tensors(path)
    assert (same(tensors, new), note) == (True, "new")


def test_the_partial_file_is_complete_on_disk_before_it_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is written in place, or renamed before it is flushed, could be lost with the power."""
    path, calls = tmp_path / "x.safetensors", []
    fsync, replace = os.fsync, os.replace

    def flushing(descriptor: int) -> None:
        calls.append("fsync")
        fsync(descriptor)

    def replacing(source: Path, target: Path) -> None:
        calls.append("replace")
        assert read_tensors(source)[1] == "note"
        assert not path.exists()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(os, "replace", replacing)
    write_tensors(path, {"a": torch.ones(3)}, "note")
    assert calls[:2] == ["fsync", "replace"]


def test_a_truncated_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.ones(1000)}, None)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SafetensorError):
        read_tensors(path)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_restored_run_continues_exactly(tmp_path: Path, fused: bool, channels_last: bool) -> None:
    """A file holds contiguous tensors; a fused Adam with another memory layout than its parameters goes wrong."""
    straight, interrupted = (Run(0, fused, channels_last) for _ in range(2))
    for _ in range(6):
        straight.step()
    for _ in range(3):
        interrupted.step()
    write_tensors(tmp_path / "x.safetensors", state_of(interrupted), None)
    resumed = Run(9, fused, channels_last)
    assert not same(resumed.state(), interrupted.state())
    restore(resumed, read_tensors(tmp_path / "x.safetensors")[0])
    assert same(resumed.state(), interrupted.state())
    for parameter in resumed.network.parameters():
        assert resumed.optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()
    for _ in range(3):
        resumed.step()
    assert same(resumed.state(), straight.state())


@pytest.mark.parametrize("part", ["network", "optimizer", "generator"])
def test_each_part_matters(part: str) -> None:
    """Planted fault: a part that is not restored changes the rest of the run."""
    straight = Run()
    for _ in range(3):
        straight.step()
    resumed = Run(9)
    for name, each in straight.state_parts().items():
        if name != part:
            restore(resumed.state_parts()[name], {key: value.clone() for key, value in state_of(each).items()})
    straight.step()
    resumed.step()
    assert not same(resumed.state(), straight.state())


def test_parts_are_restored_in_place() -> None:
    tensor, seen = torch.zeros(3, requires_grad=True), [torch.zeros(2), torch.zeros(())]
    restore(tensor, state_of(torch.arange(3.0)))
    restore(seen, state_of([torch.ones(2), torch.tensor(5.0)]))
    assert tensor.tolist() == [0, 1, 2]
    assert tensor.requires_grad
    assert [part.tolist() for part in seen] == [[1, 1], 5]
    generator = torch.Generator().manual_seed(3)
    state = state_of(generator)
    expected = torch.randn(4, generator=generator)
    restore(generator, state)
    assert torch.equal(torch.randn(4, generator=generator), expected)


def test_an_optimizer_before_its_first_step_has_no_state() -> None:
    run = Run()
    assert state_of(run.optimizer) == {}
    run.step()
    restore(run.optimizer, {})
    assert state_of(run.optimizer) == {}


def test_a_network_of_other_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        restore(nn.Linear(3, 2), state_of(nn.Linear(4, 2)))


def test_names_with_a_common_beginning_are_kept_apart() -> None:
    state = flat({"1": {"x": 1}, "10": {"x": 2}, "1/2": {"x": 3}})
    assert {name: int(value) for name, value in entries_below(state, "1").items()} == {"x": 1, "2/x": 3}
    assert {name: int(value) for name, value in entries_below(state, "10").items()} == {"x": 2}
