"""A headless Chromium for the tests of pages; they skip, and say why, where there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def installed() -> str | None:
    """Return a Chromium of this machine: what DCNET_CHROMIUM names, else the first on the PATH."""
    return os.environ.get("DCNET_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launch() -> Iterator:
    """Launch a Playwright browser; skip the test where Playwright or every Chromium is missing."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no browser test: Playwright is not installed (pip install playwright)"
    )
    with sync_api.sync_playwright() as playwright:
        path = installed() or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip(
                f"no browser test: {path} does not exist; set DCNET_CHROMIUM, or run 'playwright install chromium'"
            )
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched(browser, path: Path, hash: str = "", **options) -> Iterator:
    """Open a page from disk, at an address such as "#here".

    Fail if it logs an error or a warning, or asks for anything outside itself.
    """
    complaints: list[str] = []

    def heard(message) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"{message.type}: {message.text}")

    def asked(request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            complaints.append(f"request: {request.url}")

    context = browser.new_context(**options)
    page = context.new_page()
    page.on("console", heard)
    page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
    page.on("request", asked)
    try:
        page.goto(path.resolve().as_uri() + hash)
        yield page
    finally:
        context.close()
    assert not complaints, complaints
