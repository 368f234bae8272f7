"""A server of access tokens, as Google's library asks for them: for a key, a login, or the service of a host."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa


class TokenServer:
    """Issues ``token-1``, ``token-2`` and so on, which are valid for some seconds."""

    def __init__(self, seconds: int = 3600) -> None:
        self.seconds, self.issued = seconds, 0
        self.statuses: list[int] = []
        self.first_may_answer = threading.Event()
        self.first_may_answer.set()
        self.was_asked = threading.Event()
        self.url = ""
        self._lock = threading.Lock()

    def answer(self) -> tuple[int, dict[str, object]]:
        with self._lock:
            if self.statuses:
                return self.statuses.pop(0), {"error": "server_error"}
            self.issued += 1
            number = self.issued
        self.was_asked.set()
        if number == 1:
            self.first_may_answer.wait(30)
        return 200, {"access_token": f"token-{number}", "expires_in": self.seconds, "token_type": "Bearer"}

    @contextmanager
    def served(self) -> Iterator[TokenServer]:
        source = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                is_token = self.command == "POST" or "/token" in self.path
                status, answer = source.answer() if is_token else (200, {"email": "a@example.org", "scopes": []})
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def write_key(self, folder: Path) -> str:
        """Write the key file of a service account."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        fields = {
            "type": "service_account",
            "project_id": "project",
            "private_key_id": "1",
            "private_key": key.private_bytes(serialization.Encoding.PEM, *private).decode(),
            "client_email": "a@example.org",
            "client_id": "1",
            "token_uri": f"{self.url}/key",
        }
        return _write(folder / "key.json", fields)

    def write_login(self, folder: Path) -> str:
        """Write the file of a login, as ``gcloud auth application-default login`` does."""
        fields = {
            "type": "authorized_user",
            "client_id": "1",
            "client_secret": "secret",
            "refresh_token": "refresh",
            "quota_project_id": "payer",
        }
        return _write(folder / "application_default_credentials.json", fields)


def _write(path: Path, fields: dict[str, str]) -> str:
    path.write_text(json.dumps(fields))
    return str(path)
