"""Teacher-forced agreement with full recompute."""

import math

import pytest
import torch

from blendkv.bench.forcing import STEPS, agree, compare
from blendkv.bench.laying import Cell, cut_pieces, kept, lay_out
from blendkv.bench.methods import Blend, forced_logits, greedy_answer
from blendkv.bench.quality import quality_rows
from blendkv.bench.tasks import Example
from blendkv.testing import byte_tokenizer

EXAMPLE = Example("Who?", ["Ada: Ada wrote notes.\n\n", "Bob: Bob slept.\n\n", "Cid: Cid won.\n\n"], ["Ada"])


def test_the_layout_is_the_protocols(attached):
    tokenizer = byte_tokenizer(chat=True)
    case = lay_out(attached("llama"), tokenizer, EXAMPLE)
    assert tokenizer.decode(case.ids[0]) == (
        "<|im_start|>system\nAnswer the question using the passages below.<|im_end|>\n<|im_start|>user\n"
        "Ada: Ada wrote notes.\n\nBob: Bob slept.\n\nCid: Cid won.\n\n"
        "Question: Who?\nAnswer within 5 words.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [tokenizer.decode(chunk.ids) for chunk in case.chunks[1:]] == EXAMPLE.chunks
    assert case.chunks[0].ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_forcing_the_greedy_answer_on_full_recompute_gives_its_own_logits(attached):
    case = lay_out(attached("llama"), byte_tokenizer(), EXAMPLE)
    answer, logits = greedy_answer(case.model, case.ids, 6)
    assert answer.tolist() == logits.argmax(-1).tolist()
    forced = forced_logits(case.model, case.ids, answer, None)
    torch.testing.assert_close(forced, logits, atol=1e-4, rtol=1e-4)
    one = forced_logits(case.model, case.ids, answer[:1], None)
    torch.testing.assert_close(one, logits[:1], atol=1e-4, rtol=1e-4)


def test_ratio_1_agrees_with_full_recompute_and_reuse_does_not(attached):
    reuse, blend = agree(attached("llama"), byte_tokenizer(), EXAMPLE, [Blend(0.0), Blend(1.0)])
    assert blend.kl == pytest.approx(0, abs=1e-6)
    assert blend.same
    assert blend.charged_budget == pytest.approx(1)
    assert reuse.kl > 1e-3
    assert reuse.charged_budget == 0


def test_rows_are_means_over_prompts_paired_with_the_reference(attached):
    model, tokenizer = attached("llama"), byte_tokenizer()
    other = Example("What?", list(reversed(EXAMPLE.chunks)), ["notes"])
    rows = quality_rows(model, tokenizer, [EXAMPLE, other], (0.0, 0.15, 1.0))
    assert [(row["method"], row["ratio"]) for row in rows] == [
        ("full", None), ("reuse", 0.0), ("blend", 0.15), ("blend", 1.0),
    ]  # fmt: skip
    slow = [agree(model, tokenizer, e, [Blend(0.0), Blend(0.15), Blend(1.0)]) for e in (EXAMPLE, other)]
    for i, row in enumerate(rows[1:]):
        mean = sum(found[i].kl for found in slow) / 2
        assert row["kl"] == pytest.approx(mean, abs=1e-7)
        assert row["kl_first"] == pytest.approx(sum(found[i].first_kl for found in slow) / 2, abs=1e-7)
        assert row["same"] == sum(found[i].same for found in slow) / 2
        assert row["charged_budget"] == pytest.approx(sum(found[i].charged_budget for found in slow) / 2)
        assert row["relative"] == pytest.approx(mean / (sum(found[1].kl for found in slow) / 2), abs=1e-6)
        low, high = row["ci"]["kl"]
        assert low <= row["kl"] <= high
        assert row["relative_to"] == ["hkvd", 0.15]
        assert row["f1"] is None
        assert row["ci"]["f1"] is None
        assert row["ttft_s"] > 0
    assert rows[2]["ci"]["relative"] == pytest.approx([1, 1])
    assert rows[-1]["same"] == 1


def test_a_model_with_a_bos_and_no_template_gets_it_once(attached):
    tokenizer = byte_tokenizer(bos=True)
    ids = lay_out(attached("llama"), tokenizer, EXAMPLE).ids[0].tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_cells_keep_what_the_answer_needs_and_cut_ids_anew():
    tokenizer = byte_tokenizer()
    example = Example("Q", ["one.", "two.", "three.", "four."], ["A"], support=(3, 1))
    assert list(kept(example, 3)) == [0, 1, 3]
    assert list(kept(example, 2)) == [1, 3]
    assert list(kept(example, None)) == list(kept(example, 9)) == [0, 1, 2, 3]
    whole = [token for piece in cut_pieces(tokenizer, example, Cell()) for token in piece]
    cut = cut_pieces(tokenizer, example, Cell(chunk_tokens=5))
    assert [len(piece) for piece in cut[:-1]] == [5] * (len(cut) - 1)
    assert 0 < len(cut[-1]) <= 5
    assert [token for piece in cut for token in piece] == whole  # never re-tokenised


def test_two_steps_by_hand():
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    found = compare(full, other, torch.tensor([0, 0]), frozenset())
    first = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert found.first_kl == pytest.approx(first, abs=1e-6)
    assert found.kl == pytest.approx(first / 2, abs=1e-6)
    assert not found.same


def test_what_follows_the_end_of_text_does_not_count_for_the_same_answer():
    said = torch.tensor([3, 1, 2])
    logits = torch.eye(4)[torch.tensor([3, 1, 0])]
    assert compare(logits, logits, said, frozenset({1})).same
    assert not compare(logits, logits, said, frozenset()).same
    assert not compare(logits, logits, torch.tensor([2, 1, 0]), frozenset({1})).same


def test_twelve_steps():
    assert STEPS == 12
