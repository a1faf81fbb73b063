"""Folders below the root, and no others."""

from __future__ import annotations

import pytest

from sfumato.data import DataError
from sfumato.web.allowed_folders import AllowedFolders


@pytest.fixture
def folders(tmp_path):
    root = tmp_path / "root"
    for name in ("a/b", "a/.hidden", "sfumato-runs/x", "link-target"):
        (root / name).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root-but-longer").mkdir()
    (root / "a" / "out").symlink_to(tmp_path / "outside")
    (root / "a" / "in").symlink_to(root / "link-target")
    (root / "a" / "images.npz").write_bytes(b"")
    (root / "a" / "notes.txt").write_bytes(b"")
    return AllowedFolders(root, root / "sfumato-runs")


@pytest.mark.parametrize(
    "name",
    ["..", "../outside", "a/../../outside", "a/../b", "/etc", "//etc", "a/out", "a/out/x", "~", "~root", "a/\0",
     "nothing", "../root-but-longer", "a/notes.txt", "sfumato-runs", "sfumato-runs/x", "a/./../../outside", "x" * 5000],
)  # fmt: skip
def test_a_path_out_of_the_root_is_refused(folders, name):
    with pytest.raises(DataError, match="below the root"):
        folders.find(name)


def test_folders_below_the_root_are_found(folders):
    assert folders.find("") == folders.root
    assert folders.find("a/b") == folders.root / "a" / "b"
    assert folders.find("a/in") == folders.root / "link-target"
    assert folders.find("a/images.npz").is_file()


def test_only_what_can_be_chosen_is_listed(folders):
    assert [entry.name for entry in folders.entries(folders.root)] == ["a", "link-target"]
    assert [entry.name for entry in folders.entries(folders.find("a"))] == ["b", "images.npz", "in"]


def test_a_link_inside_that_leads_out_is_refused(folders):
    with pytest.raises(DataError, match="a/out is a link that leads out"):
        folders.check_links(folders.find("a"))
    folders.check_links(folders.find("a/b"))


def test_runs_inside_the_data_need_their_own_name(tmp_path):
    (tmp_path / "scans" / "mine").mkdir(parents=True)
    folders = AllowedFolders(tmp_path, tmp_path / "scans" / "mine")
    with pytest.raises(DataError, match="start it with --out elsewhere"):
        folders.find("scans")
