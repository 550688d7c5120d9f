"""A Hub on the loopback interface: the part of its HTTP API that huggingface_hub uses for model repositories.

Repositories live in memory. As on the Hub, a large file is uploaded before the commit that names it, and a revision
exists only once the request of its commit has been read to the end.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".png")


class HubError(Exception):
    """An answer that is no success, as the Hub words it."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class Commit:
    """A revision: all its files, whole, and the message that made it."""

    message: str
    files: dict[str, bytes]
    sha: str


@dataclass
class Repository:
    private: bool
    commits: list[Commit] = field(default_factory=list)
    branches: dict[str, Commit] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> Commit:
        """Add a revision; `branch` then points to it."""
        sha = hashlib.sha1(f"{id(self)} {len(self.commits)} {message}".encode()).hexdigest()
        self.commits.append(Commit(message, files, sha))
        self.branches[branch] = self.commits[-1]
        return self.commits[-1]

    def revision(self, name: str) -> Commit:
        named = self.branches.get(name) or next((each for each in self.commits if each.sha == name), None)
        if named is None:
            raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return named


class HubServer:
    """The server; a context manager.

    Attributes:
        url: The endpoint.
        token: The only token that is accepted.
        repositories: By `user/name`.
        objects: Large files, by SHA-256; they belong to no repository until a commit names them.
        requests: Method and path of all requests, in order.
        cuts: How many more requests of a kind, `"lfs"` or `"commit"`, lose their connection half-way through the body.
        refusals: Status with which requests to a path are refused.
        answers: What requests to a path are answered in place of the Hub's answer, with status 200.
        silent: Paths whose requests are read, and never answered.
    """

    def __init__(self, token: str = "hf_right") -> None:
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.cuts = {"lfs": 0, "commit": 0}
        self.refusals: dict[str, int] = {}
        self.answers: dict[str, bytes] = {}
        self.silent: set[str] = set()
        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def count(self, method: str, part: str) -> int:
        """Number of requests of a method whose path contains `part`."""
        return sum(verb == method and part in path for verb, path in self.requests)

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        """What a branch holds, but for `.gitattributes`."""
        files = self.repositories[repo_id].branches[branch].files
        return {path: content for path, content in files.items() if path != ".gitattributes"}

    def repository(self, repo_id: str) -> Repository:
        if repo_id not in self.repositories:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return self.repositories[repo_id]


class _Handler(BaseHTTPRequestHandler):
    """One request: find its route, check the token, read the body, answer."""

    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    @property
    def hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        self.hub.requests.append((self.command, address.path))
        self.query = parse_qs(address.query)
        route, arguments = self._route(address.path)
        self.body = self._read_body(route)
        if address.path in self.hub.silent:
            self.hub.closing.wait()
            raise ConnectionAbortedError
        if address.path in self.hub.answers:
            self._send(200, self.hub.answers[address.path], {"Content-Type": "application/json"})
            return
        try:
            if address.path in self.hub.refusals:
                raise HubError(self.hub.refusals[address.path], "refused")
            self._check_token(route)
            route(self, *arguments)
        except HubError as error:
            self._answer({"error": error.message}, error.status, error.code, error.message)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _route(self, path: str) -> tuple[Callable[..., None], list[str]]:
        for method, pattern, route in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method.split():
                return route, [unquote(group) for group in found.groups()]
        return _Handler.no_such_page, []

    def _check_token(self, route: Callable[..., None]) -> None:
        given = self.headers.get("Authorization")
        if given is not None and given != f"Bearer {self.hub.token}":
            raise HubError(401, "Invalid credentials in Authorization header")
        # The address of an LFS upload is a secret of its own, as with signed addresses.
        if given is None and self.command == "POST" and route is not _Handler.validate_card:
            raise HubError(401, "Invalid username or password.")

    def _read_body(self, route: Callable[..., None]) -> bytes:
        length = int(self.headers.get("Content-Length", 0))
        kind = {_Handler.put_object: "lfs", _Handler.commit: "commit"}.get(route)
        if kind is None or self.hub.cuts[kind] == 0:
            return self.rfile.read(length)
        self.hub.cuts[kind] -= 1
        self.rfile.read(length // 2)
        self.connection.shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError

    def _answer(self, content: object, status: int = 200, code: str = "", message: str = "") -> None:
        body = json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "X-Error-Code": code, "X-Error-Message": message}
        self._send(status, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def no_such_page(self) -> None:
        raise HubError(404, "Sorry, we can't find the page you are looking for.")

    def create(self) -> None:
        wanted = json.loads(self.body)
        repo_id = f"{wanted['organization'] or 'user'}/{wanted['name']}"
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repositories:
            self._answer({"error": "You already created this model repo", "url": url}, 409)
            return
        repository = Repository(private=wanted.get("visibility") == "private")
        repository.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.hub.repositories[repo_id] = repository
        self._answer({"url": url, "name": repo_id})

    def create_branch(self, repo_id: str, branch: str) -> None:
        repository = self.hub.repository(repo_id)
        if branch.startswith("refs/"):
            raise HubError(400, f"Invalid reference for a branch: {branch}")
        if branch in repository.branches:
            raise HubError(409, f"Reference already exists: {branch}")
        repository.branches[branch] = repository.revision("main")
        self._answer({}, 201)

    def validate_card(self) -> None:
        has_front_matter = json.loads(self.body)["content"].startswith("---\n")
        warnings = [] if has_front_matter else [{"message": "empty or missing yaml metadata in repo card"}]
        self._answer({"errors": [], "warnings": warnings})

    def preupload(self, repo_id: str, revision: str) -> None:
        there = self.hub.repository(repo_id).revision(revision).files
        self._answer({"files": [_upload_mode(file, there) for file in json.loads(self.body)["files"]]})

    def lfs_batch(self, repo_id: str) -> None:
        self.hub.repository(repo_id)
        objects = json.loads(self.body)["objects"]
        for each in objects:
            if each["oid"] not in self.hub.objects:
                each["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{each['oid']}"}}
        self._answer({"transfer": "basic", "objects": objects})

    def put_object(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "The object does not have this SHA-256.")
        self.hub.objects[oid] = self.body
        self._answer({})

    def commit(self, repo_id: str, revision: str) -> None:
        repository = self.hub.repository(repo_id)
        lines = [json.loads(line) for line in self.body.splitlines()]
        files = dict(repository.revision(revision).files)
        for line in lines:
            self._apply(line["key"], line["value"], files)
        number = sum(branch.startswith("refs/pr/") for branch in repository.branches) + 1
        pull_request = "create_pr" in self.query
        branch = f"refs/pr/{number}" if pull_request else revision
        made = repository.commit(branch, lines[0]["value"]["summary"], files)
        url = f"{self.hub.url}/{repo_id}"
        answer = {"success": True, "commitOid": made.sha, "commitUrl": f"{url}/commit/{made.sha}"}
        self._answer(answer | ({"pullRequestUrl": f"{url}/discussions/{number}"} if pull_request else {}))

    def _apply(self, key: str, value: dict[str, Any], files: dict[str, bytes]) -> None:
        """Do to `files` what a line of a commit says."""
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            if value["oid"] not in self.hub.objects:
                raise HubError(400, f"LFS pointer points to a file that does not exist: {value['path']}")
            files[value["path"]] = self.hub.objects[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
        elif key != "header":
            raise HubError(400, f"Unknown operation {key}")

    def info(self, repo_id: str, revision: str = "main") -> None:
        repository = self.hub.repository(repo_id)
        commit = repository.revision(revision)
        siblings = [{"rfilename": path} for path in commit.files]
        answer = {"id": repo_id, "sha": commit.sha, "private": repository.private, "siblings": siblings}
        self._answer(answer)

    def tree(self, repo_id: str, revision: str) -> None:
        files = self.hub.repository(repo_id).revision(revision).files
        self._answer(
            [
                {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
                for path, content in files.items()
            ]
        )

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        commit = self.hub.repository(repo_id).revision(revision)
        headers = {"X-Repo-Commit": commit.sha}
        content = commit.files.get(path)
        if content is None:
            missing = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self._send(404, b"Entry not found", headers | missing)
            return
        if path.endswith(LFS_SUFFIXES):
            oid = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        self._send(200, content, headers | {"ETag": f'"{_blob_id(content)}"'})


def _upload_mode(file: dict[str, Any], there: dict[str, bytes]) -> dict[str, Any]:
    path = file["path"]
    mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
    answer: dict[str, Any] = {"path": path, "uploadMode": mode, "shouldIgnore": False}
    if path in there:
        answer["oid"] = hashlib.sha256(there[path]).hexdigest() if mode == "lfs" else _blob_id(there[path])
    return answer


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate_card),
    ("POST", f"/api/models/{REPO}/branch/([^/]+)", _Handler.create_branch),
    ("POST", f"/api/models/{REPO}/preupload/([^/]+)", _Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/([^/]+)", _Handler.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", "/objects/([0-9a-f]{64})", _Handler.put_object),
    ("GET", f"/api/models/{REPO}", _Handler.info),
    ("GET", f"/api/models/{REPO}/revision/([^/]+)", _Handler.info),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)", _Handler.tree),
    ("GET HEAD", f"/{REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
