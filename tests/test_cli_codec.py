"""`blendkv profile`, `bench codec`, `bench joint`, from the command line."""

import json

import pytest
from typer.testing import CliRunner

from blendkv.bench.results import read_rows
from blendkv.bench.table import markdown
from blendkv.cli import main
from blendkv.codecs.profile import load_profile, profile_folder
from blendkv.testing import byte_tokenizer, tiny_model


def load_tiny(*args, **kwargs):
    return tiny_model("llama"), byte_tokenizer(chat=True)


@pytest.fixture
def run(monkeypatch):
    """`run(*arguments)`: the command's result, on a tiny Llama whatever MODEL says."""
    monkeypatch.setattr("blendkv.models.load_model", load_tiny)
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Records of the task hotpot, each of about 100 tokens."""
    path = tmp_path_factory.mktemp("data") / "hotpot.json"
    context = [[["T", [f"S{i} {j}.", " So it was, and then it was not."]] for j in range(3)] for i in range(24)]
    path.write_text(json.dumps([{"question": f"Q{i}?", "answer": "A", "context": c} for i, c in enumerate(context)]))
    return path


@pytest.fixture(scope="module")
def profiles(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    arguments = ["--data", data, "--passages", 10, "--tokens", 72, "--continuation", 8]
    arguments += ["--codec", "klt,cachegen", "--out", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blendkv.models.load_model", load_tiny)
        result = CliRunner().invoke(main, ["profile", "m", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return folder, result


def test_profile_writes_files_and_says_which(run, data, profiles):
    folder, result = profiles
    assert sorted(path.name for path in folder.iterdir()) == ["cachegen.safetensors", "klt.safetensors"]
    klt = load_profile(folder / "klt.safetensors")
    assert klt.hash in result.stdout
    assert "10 passages of 72 + 8 tokens" in result.stdout
    assert klt.about["model"] == "m"


def test_profile_without_a_folder_is_found_by_its_hash(run, data):
    result = run(
        "profile",
        "m",
        "--data",
        data,
        "--passages",
        3,
        "--tokens",
        32,
        "--continuation",
        8,
        "--codec",
        "cachegen",
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    [row] = json.loads(result.stdout)["rows"]
    assert row["file"] == str(profile_folder() / f"{row['hash']}.safetensors")
    assert load_profile(row["hash"]).codec == "cachegen"


def test_bench_codec_and_joint(run, data, profiles, tmp_path):
    folder, _ = profiles
    out, page = tmp_path / "rows.json", tmp_path / "page.md"
    arguments = ["bench", "codec", "m", "--data", data, "--contexts", 2, "--tokens", 72, "--continuation", 8]
    arguments += ["--codecs", "raw,klt", "--profiles", folder, "--repeats", 1, "--short", "16", "--out", out]
    result = run(*arguments, "--levels", "-4,0", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["codec"], row["level"]) for row in rows] == [
        ("raw", 1),
        ("klt", -4),
        ("klt", 0),
        ("raw", None),
        ("klt", None),
    ]
    assert rows[0]["texts_left_out"] >= 10
    assert len(read_rows(out)) == 5
    told = run(*arguments, "--levels", "4")
    assert told.exit_code == 0, told.stderr
    assert "2 contexts of 72 tokens" in told.stdout
    assert len(read_rows(out)) == 6
    arguments = ["bench", "joint", "m", "--data", data, "--prompts", 2, "--codecs", "raw,klt", "--profiles", folder]
    result = run(*arguments, "--levels", "0", "--ratios", "0,0.3", "--controls", 0, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "4 protected tokens" in result.stdout
    assert len(read_rows(out)) == 6 + 2 * (1 + 1 + 5)
    page.write_text(f"<!-- table: {out} -->\n<!-- end of table -->\n")
    assert run("bench", "table", out, "--into", page).exit_code == 0
    assert markdown(read_rows(out)) in page.read_text()


def test_texts_that_are_all_calibrated_on_are_one_line(run, data, profiles, tmp_path):
    folder, _ = profiles
    few = tmp_path / "few.json"
    few.write_text(json.dumps(json.loads(data.read_text())[:2]))
    result = run(
        "bench",
        "codec",
        "m",
        "--data",
        few,
        "--tokens",
        72,
        "--continuation",
        8,
        "--codecs",
        "klt",
        "--profiles",
        folder,
    )
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no 80 tokens of text that may be used" in result.stderr


@pytest.mark.parametrize("command", [["codec"], ["joint"]], ids=" ".join)
def test_without_profiles_the_error_names_the_command(run, data, command):
    result = run("bench", *command, "m", "--data", data, "--codecs", "raw,klt")
    assert (result.exit_code, result.stdout) == (1, "")
    assert (
        "klt: needs a profile of the model: `blendkv profile MODEL --data FILES --out FOLDER` makes it" in result.stderr
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "m"],
        ["profile", "m", "--data", "f", "--codec", "raw"],
        ["profile", "m", "--data", "f", "--passages", "1"],
        ["bench", "codec", "m"],
        ["bench", "codec", "m", "--data", "f", "--codecs", "magic"],
        ["bench", "codec", "m", "--data", "f", "--levels", "0,x"],
        ["bench", "codec", "m", "--data", "f", "--short", "0"],
        ["bench", "joint", "m", "--data", "f", "--task", "magic"],
        ["bench", "joint", "m", "--data", "f", "--ratios", "1.5"],
        ["bench", "joint", "m", "--data", "f", "--selector", "magic"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_profile_looks_at_its_folder_before_the_work(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("hello")

    def load(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("blendkv.models.load_model", load)
    result = CliRunner().invoke(main, ["profile", "m", "--data", str(data), "--out", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "File exists" in result.stderr


def test_profile_of_one_long_text_says_what_to_give(run, tmp_path):
    (tmp_path / "manual.txt").write_text("So it was, and then it was not. " * 100)
    arguments = ["--data", tmp_path / "manual.txt", "--tokens", 72, "--continuation", 8, "--out", tmp_path / "out"]
    result = run("profile", "m", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("blendkv: --data has one passage of 80 tokens")
    assert "give more files" in result.stderr


def test_profile_says_that_there_was_little_text(profiles):
    assert "10 passages of 72 tokens are little to learn from" in profiles[1].stderr
