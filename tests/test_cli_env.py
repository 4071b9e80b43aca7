import json
import os

import torch
from typer.testing import CliRunner

from blendkv.cli import main


def test_a_bug_report_says_what_is_installed_and_nothing_of_whose_machine_it_is(monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", "/somebody/secret")
    monkeypatch.setenv("BLENDKV_KERNELS", "off")
    found = CliRunner().invoke(main, ["env"])
    assert found.exit_code == 0
    assert f"- torch: {torch.__version__}" in found.output
    assert "BLENDKV_KERNELS=off" in found.output
    assert "secret" not in found.output
    assert os.uname().nodename not in found.output
    said = json.loads(CliRunner().invoke(main, ["env", "--json"]).stdout)
    assert said["torch"] == torch.__version__
    assert {"BLENDKV_HOME", "BLENDKV_KERNELS=off"} <= set(said["switches"])
    assert said["Triton kernels"] == "switched off by BLENDKV_KERNELS"


def test_help_tells_exit_codes_and_completion():
    said = CliRunner().invoke(main, ["--help"], env={"COLUMNS": "200"}).output
    assert "Exit codes" in said
    assert "--show-completion" in said
