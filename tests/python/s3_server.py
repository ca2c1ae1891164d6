"""A small S3 server with faults on order, for the tests: `python s3_server.py [PEM]` prints its
port.

It serves one bucket, "bucket", from memory, and checks every signature and every SHA-256 by itself.
It serves the same on 127.0.0.1, 127.0.0.2 and 127.0.0.3.

- `POST /_control` takes {"faults": [...], "conditions": bool, "skew": seconds, "tokens": [...],
  "page": keys, "checksums": bool (parts of uploads have a CRC32C), "etags": bool (GET names one),
  "opaque": bool (an upload's ETag says nothing of its parts), "clear": bool, "record": bool}.
- `POST /_fill` takes {"prefix", "count"} and makes empty objects.
- `GET /_log` answers with all requests that were answered since then, as [method, path with query,
  status, address, host, region].
- From "record" on the server keeps what it holds before the next request that changes something,
  and behind each: `POST /_at` takes {"state": number} and makes that what it holds. `GET /_held`
  answers with {"keys", "uploads": {id: key}, "states": how many were kept}.
- `GET /_seen` answers with {"arrived": requests, "peak": at once, "checked": parts whose CRC32C was
  right}.

A fault is {"kind", "method", "match" (a part of path and query), "times"}; a status also
{"signed": "host" or "region" that the request is for}. Kinds: slow (seconds before it is done),
status (status, code or body, headers), close (before it is done), close_after (when it is done),
stall and stall_in_body (seconds), truncate (bytes), wrong_range, late_error (200 with an error),
lost_part (of an upload), page_loop, blank and blank_before (200 that says nothing), replace and
vanish (what becomes of the object behind this answer), wrong_bytes (the body of a PUT is damaged
on its way).
"""

from __future__ import annotations

import base64
import calendar
import contextlib
import hashlib
import hmac
import json
import socketserver
import ssl
import sys
import threading
import time
import urllib.parse
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from xml.etree import ElementTree
from xml.sax.saxutils import escape

KEYS = {"AKIDTEST": "secret/of+the=test"}


class World:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.going = 0
        self.objects: dict[str, tuple[bytes, str, dict[str, str]]] = {}
        # key, meta, parts: bytes, ETag and checksum; whether parts have one
        self.uploads: dict[
            str, tuple[str, dict[str, str], dict[int, tuple[bytes, str, str]], bool]
        ] = {}
        self.states: list[tuple[dict, dict]] = []  # what it held, once that is recorded
        self.recording = False
        self.tests = 0  # that began: what a request of an older one finds is not its own
        self.reset({})

    def reset(self, control: dict) -> None:
        self.faults = [dict(fault) for fault in control.get("faults", [])]
        self.conditions = control.get("conditions", True)
        self.upload_conditions = control.get("upload_conditions", True)
        self.skew = control.get("skew", 0)
        self.bare = control.get("bare", False)  # If-Match is compared as RGW 16 does
        self.tokens = control.get("tokens")  # session tokens that are good; None: any
        self.page = control.get("page", 1000)
        self.checksums = control.get("checksums", False)
        self.etags = control.get("etags", True)
        self.opaque = control.get("opaque", False)
        # Lifetimes in seconds of the credentials that the metadata services name, one after
        # another.
        self.lifetimes = list(control.get("lifetimes", []))
        self.given = control.get("given", 0)
        self.log: list[tuple[str, str, int, str]] = []
        self.arrived = self.peak = self.checked = 0
        self.recording = control.get("record", False)
        if self.recording:
            self.states.clear()
            self.keep()
        if control.get("clear"):
            self.tests += 1
            self.objects.clear()
            self.uploads.clear()

    def keep(self) -> None:
        """What it holds now is one more state."""
        uploads = {each: (*of[:2], dict(of[2]), of[3]) for each, of in self.uploads.items()}
        self.states.append((dict(self.objects), uploads))

    def go_to(self, number: int) -> None:
        objects, uploads = self.states[number]
        self.objects = dict(objects)
        self.uploads = {each: (*of[:2], dict(of[2]), of[3]) for each, of in uploads.items()}

    def fault(
        self, method: str, path: str, kinds: set[str], signed: tuple[str, ...] = ()
    ) -> dict | None:
        with self.lock:
            for fault in self.faults:
                if (
                    fault["kind"] in kinds
                    and fault.get("method", method) == method
                    and fault.get("match", "") in path
                    and fault.get("times", 1) > 0
                    and ("signed" not in fault or fault["signed"] in signed)
                ):
                    fault["times"] = fault.get("times", 1) - 1
                    return fault
        return None


WORLD = World()


def etag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


SEEN = ("arrived", "peak", "checked")
POLYNOMIAL = 0x11EDC6F41
MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def remainder(value: int, bits: int) -> int:
    """Modulo the polynomial: halves are folded onto each other, then bit by bit."""
    while bits > 96:
        half = bits // 2
        power, upper, value = power_of_x(half), value >> half, value & ((1 << half) - 1)
        for bit in range(32):
            if power >> bit & 1:
                value ^= upper << bit
        bits = max(half, bits - half + 32)
    for bit in range(bits - 1, 31, -1):
        if value >> bit & 1:
            value ^= POLYNOMIAL << (bit - 32)
    return value


def power_of_x(exponent: int) -> int:
    power = 1
    for digit in f"{exponent:b}":
        power = sum(1 << 2 * bit for bit in range(32) if power >> bit & 1) << int(digit)
        power = remainder(power, 65)
    return power


def crc32c(data: bytes) -> bytes:
    bits = 8 * len(data)
    value = int.from_bytes(data.translate(MIRRORED), "big") << 32
    crc = remainder(value ^ 0xFFFFFFFF << bits, bits + 32) ^ 0xFFFFFFFF
    return crc.to_bytes(4, "big").translate(MIRRORED)[::-1]


def encode(text: str) -> str:
    return urllib.parse.quote(text, safe="-._~")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(
            6, 1, 1
        )  # TCP_NODELAY: else each small answer waits for the peer's acknowledgement

    # ---- answers

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.note(status)
        if WORLD.fault(self.command, self.path, {"close_after"}):
            self.gone()
            return
        if WORLD.fault(self.command, self.path, {"blank"}):
            body, headers = b" \n", {}
        cut = WORLD.fault(self.command, self.path, {"truncate"}) if body else None
        stall = WORLD.fault(self.command, self.path, {"stall_in_body"}) if body else None
        headers = {"Content-Length": str(len(body)), **(headers or {})}
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time() + WORLD.skew, usegmt=True))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut:
            self.wfile.write(body[: cut["bytes"]])
            self.gone()
        elif stall:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            WORLD.lock.release()  # others are served meanwhile
            time.sleep(stall["seconds"])
            WORLD.lock.acquire()
            self.gone()
        else:
            self.wfile.write(body)

    def note(self, status: int) -> None:
        address = self.connection.getsockname()[0]
        host = self.headers["Host"]
        WORLD.log.append((self.command, self.path, status, address, host, self.region()))

    def region(self) -> str:
        return (self.headers.get("Authorization", "") + "///").split("/")[2]

    def gone(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client may be gone first
            self.wfile.flush()
            self.connection.shutdown(2)

    def error(self, status: int, code: str, message: str = "as the test wants it") -> None:
        self.answer(
            status,
            f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode(),
            {"Content-Type": "application/xml"},
        )

    def xml(self, text: str, headers: dict[str, str] | None = None) -> None:
        self.answer(
            200,
            b'<?xml version="1.0" encoding="UTF-8"?>' + text.encode(),
            {"Content-Type": "application/xml", **(headers or {})},
        )

    # ---- what is checked

    def signed(self, body: bytes) -> bool:
        proof = self.headers.get("Authorization", "")
        if not proof.startswith("AWS4-HMAC-SHA256 "):
            self.error(403, "AccessDenied", "no signature")
            return False
        fields = dict(
            part.strip().split("=", 1) for part in proof[len("AWS4-HMAC-SHA256 ") :].split(",")
        )
        access, date, region, service, _ = fields["Credential"].split("/")
        secret, when = KEYS.get(access), self.headers["x-amz-date"]
        if secret is None:
            self.error(403, "InvalidAccessKeyId")
            return False
        theirs = calendar.timegm(time.strptime(when, "%Y%m%dT%H%M%SZ"))
        if abs(theirs - time.time() - WORLD.skew) > 900:
            self.error(403, "RequestTimeTooSkewed")
            return False
        if (
            WORLD.tokens is not None
            and self.headers.get("x-amz-security-token") not in WORLD.tokens
        ):
            self.error(400, "ExpiredToken")
            return False
        digest = self.headers["x-amz-content-sha256"]
        unsigned = digest == "UNSIGNED-PAYLOAD" and len(sys.argv) > 1  # by TLS alone
        if not unsigned and digest != hashlib.sha256(body).hexdigest():
            self.error(400, "XAmzContentSHA256Mismatch")
            return False
        path, _, query = self.path.partition("?")
        names = fields["SignedHeaders"].split(";")
        pairs = sorted(
            tuple(part.split("=", 1)) if "=" in part else (part, "")
            for part in query.split("&")
            if part
        )
        signed = [f"{name}:{' '.join(self.headers[name].split())}" for name in names]
        args = "&".join(f"{name}={value}" for name, value in pairs)
        canonical = "\n".join([self.command, path, args, *signed, "", ";".join(names), digest])
        scope = f"{date}/{region}/{service}/aws4_request"
        text = (
            f"AWS4-HMAC-SHA256\n{when}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        )
        key = f"AWS4{secret}".encode()
        for part in (date, region, service, "aws4_request"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        if hmac.new(key, text.encode(), hashlib.sha256).hexdigest() != fields["Signature"]:
            self.error(403, "SignatureDoesNotMatch")
            return False
        unsigned = {
            name.lower()
            for name in self.headers
            if name.lower().startswith("x-amz-")
            or name.lower() in {"host", "range", "if-match", "if-none-match"}
        } - set(names)
        if unsigned:
            self.error(403, "AccessDenied", f"not signed: {unsigned}")
        return not unsigned

    def holds(self, key: str) -> bool:
        """The conditions of a PUT; False: answered."""
        there = WORLD.objects.get(key)
        if not WORLD.conditions:
            return True
        if self.headers.get("If-None-Match") == "*" and there is not None:
            self.error(412, "PreconditionFailed")
            return False
        wanted = self.headers.get("If-Match")
        if wanted is not None and there is None:
            self.error(404, "NoSuchKey")
            return False
        etag = "" if there is None else there[1].strip('"') if WORLD.bare else there[1]
        if wanted is not None and there is not None and wanted != etag:
            self.error(412, "PreconditionFailed")
            return False
        return True

    # ---- requests

    def do_GET(self) -> None:
        self.serve()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/_log":
            self.answer_plain(json.dumps(WORLD.log).encode())
            return
        if self.path == "/_control":
            with WORLD.lock:
                WORLD.reset(json.loads(body))
            self.answer_plain(b"")
            return
        if self.path == "/_fill":
            wanted = json.loads(body)
            with WORLD.lock:
                for i in range(wanted["count"]):
                    WORLD.objects[f"{wanted['prefix']}{i:06}"] = (b"", etag_of(b""), {})
            self.answer_plain(b"")
            return
        if self.path == "/_at":
            with WORLD.lock:
                WORLD.recording = False
                WORLD.go_to(json.loads(body)["state"])
            self.answer_plain(b"")
            return
        if self.path == "/_held":
            with WORLD.lock:
                uploads = {each: of[0] for each, of in WORLD.uploads.items()}
                held = {"keys": sorted(WORLD.objects), "uploads": uploads}
                held["states"] = len(WORLD.states)
            self.answer_plain(json.dumps(held).encode())
            return
        if self.path == "/_seen":
            self.answer_plain(json.dumps({each: getattr(WORLD, each) for each in SEEN}).encode())
            return
        if self.path.startswith(("/latest/", "/container")):
            if slow := WORLD.fault(self.command, self.path, {"slow"}):
                time.sleep(slow["seconds"])
            with WORLD.lock:
                self.metadata()
            return
        with WORLD.lock:
            WORLD.arrived += 1
            WORLD.going += 1
            WORLD.peak = max(WORLD.peak, WORLD.going)
        try:
            self.serve_store(body)
        finally:
            with WORLD.lock:
                WORLD.going -= 1

    # ---- metadata services of an instance (IMDSv2) and of a container

    def metadata(self) -> None:
        roles = "/latest/meta-data/iam/security-credentials/"
        if self.command == "PUT" and self.path == "/latest/api/token":
            good = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds") is not None
            self.answer(200 if good else 400, b"metadata-token")
        elif self.path.startswith("/latest/"):
            if self.headers.get("X-aws-ec2-metadata-token") != "metadata-token":
                self.answer(401)
            elif self.path == roles:
                self.answer(200, b"role")
            elif self.path == roles + "role":
                self.credentials()
            else:
                self.answer(404)
        elif self.headers.get("Authorization") == "container-token":
            self.credentials()
        else:
            self.answer(401)

    def credentials(self) -> None:
        if not WORLD.lifetimes:
            self.answer(404)
            return
        WORLD.given += 1
        until = time.gmtime(time.time() + WORLD.lifetimes.pop(0))
        [(access, secret)] = KEYS.items()
        found = {"AccessKeyId": access, "SecretAccessKey": secret, "Token": f"given-{WORLD.given}"}
        found["Expiration"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", until)
        self.answer(200, json.dumps(found).encode())

    def serve_store(self, body: bytes) -> None:
        of = WORLD.tests
        for kind in ("stall", "slow"):
            if fault := WORLD.fault(self.command, self.path, {kind}):
                time.sleep(fault["seconds"])
        if WORLD.tests != of:
            self.gone()
            return
        if WORLD.fault(self.command, self.path, {"blank_before"}):
            self.answer(200, b" \n")
            return
        if WORLD.fault(self.command, self.path, {"close"}):
            self.note(0)
            self.gone()
            return
        signed = (self.headers["Host"], self.region())
        if fault := WORLD.fault(self.command, self.path, {"status"}, signed):
            if fault.get("code"):
                self.error(fault["status"], fault["code"])
            else:
                page = fault.get("body", "a proxy's own page").encode()
                self.answer(fault["status"], page, fault.get("headers"))
            return
        if body and WORLD.fault(self.command, self.path, {"wrong_bytes"}):
            body = bytes([body[0] ^ 1]) + body[1:]
        if not self.signed(body):
            return
        path, _, query = self.path.partition("?")
        bucket, _, key = urllib.parse.unquote(path[1:]).partition("/")
        if self.headers["Host"].startswith("bucket."):  # virtual-host style
            bucket, key = "bucket", urllib.parse.unquote(path[1:])
        args = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if bucket != "bucket":
            self.error(404, "NoSuchBucket")
            return
        with WORLD.lock:
            getattr(self, f"on_{self.command}")(key, args, body)
            if WORLD.recording and self.command not in ("GET", "HEAD"):
                WORLD.keep()

    def answer_plain(self, body: bytes) -> None:
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def on_HEAD(self, key: str, _args: dict[str, str], _body: bytes) -> None:
        found = WORLD.objects.get(key)
        if found is None:
            self.answer(404)
        else:
            self.answer(
                200, b"", {"Content-Length": str(len(found[0])), "ETag": found[1], **found[2]}
            )

    def on_GET(self, key: str, args: dict[str, str], _body: bytes) -> None:
        if not key:
            self.listing(args)
            return
        found = WORLD.objects.get(key)
        if found is None:
            self.error(404, "NoSuchKey")
            return
        data, etag, meta = found
        if self.headers.get("If-Match", etag) != etag:
            self.error(412, "PreconditionFailed")
            return
        headers = {"ETag": etag, **meta} if WORLD.etags else {}
        status, first, last = 200, 0, len(data) - 1
        if wanted := self.headers.get("Range"):
            first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
            if first >= len(data):
                self.error(416, "InvalidRange")
                return
            if WORLD.fault("GET", self.path, {"wrong_range"}):
                first, last = first + 1, last + 1
            last = min(last, len(data) - 1)
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(data)}"
        if WORLD.fault("GET", self.path, {"vanish"}):
            del WORLD.objects[key]
        if WORLD.fault("GET", self.path, {"replace"}):
            other = bytes(len(data))
            WORLD.objects[key] = (other, etag_of(other), {})
        self.answer(status, data[first : last + 1], headers)

    def listing(self, args: dict[str, str]) -> None:
        prefix, after = args.get("prefix", ""), args.get("continuation-token", "")
        if WORLD.fault("GET", self.path, {"page_loop"}):
            after = ""
        delimiter = args.get("delimiter", "")

        def shown(key: str) -> str:  # itself, or the folder that it lies in
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            return key if end < 0 else key[: end + 1]

        below = (key for key in WORLD.objects if key.startswith(prefix))
        names = sorted({shown(key) for key in below if shown(key) > after})
        page = names[: min(WORLD.page, int(args.get("max-keys", 1000)))]
        more = len(page) < len(names)
        show = encode if args.get("encoding-type") == "url" else escape
        text = (
            "<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Name>bucket</Name>"
        )
        text += f"<EncodingType>url</EncodingType><IsTruncated>{str(more).lower()}</IsTruncated>"
        for key in page:
            if delimiter and key.endswith(delimiter):
                text += f"<CommonPrefixes><Prefix>{show(key)}</Prefix></CommonPrefixes>"
                continue
            data, etag, _ = WORLD.objects[key]
            quoted = escape(etag, {chr(34): "&quot;"})
            text += f"<Contents><Key>{show(key)}</Key><Size>{len(data)}</Size>"
            text += f"<ETag>{quoted}</ETag></Contents>"
        if more:
            text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        self.xml(text + "</ListBucketResult>")

    def on_PUT(self, key: str, args: dict[str, str], body: bytes) -> None:
        if "partNumber" in args:
            upload = WORLD.uploads.get(args["uploadId"])
            if upload is None:
                self.error(404, "NoSuchUpload")
                return
            named = self.headers.get("x-amz-checksum-crc32c", "")
            if upload[3] and named != base64.b64encode(crc32c(body)).decode():
                self.error(400, "BadDigest" if named else "InvalidRequest")
                return
            WORLD.checked += upload[3]
            upload[2][int(args["partNumber"])] = (body, etag_of(body), named)
            self.answer(200, b"", {"ETag": etag_of(body)})
            return
        if source := self.headers.get("x-amz-copy-source"):
            found = WORLD.objects.get(urllib.parse.unquote(source).removeprefix("/bucket/"))
            if found is None:
                self.error(404, "NoSuchKey")
            elif self.headers.get("x-amz-copy-source-if-match", found[1]) != found[1]:
                self.error(412, "PreconditionFailed")
            else:
                WORLD.objects[key] = found
                self.xml(f"<CopyObjectResult><ETag>{escape(found[1])}</ETag></CopyObjectResult>")
            return
        if not self.holds(key):
            return
        WORLD.objects[key] = (body, etag_of(body), self.meta())
        self.answer(200, b"", {"ETag": etag_of(body)})

    def meta(self) -> dict[str, str]:
        return {
            name.lower(): value
            for name, value in self.headers.items()
            if name.lower().startswith("x-amz-meta-")
        }

    def on_POST(self, key: str, args: dict[str, str], body: bytes) -> None:
        if "delete" in args:
            md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
            if self.headers.get("Content-MD5") != md5:
                self.error(400, "BadDigest")
                return
            try:
                keys = [each.text for each in ElementTree.fromstring(body).iter() if each.text]
            except ElementTree.ParseError:
                self.error(400, "MalformedXML")
                return
            for key in keys:
                WORLD.objects.pop(key, None)
            self.xml("<DeleteResult></DeleteResult>")
            return
        if "uploads" in args:
            upload = f"upload-{time.time_ns()}"
            wanted = self.headers.get("x-amz-checksum-algorithm", "")
            checks = WORLD.checksums and wanted == "CRC32C"
            WORLD.uploads[upload] = (key, self.meta(), {}, checks)
            self.xml(
                f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
                "</InitiateMultipartUploadResult>",
                {"x-amz-checksum-algorithm": wanted} if checks else {},
            )
            return
        found = WORLD.uploads.get(args.get("uploadId", ""))
        if found is None:
            self.error(404, "NoSuchUpload")
            return
        _, meta, parts, checks = found
        numbers = list(range(1, len(parts) + 1))
        if (
            sorted(parts) != numbers
            or any(len(parts[n][0]) < 5 << 20 for n in numbers[:-1])
            or any(parts[n][1].strip('"').encode() not in body for n in numbers)
            or (checks and any(parts[n][2].encode() not in body for n in numbers))
        ):
            self.error(400, "InvalidPart")
            return
        if WORLD.upload_conditions and not self.holds(key):
            return
        if WORLD.fault("POST", self.path, {"late_error"}):
            self.xml("<Error><Code>InternalError</Code><Message>late</Message></Error>")
            return
        if WORLD.fault("POST", self.path, {"lost_part"}):
            numbers.pop()
        del WORLD.uploads[args["uploadId"]]
        whole = b"".join(parts[n][0] for n in numbers)
        of_parts = "opaque-7b" if WORLD.opaque else len(numbers)
        tag = f"{hashlib.md5(whole).hexdigest()}-{of_parts}"
        WORLD.objects[key] = (whole, f'"{tag}"', meta)
        tag = f"<ETag>&quot;{tag}&quot;</ETag>"
        self.xml(f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>")

    def on_DELETE(self, key: str, args: dict[str, str], _body: bytes) -> None:
        if "uploadId" in args:
            WORLD.uploads.pop(args["uploadId"], None)
        else:
            WORLD.objects.pop(key, None)
        self.answer(204)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave when it likes
            super().handle_error(request, client_address)


if __name__ == "__main__":
    first = Server(("127.0.0.1", 0), Handler)
    port = first.server_address[1]
    for server in (first, *(Server((f"127.0.0.{i}", port), Handler) for i in (2, 3))):
        if sys.argv[1:]:  # a certificate and its key: TLS
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(sys.argv[1])
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(port, flush=True)
    sys.stdin.read()  # ends with who started it
