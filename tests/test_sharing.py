"""Libraries in folders and on the hub: everything that was saved is found again, and nothing else is."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blendkv import (
    HKVD,
    Boundary,
    ChunkLibrary,
    DiskStore,
    Pool,
    StoreError,
    TieredStore,
    decode_chunk,
    encode_chunk,
    open_store,
)
from blendkv.codecs import get_codec
from blendkv.container import ContainerReader
from blendkv.hub import card
from blendkv.manifest import Manifest, name_of
from blendkv.stores import RemoteStore, SavedStore
from blendkv.testing import byte_tokenizer, tiny_model
from tests import hub
from tests.chunks import assert_same
from tests.made_up import fit_profile
from tests.sharing_hub import DOCUMENTS

SECRET = b"0123456789abcdef"
QUESTION = "How high is it?"
TOKENIZER = byte_tokenizer(chat=True)


@pytest.fixture
def model(attached):
    return attached()


def library(model, store="memory://", **options):
    return ChunkLibrary(model, TOKENIZER, store, **options)


def load(folder, model, **options):
    return ChunkLibrary.from_pretrained(folder, model, TOKENIZER, **options)


def saved_keys(folder):
    return set(SavedStore(folder).keys())


def said_by(folder):
    return json.loads((Path(folder) / "library.json").read_text())


def answer(kv, documents=DOCUMENTS):
    inputs = kv(documents, QUESTION)
    out = kv.model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return out[0, inputs["input_ids"].shape[1] :].tolist(), inputs.report


def hits(kv, documents=DOCUMENTS):
    """Tokens of documents that came from what was saved."""
    loaded = kv(documents, QUESTION, recompute_ratio=0.0).report.loaded
    return sum(tokens for tier, tokens in loaded.items() if tier != "memory")


def tokens(documents=DOCUMENTS):
    return sum(len(document.encode()) for document in documents)


def profile_for(model):
    """A profile of this model's own chunks."""
    texts = [f"Sentence {i} of {j} about nothing in particular, to be measured." for i in range(6) for j in range(2)]
    return fit_profile(library(model).prefill(texts))


def test_a_round_trip_is_exact(model, tmp_path):
    kv = library(model, recompute_ratio=0.0)
    want, _ = answer(kv)
    assert kv.save_pretrained(tmp_path / "library", DOCUMENTS) is None
    assert saved_keys(tmp_path / "library") == set(kv.keys(DOCUMENTS)) == set(said_by(tmp_path / "library")["chunks"])
    other = load(tmp_path / "library", model, on_miss="recompute")
    for a, b in zip(kv.prefill(DOCUMENTS), other.prefill(DOCUMENTS), strict=True):
        assert_same(a, b)
    assert other.pool.stats.misses == 0
    got, report = answer(load(str(tmp_path / "library"), model))
    assert got == want
    assert report.loaded == {f"file://{tmp_path}/library": tokens()}
    assert report.put_failures == 0


def test_settings_come_back_and_can_be_overridden(model, tmp_path):
    kv = library(
        model,
        selector=HKVD("v"),
        check_layers={1: 0.5, 2: 0.25},
        chunk_tokens=40,
        separator="\n",
        namespace="team",
        condition="system",
    )
    kv.save_pretrained(tmp_path, DOCUMENTS, system="Be brief.")
    other = load(tmp_path, model)
    assert other.options["selector"] == HKVD("v")
    assert other.options["check_layers"] == {1: 0.5, 2: 0.25}
    assert (other.condition, other.namespace) == ("system", "team")
    assert other.keys(DOCUMENTS, "Be brief.") == kv.keys(DOCUMENTS, "Be brief.")
    assert other.keys(DOCUMENTS, "Be brief.") != other.keys(DOCUMENTS, "Be long.")
    assert hits(load(tmp_path, model), DOCUMENTS) == 0  # under another system prompt
    other = load(tmp_path, model, selector="boundary", check_layers=None, recompute_ratio=0.5, strict=True)
    assert other.options | {"reserve": 0} == {
        "selector": "boundary",
        "check_layers": None,
        "recompute_ratio": 0.5,
        "strict": True,
        "reserve": 0,
        "corrector": None,
    }
    assert hits(load(tmp_path, model, namespace="others", condition="none")) == 0
    assert load(tmp_path, model, recompute_ratio=0.25).options["check_layers"] is None  # or the ratio would not count


class Mine(Boundary):
    """A selector that nobody registered."""


def test_a_selector_without_a_name_is_not_saved(model, tmp_path):
    with pytest.warns(UserWarning, match="no registered name"):
        library(model, selector=Mine()).save_pretrained(tmp_path, DOCUMENTS)
    assert load(tmp_path, model).options["selector"] == "hkvd"
    said = said_by(tmp_path)
    said["settings"]["selector"] = {"name": "of another package", "settings": {}}
    (tmp_path / "library.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"cannot be made here .*pass selector="):
        load(tmp_path, model)
    assert load(tmp_path, model, selector="random").options["selector"] == "random"


def test_all_that_tiers_hold_of_this_library_and_nothing_else(model, tmp_path):
    store = tmp_path / "store"
    for namespace, seed in (("mine", 0), ("theirs", 0), ("mine", 1)):
        maker = model if seed == 0 else tiny_model("llama", seed=seed)
        library(maker, store, namespace=namespace).prefill(DOCUMENTS)
    ChunkLibrary(model, byte_tokenizer(chat=True, bos=True), store, namespace="mine").prefill(DOCUMENTS)
    assert len(set(DiskStore(store).keys())) == 4 * len(DOCUMENTS)
    kv = library(model, store, namespace="mine")  # nothing of it in memory
    kv.save_pretrained(tmp_path / "library")
    assert saved_keys(tmp_path / "library") == set(kv.keys(DOCUMENTS))
    for key in kv.keys(DOCUMENTS):
        assert DiskStore(store).get(key) == SavedStore(tmp_path / "library").get(key)
    assert hits(load(tmp_path / "library", model)) == tokens()


def test_memory_and_a_store_far_away_are_asked_for_their_keys(model, tmp_path):
    far = RemoteStore(f"memory://{tmp_path.name}")
    far.local = False
    library(model, far, namespace="n").prefill(DOCUMENTS[:2])
    far.put("ab" * 32, b"something else altogether")
    kv = library(model, TieredStore(far, write="back"), namespace="n")
    kv.prefill(DOCUMENTS[2:])
    kv.save_pretrained(tmp_path / "library")
    assert saved_keys(tmp_path / "library") == set(kv.keys(DOCUMENTS))


def test_a_subset_of_the_documents_is_computed_where_it_is_missing(model, tmp_path):
    kv = library(model, tmp_path / "store")
    kv.prefill([DOCUMENTS[0], "Not wanted."])
    kv.save_pretrained(tmp_path / "library", (document for document in [*DOCUMENTS[:2], DOCUMENTS[0]]))
    assert saved_keys(tmp_path / "library") == set(kv.keys(DOCUMENTS[:2]))
    assert set(kv.keys(DOCUMENTS[:2])) < set(DiskStore(tmp_path / "store").keys())
    assert hits(load(tmp_path / "library", model)) == tokens(DOCUMENTS[:2])
    with pytest.raises(TypeError, match="one string"):
        kv.save_pretrained(tmp_path / "library", "text")


def test_more_documents_than_are_saved_at_once(model, tmp_path):
    texts = [f"Document number {number}." for number in range(40)]
    kv = library(model)
    kv.prefill(texts[5:20])
    kv.save_pretrained(tmp_path, texts)
    assert saved_keys(tmp_path) == set(kv.keys(texts))


@pytest.mark.parametrize("held", ["tensors", "pool", "store"])
def test_a_lossy_codec_brings_its_profile(model, tmp_path, held, monkeypatch):
    codec = get_codec("klt", profile=profile_for(model), streams=2)
    store = {
        "tensors": "memory://",
        "pool": Pool(codec=codec),
        "store": TieredStore(DiskStore(tmp_path / "s"), codec=codec),
    }
    kv = library(model, store[held], recompute_ratio=0.0)
    kv.prefill(DOCUMENTS)
    kv.save_pretrained(tmp_path / "library", codec=codec if held == "tensors" else None)
    name = {"name": "klt", "level": 0, "profile": codec.profile_hash, "streams": 2}
    assert said_by(tmp_path / "library")["codecs"] == [name]
    assert os.listdir(tmp_path / "library/profiles") == [f"{codec.profile_hash}.safetensors"]
    want = [
        decode_chunk(encode_chunk(chunk, codec), profiles=codec.profile) for chunk in library(model).prefill(DOCUMENTS)
    ]
    other = load(tmp_path / "library", model)
    here = Path(os.environ["BLENDKV_HOME"]) / "profiles" / f"{codec.profile_hash}.safetensors"
    assert not here.exists()  # nowhere but in the folder
    for a, b in zip(want, other.prefill(DOCUMENTS), strict=True):
        assert_same(a, b)
    assert other.pool.stats.misses == 0
    assert "lossy" in str(other.pool.notes)
    other = load(tmp_path / "library", model, store=tmp_path / "near")
    other.prefill(["Something new."])
    (key,) = other.keys(["Something new."])
    assert ContainerReader(DiskStore(tmp_path / "near").get(key)).header.codec == "klt"
    # given away again as it is, and back to raw
    other.save_pretrained(tmp_path / "again", DOCUMENTS)
    for key in kv.keys(DOCUMENTS):
        assert SavedStore(tmp_path / "again").get(key) == SavedStore(tmp_path / "library").get(key)
    other.save_pretrained(tmp_path / "raw", DOCUMENTS, codec="raw")
    assert said_by(tmp_path / "raw")["codecs"] == [{"name": "raw", "level": 1, "profile": None}]
    for a, b in zip(want, load(tmp_path / "raw", model).prefill(DOCUMENTS), strict=True):
        assert_same(a, b)
    # without the profile: misses
    (tmp_path / f"library/profiles/{codec.profile_hash}.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="cannot be read here"):
        bare = load(tmp_path / "library", model)
    assert hits(bare) == 0
    assert bare.pool.stats.unreadable == {"profile": len(DOCUMENTS)}


def test_what_a_codec_refuses_is_raw(model, tmp_path):
    profile = fit_profile(
        library(tiny_model("llama", num_key_value_heads=4)).prefill(["Some other model's shape."] * 9)
    )
    kv = library(model)
    with pytest.warns(UserWarning, match="refused 3 chunks, which are raw"):
        kv.save_pretrained(tmp_path, DOCUMENTS, codec=get_codec("klt", profile=profile))
    assert hits(load(tmp_path, model)) == tokens()


def test_sealed_stays_sealed(model, tmp_path):
    kv = library(model, tmp_path / "store", secret=SECRET)
    kv.prefill(DOCUMENTS[:2])
    kv.save_pretrained(tmp_path / "library", DOCUMENTS)
    text = (tmp_path / "library/library.json").read_text()
    assert SECRET.decode() not in text
    assert SECRET.hex() not in text
    assert said_by(tmp_path / "library")["sealed"] is True
    for data in SavedStore(tmp_path / "library").get_many(kv.keys(DOCUMENTS)).values():
        assert decode_chunk(data, secret=SECRET)
        with pytest.raises(ValueError, match="sealed"):
            decode_chunk(data)
    assert hits(load(tmp_path / "library", model, secret=SECRET)) == tokens()
    assert hits(load(tmp_path / "library", model, store=tmp_path / "near", secret=SECRET)) == tokens()
    with pytest.raises(ValueError, match="no secret was given"):
        load(tmp_path / "library", model)
    with pytest.raises(ValueError, match="another secret"):
        load(tmp_path / "library", model, secret=b"another secret!!")
    assert hits(load(tmp_path / "library", model, secret=b"another secret!!", ignore_mismatch=True)) == 0
    library(model).save_pretrained(tmp_path / "open", DOCUMENTS)
    with pytest.raises(ValueError, match="not sealed"):
        load(tmp_path / "open", model, secret=SECRET)


def test_a_secret_in_memory_seals_what_is_saved(model, tmp_path):
    library(model, secret=SECRET).save_pretrained(tmp_path, DOCUMENTS)
    assert hits(load(tmp_path, model, secret=SECRET)) == tokens()


@pytest.mark.parametrize("near", ["folder", "store", "pool", "tiers", "back"])
def test_it_lies_under_the_given_store(model, tmp_path, near):
    library(model).save_pretrained(tmp_path / "library", DOCUMENTS[:2])
    before = {path: path.read_bytes() for path in (tmp_path / "library").rglob("*") if path.is_file()}
    disk = DiskStore(tmp_path / "near")
    given = {
        "folder": tmp_path / "near",
        "store": disk,
        "pool": Pool(),
        "tiers": TieredStore(disk),
        "back": TieredStore(Pool(), disk, write="back"),
    }[near]
    kv = load(tmp_path / "library", model, store=given)
    assert hits(kv) == tokens(DOCUMENTS[:2])
    kv.flush()
    assert near == "pool" or set(kv.keys(DOCUMENTS)) <= set(disk.keys())  # promoted, and what was new
    assert hits(load(tmp_path / "library", model, store=given if near == "pool" else disk)) == (
        0 if near == "pool" else tokens() + len(kv(DOCUMENTS, QUESTION).cache.chunks[0][0])
    )
    assert before == {path: path.read_bytes() for path in (tmp_path / "library").rglob("*") if path.is_file()}


def test_strict_is_content_with_memory_where_nothing_can_be_written(model, tmp_path):
    library(model).save_pretrained(tmp_path, DOCUMENTS[:1])
    _, report = answer(load(tmp_path, model, strict=True))
    assert report.put_failures == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "folder", "gone"])
def test_damaged_files_are_counted_misses(model, tmp_path, damage):
    kv = library(model, recompute_ratio=0.0)
    kv.save_pretrained(tmp_path, DOCUMENTS)
    want, _ = answer(kv)
    paths = [next(tmp_path.rglob(f"{key}.bkv")) for key in kv.keys(DOCUMENTS)]
    data = paths[0].read_bytes()
    paths[0].unlink()
    if damage == "flip":
        paths[0].write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "cut":
        paths[0].write_bytes(data[:-16])
    elif damage == "swap":
        paths[0].write_bytes(paths[1].read_bytes())
    elif damage == "folder":
        paths[0].mkdir()
    other = load(tmp_path, model)
    got, report = answer(other)
    assert got == want
    assert sum(n for tier, n in report.loaded.items() if tier != "memory") == tokens(DOCUMENTS[1:])
    assert sum(other.pool.stats.damaged.values()) == (damage in ("flip", "cut", "swap"))
    assert damage not in ("flip", "cut", "swap") or paths[0].is_file()  # it is somebody else's folder


def test_damaged_copies_are_not_given_away(model, tmp_path):
    kv = library(model, tmp_path / "store")
    kv.prefill(DOCUMENTS)
    path = next((tmp_path / "store").rglob(f"{kv.keys(DOCUMENTS)[0]}.bkv"))
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    fresh = library(model, tmp_path / "store")
    with pytest.warns(UserWarning, match="1 chunks were left out"):
        fresh.save_pretrained(tmp_path / "all")
    assert saved_keys(tmp_path / "all") == set(kv.keys(DOCUMENTS[1:]))
    fresh.save_pretrained(tmp_path / "library", DOCUMENTS)  # computed again
    assert hits(load(tmp_path / "library", model)) == tokens()


KILLED = """
import os, signal, sys
from blendkv import ChunkLibrary, DiskStore
from blendkv.testing import byte_tokenizer, tiny_model
from tests.sharing_hub import DOCUMENTS
put, count = DiskStore.put, 0
def killed(self, key, data):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, key, data)
DiskStore.put = killed
ChunkLibrary(tiny_model("llama"), byte_tokenizer(chat=True)).save_pretrained(sys.argv[1], DOCUMENTS)
"""


@pytest.mark.slow
def test_killed_in_the_middle_is_no_library(model, tmp_path):
    """Two files are there, and nobody takes them for a library; saving again makes it one."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parent.parent, check=False
    )
    assert process.returncode == -signal.SIGKILL
    assert len(saved_keys(tmp_path)) == 2
    with pytest.raises(StoreError, match=r"no library\.json.*not finished.*save_pretrained again"):
        load(tmp_path, model)
    library(model).save_pretrained(tmp_path, DOCUMENTS)
    assert hits(load(tmp_path, model)) == tokens()


def test_an_error_in_the_middle_leaves_the_library_that_was_there(model, tmp_path, monkeypatch):
    kv = library(model)
    kv.save_pretrained(tmp_path, DOCUMENTS[:1])
    monkeypatch.setattr(DiskStore, "put", lambda self, key, data: self.stats.count("put_failures", "full"))
    with pytest.raises(StoreError, match=r"could not be written \(full\): make room"):
        kv.save_pretrained(tmp_path, DOCUMENTS)
    assert hits(load(tmp_path, model)) == tokens(DOCUMENTS[:1])
    monkeypatch.undo()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="No space left"):
        kv.save_pretrained(tmp_path, DOCUMENTS)
    monkeypatch.undo()
    assert hits(load(tmp_path, model)) == tokens()  # files of both, settings of the first
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_other_files_in_the_folder_stay(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "data.bin").write_bytes(b"mine too")
    kv = library(model)
    kv.save_pretrained(tmp_path, DOCUMENTS[:1])
    kv.save_pretrained(tmp_path, DOCUMENTS[1:])
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "ab" / "data.bin").read_bytes() == b"mine too"
    assert set(said_by(tmp_path)["chunks"]) == set(kv.keys(DOCUMENTS[1:]))
    assert hits(load(tmp_path, model)) == tokens()


def test_a_folder_that_cannot_be_written(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="a file of that name"):
        library(model).save_pretrained(tmp_path / "file", DOCUMENTS)
    with pytest.raises(StoreError, match="a file of that name, or on the way"):
        library(model).save_pretrained(tmp_path / "file" / "library", DOCUMENTS)
    if os.geteuid():
        (tmp_path / "mine").mkdir(mode=0o500)
        with pytest.raises(StoreError, match="permission denied"):
            library(model).save_pretrained(tmp_path / "mine", DOCUMENTS)


def test_the_folder_is_a_store(model, tmp_path):
    library(model).save_pretrained(tmp_path, DOCUMENTS)
    kv = library(model, open_store(str(tmp_path)))
    assert hits(kv) == tokens()
    kv.save_pretrained(tmp_path)  # into itself
    assert hits(load(tmp_path, model)) >= tokens()


def test_another_model_tokenizer_or_dtype_is_refused_by_name(model, tmp_path):
    library(model).save_pretrained(tmp_path, DOCUMENTS)
    other = tiny_model("llama", seed=1)
    with pytest.raises(ValueError, match=r"does not fit: it was made with the model .* fingerprint .*ignore_mismatch"):
        load(tmp_path, other)
    with pytest.raises(ValueError, match=r"made in fp32, and this model is in bf16"):
        load(tmp_path, tiny_model("llama", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"tokenizer of digest"):
        ChunkLibrary.from_pretrained(tmp_path, model, byte_tokenizer(chat=True, bos=True))
    kv = load(tmp_path, other, ignore_mismatch=True)
    _, report = answer(kv)
    assert report.loaded == {}
    assert kv.pool.stats.misses >= len(DOCUMENTS)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda said: said | {"format_version": 2}, "format 2, and this blendkv .* reads 1: update blendkv"),
        (lambda said: said | {"chunks": []}, r"library\.json is damaged .*chunks"),
        (lambda said: said | {"settings": {}}, r"library\.json is damaged"),
        (lambda said: said | {"model": None}, r"library\.json is damaged"),
        (lambda said: [said], r"library\.json is damaged"),
    ],
    ids=["newer", "chunks", "settings", "model", "list"],
)
def test_what_cannot_be_understood_is_refused(model, tmp_path, change, match):
    library(model).save_pretrained(tmp_path, DOCUMENTS)
    (tmp_path / "library.json").write_text(json.dumps(change(said_by(tmp_path))))
    with pytest.raises(StoreError, match=match):
        load(tmp_path, model)
    (tmp_path / "library.json").write_text('{"format_version": 1, ')
    with pytest.raises(StoreError, match="damaged"):
        load(tmp_path, model)


@pytest.mark.parametrize("name", ["nobody/nothing", "./nothing", "/nothing/at/all", "~/nothing/at/all", "not a name"])
def test_neither_a_folder_nor_a_repository(model, name):
    with pytest.raises(StoreError, match=r"is no folder, and no dataset repository of the hub.*HF_HUB_OFFLINE"):
        load(name, model)


def test_options_of_the_hub_need_the_hub(model, tmp_path):
    with pytest.raises(TypeError, match="push_to_hub=True"):
        library(model).save_pretrained(tmp_path, DOCUMENTS, repo_id="a/b")


def test_no_paths_are_told(tmp_path):
    model = tiny_model("llama")
    for path in (str(tmp_path), "/home/somebody/models/tiny-7b", "C:\\models\\tiny-7b", str(tmp_path) + "/"):
        model.config._name_or_path = path
        assert name_of(model) == path.rstrip("/").replace("\\", "/").rpartition("/")[2]
    for name in ("meta-llama/Llama-3.1-8B", "gpt2", ""):
        model.config._name_or_path = name
        assert name_of(model) == name
    model.config._name_or_path = str(tmp_path)
    library(model, tmp_path / "store").save_pretrained(tmp_path / "library", DOCUMENTS)
    assert str(tmp_path) not in (tmp_path / "library/library.json").read_text()


def test_a_snapshot_of_links_is_read(model, tmp_path):
    """As the hub's cache lays it out."""
    kv = library(model)
    kv.save_pretrained(tmp_path / "library", DOCUMENTS)
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted((tmp_path / "library").rglob("*.*"))):
        blob = path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(os.path.relpath(blob, path.parent))
    assert all(path.is_symlink() for path in (tmp_path / "library").rglob("*.bkv"))
    assert hits(load(tmp_path / "library", model)) == tokens()
    assert saved_keys(tmp_path / "library") == set(kv.keys(DOCUMENTS))


def run(hub_url, home, *arguments):
    """`tests.sharing_hub` in a process with the hub's address in its environment; what it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_standin"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "tests.sharing_hub", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_to_the_hub_and_back(model, tmp_path):
    with hub.running() as server:
        pushed = run(server.url, tmp_path / "one", "push", "someone/tower")
        repo = "datasets/someone/tower"
        files = server.files(repo)
        first = server.created[0]
        assert first.get("visibility") == "private" or first["private"]  # by version
        assert pushed["message"] == "two"
        assert pushed["oids"][1] == server.sha(repo)
        kv = library(model, recompute_ratio=0.0)
        names = {f"{key[:2]}/{key}.bkv" for key in kv.keys(DOCUMENTS)}
        assert set(files) == names | {"README.md", "library.json"}
        assert server.uploads == sum(len(files[name]) for name in names)  # none of them twice
        assert b"base_model" not in files["README.md"]  # a model that is on no hub
        assert files["README.md"].startswith(b"---\nlibrary_name: blendkv\ntags:\n- blendkv\n- kv-cache\n")
        pulled = run(server.url, tmp_path / "two", "pull", "someone/tower")
    want, _ = answer(kv)
    assert pulled["answer"] == want
    assert pulled["loaded"] == [tokens()]
    assert pulled["hits"].count(True) == len(DOCUMENTS)
    assert pulled["ratio"] == 0.0
    assert "is no folder, and no dataset repository" in pulled["error"]
    snapshots = list((tmp_path / "two").rglob("*.bkv"))
    assert len(snapshots) == len(DOCUMENTS)
    assert all(path.is_symlink() for path in snapshots)


def test_a_card_says_how_to_load(model, tmp_path):
    library(model, secret=SECRET).save_pretrained(tmp_path, DOCUMENTS)
    manifest = replace(Manifest.read(tmp_path), name_or_path="meta-llama/Llama-3.1-8B")
    text = card(manifest, "someone/tower", "model")
    assert "\nbase_model: meta-llama/Llama-3.1-8B\n---\n" in text
    assert 'from_pretrained("someone/tower", model, tokenizer, repo_type="model", secret=secret)' in text
    assert "sealed" in text


@pytest.mark.parametrize("folder", ["file:///tmp/library", "s3://bucket/library", ""])
def test_only_a_folder_is_saved_into(model, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"give (the path of )?a folder"):
        library(model).save_pretrained(folder, DOCUMENTS)
    assert not list(tmp_path.iterdir())


def test_a_lossy_library_is_a_store_too(model, tmp_path):
    codec = get_codec("klt", profile=profile_for(model))
    library(model).save_pretrained(tmp_path / "library", DOCUMENTS, codec=codec)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.bkv")}
    kv = library(model, tmp_path / "library")
    assert hits(kv) == tokens()
    kv.close()
    assert {path: path.read_bytes() for path in files} == files  # not written again as raw
    kv = library(model, str(tmp_path / "library"), codec="raw")
    kv.prefill(DOCUMENTS)
    assert kv.pool.stats.misses == 0
    (tmp_path / f"library/profiles/{codec.profile_hash}.safetensors").unlink()
    kv = library(model, tmp_path / "library")
    kv.prefill(DOCUMENTS)
    assert kv.pool.stats.misses == len(DOCUMENTS)
    assert any("profiles=" in note for note in kv.pool.notes)
