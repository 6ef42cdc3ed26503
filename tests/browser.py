"""Chromium without a window, driven over its debugging pipe: no driver and no further package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# All text of the page, of its shadow trees too, which is where TensorBoard keeps most of it.
_DEEP_TEXT = """
(() => {
  const found = [];
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) { found.push(node.textContent); return; }
    if (["STYLE", "SCRIPT", "TEMPLATE"].includes(node.nodeName)) return;
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return found.join(" ").replace(/\\s+/g, " ");
})()
"""

# `deep(selector)`: every element that matches, in shadow trees too.
_DEEP_SELECT = """
window.deep = (selector, root = document) => {
  const found = [...root.querySelectorAll(selector)];
  root.querySelectorAll("*").forEach((node) => {
    if (node.shadowRoot) found.push(...window.deep(selector, node.shadowRoot));
  });
  return found;
};
"""


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000):
        to_browser, from_browser = os.pipe(), os.pipe()

        def as_three_and_four() -> None:  # the descriptors that Chromium's pipe is at
            reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1]))
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        command = [
            EXECUTABLE, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, preexec_fn=as_three_and_four, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._write, self._read, self._buffer, self._count = to_browser[1], from_browser[0], b"", 0
        self._session: str | None = None
        self.console: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")
        self._session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.size(width, height)

    def size(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        found = self._call("Runtime.evaluate", expression=_DEEP_SELECT + script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def text(self) -> str:
        return self.evaluate(_DEEP_TEXT)

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """What a script returns as soon as that is true."""
        until = time.monotonic() + seconds
        while True:
            try:
                found = self.evaluate(script)
            except RuntimeError:  # the page is not there yet
                found = None
            if found:
                return found
            if time.monotonic() > until:
                raise TimeoutError(f"not within {seconds:.0f} s: {script}; the page says {self.text()[:2000]!r}")
            time.sleep(0.25)

    def wait_for_text(self, *parts: str, seconds: float = 60.0) -> str:
        """The page's text as soon as it holds every part."""
        return self.wait(
            f"(() => {{ const text = {_DEEP_TEXT.strip()}; "
            f"return {json.dumps(parts)}.every((part) => text.includes(part)) && text; }})()",
            seconds,
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                part = os.read(self._read, 1 << 16)
                if not part:
                    raise RuntimeError(f"chromium ended with {self._process.wait(5)}")
                self._buffer += part
            line, _, self._buffer = self._buffer.partition(b"\0")
            reply = json.loads(line)
            if reply.get("method") == "Runtime.exceptionThrown":
                self.console.append(json.dumps(reply["params"]["exceptionDetails"]))
            if reply.get("id") == self._count:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
