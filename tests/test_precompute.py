"""`blendkv precompute`: documents out of files, chunks into a store, alone and by several processes."""

import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from blendkv import ChunkLibrary, Pool
from blendkv.chunkfile import ChunkFile
from blendkv.cli import main
from blendkv.codecs import load_profile
from blendkv.container import read_head
from blendkv.documents import count_documents, find_files, read_documents
from blendkv.errors import StoreError
from blendkv.levelkeys import name_in
from blendkv.precompute import ASK_BATCHES, Precomputed, precompute
from blendkv.prefilling import prefill
from blendkv.stores import DiskStore, TieredStore
from blendkv.testing import byte_tokenizer, tiny_model
from tests.stores.servers import free_port

TEXTS = [f"Document {i} says that {i} times {i} is {i * i}. " * (1 + i % 3) for i in range(12)]


# -- documents --------------------------------------------------------------------------------------------------------


def texts_of(*paths, field="text"):
    files = find_files(paths)
    texts = list(read_documents(files, field))
    assert count_documents(files, field) == len(texts)
    return texts


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_documents_of_files_and_folders(tmp_path):
    a = write(tmp_path / "a.txt", "text a\n")
    lines = write(tmp_path / "sub" / "b.jsonl", '{"text": "b1", "id": 1}\n\n"b2"\n{"text": " "}\n')
    items = write(tmp_path / "c.json", '[{"body": "c1"}, {"body": "c2"}]')
    write(tmp_path / "sub" / "deep" / "d.MD", b"\xef\xbb\xbf# d")
    write(tmp_path / "sub" / "empty.txt", "")
    write(tmp_path / "sub" / ".hidden" / "e.txt", "hidden")
    write(tmp_path / "sub" / "f.bin", b"\0")
    assert texts_of(a, lines) == ["text a\n", "b1", "b2"]
    assert texts_of(tmp_path) == ["text a\n", "b1", "b2", "# d"]  # .json of a folder may be anything
    assert texts_of(items, field="body") == ["c1", "c2"]
    assert texts_of(a, tmp_path, a) == ["text a\n", "b1", "b2", "# d"]  # each file once
    other = write(tmp_path / "named.log", "a log")
    assert texts_of(other) == ["a log"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "is empty: leave it out"),
        ("a.txt", " \n", "holds no text: leave it out"),
        ("a.txt", b"text\0text", "is a binary file, no text"),
        ("a.txt", b"text \xff\xfe", r"no UTF-8 text \(byte 5\): convert it"),
        ("a.json", "", "is empty: leave it out"),
        ("a.json", "[]", "holds no text"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.json", "[1]", r"item 1 is a int: an item is a string, or an object with a field 'text'"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"id": 1, "body": "b"}\n',
            r"line 2 has no field 'text': name one of body, id with",
        ),
        ("a.jsonl", '{"text": 3}', r"line 1: the field 'text' is a int, not a string"),
        ("a.jsonl", "{}", r"line 1 has no field 'text': name one of \(it has none\)"),
        ("a.jsonl", '{"text": "a"}\nnonsense', "line 2 is not JSON"),
    ],
    ids=str,
)
def test_bad_files_are_one_sentence(tmp_path, name, content, message):
    write(tmp_path / "good.txt", "good")
    with pytest.raises(ValueError, match=message):
        texts_of(tmp_path / "good.txt", write(tmp_path / name, content))


def test_nothing_to_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.txt is not there: give files, or folders"):
        find_files([tmp_path / "none.txt"])
    with pytest.raises(ValueError, match=r"holds no \.txt, \.md, \.jsonl"):
        find_files([tmp_path])
    write(tmp_path / "empty.txt", "")
    with pytest.raises(ValueError, match="there are no documents"):
        count_documents(find_files([tmp_path]))


# -- precompute, over any library -------------------------------------------------------------------------------------


@pytest.fixture
def library(attached):
    def make(**options):
        return ChunkLibrary(attached(), byte_tokenizer(chat=True), **options)

    return make


def test_chunks_are_those_that_the_library_would_compute(library):
    kv = library(chunk_tokens=40, batch_tokens=64)
    seen = []
    done = precompute(kv, iter(TEXTS), on_batch=seen.append)
    alone = library(chunk_tokens=40).prefill(TEXTS)
    assert sorted(kv.pool.keys()) == sorted({chunk.key for chunk in alone})
    assert (done.documents, done.chunks, done.tokens) == (12, len(alone), sum(map(len, alone)))
    assert done.computed == len({chunk.key for chunk in alone})
    assert (done.found, done.refused, done.evicted) == (done.chunks - done.computed, 0, 0)
    assert seen[-1] == done
    assert len(seen) > 2
    assert [one.documents for one in seen] == sorted(one.documents for one in seen)


def test_what_is_there_is_not_computed_again(library, monkeypatch):
    pool = Pool()
    half = precompute(library(store=pool), TEXTS[:5])
    assert (half.found, half.computed) == (0, 5)
    rest = precompute(library(store=pool), [*TEXTS, TEXTS[0]])
    assert (rest.documents, rest.found, rest.computed) == (13, 6, 7)
    monkeypatch.setattr("blendkv.supply.prefill", lambda *args, **kwargs: pytest.fail("computed again"))
    assert precompute(library(store=pool), TEXTS).computed == 0


def test_batches_are_full_and_memory_is_bounded(library, monkeypatch):
    """Whatever documents are like: many short ones, one that is longer than all batches."""
    asked, plain = [], ChunkLibrary.prefill
    monkeypatch.setattr(
        ChunkLibrary,
        "prefill",
        lambda self, texts, system=None: asked.append(list(texts)) or plain(self, texts, system),
    )
    kv, most = library(chunk_tokens=30, batch_tokens=50), ASK_BATCHES * 50
    long = " ".join(f"Sentence number {i} of a long text." for i in range(30))
    documents = [*TEXTS[:6], long, *TEXTS[:6]]
    done = precompute(kv, documents)
    assert "".join("".join(texts) for texts in asked) == "".join(documents)
    tokens = [sum(len(kv.tokenizer(text)["input_ids"]) for text in texts) for texts in asked]
    assert max(tokens) <= most
    assert all(count > most - 30 for count in tokens[:-1])
    assert done.documents == len(documents)


def test_documents_are_read_as_they_are_needed(library):
    read = []

    def documents():
        for text in TEXTS[:8]:
            read.append(text)
            yield text

    behind = []
    precompute(library(batch_tokens=32), documents(), on_batch=lambda done: behind.append(len(read) - done.documents))
    assert max(behind) <= 1


def test_conditioning_is_part_of_it(library):
    kv = library(condition="system")
    precompute(kv, TEXTS[:2], system="Be brief.")
    [chunk, _] = kv.prefill(TEXTS[:2], system="Be brief.")
    assert len(chunk.conditioning) > 0
    assert precompute(kv, TEXTS[:2], system="Be brief.").computed == 0
    assert precompute(kv, TEXTS[:2], system="Be long.").computed == 2


class Full(DiskStore):
    """Keeps so many entries, and no more."""

    room = 0

    def put(self, key, data):
        if self.room <= 0:
            self.stats.count("put_failures", "full")
            return False
        self.room -= 1
        return super().put(key, data)


def test_a_store_that_keeps_nothing_stops_it(library, tmp_path):
    store = Full(tmp_path)
    kv = library(store=TieredStore(Pool(1 << 20), store, write="through"), batch_tokens=32)
    with pytest.raises(StoreError, match=r"kept none of \d chunks \(full\): make room"):
        precompute(kv, TEXTS)
    store.room = 2
    kv = library(store=TieredStore(Pool(1 << 20), store, write="through"), batch_tokens=4096)
    done = precompute(kv, TEXTS)
    assert (done.computed, done.refused, len(list(store.keys()))) == (12, 10, 2)


def test_a_library_is_all_that_it_needs():
    """A stand-in with a lazily writing store: flushed before what was refused is counted."""
    stats = SimpleNamespace(hits=Counter(), uncoded=0, refusal="")
    store = SimpleNamespace(stats=SimpleNamespace(put_failures=0, evictions=3, faults=Counter()))

    class Fake:
        pool = SimpleNamespace(stats=stats, stores=[store])
        layout = SimpleNamespace(document=lambda text: [SimpleNamespace(text=text, ids=range(10))])
        batch_tokens = 10

        def prefill(self, documents, system=None):
            stats.hits["far"] += 1
            self.waiting = len(documents) - 1
            return [Chunk(text) for text in documents]

        def flush(self):
            store.stats.put_failures += self.waiting - 1
            store.stats.evictions += 1

    class Chunk(str):
        @property
        def key(self):
            return str(self)

    done = precompute(Fake(), ["a", "b", "c", "d", "e", "f", "g"])
    assert (done.documents, done.found, done.computed, done.refused, done.evicted) == (7, 2, 5, 3, 2)


def test_sums_of_processes():
    total = Precomputed(1, 2, 3, 4, 5, 6, 7, 8.0) + Precomputed(10, 20, 30, 40, 50, 60, 70, 5.0)
    assert total == Precomputed(11, 22, 33, 44, 55, 66, 77, 8.0)


# -- the command ------------------------------------------------------------------------------------------------------


def load_tiny(*args, **kwargs):
    return tiny_model("llama"), byte_tokenizer(chat=True)


@pytest.fixture
def run(monkeypatch):
    """`run(*arguments)`: the command's result, on a tiny Llama whatever MODEL says."""
    monkeypatch.setattr("blendkv.models.load_model", load_tiny)
    return lambda *arguments: CliRunner().invoke(main, ["precompute", "m", *map(str, arguments)])


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    write(folder / "a.jsonl", "\n".join(json.dumps({"text": text}) for text in TEXTS[:10]))
    for i in (10, 11):
        write(folder / f"{i}.txt", TEXTS[i])
    return folder


def only_json(result):
    return json.loads(result.stdout, parse_constant=pytest.fail)


def test_the_command_fills_a_store_that_a_library_reads(run, data, tmp_path):
    store = tmp_path / "store"
    result = run(data, "--store", store, "--chunk-tokens", 40, "--batch-tokens", 128, "--json")
    assert result.exit_code == 0, result.stderr
    told = only_json(result)
    assert (told["documents"], told["files"], told["found"], told["processes"]) == (
        12,
        3,
        told["chunks"] - told["computed"],
        1,
    )
    assert (told["store"], told["codec"], told["level"]) == (f"file://{store}", "raw", 0)
    assert (told["refused"], told["evicted"]) == (0, 0)
    assert len(list(DiskStore(store).keys())) == told["computed"] > 12
    kv = ChunkLibrary(*load_tiny(), store=store, chunk_tokens=40)
    chunks = kv.prefill(TEXTS)
    assert kv.pool.stats.misses == 0
    twins = prefill(kv.model, [chunk.ids for chunk in chunks], progress=False)
    assert all(torch.allclose(a.keys[2], b.keys[2], atol=1e-5) for a, b in zip(chunks, twins, strict=True))
    kv.close()
    again = run(data, "--store", store, "--chunk-tokens", 40)
    assert again.exit_code == 0, again.stderr
    assert f"12 documents, {told['chunks']} chunks" in again.stdout
    assert f"0 chunks computed, {told['chunks']} found" in again.stdout


def test_the_command_codes_and_conditions(run, data, tmp_path):
    profile = tmp_path / "profiles"
    arguments = ["--data", data / "a.jsonl", "--passages", 4, "--tokens", 64, "--continuation", 8, "--codec", "klt"]
    made = CliRunner().invoke(main, ["profile", "m", *map(str, arguments), "--out", str(profile)])
    assert made.exit_code == 0, made.stderr
    options = ["--codec", "klt", "--level", -2, "--profile", profile / "klt.safetensors", "--namespace", "n"]
    options += ["--condition", "system", "--system", "Be brief."]
    result = run(data, "--store", tmp_path / "store", *options, "--json")
    assert result.exit_code == 0, result.stderr
    told = only_json(result)
    assert (told["codec"], told["level"], told["computed"]) == ("klt", -2, 12)
    store, profiles = DiskStore(tmp_path / "store"), load_profile(profile / "klt.safetensors")
    for entry in store.entries():
        with ChunkFile(store.get(entry.key), profiles=profiles) as file:
            assert file.key == entry.key
            assert (file.header.namespace, file.header.codec, file.header.level) == ("n", "klt", -2)
            assert len(file.conditioning) > 0
    beside = ["--levels", "klt@0,klt@4", "--profile", profile / "klt.safetensors"]
    result = run(data, "--store", tmp_path / "levels", *beside, "--json")
    assert result.exit_code == 0, result.stderr
    store = DiskStore(tmp_path / "levels")
    heads = [read_head(store.get(entry.key)).header for entry in store.entries()]
    assert Counter(map(name_in, heads)) == {"raw": 12, "klt@0": 12, "klt@4": 12}


def test_the_command_is_resumed_after_it_was_stopped(run, data, tmp_path, monkeypatch):
    from blendkv import precompute as module

    plain, arguments = module.precompute, (data, "--store", tmp_path / "store", "--batch-tokens", 32)

    def stopped(library, documents, on_batch, **options):
        def stop(done):
            if done.documents > 5:
                raise KeyboardInterrupt

        return plain(library, documents, on_batch=stop, **options)

    monkeypatch.setattr(module, "precompute", stopped)
    assert run(*arguments).exit_code != 0
    there = len(list(DiskStore(tmp_path / "store").keys()))
    assert there > 5
    monkeypatch.undo()
    monkeypatch.setattr("blendkv.models.load_model", load_tiny)
    told = only_json(run(*arguments, "--json"))
    assert (told["found"], told["computed"]) == (there, 12 - there)


def test_a_full_folder_is_told(run, data, tmp_path):
    result = run(data, "--store", tmp_path / "store", "--capacity", "300k", "--batch-tokens", 64)
    assert result.exit_code == 0, result.stderr
    assert "entries gave way to others" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.txt", "--store", "s"], "none.txt is not there"),
        (["{data}", "--field", "body", "--store", "s"], "has no field 'body': name one of text with --field"),
        (["{data}", "--store", "nope://u:geheim@x"], "unknown scheme 'nope'"),
        (["{data}", "--store", "s", "--codec", "klt"], "--profile FOLDER/klt.safetensors reads it"),
        (["{data}", "--store", "s", "--level", "3"], "raw has level 0"),
    ],
    ids=["file", "field", "scheme", "profile", "level"],
)
def test_bad_input_is_one_line(run, data, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run(*(part.format(data=data) for part in arguments))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert "geheim" not in result.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["f"],
        ["f", "--store", "s", "--condition", "magic"],
        ["f", "--store", "s", "--system", "x"],
        ["f", "--store", "s", "--chunk-tokens", "0"],
        ["f", "--store", "s", "--capacity", "much"],
        ["f", "--store", "s3://b", "--capacity", "1G"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.slow
def test_two_processes_take_a_share_each(data, tmp_path):
    """As `accelerate launch` starts them on GPUs, and torchrun everywhere: one sum, and together all chunks."""
    script = write(
        tmp_path / "main.py",
        "import blendkv.models\nfrom tests.test_precompute import load_tiny\n"
        "blendkv.models.load_model = load_tiny\nfrom blendkv.cli import main\nmain()\n",
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [*launch, str(script), "precompute", "m", str(data), "--store", str(tmp_path / "store"), "--json"]
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert (told["processes"], told["documents"], told["computed"]) == (2, 12, 12)
    assert len(list(DiskStore(tmp_path / "store").keys())) == 12
