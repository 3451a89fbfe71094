"""A server that takes what `wandb sync` uploads, as far as the client needs one."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Keeps the rows of history and the configuration that are uploaded."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.rows = {}
        self.runs = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while length := int(self.rfile.readline(), 16):
                body += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def answer(self, what):
        text = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_PUT(self):
        self.body()
        self.answer({})

    def do_POST(self):
        body = self.body()
        if self.path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            for number, line in enumerate(history["content"] if history else []):
                self.server.rows[history["offset"] + number] = line
            return self.answer({})
        if not self.path.endswith("/graphql"):
            return self.answer({})
        variables = json.loads(body).get("variables") or {}
        if variables.get("config") and variables.get("displayName"):
            self.server.runs.append(variables)
        project = {"id": "1", "name": variables.get("project"), "entity": {"id": "1", "name": "me"}}
        bucket = {"id": "1", "name": variables.get("name"), "displayName": variables.get("displayName"), "config": "{}", "historyLineCount": 0, "project": project}
        files = [{"name": name, "uploadUrl": f"{self.server.url}/{name}"} for name in variables.get("files") or []]
        self.answer({"data": {
            "viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
            "serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0.0"}, "features": []},
            "upsertBucket": {"bucket": bucket, "inserted": True},
            "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files},
        }})
