"""Allocation of pixels, in memory and in an unnamed temporary file."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from sfumato.data import DataError, storage


def test_available_memory_is_plausible():
    assert 1 << 20 < storage.available_memory() < 1 << 50


def test_threshold_is_a_share_of_available_memory(monkeypatch):
    monkeypatch.setattr(storage, "available_memory", lambda: 200)
    assert not isinstance(storage.allocate((1, 1, 10, 10)), np.memmap)
    assert isinstance(storage.allocate((1, 1, 10, 11)), np.memmap)


def test_container_limit_counts(monkeypatch):
    monkeypatch.setattr(storage, "_read_meminfo", lambda *_: 1000)
    monkeypatch.setattr(storage, "_read_integer", lambda path: {"memory.max": 500, "memory.current": 100}[path.name])
    assert storage.available_memory() == 400


def test_temporary_file_has_no_name(monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "available_memory", lambda: 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    array = storage.allocate((2, 1, 8, 8))
    array[1] = 7
    assert list(tmp_path.iterdir()) == []
    assert array.sum() == 7 * 64


def test_full_disk_raises_data_error(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "available_memory", lambda: 0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"no space left on device.*TMPDIR"):
        storage.allocate((2, 1, 8, 8))
