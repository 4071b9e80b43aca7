"""Every decoder family is proven or refused; none is wrong, none crashes."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from blendkv import BlendedCache, UnsupportedModelError, attach, prefill, proof
from blendkv.cli import main
from blendkv.families import families, tiny_family
from blendkv.guide import BEGIN, END, kind_of, write_guide
from blendkv.selectors import Random
from blendkv.survey import Outcome, examine, survey
from tests.helpers import run

SAMPLE = {
    "afmoe": "proven",  # passes its mask by keyword
    "bamba": "refused",
    "bloom": "proven",  # ALiBi
    "deepseek_v3": "refused",
    "falcon": "proven",  # with eager attention
    "gemma2": "proven",
    "gemma3_text": "proven",
    "glm": "proven",
    "gpt2": "refused",
    "gpt_neox": "proven",
    "gpt_oss": "proven",
    "jetmoe": "proven",
    "llama4_text": "refused",
    "mixtral": "proven",
    "modernbert-decoder": "proven",  # its head is called the decoder
    "mpt": "proven",  # ALiBi, and a mask of its own kind
    "nanochat": "proven",  # turns backwards
    "phi3": "proven",
    "llama+dynamic": "refused",
    "llama+mqa": "proven",
    "qwen2+windows": "proven",
}


GUIDE = Path(__file__).parent.parent / "docs/guides/models.md"
STATUS = re.compile(r"^\| `([^`]+)` \| (\w+) \|", re.MULTILINE)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))


def test_a_sample_by_the_command():
    result = CliRunner().invoke(main, ["verify", "--tiny", *SAMPLE, "--json"])
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert {entry["family"]: entry["status"] for entry in told["families"]} == SAMPLE
    assert told["not_built"] == []
    for entry in told["families"]:
        assert entry["detail"]
        if entry["status"] == "refused":
            kind_of(entry["detail"])


@pytest.mark.slow
def test_every_fifth_family_is_what_the_guide_says():
    """`make families` is for all of them; `tests/cases/test_d13.py` attaches, and so proves, each."""
    names = [name for name in families() if name not in SAMPLE][::5]
    outcomes = list(survey(names))
    assert [outcome.family for outcome in outcomes] == names
    assert not [outcome for outcome in outcomes if outcome.status in ("wrong", "crashed")]
    counts = Counter(outcome.status for outcome in outcomes)
    assert counts["proven"] >= 12
    assert counts["proven"] + counts["refused"] >= 0.8 * len(names)
    for outcome in outcomes:
        if outcome.status == "refused":
            kind_of(outcome.detail)
    text = GUIDE.read_text()
    if re.findall(r"^\| (5[\d.]+) \|", text, re.MULTILINE)[-1] == transformers.__version__:
        told = dict(STATUS.findall(text))
        assert {one.family: one.status for one in outcomes} == {name: told.get(name, "not built") for name in names}


def test_the_same_model_each_time():
    first, again = tiny_family("llama"), tiny_family("llama")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not any(p.numel() > 1 and float(p.detach().std()) == 0.0 for p in first.parameters())


# -- what the proof must not let through ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "match"),
    [
        ("deepseek_v3", "moves? with position"),
        ("opt", "position to its embedding"),
        ("bert", "BertEncoder, which is not given input_ids"),
        ("llava", "embeddings of text and images"),
        ("mllama", "cross_attention_layers"),
        ("ctrl", "no argument hidden_states"),
    ],
)
def test_refused_by_name(home, family, match):
    model = tiny_family(family)
    before = sorted(model.__dict__)
    with pytest.raises(UnsupportedModelError, match=match):
        attach(model)
    assert sorted(model.__dict__) == before


def test_softcap_under_sdpa_is_refused_with_what_to_do(home, monkeypatch):
    model = tiny_family("gemma2")
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(UnsupportedModelError, match="attn_implementation='eager'"):
        attach(model)


@pytest.mark.parametrize("family", ["falcon", "falcon+alibi"])
def test_attention_that_knows_only_its_own_names_is_refused_with_what_to_do(home, family):
    """Falcon asks whether its implementation is called "sdpa", and adds a mask of booleans to its scores if not."""
    with pytest.raises(UnsupportedModelError, match=r"ordinary use stays as it was.*attn_implementation='eager'"):
        attach(tiny_family(family))
    model = tiny_family(family, attn_implementation="eager")
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        before = model(ids).logits
        assert torch.equal(attach(model)(ids).logits, before)


@pytest.mark.parametrize("family", ["bloom", "mpt", "gpt_neox", "nanochat", "modernbert-decoder"])
def test_padded_rows_of_a_batch_are_what_they_are_alone(home, family):
    """Masks that a model makes itself, and biases by position, are those of each row."""
    model = attach(tiny_family(family))
    ids = torch.randint(3, 380, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    chunks = prefill(model, [ids[0, 5:25], ids[1, 14:34]], progress=False)
    options = {"check_layers": {1: 0.4}, "selector": Random(2)}
    both = run(model, ids, BlendedCache([[c] for c in chunks], **options), attention_mask=mask).logits
    for b, row in enumerate((ids[:1], ids[1:, 9:])):
        alone = run(model, row, BlendedCache([chunks[b]], **options)).logits
        torch.testing.assert_close(both[b, -1], alone[0, -1], atol=1e-4, rtol=1e-4)


def test_learned_positions_fail_the_proof_too(home, monkeypatch):
    monkeypatch.setattr(proof, "refuse_unmovable", lambda state: None)
    with pytest.raises(UnsupportedModelError, match="exact KV moved by 23 stays exact"):
        attach(tiny_family("opt"))


def test_arguments_for_every_token_are_refused(home):
    model = tiny_family("llama")

    def extra(layer, args, kwargs):
        return args, kwargs | {"bias": torch.zeros(1, args[0].shape[1], 4)}

    model.model.layers[1].register_forward_pre_hook(extra, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="layer 1 is given 'bias' for every token"):
        attach(model)


# -- the survey sees what the proof does not --------------------------------------------------------------------------


def test_wrong_and_crashed(home, monkeypatch):
    monkeypatch.setattr(proof, "refuse_unmovable", lambda state: None)
    monkeypatch.setattr(proof, "exactness_checks", lambda state: iter([proof.most("nothing", 0, 0)]))
    wrong = examine("opt")
    assert wrong.status == "wrong"
    assert "moved, ratio 0" in wrong.detail
    assert examine("llama").status == "proven"

    def broken(model):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("blendkv.survey.attach", broken)
    assert examine("llama") == Outcome("llama", "crashed", "RuntimeError: first line second line")
    assert examine("gemma3n").status in ("not built", "crashed")
    assert examine("nonsense").status == "not built"


CHILD = """
import json, os, sys, time
for name in sys.argv[1:]:
    if name == "dies":
        os._exit(3)
    if name == "hangs":
        time.sleep(60)
    print(json.dumps({"family": name, "status": "proven", "detail": "well"}), flush=True)
"""


def test_a_hang_and_a_crash_cost_one_family_each():
    names = ["a", "dies", "b", "hangs", "c"]
    outcomes = list(survey(names, limit_s=2.0, command=(sys.executable, "-c", CHILD)))
    assert [outcome.family for outcome in outcomes] == names
    assert [outcome.status for outcome in outcomes] == ["proven", "crashed", "proven", "crashed", "proven"]
    assert "code 3" in outcomes[1].detail
    assert "no answer after 2 s" in outcomes[3].detail


def test_kinds_of_attention_agree_with_the_families():
    text = GUIDE.read_text()
    status = dict(STATUS.findall(text))
    kinds = re.findall(r"^\| [^|`]+ \| (`[^|]+`) \| (\w+) \|$", text, re.MULTILINE)
    assert len(kinds) >= 15
    for named, told in kinds:
        names = re.findall("`([^`]+)`", named)
        assert {name: status[name] for name in names} == dict.fromkeys(names, told)


# -- the command and the guide ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["llama", "qwen2"], ["llama", "--write", "x.md"], ["--tiny", "llama", "--write", "x.md"]],
    ids=" ".join,
)
def test_wrong_usage(arguments):
    assert CliRunner().invoke(main, ["verify", *arguments]).exit_code == 2


def test_an_unknown_family_is_one_line():
    result = CliRunner().invoke(main, ["verify", "--tiny", "llama", "lama"])
    assert result.exit_code == 1
    assert "no causal family 'lama'" in result.stderr


@pytest.mark.parametrize(("status", "code"), [("proven", 0), ("refused", 0), ("wrong", 1), ("crashed", 1)])
def test_exit_code_and_table(monkeypatch, status, code):
    monkeypatch.setattr("blendkv.survey.survey", lambda names: iter([Outcome(n, status, "why") for n in names]))
    result = CliRunner().invoke(main, ["verify", "--tiny", "llama"])
    assert result.exit_code == code
    assert f"1 {status}" in result.stdout


def test_guide(tmp_path):
    path = tmp_path / "models.md"
    path.write_text(
        "\n".join(f"{BEGIN.format(name)}\n{END.format(name)}" for name in ("counts", "families", "refusals"))
    )
    outcomes = [
        Outcome("llama", "proven", "largest error 1e-06"),
        Outcome("gpt2", "refused", "GPT2 adds a token's position to its embedding"),
        Outcome("llama+mqa", "proven", "largest error 1e-06"),
        Outcome("blt", "not built", "no | way"),
    ]
    write_guide(path, "5.24.0", outcomes)
    write_guide(path, "5.4.0", outcomes[:1])
    write_guide(path, "5.24.0", outcomes)
    text = path.read_text()
    assert text.index("| 5.4.0 | 1 | 1 | 0 | 0 | 0 | 0 |") < text.index("| 5.24.0 | 2 | 1 | 1 | 0 | 0 | 1 |")
    assert text.count("| 5.24.0 |") == 1
    assert "| `gpt2` | refused | learned or sinusoidal positions |" in text
    assert r"no \| way" in text
    with pytest.raises(ValueError, match="does not explain"):
        write_guide(path, "5.24.0", [Outcome("x", "refused", "because")])
    path.write_text("nothing")
    with pytest.raises(ValueError, match="the guide has no"):
        write_guide(path, "5.24.0", outcomes)
