import importlib.util
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import blendkv
from blendkv import BlendedCache, ChunkLibrary, UnsupportedModelError, _compat, attach, detach, prefill, proof
from blendkv.testing import byte_tokenizer
from tests.cases.common import assert_same_run, forward, ids_of, model_of

HOME = Path(blendkv.__file__).parent
DOCUMENTS = [ids_of(30, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(DOCUMENTS)[None], ids_of(8, 3)], dim=1)
NEW_NAME = "cache" in inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters


@pytest.mark.parametrize("name", ["past_key_values", "cache"] if NEW_NAME else ["past_key_values"])
def test_d20_generate_takes_the_cache_under_every_name_the_installed_transformers_has(name):
    """`past_key_values=` becomes `cache=` (MemTensor/MemOS#177): both work, and blendkv itself never warns."""
    model = model_of()
    chunks = prefill(model, DOCUMENTS, progress=False)
    wanted = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        cache = BlendedCache(chunks, recompute_ratio=1.0)
        got = model.generate(PROMPT, max_new_tokens=4, do_sample=False, **{name: cache})
    assert got.tolist() == wanted.tolist()
    assert cache.is_filled
    assert not [w for w in seen if issubclass(w.category, FutureWarning) and HOME in Path(w.filename).parents]
    if name == _compat.CACHE_ARG:
        assert not [w for w in seen if issubclass(w.category, FutureWarning | DeprecationWarning)]


@pytest.mark.parametrize("name", ["past_key_values", "cache"] if NEW_NAME else ["past_key_values"])
def test_d20_forward_takes_the_cache_under_every_name_too(name):
    """The same for a direct forward."""
    model = model_of()
    cache = BlendedCache(prefill(model, DOCUMENTS, progress=False), recompute_ratio=1.0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        model(input_ids=PROMPT, use_cache=True, **{name: cache})
    assert cache.get_seq_length() == PROMPT.shape[1]
    assert cache.report.tokens == PROMPT.shape[1]


def test_d20_the_name_is_the_one_that_this_transformers_documents():
    """The keyword that ChunkLibrary uses is a parameter of the installed version's own method."""
    parameters = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
    assert _compat.CACHE_ARG in parameters


def test_d20_the_librarys_whole_road_warns_of_nothing():
    """Attach with its proof, prefill, layout and generate: not one warning, whatever transformers deprecates."""
    model = model_of(seed=20)  # never proven before: the proof runs here
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kv = ChunkLibrary(model, byte_tokenizer())
        inputs = kv(["Otters hold hands.", "Rafts of otters drift."], "Why do otters hold hands?")
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert inputs.report.reused_tokens > 0


def test_d20_an_unknown_newer_major_imports(monkeypatch):
    """The version file works it out for versions that do not exist yet."""
    monkeypatch.setattr(transformers, "__version__", "6.0.0")
    spec = importlib.util.spec_from_file_location("blendkv_compat_of_tomorrow", HOME / "_compat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.CACHE_ARG == "cache"


def test_d20_an_unknown_newer_major_is_checked_against_full_prefill_at_first_use(monkeypatch, tmp_path):
    """What was proven on one version is proven again on the next, once, before anything is answered."""
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    ran = []
    checks = proof.exactness_checks
    monkeypatch.setattr(proof, "exactness_checks", lambda *a, **k: ran.append(1) or checks(*a, **k))
    for version, proofs in ((_compat.TRANSFORMERS_VERSION, 1), (_compat.TRANSFORMERS_VERSION, 1), ("6.0.0", 2)):
        monkeypatch.setattr(_compat, "TRANSFORMERS_VERSION", version)
        model = attach(model_of())
        assert len(ran) == proofs
    cache = BlendedCache(prefill(model, DOCUMENTS, progress=False), recompute_ratio=1.0)
    assert_same_run(forward(model, PROMPT, cache), forward(model, PROMPT))


def test_d20_a_newer_major_that_fails_the_check_is_refused(monkeypatch, tmp_path):
    """If transformers changes under us, the model is refused by name and left as it was."""
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "blend_error", lambda *a, **k: 0.5)
    model = model_of()
    with pytest.raises(UnsupportedModelError, match="full prefill"):
        attach(model)
    detach(model)
    assert not any(tmp_path.rglob("*.json"))


def test_d20_importing_is_cheap():
    """`import blendkv` needs no torch, whatever version of it or of transformers is there."""
    code = "import sys, blendkv; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=120).returncode == 0
