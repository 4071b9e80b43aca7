"""Teacher-forced agreement with full recompute."""

import math

import pytest
import torch

from blendkv.bench.methods import Blend, forced_logits, greedy_answer
from blendkv.bench.quality import STEPS, agree, compare, lay_out, quality_rows
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


def test_rows_are_means_over_prompts_paired_with_the_first(attached):
    other = Example("What?", list(reversed(EXAMPLE.chunks)), ["notes"])
    rows = quality_rows(attached("llama"), byte_tokenizer(), [EXAMPLE, other], (0.0, 0.3, 1.0))
    assert [row["ratio"] for row in rows] == [0.0, 0.3, 1.0]
    assert [row["method"] for row in rows] == ["reuse", "blend", "blend"]
    for row in rows:
        assert row["kl"] == pytest.approx(sum(row["all_kl"]) / 2)
        assert row["kl_low"] <= row["kl"] <= row["kl_high"]
        assert row["kl_minus_first_row"] == pytest.approx(row["kl"] - rows[0]["kl"])
    assert rows[-1]["same_answer"] == 1


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
