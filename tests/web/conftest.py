"""A server in this process, and somebody who was let in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from sfumato.data import ImageSet, save_images
from sfumato.data.folders import RUNS_FOLDER
from sfumato.web.authentication import Sessions
from sfumato.web.server import create_app

ORIGIN = "http://127.0.0.1:8765"


class Person:
    """Somebody who was let in: a client with a session, and the token of its forms."""

    def __init__(self, client: TestClient, sessions: Sessions) -> None:
        self.client = client
        answer = client.post("/enter", data={"token": sessions.new_token()})
        assert answer.status_code == 303, answer.text
        found = re.search(r'name="csrf" value="([^"]+)"', client.get("/").text)
        assert found is not None
        self.csrf = found[1]

    def post(self, path: str, **options):
        return self.client.post(path, data={"csrf": self.csrf, **options.pop("data", {})}, **options)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory, few_digits: ImageSet) -> Path:
    """A root with two folders of images."""
    root = tmp_path_factory.mktemp("served")
    save_images(few_digits, root / "ward" / "scans")
    save_images(few_digits, root / "held-out")
    return root


class Served:
    """A server in this process."""

    def __init__(self, root: Path, runs: Path | None = None, **options) -> None:
        runs = root / RUNS_FOLDER if runs is None else runs
        self.root, self.runs = root, runs
        self.app, self.sessions = create_app(root, runs, hosts=["127.0.0.1"], port=8765, **options)

    def client(self) -> TestClient:
        """Return a browser that is not let in yet."""
        return TestClient(self.app, base_url=ORIGIN, headers={"origin": ORIGIN}, follow_redirects=False)

    def person(self) -> Person:
        return Person(self.client(), self.sessions)


@pytest.fixture
def served(data_root: Path, tmp_path: Path) -> Served:
    return Served(data_root, tmp_path / "runs")
