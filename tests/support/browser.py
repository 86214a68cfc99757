"""Chromium over its DevTools protocol: open a page, evaluate JavaScript, listen to console and network.

Needs only the websocket client that jupyter_server brings.
"""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-allow-origins=*",
    "--remote-debugging-port=0",
    "--window-size=1200,1000",
)


class Browser:
    """One headless Chromium with one page; a context manager."""

    def __enter__(self):
        import websocket

        self.profile = tempfile.mkdtemp(prefix="browser-")
        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port_file = Path(self.profile, "DevToolsActivePort")
            self._wait(lambda: port_file.exists() and "\n" in port_file.read_text(), 60, "Chromium to start")
            port = port_file.read_text().split("\n")[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
                target = next(t for t in json.load(answer) if t["type"] == "page")
            self.socket = websocket.create_connection(target["webSocketDebuggerUrl"], timeout=60)
            self._next, self.problems, self.requests = 0, [], []
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **parameters):
        """A protocol command and its result; events that arrive meanwhile are noted."""
        self._next += 1
        self.socket.send(json.dumps({"id": self._next, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self._next:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message):
        kind, facts = message.get("method"), message.get("params", {})
        if kind == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif kind == "Runtime.exceptionThrown":
            self.problems.append(
                str(facts["exceptionDetails"].get("exception", {}).get("description", facts))
            )
        elif kind == "Runtime.consoleAPICalled" and facts["type"] == "error":
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in facts["args"]))
        elif kind == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.problems.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")

    def open(self, url):
        self.problems, self.requests = [], []
        self.call("Page.navigate", url=str(url))
        self.until("document.readyState === 'complete'", 60)

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, expression, seconds):
        """Wait until a JavaScript expression is true, and return its value."""
        return self._wait(lambda: self.evaluate(expression), seconds, expression)

    def media(self, *, dark=False, kind=""):
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def size(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def key(self, key, modifiers=0, code=0):
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                modifiers=modifiers,
                windowsVirtualKeyCode=code,
            )

    def screenshot(self, path=None, whole=False):
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        picture = base64.b64decode(taken["data"])
        if path:
            Path(path).write_bytes(picture)
        return picture

    @staticmethod
    def _wait(true, seconds, what):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = true()
            if value:
                return value
            time.sleep(0.1)
        raise TimeoutError(f"waited {seconds} s for: {what}")
