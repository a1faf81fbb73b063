"""Strangers, other sites and other hosts are refused."""

from __future__ import annotations

import re

import pytest
from starlette.routing import Route

from sfumato.web import authentication

SECRET_PAGES = ["/", "/new?folder=ward/scans", "/plan?folder=ward/scans", "/runs/x", "/verify", "/runs/x/all.zip"]


@pytest.mark.parametrize("path", SECRET_PAGES)
def test_a_stranger_sees_nothing(served, path):
    answer = served.client().get(path)
    assert answer.status_code == 403
    assert "ward" not in answer.text
    assert "Open the link" in answer.text


def test_a_token_works_once_and_a_cookie_is_strict(served):
    token = served.sessions.new_token()
    answer = served.client().post("/enter", data={"token": token})
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert token not in str(answer.headers)
    again = served.client().post("/enter", data={"token": token})
    assert again.status_code == 403
    assert "used already" in again.text
    assert "set-cookie" not in again.headers
    for wrong in ("", "x", "ü" * 50):
        assert served.client().post("/enter", data={"token": wrong}).status_code == 403


def test_a_session_ends(served, monkeypatch):
    person = served.person()
    assert person.client.get("/").status_code == 200
    now = authentication.time.monotonic()
    monkeypatch.setattr(authentication.time, "monotonic", lambda: now + authentication.SESSION_SECONDS + 1)
    assert person.client.get("/").status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8765", "", "127.0.0.1@evil"])
def test_another_host_name_is_refused(served, host):
    """A name of an attacker that resolves to this machine (DNS rebinding)."""
    person = served.person()
    answer = person.client.get("/", headers={"host": host})
    assert answer.status_code == 400
    assert "Choose a folder" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:9999"},
     {"origin": "https://127.0.0.1:8765"}, {"origin": "", "sec-fetch-site": "same-site"}],
)  # fmt: skip
def test_a_form_of_another_site_is_refused(served, headers):
    person = served.person()
    answer = person.post("/invite", headers=headers)
    assert answer.status_code == 403
    assert "another site" in answer.text
    del person.client.headers["origin"]
    assert person.post("/invite").status_code == 403
    assert person.post("/invite", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert person.post("/invite", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_every_form_needs_the_token_of_its_session(served):
    first, second = served.person(), served.person()
    paths = [route.path.replace("{run}", "x") for route in _routes(served) if route.methods and "POST" in route.methods]
    assert len(paths) == 6
    for path in paths:
        if path == "/enter":
            continue
        for token in ({}, {"csrf": ""}, {"csrf": second.csrf}, {"csrf": first.csrf + "x"}, {"csrf": "ü"}):
            assert first.client.post(path, data=token).status_code == 403, path


def _routes(served):
    return [route for route in served.app.routes if isinstance(route, Route)]


@pytest.mark.parametrize("path", ["/", "/enter", "/verify", "/static/style.css", "/nonsense", "/runs/x"])
def test_every_answer_has_its_headers(served, path):
    headers = served.person().client.get(path).headers
    policy = headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"


def test_no_page_has_a_script_or_a_style_of_its_own(served):
    person = served.person()
    for path in ("/", "/new?folder=ward/scans&size=8", "/verify", "/enter"):
        text = person.client.get(path).text
        assert not re.search(r"<script(?! src=\"/static/)|<style|\sstyle=|\son\w+=|javascript:|https?://", text), path


def test_what_goes_wrong_inside_is_not_shown(served, monkeypatch):
    from starlette.testclient import TestClient

    from sfumato.web import server

    def fail(self):
        raise RuntimeError("secret /path/of/a/patient")

    person = served.person()
    monkeypatch.setattr(server.RunStore, "list", fail)
    quiet = TestClient(served.app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False)
    quiet.cookies = person.client.cookies
    answer = quiet.get("/")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_an_invitation_lets_one_more_person_in(served):
    found = re.search(r"/enter#([\w-]+)", served.person().post("/invite").text)
    assert found is not None
    assert served.client().post("/enter", data={"token": found[1]}).status_code == 303
