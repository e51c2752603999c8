"""A local stand-in of the Hugging Face Hub: repositories of small files, over the Hub's HTTP interface."""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class Hub:
    """Server of repositories, from which the tests in a block download.

    Attributes:
        repositories: files of each revision, by "models/ORG/NAME" or "datasets/ORG/NAME"; the newest is "main".
        gated: repositories that need a permission.
        truncated: paths of files of which only a half is sent.
        downloads: paths of the files that were sent, in order.
    """

    def __init__(self):
        self.repositories: dict[str, dict[str, Mapping[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.truncated: set[str] = set()
        self.downloads: list[str] = []

    def __enter__(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Add a revision of a repository; return its commit."""
        commit = self._commit(files)
        self.repositories.setdefault(name, {}).update({revision: files, commit: files})
        return commit

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request for the facts about a revision, for its files, or for the content of a file."""
        path = [unquote(part) for part in urlparse(request.path).path.strip("/").split("/")]
        if path[0] == "api":  # /api/models/ORG/NAME/revision/REVISION or /api/models/ORG/NAME/tree/REVISION
            name, (kind, revision, *inside) = "/".join(path[1:4]), path[4:]
        else:  # /ORG/NAME/resolve/REVISION/FILE or /datasets/ORG/NAME/resolve/REVISION/FILE
            path = path if path[0] == "datasets" else ["models", *path]
            name, (kind, revision, *inside) = "/".join(path[:3]), path[3:]
        revisions, file = self.repositories.get(name, {}), "/".join(inside)
        files = revisions.get(revision, {})
        if not revisions:
            self._fail(request, 401, "RepoNotFound")
        elif name in self.gated:
            self._fail(request, 403, "GatedRepo")
        elif not files:
            self._fail(request, 404, "RevisionNotFound")
        elif kind == "tree":
            facts = {name: {"size": len(content), "oid": self._oid(content)} for name, content in files.items()}
            self._send(request, [{"type": "file", "path": name, **fact} for name, fact in facts.items()])
        elif kind == "revision":
            self._send(request, {"id": name.partition("/")[2], "sha": self._commit(files), "siblings": []})
        elif file not in files:
            self._fail(request, 404, "EntryNotFound")
        else:
            if request.command == "GET":
                self.downloads.append(file)
            headers = {"ETag": f'"{self._oid(files[file])}"', "X-Repo-Commit": self._commit(files)}
            self._send(request, files[file], headers, half=file in self.truncated)

    def _commit(self, files):
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def _oid(self, content):
        return hashlib.sha1(content).hexdigest()

    def _send(self, request, content, headers=(), half=False):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.send_response(200)
        for key, value in dict(headers).items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        if half:
            request.send_header("Connection", "close")
            request.close_connection = True
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body[: len(body) // 2] if half else body)

    def _fail(self, request, status, code):
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("X-Error-Message", code)
        request.send_header("Content-Length", "0")
        request.end_headers()
