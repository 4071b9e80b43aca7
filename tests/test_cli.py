import json
import logging
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import typer
from rich.text import Text
from typer.testing import CliRunner

import blendkv
from blendkv.attaching import attach
from blendkv.attention import LazyMask
from blendkv.bench.results import read_rows
from blendkv.bench.table import markdown
from blendkv.cli import main
from blendkv.demo import Reply, Round, sentence
from blendkv.passages import Passage, Question, pick_passages, read_passages
from blendkv.rope import Rotation
from blendkv.testing import byte_tokenizer, tiny_model
from blendkv.verify import verify
from tests.helpers import generate


@pytest.fixture
def run():
    """`run(*arguments)`: the command's result, stdout and stderr apart."""
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def model(monkeypatch):
    """A tiny Llama with a tokenizer, whatever MODEL says."""
    made = tiny_model("llama", max_position_embeddings=8192)
    monkeypatch.setattr("blendkv.models.load_model", lambda *args, **kwargs: (made, byte_tokenizer(chat=True)))
    return made


@contextmanager
def caught(name):
    """What a logger hands on meanwhile."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger(name).addHandler(handler)
    yield records
    logging.getLogger(name).removeHandler(handler)


def only_json(result):
    """The whole of stdout as JSON."""
    return json.loads(result.stdout, parse_constant=pytest.fail)


# -- what needs no model ----------------------------------------------------------------------------------------------


def test_help_lists_the_commands_without_importing_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from blendkv.cli import main\n"
        "for arguments in (['--help'], ['bench', '--help'], ['demo', '--help']):\n"
        "    result = CliRunner().invoke(main, arguments); assert result.exit_code == 0; print(result.stdout)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in told for name in ("demo", "verify", "bench", "ttft", "quality"))


def test_nothing_in_the_help_is_taken_for_markup():
    """Rich would take `[web]` for a colour, and leave it out."""

    def texts(command):
        yield command.help or ""
        yield from (parameter.help or "" for parameter in command.params)
        for sub in getattr(command, "commands", {}).values():
            yield from texts(sub)

    said = list(texts(typer.main.get_command(main)))
    assert len(said) > 200
    assert [text for text in said if Text.from_markup(text).plain != text] == []


def test_version(run):
    assert run("--version").stdout == f"blendkv {blendkv.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["verify"],
        ["verify", "m", "--attn", "flash"],
        ["verify", "m", "--dtype", "int8"],
        ["demo", "--ratio", "1.5"],
        ["demo", "--passages", "2"],
        ["bench", "ttft", "m", "--ratio", "0.1,x"],
        ["bench", "ttft", "m", "--ratio", "1.1"],
        ["bench", "ttft", "m", "--methods", "full,magic"],
        ["bench", "ttft", "m", "--methods", ","],
        ["bench", "ttft", "m", "--selector", "magic"],
        ["bench", "ttft", "m", "--tokens", "0"],
        ["bench", "ttft", "m", "--tokens", "64,-1"],
        ["bench", "ttft", "m", "--tokens", "64,x"],
        ["bench", "ttft", "m", "--selector", "hkvd,magic"],
        ["bench", "ttft", "m", "--batch", "0"],
        ["bench", "ttft", "m", "--runs", "0"],
        ["bench", "ttft", "m", "--pool", "cpu,tape"],
        ["bench", "ttft", "m", "--device", "gpu7"],
        ["bench", "ttft"],
        ["bench", "ttft", "m", "--shape", "tiny"],
        ["bench", "ttft", "--shape", "tiny", "--dtype", "auto"],
        ["bench", "quality", "m", "--data", "f", "--task", "magic"],
        ["bench", "quality", "m", "--data", "f", "--selectors", "hkvd,magic"],
        ["bench", "quality", "m", "--data", "f", "--methods", "full,magic"],
        ["bench", "quality", "m", "--data", "f", "--methods", "mapreduce", "--no-answers"],
        ["bench", "quality", "m", "--data", "f", "--ratios", "0,2"],
        ["bench", "quality", "m", "--data", "f", "--reference", "hkvd"],
        ["bench", "quality", "m", "--data", "f", "--reference", "boundary:0.15"],
        ["bench", "quality", "m", "--data", "f", "--selectors", " "],
        ["bench", "quality", "m", "--data", "f", "--out", "x.json", "--rows", "x.json"],
        ["bench", "quality", "m", "--data", "f", "--chunks", "0"],
        ["bench", "quality", "m", "--data", "f", "--condition", "bos,dumb"],
        ["bench", "quality", "m", "--data", "f", "--check-layers", "1:0.15,x"],
        ["bench", "quality", "m", "--data", "f", "--check-layers", "1:0.15,1:0.1"],
        ["bench", "quality", "m", "--data", "f", "--check-layers", "1:0.15,4:0.3"],
        ["verify", "m", "--data", "f"],
        ["verify", "m", "--suggest", "--selectors", "magic"],
        ["verify", "all", "--tiny", "--suggest"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["verify"], ["bench", "ttft"], ["demo", "--model"]], ids=" ".join)
def test_a_model_that_is_not_there_is_one_line(run, command):
    result = run(*command, "/nowhere/model", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("blendkv: ")]
    assert len(lines) == 1
    assert "/nowhere/model" in lines[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.json", "No such file or directory; look at its name"), ("folder", "Is a directory; give a file")],
)
def test_a_file_that_cannot_be_read_is_named_first(run, model, tmp_path, name, said):
    (tmp_path / "folder").mkdir()
    result = run("profile", "m", "--data", tmp_path / name, "--out", tmp_path)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, f"blendkv: {tmp_path / name}: {said}")


def test_an_unknown_selector_is_told_the_names(run):
    said = " ".join(run("bench", "ttft", "m", "--selector", "magic").stderr.replace("│", " ").split())
    assert "unknown selector 'magic'; choose one of all, attention, boundary," in said
    assert "pass a Selector" not in said


def test_torchao_does_not_grumble_about_what_nobody_asked_for(run, monkeypatch):
    def loading(*args, **kwargs):
        logging.getLogger("torchao").warning("Failed to load /somewhere/torchao/_C.so")
        raise ValueError("the end")

    monkeypatch.setattr("blendkv.models.load_model", loading)
    logging.getLogger("torchao").setLevel(logging.NOTSET)
    with caught("torchao") as records:
        assert run("verify", "m").stderr == "blendkv: the end\n"
    assert records == []


def test_debug_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("BLENDKV_DEBUG", "1")
    assert isinstance(run("verify", "/nowhere/model").exception, FileNotFoundError)


def test_an_error_nobody_expected_is_one_line_too(run, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("blendkv.models.load_model", broken)
    result = run("verify", "m")
    assert result.exit_code == 1
    assert result.stderr == "blendkv: RuntimeError: first line second line (BLENDKV_DEBUG=1 shows where)\n"


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_model(run, model):
    result = run("verify", "m", "--json")
    told = only_json(result)
    assert result.exit_code == 0
    assert told["ok"] is True
    names = [check["name"] for check in told["checks"]]
    assert len(names) == len(set(names))
    for check in told["checks"]:
        assert {"name", "value", "bound", "ok"} <= set(check)
        assert check["ok"] is True
        assert check["value"] >= check["bound"] if check["at_least"] else check["value"] <= check["bound"]
    for part in ("rotation of layer 3", "ratio 0.15, offset 8128", "ratio 1 equals", "ratio 0 computes nothing"):
        assert any(part in name for name in names), part
    for part in ("error falls", "mask probe", "decode continuity", "negative control", "the report counts"):
        assert any(part in name for name in names), part


def test_verify_as_a_table(run, model):
    result = run("verify", "m")
    assert result.exit_code == 0
    assert "all 22 checks hold" in result.stdout


def wrong_rotation(monkeypatch):
    right = Rotation.rotate
    monkeypatch.setattr(Rotation, "rotate", lambda self, keys, angles, **kw: right(self, keys * 1.01, angles, **kw))


def blind_mask(monkeypatch):
    right = LazyMask.visible
    monkeypatch.setattr(LazyMask, "visible", lambda self, rows, keys: torch.ones_like(right(self, rows, keys)))


@pytest.mark.parametrize("break_it", [wrong_rotation, blind_mask])
def test_verify_believes_no_earlier_proof(run, model, monkeypatch, break_it):
    attach(model)  # proven and remembered while all was well
    break_it(monkeypatch)
    result = run("verify", "m", "--json")
    assert result.exit_code == 1
    told = only_json(result)
    assert told["ok"] is False
    assert any(not check["ok"] for check in told["checks"])


def test_a_wrong_mask_is_caught_by_the_probe_itself(monkeypatch):
    blind_mask(monkeypatch)
    probe = next(c for c in verify(tiny_model("llama")) if c.name.startswith("mask probe: a later"))
    assert not probe.ok


def test_a_layer_that_computes_too_much_is_caught(monkeypatch):
    monkeypatch.setattr("blendkv.cache.make_schedule", lambda *args: {1: 0.0})
    check = next(c for c in verify(tiny_model("llama")) if c.name == "ratio 0 computes nothing")
    assert (check.ok, check.value) == (False, 44)


def test_a_refused_model_is_a_failed_check(run, monkeypatch):
    made = tiny_model("llama4")
    monkeypatch.setattr("blendkv.models.load_model", lambda *args, **kwargs: (made, None))
    result = run("verify", "m", "--json")
    assert result.exit_code == 1
    told = only_json(result)
    assert told["ok"] is False
    [check] = told["checks"]
    assert "chunked_attention" in check["detail"]
    assert "1 of 1 checks failed" in run("verify", "m").stdout


@pytest.mark.parametrize("family", ["mixtral", "smollm3", "olmo2"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_verify_of_other_families(family, attn):
    model = tiny_model(family, attn_implementation=attn)
    generate(model, torch.arange(4)[None])  # skips where the installed transformers cannot
    assert [check for check in verify(model) if not check.ok] == []


def test_verify_in_bfloat16():
    checks = list(verify(tiny_model("llama", dtype=torch.bfloat16)))
    assert [check for check in checks if not check.ok] == []


# -- demo -------------------------------------------------------------------------------------------------------------


def test_demo_as_json(run, model):
    result = run("demo", "--passages", "3", "--ratio", "0.3", "--json")
    assert result.exit_code == 0, result.stderr
    told = only_json(result)
    assert told["passages"] == 3
    assert len(told["questions"]) == 3
    for asked in told["questions"]:
        full, reuse, blend = asked["replies"]
        assert (full["kl"], full["speedup"], full["same"]) == (0, 1, True)
        assert reuse["recomputed"] == 0
        assert blend["recomputed"] == pytest.approx(0.3, abs=0.01)
        assert reuse["kl"] > 0
        assert (
            sum(blend["report"]["layers"][-1][k] for k in ("reused", "recomputed", "fresh", "missed"))
            == (asked["prompt_tokens"])
        )
        assert not blend["report"]["misses"]
        assert set(blend["order"] if "order" in blend else asked["order"]) == set(asked["order"])
    assert told["summary"].count("KL") == 1


def test_demo_for_people_at_ratio_1_says_that_the_blend_is_full_recompute(run, model):
    result = run("demo", "--passages", "3", "--ratio", "1")
    assert result.exit_code == 0, result.stderr
    assert "(KL 0.000 against" in result.stdout
    assert "Recomputing 100% of the chunk tokens" in result.stdout
    assert "The report of the last blend" in result.stdout


def test_the_sentence_says_what_was_measured():
    def reply(method, right, speedup, recomputed, kl):
        return Reply(method, "", right, True, 1.0, speedup, recomputed, kl)

    done = Round(
        Question("q", "a"),
        ("t",),
        9,
        (reply("f", True, 1.0, 1.0, 0.0), reply("r", False, 9.0, 0.0, 0.5), reply("b", True, 0.5, 0.2, 0.6)),
    )
    assert sentence([done]) == (
        "Recomputing 20% of the chunk tokens, the blend reached its first token 2.0x later than full recompute and was "
        "no nearer to it than full reuse (KL 0.600 against 0.500 nats); right answers: full recompute 1, full reuse 0, "
        "blend 1 of 1."
    )


def test_there_are_a_dozen_passages_and_each_question_needs_one():
    passages, questions = read_passages()
    assert (len(passages), len(questions)) == (12, 3)
    for question in questions:
        assert any(question.answer.lower() in passage.text.lower() for passage in passages)
    needed = pick_passages(passages, questions, 3)
    for question in questions:
        assert any(question.answer.lower() in passage.text.lower() for passage in needed)


def test_passages_that_hold_answers_are_picked_first_and_keep_their_order():
    passages = [Passage(t, t) for t in ("one", "two", "three", "four")]
    picked = pick_passages(passages, [Question("?", "FOUR"), Question("?", "two")], 3)
    assert [passage.title for passage in picked] == ["one", "two", "four"]
    with pytest.raises(ValueError, match="choose 1 to 4"):
        pick_passages(passages, [Question("?", "one")], 5)


# -- bench ------------------------------------------------------------------------------------------------------------


def test_bench_ttft_as_json_and_as_a_table(run, model):
    arguments = ["bench", "ttft", "m", "--tokens", 96, "--chunk-tokens", 32, "--question-tokens", 8, "--repeats", 1]
    arguments += ["--ratio", "0.1,0.5"]
    result = run(*arguments, "--decode-tokens", "3", "--json")
    assert result.exit_code == 0, result.stderr
    rows = only_json(result)["rows"]
    assert [(row["method"], row["ratio"]) for row in rows] == [
        ("full", None),
        ("prefix", None),
        ("reuse", 0.0),
        ("blend", 0.1),
        ("blend", 0.5),
    ]
    result = run(*arguments, "--decode-tokens", "0")
    assert result.exit_code == 0, result.stderr
    assert all(line.startswith(row["method"]) for line, row in zip(result.stdout.splitlines()[3:], rows, strict=True))


def test_bench_ttft_of_a_shape_keeps_its_rows(run, tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    arguments = ["bench", "ttft", "--shape", "tiny", "--chunk-tokens", 32, "--question-tokens", 8, "--repeats", 1]
    arguments += ["--methods", "blend", "--selector", "hkvd,boundary", "--decode-tokens", 2, "--batch", 2, "--out", out]
    result = run(*arguments, "--tokens", "64,96", "--runs", 2, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(only_json(result)["rows"]) == len(read_rows(out)) == 8
    result = run(*arguments, "--tokens", "128", "--memory")
    assert result.exit_code == 0, result.stderr
    assert "selected rows" in result.stdout
    assert "tiny, float32, 8 question tokens, batch 2, on " in result.stdout
    assert len(read_rows(out)) == 10
    result = run("bench", "table", out)
    assert result.stdout == markdown(read_rows(out))
    page = tmp_path / "page.md"
    page.write_text(f"<!-- table: {out} -->\n<!-- end of table -->\n")
    assert run("bench", "table", out, "--into", page).exit_code == 0
    assert result.stdout in page.read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("bench", "plot", out, "--out", tmp_path / "x.svg")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "pip install 'blendkv[bench]'" in result.stderr
    out.write_text("[]")
    result = run(*arguments, "--tokens", "64")
    assert (result.exit_code, out.read_text()) == (1, "[]")


def test_bench_ttft_names_the_shapes_it_knows_and_the_device_it_lacks(run):
    result = run("bench", "ttft", "--shape", "gpt-5")
    assert result.exit_code == 2
    assert "llama-8b" in result.stderr
    result = run("bench", "ttft", "--shape", "tiny", "--device", f"cuda:{torch.cuda.device_count()}")
    assert result.exit_code == 2
    assert f"sees {torch.cuda.device_count()} CUDA devices" in " ".join(result.stderr.replace("│", "").split())


def test_bench_ttft_stops_where_ratio_1_is_wrong(run, model, monkeypatch):
    monkeypatch.setattr("blendkv.bench.gates.rms_ratio", lambda *args: float("nan"))
    result = run("bench", "ttft", "m", "--tokens", "32", "--repeats", "1", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "not full prefill" in result.stderr


def test_bench_quality(run, model, tmp_path):
    record = {"question": "Who?", "answer": "Ada", "context": [["A", ["Ada was."]], ["B", ["Bob is.", " So."]]]}
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([record, record, {"question": "no context"}]))
    arguments = ["bench", "quality", "m", "--data", path, "--n", "2", "--ratios", "0,0.15,1"]
    more = ["--selectors", "hkvd,random", "--methods", "full,prefix,blend,mapreduce,maprerank", "--max-new-tokens", "3"]
    rows_file, items = tmp_path / "rows.json", tmp_path / "items.jsonl"
    result = run(*arguments, *more, "--out", items, "--rows", rows_file, "--json")
    assert result.exit_code == 0, result.stderr
    told = only_json(result)
    assert (told["prompts"], told["computed"], told["skipped"]) == (2, 20, [])
    keys = [(row["method"], row["selector"], row["ratio"]) for row in told["rows"]]
    assert keys == [
        ("full", None, None), ("nocontext", None, None), ("prefix", None, None), ("reuse", None, 0.0),
        ("blend", "hkvd", 0.15), ("blend", "hkvd", 1.0), ("blend", "random", 0.15), ("blend", "random", 1.0),
        ("mapreduce", None, None), ("maprerank", None, None),
    ]  # fmt: skip
    by_key = dict(zip(keys, told["rows"], strict=True))
    assert by_key["reuse", None, 0.0]["kl"] > 0
    assert by_key["blend", "hkvd", 1.0]["kl"] == pytest.approx(0, abs=1e-6)
    assert by_key["prefix", None, None]["kl"] == pytest.approx(0, abs=1e-6)
    for row in told["rows"]:
        assert (row["kl"] is None) == row["method"].startswith("map")
        assert set(row["ci"]) == {
            "kl",
            "kl_first",
            "same",
            "f1",
            "rouge_l",
            "ttft_s",
            "speedup",
            "relative",
            "charged_budget",
        }
        assert row["command"].startswith("blendkv")
        assert str(tmp_path) not in row["command"]
    assert len(read_rows(rows_file)) == 10
    pytest.importorskip("matplotlib")
    figure = tmp_path / "figure.svg"
    again = only_json(run(*arguments, *more, "--out", items, "--figure", figure, "--json"))
    assert "time to the first token / full recompute" in figure.read_text()
    assert "matplotlib draws" in run(*arguments, "--figure", "figure.docx").stderr
    assert again["computed"] == 0
    assert [row["kl"] for row in again["rows"]] == [row["kl"] for row in told["rows"]]
    other = run(*arguments, "--no-answers", "--out", items)
    assert other.exit_code == 1
    assert "answers was True, is False" in other.stderr
    assert "2 prompts of hotpot" in run(*arguments, "--no-answers").stdout
    board = run("bench", "leaderboard", rows_file)
    assert board.exit_code == 0, board.stderr
    assert "| blend, random, 15% (control) |" in board.stdout


def test_bench_quality_stops_at_bad_records_before_a_model_is_loaded(run, monkeypatch, tmp_path):
    monkeypatch.setattr("blendkv.models.load_model", lambda *args, **kwargs: pytest.fail("loaded"))
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "Q", "chunks": ["a"]}\n{"question": "Q"}\n')
    for command in (["bench", "quality", "m"], ["bench", "insights", "m"], ["verify", "m", "--suggest"]):
        result = run(*command, "--data", path, "--task", "plain")
        assert result.exit_code == 1
        assert "own.jsonl, line 2, field 'chunks': missing" in result.stderr
    missing = run("bench", "quality", "m", "--data", tmp_path / "none.json")
    assert missing.exit_code == 1
    assert "none.json" in missing.stderr


def test_bench_quality_skips_bad_records_where_it_is_told_to(run, model, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "Q", "chunks": ["a few words."]}\n{"question": "Q"}\n')
    options = ["--data", path, "--task", "plain", "--no-answers", "--skip-bad", "--json"]
    told = only_json(run("bench", "quality", "m", *options))
    assert told["prompts"] == 1
    assert told["skipped"] == ["own.jsonl, line 2, field 'chunks': missing"]
    assert {row["skipped"] for row in told["rows"]} == {1}


def test_verify_suggests_nothing_from_three_prompts(run, model):
    told = only_json(run("verify", "m", "--suggest", "--json"))
    assert told["ok"]
    found = told["suggestion"]
    assert (found["selector"], found["prompts"]) == (None, 3)
    assert "too few" in found["told"]
    assert {row["method"] for row in found["rows"]} == {"reuse", "blend"}


def test_bench_insights(run, monkeypatch, tmp_path):
    made = tiny_model("llama", max_position_embeddings=8192, attn_implementation="eager")
    monkeypatch.setattr("blendkv.models.load_model", lambda *args, **kwargs: (made, byte_tokenizer(chat=True)))
    options = ["--n", "2", "--ratios", "0,0.3,1"]
    result = run("bench", "insights", "m", *options, "--rows", tmp_path / "r.json", "--json")
    assert result.exit_code == 0, result.stderr
    assert {row["figure"] for row in only_json(result)["rows"]} == {
        "attention deviation", "rank correlation", "deviation held by the top 15%",
    }  # fmt: skip
    assert len(read_rows(tmp_path / "r.json")) == len(only_json(result)["rows"])
