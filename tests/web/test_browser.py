"""The whole job in a real browser: from a folder to a verified certificate. Run with `make browser-test`.

It needs Chromium and its driver (Debian: chromium, chromium-driver); Selenium downloads nothing. If SFUMATO_SCREENSHOTS
names a folder, it writes pictures of the pages there, at the width of a desktop and of a phone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sfumato.data import ImageSet, save_images

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
]
DESKTOP, PHONE = (1280, 900), (390, 844)


class Server:
    """`sfumato serve` as a process of its own."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "sfumato", "serve", "--root", str(root), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.link = next(line.strip() for line in self.process.stdout if line.startswith("http://"))

    def stop(self) -> str:
        """Stop the server as Ctrl-C does, and return the rest of what it printed."""
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=1800)[0]


@pytest.fixture
def root(tmp_path: Path, digits: ImageSet) -> Path:
    save_images(digits, tmp_path / "data" / "scans")
    return tmp_path / "data"


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield found
    found.quit()


def wait(condition: Callable[[], Any], seconds: float = 1800) -> Any:
    """Wait until a condition holds; generous, because the machine may be busy."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except (NoSuchElementException, StaleElementReferenceException):
            pass  # the page is changing
        time.sleep(0.2)
    raise AssertionError("the page did not get there")


def test_from_a_folder_to_a_verified_certificate(driver: Any, root: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    def one(selector: str) -> Any:
        return driver.find_element(By.CSS_SELECTOR, selector)

    def text() -> str:
        return str(one("main").text)

    def photograph(name: str) -> None:
        if folder := os.environ.get("SFUMATO_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            for kind, (width, height) in (("desktop", DESKTOP), ("phone", PHONE)):
                for scheme in ("light", "dark"):
                    feature = [{"name": "prefers-color-scheme", "value": scheme}]
                    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
                    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": kind == "phone"}
                    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                    time.sleep(0.3)
                    wide = driver.execute_script("return document.documentElement.scrollWidth")
                    assert wide <= width, f"{name} is {wide} pixels wide on a {kind}"
                    full = driver.execute_script("return document.documentElement.scrollHeight")
                    metrics["height"] = min(full, 2600)
                    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                    driver.save_screenshot(str(Path(folder) / f"{name}-{kind}-{scheme}.png"))
            driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    driver.set_window_size(*DESKTOP)
    server = Server(root)
    try:
        # Come in with the link, once.
        driver.get(server.link)
        wait(lambda: "Choose a folder" in text())
        assert "#" not in driver.current_url
        photograph("home")

        # Choose a folder; the plan follows what is moved.
        one("a[href='/?folder=scans']").click()
        one("a[href='/new?folder=scans']").click()
        wait(lambda: "What an attacker could learn" in text())
        Select(one("[name=size]")).select_by_value("8")
        Select(one("[name=mode]")).select_by_value("grey")
        before = wait(lambda: "8 × 8 pixels, grey" in text() and one(".plan svg").get_attribute("aria-label"))
        driver.execute_script(
            "const s = document.querySelector('[type=range]'); s.value = 0.6; s.dispatchEvent(new Event('input', "
            "{bubbles: true}))"
        )
        wait(lambda: one(".plan svg").get_attribute("aria-label") != before)
        assert one("#epsilon").get_attribute("value") == "4"
        wait(lambda: "ε 4 at δ 1e-05" in text())
        Select(one("[name=unit]")).select_by_value("person")
        wait(lambda: "say where the person" in text())
        Select(one("[name=unit]")).select_by_value("image")
        wait(lambda: "Protected unit" in text())
        photograph("plan")

        # A long run: stop it, resume it, stop it again. Nothing is charged twice.
        one("[data-start]").click()
        wait(lambda: "of 4" in text() and "left" in text())
        photograph("running")
        ledger = next(root.glob("sfumato-runs/*/*/ledger.jsonl"))
        charged = ledger.read_text("utf-8").count('"charge"')
        one("form[action$=cancel] button").click()
        wait(lambda: one(".state").text == "stopped")
        photograph("stopped")
        one("form[action$=resume] button").click()
        wait(lambda: "left" in text())

        # The server goes away; the run goes on; a new server finds it.
        run_page = driver.current_url
        driver.get("about:blank")
        assert "go on" in server.stop()
        server = Server(root)
        driver.get(server.link)
        wait(lambda: "scans" in one(".runs").text and "running" in one(".runs").text)
        one(".runs a").click()
        assert driver.current_url.rpartition("/")[2] == run_page.rpartition("/")[2]
        one("form[action$=cancel] button").click()
        wait(lambda: one(".state").text == "stopped")
        assert ledger.read_text("utf-8").count('"charge"') == charged

        # A short run to its end.
        driver.get(server.link.partition("/enter")[0] + "/new?folder=scans&size=8&mode=grey&method=ldpdc&epsilon=4")
        assert "1 run on this folder already" in text()
        one("[name=number]").clear()
        one("[name=number]").send_keys("100")
        one("[data-start]").click()
        wait(lambda: one(".state").text == "finished")
        wait(lambda: driver.execute_script("return document.querySelector('figure img').naturalWidth > 0"))
        photograph("finished")
        one("a[href$='all.zip']").click()
        archive = wait(lambda: next((tmp_path / "downloads").glob("*.zip"), None))
        with zipfile.ZipFile(archive) as content:
            assert content.testzip() is None
            assert any(name.endswith("/certificate.json") for name in content.namelist())
        one("a[href$='report.html']").click()
        wait(lambda: "What the guarantee means" in one("body").text)
        driver.back()

        # Verify what was downloaded.
        one("nav a[href='/verify']").click()
        one("[name=file]").send_keys(str(archive))
        one("form[data-drop] button").click()
        wait(lambda: "The guarantee holds." in text())
        assert "There is no signature" in text()
        photograph("verified")

        # A link works once; an invitation is another one.
        one("form[action='/invite'] button").click()
        invitation = one("[data-select]").get_attribute("value")
        driver.delete_all_cookies()
        driver.get(server.link)
        wait(lambda: "used already" in text())
        driver.get(invitation)
        wait(lambda: "Choose a folder" in text())
        errors = [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        expected = [entry for entry in errors if "/enter" in entry["message"] and "403" in entry["message"]]
        assert errors == expected, errors
        assert len(expected) == 1  # the link that was used already
    finally:
        server.stop()
