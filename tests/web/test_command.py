"""`blendkv demo --web`: what cannot be is one line on stderr, and exit code 1."""

import socket

import pytest
from typer.testing import CliRunner

from blendkv import cli_demo
from blendkv.cli import main
from blendkv.testing import byte_tokenizer, tiny_model

pytest.importorskip("gradio", reason="pip install 'blendkv[web]'")


def refused(*options: str) -> str:
    result = CliRunner().invoke(main, ["demo", "--web", "--port", "0", *options])
    assert result.exit_code == 1
    assert result.stdout == ""
    *before, last = result.stderr.strip().splitlines()
    assert all(line.startswith("Loading") for line in before), result.stderr
    return last


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(cli_demo, "load", lambda *args: pytest.fail("the model was loaded"))


@pytest.mark.usefixtures("no_model")
def test_a_missing_extra_names_the_command(monkeypatch):
    monkeypatch.setattr(cli_demo, "find_spec", lambda name: None)
    assert refused().endswith("needs gradio, which is not installed: pip install 'blendkv[web]'")


@pytest.mark.usefixtures("no_model")
def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused("--port", str(port))
    assert said.startswith(f"blendkv: cannot listen on port {port} of 127.0.0.1: somebody listens there already")
    assert "--port" in said


@pytest.mark.usefixtures("no_model")
def test_a_host_that_is_none():
    assert "127.0.0.1 is this machine alone" in refused("--host", "no such host")


def test_models_that_cannot_be_loaded(tmp_path, monkeypatch):
    assert "no model at" in refused("--model", str(tmp_path / "nothing"))
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    assert "is not a GGUF file" in refused("--model", str(tmp_path / "bad.gguf"))
    impossible = tiny_model("jamba"), byte_tokenizer()
    monkeypatch.setattr("blendkv.models.load_model", lambda *args, **kwargs: impossible)
    assert "JambaForCausalLM has layers of type linear_attention" in refused()


def test_json_and_a_page_do_not_go_together():
    result = CliRunner().invoke(main, ["demo", "--web", "--json"])
    assert result.exit_code == 2
