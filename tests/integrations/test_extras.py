"""Without a framework, its module says which command installs it; nothing else of blendkv imports one."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""
FRAMEWORKS = ("langchain_core", "llama_index", "haystack")


@pytest.mark.parametrize(("module", "extra"), [("langchain",) * 2, ("llama_index", "llama-index"), ("haystack",) * 2])
def test_a_missing_extra_names_the_command(module, extra):
    code = HIDE.format(hidden=FRAMEWORKS) + f"import blendkv.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: blendkv.integrations.{module} needs a package that is not installed")
    assert last.endswith(f"pip install 'blendkv[{extra}]'")


def test_the_rest_needs_no_framework():
    code = HIDE.format(hidden=FRAMEWORKS)
    code += "import blendkv.cli, blendkv.integrations.answering, blendkv.integrations.pipeline\n"
    code += f"assert not [name for name in sys.modules if name.split('.')[0] in {FRAMEWORKS}]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())["project"]
    assert {"langchain", "llama-index", "haystack"} <= set(project["optional-dependencies"])
