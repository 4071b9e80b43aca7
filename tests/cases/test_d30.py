import warnings
from unittest import mock

import pytest
import torch

from blendkv import _compat, chunk
from blendkv.testing import byte_tokenizer
from tests.cases.common import answer, model_of
from tests.cases.stored import (
    DOCUMENTS,
    QUESTION,
    TOKENIZER,
    ask,
    assert_hit,
    assert_missed,
    differ,
    files_of,
    full,
    library,
)


@pytest.fixture(scope="module")
def base():
    """The model that filled the folder."""
    return model_of()


@pytest.fixture
def folder(tmp_path, base):
    """A folder with its chunks, which it finds again."""
    with library(base, tmp_path) as kv:
        assert ask(kv)[1].prefilled_tokens
    return tmp_path


def weights():
    model = model_of()
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.view(-1)[77] += 0.5
    return model


def revision():
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))  # keys and values are as before
    return model


def theta():
    return model_of(rope_parameters={"rope_type": "default", "rope_theta": 5e5})


def scaling():
    return model_of(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})


def dtype():
    return model_of(dtype=torch.bfloat16)


def quantisation():
    model = model_of()
    model.config.quantization_config = {"quant_method": "made up", "bits": 8}
    return model


def adapters():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return peft.get_peft_model(model_of(), config).eval()


def layout():
    mistral = model_of("mistral")
    mistral.load_state_dict(model_of().state_dict())  # the same numbers, laid out by another class
    return mistral


MODELS = [weights, revision, theta, scaling, dtype, quantisation, adapters, layout]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls deprecated names of transformers
@pytest.mark.parametrize("other", MODELS, ids=lambda make: make.__name__)
def test_d30_another_model_of_the_same_name_misses(folder, base, other):
    """KV of other weights was loaded because name, folder and tokens were the same (sglang#24758, orbitkv#132)."""
    model = other()
    reader = library(model, folder, on_miss="recompute")
    report = assert_missed(reader)
    assert not report.loaded
    if other not in (quantisation, layout):  # which compute the same
        assert differ(full(reader), full(library(base, folder)))
    assert_hit(library(base, folder))  # what was there is as it was
    before = len(files_of(folder))
    with library(model, folder) as kv:  # and the other model has entries of its own, beside them
        ask(kv)
    assert len(files_of(folder)) == 2 * before
    assert_hit(library(base, folder))


def test_d30_the_original_hits_again(folder):
    """The same weights read anew are the same model; so are they after a change that was taken back."""
    model = model_of()
    kv = library(model, folder, on_miss="recompute")
    assert_hit(kv)
    weight = model.model.layers[1].self_attn.k_proj.weight
    was = weight.detach().clone()
    with torch.no_grad():
        weight[3, 5] += 0.25
    kv.clear()
    assert not assert_missed(kv).loaded
    with torch.no_grad():
        weight.copy_(was)
    assert_hit(kv)


def test_d30_another_vocabulary_misses(folder, base):
    """The documents' ids are equal, and what they stand for need not be."""
    other = byte_tokenizer(chat=True, bos=True, merges=(("Z", "Q"),))
    prompts = [
        library(base, folder, tokenizer=tokenizer).assemble(DOCUMENTS, QUESTION) for tokenizer in (TOKENIZER, other)
    ]
    documents = [[piece.ids for piece in prompt.pieces if piece.kind == "chunk"] for prompt in prompts]
    assert documents[0] == documents[1]
    assert not assert_missed(library(base, folder, tokenizer=other, on_miss="recompute")).loaded
    assert_hit(library(base, folder))
    before = len(files_of(folder))
    with library(base, folder, tokenizer=other) as kv:
        ask(kv)
    assert len(files_of(folder)) == 2 * before
    assert_hit(library(base, folder))


@pytest.mark.parametrize("condition", ["bos", "system"])
def test_d30_another_position_convention_misses(folder, base, condition):
    """Chunks computed behind a BOS or a system prompt stand at other positions than those computed alone."""
    reader = library(base, folder, condition=condition, on_miss="recompute")
    report = assert_missed(reader)
    assert sum(report.loaded.values()) == report.chunks[0].found  # the head itself stands where it stood
    assert_hit(library(base, folder))


def test_d30_another_major_of_transformers_misses(folder, base):
    """Layouts of the cache differ between majors (latent attention did)."""
    major = int(_compat.TRANSFORMERS_VERSION.split(".")[0])
    with mock.patch.object(_compat, "TRANSFORMERS_VERSION", f"{major + 1}.0.0"):
        model = model_of()
        report = assert_missed(library(model, folder, on_miss="recompute"))
        assert not report.loaded
    with mock.patch.object(_compat, "TRANSFORMERS_VERSION", f"{major}.99.1"):
        assert_hit(library(model_of(), folder))
    assert_hit(library(base, folder))


def test_d30_another_version_of_keys_misses(folder, base, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(chunk, "KEY_VERSION", chunk.KEY_VERSION + 1)
        assert not assert_missed(library(base, folder, on_miss="recompute")).loaded
    assert_hit(library(base, folder))


def test_d30_another_version_of_the_file_misses_and_is_left_alone(folder, base):
    before = {path: path.read_bytes() for path in files_of(folder)}
    for path, data in before.items():
        changed = bytearray(data)
        changed[8] += 1
        path.write_bytes(changed)
    reader = library(base, folder, on_miss="recompute")
    report = assert_missed(reader)
    assert not report.loaded
    assert reader.pool.stats.unreadable == {"version": len(before)}
    assert len(files_of(folder)) == len(before)  # a newer blendkv can read them
    for path, data in before.items():
        path.write_bytes(data)
    assert_hit(library(base, folder))


def test_d30_a_stock_cache_would_not_complain(base):
    """Why it must be asked: other weights run without an error, and answer otherwise."""
    ids = torch.tensor([library(base, "memory://").assemble(DOCUMENTS, QUESTION).ids])
    assert differ(answer(base, ids), answer(weights(), ids))
