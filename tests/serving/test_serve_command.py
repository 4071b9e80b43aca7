"""`blendkv serve` as a process: what it says, where its token is, TLS, and one sentence for what goes wrong."""

import contextlib
import http.client
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blendkv.cli import main
from blendkv.stores import open_store
from tests.s3 import free_port
from tests.serving.gateways import TOKEN, chunk_file, disk, gateway, path_of

KEY, DATA = chunk_file(0)


@contextlib.contextmanager
def served(*args, **environment):
    """URL and process of a gateway, and the lines that it has written."""
    command = [sys.executable, "-m", "blendkv", "serve", "--port", "0", *map(str, args)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, **environment}
    )
    lines: list[str] = []
    ready = threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if "is served at" in line:
                ready.set()
        ready.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert ready.wait(120)
        url = re.search(r"served at (\S+?)/chunks", "".join(lines))
        assert url is not None, lines
        yield url[1], process, lines
    finally:
        process.terminate()
        process.wait(30)
        thread.join(30)
        process.stderr.close()


def refused(*args):
    """What the command says when it cannot serve."""
    result = CliRunner().invoke(main, ["serve", *map(str, args)])
    assert result.exit_code != 0
    return " ".join(result.output.replace("│", " ").split())


def test_as_the_guide_says(tmp_path):
    """No token given: one is made, for this user only, and kept; loopback; a signal ends it."""
    home = str(tmp_path / "home")
    disk(tmp_path / "store").put(KEY, DATA)
    file = tmp_path / "home" / "gateway-token"
    with served("--store", tmp_path / "store", BLENDKV_HOME=home) as (url, process, lines):
        assert url.startswith("http://127.0.0.1:")
        assert f"the token is in {file} (made now)" in "".join(lines)
        assert file.stat().st_mode & 0o777 == 0o600
        token = file.read_text().strip()
        store = open_store(url + "/chunks", token=token)
        assert store.get(KEY) == DATA
        assert token not in "".join(lines)
        process.send_signal(signal.SIGINT)
        process.wait(30)
        assert process.returncode in (0, -signal.SIGINT, 130)
        assert "Traceback" not in "".join(lines)
    with served("--store", tmp_path / "store", BLENDKV_HOME=home) as (url, process, lines):
        assert "made now" not in "".join(lines)
        assert open_store(url + "/chunks", token=token).get(KEY) == DATA
        process.terminate()
        assert process.wait(30) == 0


def test_tls(tmp_path):
    trust, certificate, key = make_certificate(tmp_path)
    arguments = ("--store", tmp_path / "store", "--token", TOKEN, "--ssl-certfile", certificate, "--ssl-keyfile", key)
    with served(*arguments) as (url, _, _):
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=trust)
        port = int(url.rpartition(":")[2])
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for method, body, expected in (("PUT", DATA, (201, b"")), ("GET", None, (200, DATA))):
            connection.request(method, path_of(KEY), body, headers)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == expected
        connection.close()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:  # no http there
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert not plain.recv(100).startswith(b"HTTP")


def make_certificate(folder: Path) -> tuple[str, str, str]:
    """Files of a certificate for 127.0.0.1 that vouches for itself: what to trust, the certificate, its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return str(certificate), str(certificate), str(private)


def test_a_region_of_processes(tmp_path):
    with (
        served("--store", tmp_path / "central", "--token", TOKEN) as (central, _, _),
        served("--store", tmp_path / "region", "--central", central, "--token", TOKEN, BLENDKV_TOKEN=TOKEN) as (
            near,
            _,
            _,
        ),
    ):
        assert open_store(central + "/chunks", token=TOKEN).put(KEY, DATA)
        assert open_store(near + "/chunks", token=TOKEN).get(KEY) == DATA
        assert disk(tmp_path / "region").get(KEY) == DATA


def test_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("--store", tmp_path, "--token", TOKEN, "--port", port)
    assert f"cannot listen on port {port} of 127.0.0.1: somebody listens there already; choose another one" in said
    assert "cannot listen" in refused("--store", tmp_path, "--token", TOKEN, "--host", "192.0.2.1", "--port", 0)
    assert "--host no.such.host.invalid" in refused(
        "--store", tmp_path, "--token", TOKEN, "--host", "no.such.host.invalid"
    )


def test_missing_packages(tmp_path, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "uvicorn" else found(name, *a))
    said = refused("--store", tmp_path)
    assert said == "blendkv: blendkv serve needs uvicorn: pip install 'blendkv[serve]'"


def test_unreachable_centre(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    begin = time.monotonic()
    said = refused("--store", tmp_path, "--token", TOKEN, "--central", url)
    assert f"{url}/chunks does not answer" in said
    assert time.monotonic() - begin < 60
    said = refused("--store", tmp_path, "--token", TOKEN, "--catalog", url)
    assert f"{url} does not answer" in said


def test_a_centre_that_refuses(tmp_path, monkeypatch):
    monkeypatch.delenv("BLENDKV_TOKEN", raising=False)
    with gateway(disk(tmp_path / "central")) as central:
        said = refused("--store", tmp_path / "region", "--token", TOKEN, "--central", central.url)
    assert f"{central.url}/chunks refuses: give its token with token=... or $BLENDKV_TOKEN" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--token", "short"), "at least 16"),
        (("--token", TOKEN, "--policy", "lifo"), "choose one of drr, softmax, fifo"),
        (("--token", TOKEN, "--log-level", "loud"), "choose one of debug"),
        (("--token", TOKEN, "--ssl-certfile", "x.pem"), "go together"),
        (("--token", TOKEN, "--ssl-certfile", "x.pem", "--ssl-keyfile", "y.pem"), "no certificate that can be used"),
        (("--token", TOKEN, "--max-entry", "lots"), "is not a size"),
        (("--token", TOKEN, "--max-entry", "3G"), "at least --max-entry"),
        (("--token", TOKEN, "--catalog", "ftp://x"), "--catalog"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_options(tmp_path, arguments, said):
    assert said in refused("--store", tmp_path, *arguments)


def test_a_store_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")
    assert "there is a file of that name" in refused("--store", tmp_path / "file", "--token", TOKEN)
    assert "unknown scheme" in refused("--store", "nope://x", "--token", TOKEN)
    assert "it goes with a folder" in refused("--store", "redis://127.0.0.1:1", "--token", TOKEN, "--capacity", "1G")


def test_help_tells_what_matters():
    said = " ".join(CliRunner().invoke(main, ["serve", "--help"], env={"COLUMNS": "200"}).output.split())
    for word in ("BLENDKV_TOKEN", "this machine alone", "--central", "--ssl-certfile", "any number of gateways"):
        assert word in said


def test_the_core_never_imports_the_server():
    code = (
        "import sys, blendkv, blendkv.cli, blendkv.library, blendkv.stores.remote, blendkv.stores.http, "
        "blendkv.loading.scheduler; print([m for m in sys.modules if m.split('.')[0] in "
        "('starlette', 'uvicorn', 'prometheus_client', 'httptools') or m.startswith('blendkv.serving')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr
