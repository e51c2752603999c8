"""A local stand-in of Google Cloud Storage: a bucket in memory, over the part of its JSON interface for gcsfs."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class Storage:
    """Server of a bucket, whose URL is that of STORAGE_EMULATOR_HOST.

    Attributes:
        objects: content by name.
    """

    bucket = "bucket"

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        storage = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                storage.answer(self)

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request: list, describe, read, write or delete."""
        address = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        match = re.fullmatch(r"(?:/download|/upload)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", address.path)
        bucket, name = match[1], unquote(match[2] or "")
        if bucket != self.bucket or (name and name not in self.objects):
            self._send(request, {"error": {"code": 404, "message": "Not Found"}}, 404)
        elif request.command == "DELETE":
            del self.objects[name]
            self._send(request, b"", 204)
        elif request.command == "POST":
            _, metadata, content = re.split(rb"--==0==(?:--)?\n?", body)[:3]
            name = json.loads(metadata.partition(b"\n\n")[2])["name"]
            self.objects[name] = content.partition(b"\n\n")[2].removesuffix(b"\n")
            self._send(request, self._facts(name))
        elif query.get("alt") == "media":
            self._send(request, self.objects[name])
        elif name:
            self._send(request, self._facts(name))
        else:
            self._send(request, self._listed(query.get("prefix", ""), query.get("delimiter", "")))

    def _listed(self, prefix, delimiter):
        names = sorted(name for name in self.objects if name.startswith(prefix))
        inside = [name for name in names if not delimiter or delimiter not in name[len(prefix) :]]
        folders = {
            prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter for name in set(names) - set(inside)
        }
        return {"items": [self._facts(name) for name in inside], "prefixes": sorted(folders)}

    def _facts(self, name):
        content = self.objects[name]
        digest = hashlib.md5(content)
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": self.bucket,
            "size": str(len(content)),
            "md5Hash": base64.b64encode(digest.digest()).decode(),
            "etag": digest.hexdigest(),
            "generation": "1",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def _send(self, request, content, status=200):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        if not isinstance(content, bytes):
            request.send_header("Content-Type", "application/json")
        request.end_headers()
        request.wfile.write(body)
