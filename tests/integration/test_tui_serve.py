"""`prl-tui --serve`: which clients are let in, what is started, and the real thing in a real browser."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from prime_rl.contract.files import wait_for
from tests.page_attacks import answered
from tests.patience import PATIENCE_S
from tests.tui_support import build_workspace
from tui.serve import child_command

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZE = (1000, 640)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)


@contextmanager
def served(workspace: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The address at which a real server serves `workspace`."""
    command = [sys.executable, "-m", "tui", "--serve", "--port", "0", *arguments, str(workspace)]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=env)
    try:
        wait_for(lambda: "press Ctrl-C to stop" in log.read_text(encoding="utf-8"), "the server", timeout_s=PATIENCE_S)
        found = re.search(r"http://\S+", log.read_text(encoding="utf-8"))
        assert found is not None
        yield found[0]
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=PATIENCE_S) == 0, log.read_text(encoding="utf-8")
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("name", ["a b", "a'; touch pwned; '", "$(touch pwned)", "--help", 'x`touch pwned`\n"y'])
def test_the_shell_gets_the_folder_as_one_word(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    command = child_command(folder, allow_actions=False)
    shown = command.replace("exec ", "printf '%s\\0' ", 1)
    done = subprocess.run(["/bin/sh", "-c", shown], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split("\0")[:-1] == [sys.executable, "-m", "tui", "--read-only", "--", str(folder)]
    assert not (tmp_path / "pwned").exists()


def test_it_acts_only_when_asked(tmp_path: Path) -> None:
    assert "--read-only" in shlex.split(child_command(tmp_path, allow_actions=False))
    assert "--read-only" not in shlex.split(child_command(tmp_path, allow_actions=True))


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_its_own_pages_are_answered(tmp_path: Path) -> None:
    """Not another site in the same browser (its origin), nor one whose name was bent to this address (its host)."""
    (tmp_path / "workspace").mkdir()
    with served(tmp_path / "workspace", tmp_path / "log") as url:
        authority = url.removeprefix("http://")
        assert "(read-only)" in (tmp_path / "log").read_text()
        assert status_of(url) == 200
        assert status_of(url, Host=f"localhost:{authority.rpartition(':')[2]}") == 200
        assert answered(int(authority.rpartition(":")[2]), "/") == []
        with pytest.raises(InvalidStatus):
            connect(f"ws://{authority}/ws", origin="http://evil.example")  # type: ignore[arg-type]
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            page = answer.read().decode()
        links = re.findall(r"(?:src|href)=\"(https?://[^\"]*)", page)
        assert f"{url}/static/css/xterm.css" in links
        assert all(link.startswith(url) for link in links), "nothing is requested from other hosts"


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with served(tmp_path, tmp_path.with_name("log")) as url:
        port = url.rpartition(":")[2]
        command = [sys.executable, "-m", "tui", "--serve", "--port", port, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and f"port {port}" in done.stderr


class Browser:
    """One page of a headless Chromium, driven over its DevTools socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        self.call("Page.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=SIZE[0], height=SIZE[1], deviceScaleFactor=1, mobile=False
        )
        self.call("Page.navigate", url=url)

        def has_drawn() -> bool:
            words = "document.body.classList.contains('-first-byte') + ' ' + location.href"
            try:
                value = self.call("Runtime.evaluate", expression=words)["result"].get("value")
            except AssertionError:  # between two pages
                return False
            return str(value) == f"true {url}"

        wait_for(has_drawn, "the first bytes of the app", timeout_s=PATIENCE_S)

    def picture(self) -> Image.Image:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")

    def still_picture(self, what: str) -> Image.Image:
        """A picture with a cursor that was the same twice."""
        found: list[Image.Image] = [self.picture()]

        def is_still() -> bool:
            found.append(self.picture())
            return _cursor_row(found[-1]) is not None and found[-1].tobytes() == found[-2].tobytes()

        wait_for(is_still, what, timeout_s=PATIENCE_S)
        return found[-1]

    def click(self, x: int, y: int) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}", "about:blank"]
    with (profile.parent / "chromium.log").open("w") as log:
        chromium = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    port_file = profile / "DevToolsActivePort"
    try:
        wait_for(lambda: port_file.exists() and "\n" in port_file.read_text(), "Chromium", timeout_s=PATIENCE_S)
        port = port_file.read_text().split("\n")[0]
        pages: list[dict[str, Any]] = []

        def has_page() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE_S) as answer:
                pages[:] = [each for each in json.load(answer) if each["type"] == "page"]
            return pages != []

        wait_for(has_page, "a page", timeout_s=PATIENCE_S)
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Browser(socket)
    finally:
        os.killpg(chromium.pid, signal.SIGKILL)
        chromium.wait()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
def test_in_a_browser_a_click_chooses_a_run(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "workspace", living=False)
    with served(workspace.path, tmp_path / "log") as url, browser(tmp_path / "profile") as page:
        page.open(f"{url}/?fontsize=16")
        before = page.still_picture("the runs in the browser")
        row = _cursor_row(before)
        assert row is not None, "no line is under the cursor"
        # Three lines further down: some 20 pixels each.
        page.click(SIZE[0] // 3, row + 60)
        wait_for(
            lambda: (_cursor_row(page.picture()) or 0) > row + 40, "the cursor on the clicked run", timeout_s=PATIENCE_S
        )
        assert page.still_picture("the chosen run").tobytes() != before.tobytes()


def _cursor_row(picture: Image.Image) -> int | None:
    """The middle of the first band of the cursor's blue across the screen, in pixels from the top."""
    background = picture.getpixel((picture.width // 2, 60))
    rows = [
        y
        for y in range(50, picture.height - 40)
        if (pixel := picture.getpixel((picture.width - 60, y))) != background
        and isinstance(pixel, tuple)
        and pixel[2] > pixel[0] + 15
    ]
    band = [y for y in rows if y - rows[0] < 24]
    return sum(band) // len(band) if len(band) >= 8 else None
