"""A local HTTP server with the part of huggingface.co's API that huggingface_hub needs to create repositories, commit
(small files in the commit, large ones by the git-lfs protocol) and download."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = 100_000  # bytes; a file of this size or more goes by git-lfs


class HubServer(ThreadingHTTPServer):
    """`users`: {token: name}; `repositories`: {name: {branch: {file: content}}}.

    `drops`: (method, path pattern) pairs; the connection of the first matching request is closed without a response,
    once. `log`: a line per request.
    """

    daemon_threads = True

    def __init__(self, users: dict[str, str]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.users = users
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.commits: list[tuple[str, str, str]] = []  # (repository, branch, message)
        self.held: list[set[str]] = []  # names of the branch's files after each commit
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}  # file content by SHA-256
        self.drops: list[tuple[str, str]] = []
        self.log: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def _serve(self):
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for drop in list(self.server.drops):
            if drop[0] == self.command and re.search(drop[1], path):
                self.server.drops.remove(drop)
                self._log("dropped")
                self.close_connection = True
                self.connection.close()
                return
        for method, pattern, answer in _ROUTES:
            if method == self.command and (found := re.fullmatch(pattern, path)):
                with self.server.lock:
                    answer(self, body, **found.groupdict())
                return
        self._answer(404, {"error": f"no such route: {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def log_message(self, *args):
        pass

    def _log(self, status):
        self.server.log.append(f"{self.command} {unquote(self.path)} {status}")

    def _answer(self, status, content=None, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self._log(status)
        self.send_response(status)
        headers = {"Content-Length": len(data), **headers}
        if status >= 400 and isinstance(content, dict):
            headers["X-Error-Message"] = content["error"]
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _user(self):
        """The user of the request's token; None, with response 401, for an invalid token."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.server.users:
            self._answer(401, {"error": "Invalid username or password."})
            return None
        return self.server.users[token]

    def _files(self, repo, branch="main"):
        """A branch's files; None, with response 401 or 404, for an invalid token or a missing branch."""
        if self._user() is None:
            return None
        if repo not in self.server.repositories:
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        if branch not in self.server.repositories[repo]:
            self._answer(404, {"error": f"Invalid rev id: {branch}"}, X_Error_Code="RevisionNotFound")
            return None
        return self.server.repositories[repo][branch]

    def _may_write(self, repo):
        user = self._user()
        if user and repo.split("/")[0] != user:
            self._answer(403, {"error": "You don't have the rights to write under this namespace"})
        return user == repo.split("/")[0]

    def whoami(self, body):
        if user := self._user():
            self._answer(200, {"type": "user", "name": user, "auth": {"type": "access_token"}})

    def create(self, body):
        asked = json.loads(body)
        user = self._user()
        if not user:
            return
        repo = f"{asked['organization'] or user}/{asked['name']}"
        if not self._may_write(repo):
            return
        if repo in self.server.repositories:
            self._answer(409, {"error": "You already created this model repo"})
            return
        self.server.repositories[repo] = {"main": {".gitattributes": b"*.safetensors filter=lfs\n"}}
        if asked.get("visibility") == "private" or asked.get("private"):
            self.server.private.add(repo)
        self._answer(200, {"url": f"{self.server.url}/{repo}", "name": repo, "id": repo})

    def branch(self, body, repo, branch):
        if self._may_write(repo):
            branches = self.server.repositories[repo]
            known = branch in branches
            branches.setdefault(branch, dict(branches["main"]))
            self._answer(409 if known else 200, {"error": "branch exists"} if known else {})

    def tree(self, body, repo, branch):
        if (files := self._files(repo, branch)) is not None:
            self._answer(
                200,
                [{"type": "file", "path": n, "size": len(data), "oid": _git_oid(data)} for n, data in files.items()],
            )

    def subfolder(self, body, repo, branch, folder):
        if self._files(repo, branch) is not None:  # the client asks only for folders that do not exist here
            self._answer(404, {"error": f"{folder} does not exist"}, X_Error_Code="EntryNotFound")

    def info(self, body, repo, branch="main"):
        if (files := self._files(repo, branch)) is not None:
            siblings = [{"rfilename": name} for name in files]
            private = repo in self.server.private
            found = {"_id": "0", "id": repo, "modelId": repo, "sha": _head(files), "private": private}
            self._answer(200, {**found, "siblings": siblings})

    def auth_check(self, body, repo):
        if self._files(repo) is not None and self._may_write(repo):
            self._answer(200, {})

    def validate(self, body):
        self._answer(200, {"errors": [], "warnings": []})

    def preupload(self, body, repo, branch):
        if self._may_write(repo) and (files := self._files(repo, branch)) is not None:
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": _git_oid(files[file["path"]]) if file["path"] in files else None,
                }
                for file in asked
            ]
            self._answer(200, {"files": modes})

    def batch(self, body, repo):
        if self._may_write(repo):
            objects = []
            for item in json.loads(body)["objects"]:
                upload = {"href": f"{self.server.url}/large/{item['oid']}"}
                verify = {"href": f"{self.server.url}/verify"}
                known = item["oid"] in self.server.large
                objects.append(item if known else {**item, "actions": {"upload": upload, "verify": verify}})
            self._answer(200, {"transfer": "basic", "objects": objects})

    def put_large(self, body, oid):
        self.server.large[oid] = body
        self._answer(200, {})

    def verify(self, body):
        self._answer(200, {})

    def commit(self, body, repo, branch):
        if not self._may_write(repo) or self._files(repo, branch) is None:
            return
        files, lines = self.server.repositories[repo][branch], [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.server.commits.append((repo, branch, lines[0]["value"]["summary"]))
        self.server.held.append(set(files))
        url = f"{self.server.url}/{repo}/commit/{_head(files)}"
        self._answer(200, {"success": True, "commitOid": _head(files), "commitUrl": url, "hookOutput": ""})

    def resolve(self, body, repo, branch, file):
        branches = self.server.repositories.get(repo, {})
        if branch not in branches:  # then it is the name of a commit, which here is the head of a branch
            branch = next((name for name, files in branches.items() if _head(files) == branch), branch)
        if (files := self._files(repo, branch)) is None:
            return
        if file not in files:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return
        self._answer(200, files[file], X_Repo_Commit=_head(files), ETag=f'"{_git_oid(files[file])}"')


_REPO, _BRANCH = r"(?P<repo>[^/]+/[^/]+)", r"(?P<branch>.+)"
_ROUTES = (
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("GET", f"/api/models/{_REPO}/tree/(?P<branch>[^/]+)", _Handler.tree),
    ("GET", f"/api/models/{_REPO}/tree/(?P<branch>[^/]+)/(?P<folder>.+)", _Handler.subfolder),
    ("GET", f"/api/models/{_REPO}/revision/{_BRANCH}", _Handler.info),
    ("GET", f"/api/models/{_REPO}", _Handler.info),
    ("GET", f"/api/models/{_REPO}/auth-check/write", _Handler.auth_check),
    ("POST", f"/api/models/{_REPO}/branch/{_BRANCH}", _Handler.branch),
    ("POST", f"/api/models/{_REPO}/preupload/{_BRANCH}", _Handler.preupload),
    ("POST", f"/api/models/{_REPO}/commit/{_BRANCH}", _Handler.commit),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/large/(?P<oid>[0-9a-f]{64})", _Handler.put_large),
    ("POST", "/verify", _Handler.verify),
    ("GET", f"/{_REPO}/resolve/(?P<branch>[^/]+)/(?P<file>.+)", _Handler.resolve),
    ("HEAD", f"/{_REPO}/resolve/(?P<branch>[^/]+)/(?P<file>.+)", _Handler.resolve),
)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _head(files: dict[str, bytes]) -> str:
    return hashlib.sha1("".join(f"{name}{_git_oid(data)}" for name, data in sorted(files.items())).encode()).hexdigest()
