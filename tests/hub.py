"""A stand-in for the hub on 127.0.0.1: as much of its HTTP API as making, filling and reading a repository takes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".bkv", ".safetensors")
"""What is kept as large files; everything else is a regular file."""


class Hub:
    """Repositories in memory.

    Attributes:
        url: for `HF_ENDPOINT`.
        repos: by "datasets/user/name" (or "models/..."): the commits, each the files by their path.
        created: what `create_repo` asked for.
        uploads: bytes of large files that were uploaded.
        large: those files by their SHA-256.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.repos: dict[str, list[dict[str, bytes]]] = {}
        self.created: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}
        self.uploads = 0
        self.lock = threading.Lock()

    def files(self, repo: str) -> dict[str, bytes]:
        """The newest files of a repository."""
        return self.repos[repo][-1]

    def sha(self, repo: str) -> str:
        """Of the newest commit."""
        return hashlib.sha1(f"{repo} {len(self.repos[repo])}".encode()).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry = {"type": "file", "path": path, "rfilename": path, "size": len(data), "oid": blob, "blobId": blob}
    if path.endswith(LFS):
        digest = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 134}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to the terminal."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            repo = found[1]
            if repo in self.hub.repos:
                files = [_entry(name, data) for name, data in self.hub.files(repo).items()]
                self._json({"id": repo.partition("/")[2], "sha": self.hub.sha(repo), "siblings": files, "tags": []})
                return
        elif found := re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)/tree/[^/]+(?:/(.+))?", path):
            if found[1] in self.hub.repos:
                folder = f"{found[2]}/" if found[2] else ""
                files = self.hub.files(found[1]).items()
                entries = [_entry(name, data) for name, data in files if name.startswith(folder)]
                if entries or not folder:
                    self._json(entries)
                else:
                    self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
        elif found := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            repo = f"{found[1] or 'models'}/{found[2]}"
            data = self.hub.files(repo).get(found[3]) if repo in self.hub.repos else None
            if data is not None:
                entry = _entry(found[3], data)
                tag = entry.get("lfs", entry)["oid"]
                headers = {"ETag": f'"{tag}"', "X-Repo-Commit": self.hub.sha(repo), "X-Linked-Size": str(len(data))}
                self._answer(200, data, {**headers, "X-Linked-ETag": f'"{tag}"'})
                return
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound" if repo in self.hub.repos else "RepoNotFound"})
            return
        self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/validate-yaml":
            said = json.loads(body)["content"]
            self._json({"errors": [], "warnings": [] if said.startswith("---\n") else [{"message": "no metadata"}]})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)/preupload/[^/]+", path):
            there = self.hub.files(found[1])
            modes = []
            for file in json.loads(body)["files"]:
                name, mode = file["path"], "lfs" if file["path"].endswith(LFS) else "regular"
                entry = _entry(name, there[name]) if name in there else {}
                oid = entry.get("lfs", entry).get("oid")
                modes.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            self._json({"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = []
            for wanted in json.loads(body)["objects"]:
                actions = {"upload": {"href": f"{self.hub.url}/upload/{wanted['oid']}", "header": {}}}
                objects.append(wanted | ({} if wanted["oid"] in self.hub.large else {"actions": actions}))
            self._json({"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)/commit/[^/]+", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, b"{}")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self.hub.lock:
            self.hub.large[hashlib.sha256(data).hexdigest()] = data
            self.hub.uploads += len(data)
        self._answer(200, b"")

    def _create(self, said: dict[str, Any]) -> None:
        kind = said.get("type", "model")
        name = f"{said['organization'] or 'someone'}/{said['name']}"
        repo, url = f"{kind}s/{name}", f"{self.hub.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
        there = repo in self.hub.repos
        self.hub.created.append(said)
        self.hub.repos.setdefault(repo, [{}])
        self._json({"url": url, "name": name}, 409 if there else 200)

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.files(repo))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.repos[repo].append(files)
        sha = self.hub.sha(repo)
        self._json({"success": True, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})

    def _json(self, said: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def running() -> Generator[Hub]:
    """A hub without repositories."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {}))
    hub = Hub(server.server_address[1])
    server.RequestHandlerClass.hub = hub
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
