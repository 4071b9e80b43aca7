"""Three methods on a prompt, without a page: what is told, what stops it, and what it agrees with."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from transformers.cache_utils import DynamicCache

from blendkv.bench.methods import states_of
from blendkv.integrations.answering import PromptTooLongError
from blendkv.selectors import get_selector
from blendkv.web import running
from blendkv.web.asked import Asked
from blendkv.web.running import METHODS, SYSTEM, Comparison
from blendkv.web.tokens import deviation_of
from tests.helpers import run as forward
from tests.web.conftest import DOCUMENTS, QUESTION


def ask(comparison: Comparison, documents=DOCUMENTS, ratio=0.25, selector="hkvd", stopped=None):
    return list(comparison.run(Asked(tuple(documents), QUESTION, ratio, selector), stopped))


def own_answer(comparison: Comparison, documents) -> str:
    """What an unmodified `generate` says, without anything of ours but the ids."""
    library = comparison.library
    ids = torch.tensor([library.assemble(documents, QUESTION, SYSTEM).ids])
    out = library.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=running.ANSWER_TOKENS,
        eos_token_id=library.tokenizer.eos_token_id, pad_token_id=library.tokenizer.pad_token_id,
    )  # fmt: skip
    return library.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_views_grow_and_the_last_one_has_everything(comparison):
    views = ask(comparison)
    last = views[-1]
    assert [view.finished for view in views] == [False] * (len(views) - 1) + [True]
    assert [column.method for column in last.columns] == list(METHODS)
    for i in range(3):
        texts = [view.columns[i].text for view in views]
        grown = [b.startswith(a) for a, b in pairwise(texts)]
        assert all(grown[:-2]), "a text is only added to (but for spaces at its end)"
        assert len(set(texts)) > 3, "it is told in parts"
    answering = [[c.method for c in view.columns if c.state == "running"] for view in views]
    assert max(map(len, answering)) == 1, "one after the other"
    assert all(column.ttft_s and column.ttft_s > 0 for column in last.columns)
    assert last.picture is not None
    assert last.report is not None


def test_full_recompute_says_what_generate_says(comparison):
    assert ask(comparison)[-1].columns[0].text == own_answer(comparison, DOCUMENTS)


def test_all_of_it_recomputed_is_full_recompute(comparison):
    full, _, blend = ask(comparison, ratio=1.0)[-1].columns
    assert blend.text == full.text
    assert blend.same
    assert blend.recomputed == 1.0
    assert abs(blend.kl) < 1e-6


def test_full_reuse_recomputes_nothing_and_is_farther_away(comparison):
    last = ask(comparison, ratio=0.6)[-1]
    _, reuse, blend = last.columns
    assert reuse.recomputed == 0.0
    assert reuse.kl > blend.kl > 0


@pytest.mark.parametrize("selector", ["hkvd", "boundary", "attention", "random", "every-8", "20%boundary+attention"])
def test_the_picture_agrees_with_the_report(comparison, selector):
    last = ask(comparison, selector=selector)[-1]
    picture, report = last.picture, last.report
    drawn = [token for section in picture.sections for token in section.tokens]
    assert report.selector == get_selector(selector).name
    assert picture.recomputed == report.layers[-1].recomputed > 0
    assert picture.stored == report.chunk_tokens
    assert sum(token.recomputed for token in drawn) == picture.recomputed  # a byte a token: none stand for several
    assert "".join(token.text for token in drawn) == comparison.library.assemble(DOCUMENTS, QUESTION, SYSTEM).text
    assert last.prompt_tokens == report.tokens


def test_deviations_are_those_of_two_plain_forwards(comparison):
    """Against a twin: full recompute by a plain forward, and every chunk computed alone and rotated by the blend."""
    library = comparison.library
    last = ask(comparison)[-1]
    drawn = [token.deviation for section in last.picture.sections for token in section.tokens]
    ids = torch.tensor([library.assemble(DOCUMENTS, QUESTION, SYSTEM).ids])
    full = DynamicCache()
    forward(library.model, ids, full)
    reused = library(DOCUMENTS, QUESTION, SYSTEM, recompute_ratio=0.0)
    forward(library.model, ids, reused.cache)
    known = [t for t, deviation in enumerate(drawn) if deviation is not None]
    assert len(known) > 100
    for t in known[::7]:
        parts = []
        for (k, v), (sk, sv) in list(zip(states_of(full), states_of(reused.cache), strict=True))[1:]:
            for a, b in ((k, sk), (v, sv)):
                parts.append(float((a[0, :, t] - b[0, :, t]).square().sum() / a[0].square().sum((0, 2)).mean()))
        assert drawn[t] == pytest.approx((sum(parts) / len(parts)) ** 0.5, rel=1e-3, abs=1e-5)
    head = [token.deviation for token in last.picture.sections[0].tokens]
    assert max(head) < 1e-3, "what stands where it was computed is right"
    assert max(d for d in drawn if d is not None) > 0.05


def test_deviation_of_equal_states_is_nothing():
    states = [(torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)) for _ in range(3)]
    assert deviation_of(states, states, 5).tolist() == [0.0] * 5
    doubled = [(2 * k, 2 * v) for k, v in states]
    assert float(deviation_of(states, doubled, 7).square().mean().sqrt()) == pytest.approx(1.0, rel=1e-5)


def test_where_chunks_came_from(tiny):
    comparison = tiny()
    first, second = ask(comparison)[-1].prepared, ask(comparison, documents=DOCUMENTS[::-1])[-1].prepared
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert first.computed == size
    assert second.computed == 0
    assert second.loaded["memory"] >= size
    assert (first.device, second.device) == ("cpu", "cpu")


def test_chunks_of_another_process_come_from_disk(tiny, tmp_path):
    first = tiny(store=str(tmp_path))
    ask(first)
    first.library.close()
    again = ask(tiny(store=str(tmp_path)))[-1].prepared
    assert again.computed == 0
    assert any(tier.startswith("file://") and tokens > 50 for tier, tokens in again.loaded.items())


def test_repeated_documents(comparison):
    last = ask(comparison, documents=[DOCUMENTS[0]] * 3)[-1]
    assert last.finished
    assert [section.title for section in last.picture.sections] == [
        "System prompt", "Document 1", "Document 2", "Document 3", "Question",
    ]  # fmt: skip


def test_a_long_document_is_one_section(comparison):
    last = ask(comparison, documents=["A sentence of a long document. " * 40, DOCUMENTS[0]])[-1]
    titles = [section.title for section in last.picture.sections]
    assert titles == ["System prompt", "Document 1", "Document 2", "Question"]
    assert len(last.report.chunks) > 3


def test_characters_of_several_tokens_are_drawn_whole(comparison):
    last = ask(comparison, documents=["Zürich, 東京, 🙂!", "x"])[-1]
    texts = [token.text for section in last.picture.sections for token in section.tokens]
    assert {"ü", "東", "🙂"} <= set(texts)


def test_too_long_a_prompt_is_refused_before_anything_is_computed(tiny, monkeypatch):
    comparison = tiny()
    with pytest.raises(PromptTooLongError, match=r"The prompt has .* tokens, and this page takes 4,096"):
        ask(comparison, documents=["a " * 2100])
    monkeypatch.setattr(comparison.library.model.config, "max_position_embeddings", 64)
    with pytest.raises(PromptTooLongError, match="retrieve fewer or"):
        ask(comparison)
    assert len(comparison.library.pool) == 0


def test_methods_are_warm_before_they_are_timed(tiny, monkeypatch):
    comparison, made = tiny(), []
    real = running.tell

    def tell(library, make, most, stopped):
        made.append(most)
        return real(library, make, most, stopped)

    monkeypatch.setattr(running, "tell", tell)
    ask(comparison)
    assert made == [2, 2, 2] + [running.ANSWER_TOKENS] * 3
    ask(comparison)
    assert made[6:] == [running.ANSWER_TOKENS] * 3, "once a selector"
    ask(comparison, selector="boundary")
    assert made[9:12] == [2, 2, 2]


# -- stopping ---------------------------------------------------------------------------------------------------------


def answer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "blendkv-web-answer"]


def test_stopped_at_the_next_token(comparison):
    stopped, views = threading.Event(), []
    for view in comparison.run(Asked(DOCUMENTS, QUESTION), stopped):
        views.append(view)
        if view.columns[1].text:
            stopped.set()
    last = views[-1]
    assert last.finished
    assert last.doing == "Stopped"
    assert [column.state for column in last.columns] == ["done", "stopped", "stopped"]
    assert last.columns[1].text
    assert last.picture is None
    assert not answer_threads()


def test_stopped_before_it_began_computes_nothing(tiny):
    comparison = tiny()
    comparison.warm_up()
    before = len(comparison.library.pool)
    stopped = threading.Event()
    stopped.set()
    views = ask(comparison, stopped=stopped)
    assert [column.state for column in views[-1].columns] == ["stopped"] * 3
    assert len(comparison.library.pool) == before


def test_closing_the_generator_ends_the_answer(comparison):
    going = comparison.run(Asked(DOCUMENTS, QUESTION))
    for view in going:
        if view.columns[0].text:
            break
    assert answer_threads()
    going.close()
    assert not answer_threads()


def test_two_at_once_do_not_mix(tiny):
    comparison = tiny()
    wanted = {i: [c.text for c in ask(comparison, documents=DOCUMENTS[i:])[-1].columns] for i in range(2)}
    found: dict[int, list[str]] = {}

    def go(i):
        found[i] = [c.text for c in ask(comparison, documents=DOCUMENTS[i:])[-1].columns]

    threads = [threading.Thread(target=go, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted
    assert wanted[0] != wanted[1]


def test_an_error_while_answering_is_raised_and_the_next_run_works(comparison, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(comparison.library.model, "generate", lambda **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(comparison)
    assert ask(comparison)[-1].finished
    assert not answer_threads()


def test_the_clock_counts_from_text_to_first_token(comparison, monkeypatch):
    """Laying the prompt out is inside it, for every method."""
    real = comparison.library.layout.__class__.assemble

    def slow(self, *args):
        time.sleep(0.2)
        return real(self, *args)

    ask(comparison)
    monkeypatch.setattr(comparison.library.layout.__class__, "assemble", slow)
    assert all(column.ttft_s > 0.2 for column in ask(comparison)[-1].columns)
