"""Chunks, keys and fingerprints."""

import copy
import hashlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendkv import ChunkCache, attach, chunk_key, model_fingerprint, prefill
from blendkv.chunk import ids_bytes, tokenizer_fingerprint
from blendkv.testing import byte_tokenizer, tiny_model
from blendkv.weights import WeightsVersion, WeightsWatch
from tests.helpers import tokens

GOLDEN = "fe5b74b048c241f5c5b95d1f675186c9aaf75f1f8067a22f437bffa4ff19d376"
GOLDEN_KEYED = "014525eabe83d352b32342a8bc2e0aeb9e8d985da3e92a78caedfb80ed52f014"


def test_key_golden_vector():
    """A change here makes every stored chunk unreachable: raise KEY_VERSION and say so in the changelog."""
    given_ = ([1, 2, 70000], "f" * 64, (5,), "tok", "tenant")
    assert chunk_key(*given_) == GOLDEN
    assert chunk_key(*given_, secret=b"secret") == GOLDEN_KEYED


IDS = [0, 1, 255, 256, 70000, 2**32 - 1]
VECTORS = {
    "bare": ({}, "2ca433bd604006496740d2b875bc402114cc8915991066545ac07ab6a44231d7"),
    "namespace": (
        {"namespace": "tenant a/\u00e9\u6f22"},
        "153495e0aa6ba90f8b4da02b10e71e4c3b2b84af8bf4311e7ce20613733aad7b",
    ),
    "conditioning": ({"conditioning": (1, 50000)}, "f56d73535462730da6a05ff8f3722f259a42123a2ea6012a65dae46a9d00de64"),
    "tokenizer": (
        {"tokenizer": "0123456789abcdef" * 2},
        "6e117275118d21727e27502aacdc5d785931a607f5dbfb6ce9ee3fbada0893b0",
    ),
    "secret": ({"secret": b"0123456789abcdef"}, "9abcfaae785c61c6bbdb361ebf8e19973fb56f0bd0f88c89d24eefc06773d146"),
    "all": (
        {"conditioning": (2,), "tokenizer": "t", "namespace": "n", "secret": bytes(range(64))},
        "ef1446dd010f04fe5ec834ed801e281561a65dd5d1c9fb23fec35cbe7dd328c9",
    ),
}
"""Keys that must stay what they are: of `IDS` and the fingerprint "f" * 64, and of what else is given."""


@pytest.mark.parametrize("name", VECTORS)
def test_key_by_hand(name):
    """Each field behind its length, eight bytes, little-endian; ids four bytes each."""
    fields, want = VECTORS[name]

    def field(data):
        return len(data).to_bytes(8, "little") + data

    def numbers(ids):
        return b"".join(number.to_bytes(4, "little") for number in ids)

    payload = field((1).to_bytes(4, "little"))
    payload += field(fields.get("namespace", "").encode("utf-8")) + field(b"f" * 64)
    payload += field(fields.get("tokenizer", "").encode("utf-8"))
    payload += field(numbers(fields.get("conditioning", ()))) + field(numbers(IDS))
    secret = fields.get("secret")
    by_hand = hashlib.sha256(payload) if secret is None else hashlib.blake2b(payload, key=secret, digest_size=32)
    assert chunk_key(IDS, "f" * 64, **fields) == by_hand.hexdigest() == want
    assert (
        chunk_key(torch.tensor(IDS), "f" * 64, **fields)
        == chunk_key(np.array(IDS, np.uint32), "f" * 64, **fields)
        == want
    )


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.uint16, torch.int32, torch.int64])
def test_key_is_the_same_for_every_kind_of_ids(kind):
    ids = [3, 1, 4, 1, 5]
    if kind in (list, tuple):
        given_ = kind(ids)
    else:
        given_ = torch.tensor(ids, dtype=kind) if isinstance(kind, torch.dtype) else np.array(ids, dtype=kind)
    assert chunk_key(given_, "f") == chunk_key([3, 1, 4, 1, 5], "f")


@pytest.mark.parametrize("bad", [[-1], [2**32], [0.5], torch.tensor([1.0])])
def test_ids_that_do_not_fit_are_refused(bad):
    with pytest.raises(ValueError, match="token ids"):
        ids_bytes(bad)


@given(
    st.lists(
        st.tuples(st.text(), st.text(), st.text(), st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9))), max_size=8
    )
)
def test_no_two_lists_of_fields_share_a_key(fields):
    keys = {
        chunk_key(ids, fingerprint, conditioning, tokenizer, namespace)
        for namespace, fingerprint, tokenizer, conditioning, ids in {
            (a, b, c, tuple(d), tuple(e)) for a, b, c, d, e in fields
        }
    }
    assert len(keys) == len({(a, b, c, tuple(d), tuple(e)) for a, b, c, d, e in fields})


def test_key_depends_on_each_field():
    base = {"ids": [1, 2], "fingerprint": "f", "conditioning": [3], "tokenizer": "t", "namespace": "n"}
    changes = {"ids": [1, 3], "fingerprint": "g", "conditioning": [], "tokenizer": "u", "namespace": ""}
    keys = [chunk_key(**base), chunk_key(**base, secret=b"a"), chunk_key(**base, secret=b"b")]
    keys += [chunk_key(**base | {name: value}) for name, value in changes.items()]
    assert len(set(keys)) == len(keys)
    # a token may not move from the conditioning to the chunk unnoticed
    assert chunk_key([1, 2], "f", [3]) != chunk_key([2], "f", [3, 1]) != chunk_key([3, 1, 2], "f", [])


def test_fingerprint_is_stable_and_unmoved_by_attach():
    model = tiny_model("llama")
    print_ = model_fingerprint(model)
    assert print_ == model_fingerprint(tiny_model("llama"))
    attach(model)
    assert model_fingerprint(model) == print_
    assert model_fingerprint(tiny_model("llama", attn_implementation="eager")) == print_
    model.config.output_attentions = False
    model.config._name_or_path = "elsewhere"
    assert model_fingerprint(model) == print_


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.self_attn.v_proj.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"],
)
def test_fingerprint_changes_with_one_weight_element(name):
    model = tiny_model("llama")
    before, version, watch = model_fingerprint(model), WeightsVersion.of(model), WeightsWatch(model)
    assert watch.unchanged()
    with torch.no_grad():
        parameter = model.get_parameter(name).view(-1)
        parameter[parameter.numel() // 3] = torch.nextafter(parameter[parameter.numel() // 3], torch.tensor(9.0))
    assert model_fingerprint(model) != before
    assert WeightsVersion.of(model) != version
    assert not watch.unchanged()


def test_fingerprint_changes_with_swapped_rows_and_columns():
    model = tiny_model("llama")
    weight = model.model.layers[0].self_attn.k_proj.weight
    seen = {model_fingerprint(model)}
    with torch.no_grad():
        for dim in (0, 1):
            original = weight.clone()
            weight.copy_(weight.roll(1, dim))
            seen.add(model_fingerprint(model))
            weight.copy_(original)
        weight[0, 0], weight[0, 1] = weight[0, 1].item(), weight[0, 0].item()
        seen.add(model_fingerprint(model))
    assert len(seen) == 4


def test_fingerprint_changes_with_dtype_config_and_class():
    prints = {
        model_fingerprint(m)
        for m in (
            tiny_model("llama"),
            tiny_model("llama", dtype=torch.bfloat16),
            tiny_model("llama", rms_norm_eps=1e-5),
            tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            tiny_model("mistral"),
            tiny_model("llama").model,
        )
    }
    assert len(prints) == 6


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls deprecated names of transformers
def test_fingerprint_follows_adapters():
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    bare = model_fingerprint(model)
    config = peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    with_a = model_fingerprint(wrapped.get_base_model())
    wrapped.add_adapter("b", config)
    wrapped.set_adapter("b")
    with_b = model_fingerprint(wrapped.get_base_model())
    with wrapped.disable_adapter():
        off = model_fingerprint(wrapped.get_base_model())
    assert len({bare, with_a, with_b, off}) == 4
    chunk = prefill(wrapped, [tokens(5)], progress=False)[0]
    assert chunk.fingerprint == with_b


def test_equal_across_processes():
    code = (
        "from blendkv.testing import tiny_model, byte_tokenizer\n"
        "from blendkv import model_fingerprint, chunk_key\n"
        "from blendkv.chunk import tokenizer_fingerprint\n"
        "print(model_fingerprint(tiny_model('qwen3')), tokenizer_fingerprint(byte_tokenizer()), chunk_key([1], 'f'))"
    )
    want = f"{model_fingerprint(tiny_model('qwen3'))} {tokenizer_fingerprint(byte_tokenizer())} {chunk_key([1], 'f')}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == want


def test_tokenizer_fingerprint_changes_with_vocabulary_specials_and_merges():
    prints = {
        tokenizer_fingerprint(t)
        for t in (byte_tokenizer(), byte_tokenizer(bos=True), byte_tokenizer(merges=(("H", "e"),)))
    }
    assert len(prints) == 3


def test_shapes_are_checked():
    ids, ok = torch.arange(3), torch.zeros(2, 3, 4)
    ChunkCache(ids, (ok,), (ok,), "f")
    for keys, values in (
        ((ok,), ()),
        ((), ()),
        ((ok[:, :2],), (ok,)),
        ((ok[:1],), (ok,)),
        ((ok,), (ok[:, :2],)),
        ((ok[None],), (ok[None],)),
    ):
        with pytest.raises(ValueError, match="layer"):
            ChunkCache(ids, keys, values, "f")
    with pytest.raises(ValueError, match="at least one token"):
        ChunkCache(ids[:0], (ok[:, :0],), (ok[:, :0],), "f")


def test_repr_and_sizes_show_no_tokens():
    chunk = ChunkCache(torch.tensor([411, 422]), (torch.zeros(2, 2, 4),), (torch.zeros(2, 2, 4),), "f", text="secret")
    assert len(chunk) == 2
    assert chunk.nbytes == 2 * 2 * 2 * 4 * 4
    assert "411" not in repr(chunk)
    assert "secret" not in repr(chunk)
    assert chunk.to("cpu") is chunk


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda chunk: pickle.loads(pickle.dumps(chunk))])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_copy_says_where_its_own_tensors_are(copied, lazy):
    keys, values = (tuple(torch.randn(2, 4, 8) for _ in range(3)) for _ in range(2))
    chunk = ChunkCache(torch.arange(4), keys, values, "f", text="four")
    if lazy:
        known = {"addresses": chunk.addresses, "homes": chunk.homes}
        fields = {"conditioning": (), "tokenizer": "", "namespace": "", "text": "four"}
        chunk = ChunkCache.unchecked(lambda: (keys, values), ids=torch.arange(4), fingerprint="f", **fields, **known)
    assert chunk.addresses[0, 0, 0] == keys[0].data_ptr()
    assert chunk.homes[0] == torch.device("cpu")
    other = copied(chunk)
    at = [[(k.data_ptr(), 32), (v.data_ptr(), 32)] for k, v in zip(other.keys, other.values, strict=True)]
    assert other.addresses.tolist() == [[list(pair) for pair in layer] for layer in at]
    assert (other.key, other.text, repr(other)) == (chunk.key, "four", repr(chunk))
    assert all(torch.equal(a, b) for a, b in zip(other.keys + other.values, keys + values, strict=True))


def test_layers_that_share_memory_are_pickled_once():
    whole = torch.randn(16, 2, 4, 8)
    chunk = ChunkCache(torch.arange(4), tuple(whole[:8]), tuple(whole[8:]), "f")
    written = pickle.dumps(chunk)
    assert len(written) < 3 * whole.nbytes  # not 16 times
    again = pickle.loads(written)
    assert all(torch.equal(a, b) for a, b in zip(again.keys + again.values, whole, strict=True))
