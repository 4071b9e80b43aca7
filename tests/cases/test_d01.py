import subprocess
import sys

import pytest
import torch

from blendkv import BlendedCache, CacheStateError, prefill
from tests.cases.common import answer, assert_same_answer, digest, forward, ids_of, model_of

DOCUMENTS = [ids_of(40, seed)[0] for seed in (1, 2, 3)]
QUESTIONS = [ids_of(9, seed) for seed in (11, 12, 13)]
FRESH_PROCESS = """
import sys, torch
from tests.cases.test_d01 import DOCUMENTS, QUESTIONS, ask, new
torch.save(ask(*new(), int(sys.argv[2])), sys.argv[1])
"""


def new():
    model = model_of()
    return model, prefill(model, DOCUMENTS, progress=False)


def prompt(question: int) -> torch.Tensor:
    return torch.cat([torch.cat(DOCUMENTS)[None], QUESTIONS[question]], dim=1)


def ask(model, chunks, question: int):
    return answer(model, prompt(question), BlendedCache(chunks))


def test_d01_three_questions_over_one_stored_set_answer_as_a_fresh_process_does(tmp_path):
    """A stored memory grew with every turn and leaked earlier users' text (MemTensor/MemOS#2301): chunks stay."""
    model, chunks = new()
    before = [(digest(chunk), len(chunk)) for chunk in chunks]
    answers = [ask(model, chunks, question) for question in range(3)]
    assert [(digest(chunk), len(chunk)) for chunk in chunks] == before
    for question in range(2):
        assert_same_answer(answers[question], ask(*new(), question))
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, tmp_path / "last.pt", "2"], check=True, timeout=300)
    assert_same_answer(answers[2], tuple(torch.load(tmp_path / "last.pt")))


def test_d01_a_used_cache_refuses_another_question_and_a_fork_answers_it():
    """The second use of a cache silently went on with the first conversation: it raises, and `fork` is right."""
    model, chunks = new()
    cache = BlendedCache(chunks)
    answer(model, prompt(0), cache)
    held = cache.get_seq_length()
    with pytest.raises(CacheStateError, match=r"fork\(\)"):
        answer(model, prompt(1), cache)
    assert cache.get_seq_length() == held
    assert_same_answer(answer(model, prompt(1), cache.fork()), ask(model, chunks, 1))
    cache.reset()
    assert_same_answer(answer(model, prompt(1), cache), ask(model, chunks, 1))


def test_d01_the_same_prompt_again_on_a_used_cache_raises():
    """The very same prompt is already in the cache, answer included: it must not be appended a second time."""
    model, chunks = new()
    cache = BlendedCache(chunks)
    answer(model, prompt(0), cache)
    with pytest.raises(CacheStateError, match="fork"):
        answer(model, prompt(0), cache)


def test_d01_the_next_turn_goes_on_with_the_same_cache():
    """Same ids plus more is the next turn: it must equal full prefill of the longer text at ratio 1."""
    model, chunks = new()
    cache = BlendedCache(chunks, recompute_ratio=1.0)
    said, _ = answer(model, prompt(0), cache)
    longer = torch.cat([prompt(0), said, QUESTIONS[1]], dim=1)
    assert_same_answer(answer(model, longer, cache), answer(model, longer))
    assert cache.get_seq_length() == longer.shape[1] + 6 - 1


def test_d01_blending_does_not_write_into_chunks_at_ratio_one_either():
    """Every layer is recomputed for every row at ratio 1, the case in which most is written."""
    model, chunks = new()
    before = [digest(chunk) for chunk in chunks]
    forward(model, prompt(0), BlendedCache(chunks, recompute_ratio=1.0))
    forward(model, prompt(0), BlendedCache(chunks, check_layers={0: 0.5, 2: 0.2}))
    assert [digest(chunk) for chunk in chunks] == before
