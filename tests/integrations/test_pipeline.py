"""The pipeline "blended-text-generation", made by transformers' own `pipeline`."""

import subprocess
import sys

import pytest
import torch
from transformers import TextIteratorStreamer, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from blendkv import ChunkLibrary
from blendkv.integrations.answering import PromptTooLongError
from blendkv.integrations.pipeline import BlendedTextGenerationPipeline
from blendkv.testing import byte_tokenizer, tiny_model

DOCUMENTS, QUESTION, SYSTEM = ["The tower is 61 m high.", "It was built in 1923."], "How high?", "Answer from these."
ASK = {"documents": DOCUMENTS, "question": QUESTION, "system": SYSTEM}


@pytest.fixture(scope="module")
def kv():
    return ChunkLibrary(tiny_model("llama"), byte_tokenizer(chat=True))


@pytest.fixture
def pipe(kv):
    kv.clear()
    return pipeline(
        "blended-text-generation", model=kv.model, tokenizer=kv.tokenizer, library=kv, max_new_tokens=8, do_sample=False
    )


def test_only_importing_the_module_registers_it():
    code = "import blendkv, blendkv.library; from transformers.pipelines import PIPELINE_REGISTRY as r; "
    code += "print('blended-text-generation' in r.get_supported_tasks())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"
    assert "blended-text-generation" in PIPELINE_REGISTRY.get_supported_tasks()


def test_ratio_one_equals_plain_generate_on_the_same_ids(pipe, plain):
    assert isinstance(pipe, BlendedTextGenerationPipeline)
    answer = pipe(**ASK, recompute_ratio=1.0)
    ids = torch.tensor([pipe.library.assemble(DOCUMENTS, QUESTION, SYSTEM).ids])
    end = pipe.tokenizer.eos_token_id
    out = plain().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=end
    )
    assert answer["generated_text"] == pipe.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer["generated_text"]
    assert answer["report"].layers[-1].reused == 0


def test_chunks_are_reused(pipe):
    first = pipe(ASK)
    again = pipe(ASK | {"documents": DOCUMENTS[::-1]}, recompute_ratio=0.0)
    assert first["report"].prefilled_tokens > 0
    assert again["report"].prefilled_tokens == 0
    assert [use.hit for use in again["report"].chunks] == [True] * 3
    assert again["report"].reused_tokens == first["report"].prefilled_tokens
    assert first["report"].reused_tokens < again["report"].reused_tokens  # the default recomputes some


def test_several_prompts(pipe):
    prompts = [ASK, ASK | {"question": "When?"}, {"question": "Hello?"}]
    want = [pipe(prompt)["generated_text"] for prompt in prompts]
    assert [answer["generated_text"] for answer in pipe(prompts)] == want
    assert [answer["generated_text"] for answer in pipe(prompt for prompt in prompts)] == want
    assert pipe([]) == []


def test_arguments_of_generate(pipe):
    streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    whole = pipe(ASK)["generated_text"]
    assert pipe(ASK, streamer=streamer)["generated_text"] == "".join(streamer) == whole
    assert pipe(ASK, recompute_ratio=1.0, max_new_tokens=2)["report"].layers[-1].reused == 0
    assert len(pipe.tokenizer(pipe(ASK, max_new_tokens=2)["generated_text"])["input_ids"]) <= 2
    answers = pipe(ASK, do_sample=True, num_return_sequences=2, temperature=5.0)
    assert len(answers) == 2
    assert answers[0]["report"] is answers[1]["report"]


def test_a_library_of_its_own(tmp_path):
    model, tokenizer = tiny_model("llama"), byte_tokenizer(chat=True)
    for loaded in ("memory", "disk"):
        pipe = pipeline(
            "blended-text-generation", model=model, tokenizer=tokenizer, store=str(tmp_path / "kv"), recompute_ratio=0.0
        )
        report = pipe(ASK, max_new_tokens=2)["report"]
        assert (report.prefilled_tokens == 0) == (loaded == "disk")
        assert report.layers[-1].recomputed == 0
        pipe.library.close()


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [
        ("How high?", ValueError, "blended-text-generation was given str: pass {'documents'"),
        ({"documents": DOCUMENTS}, ValueError, r"was given \['documents'\]: pass"),
        ({"question": "a", "docs": []}, ValueError, r"was given \['docs', 'question'\]: pass"),
        ({"question": "a", "documents": "text"}, TypeError, "documents is one string"),
        ({"question": "a", "documents": ["a", ""]}, ValueError, "document 1 is empty: leave it out"),
        ({"question": "a", "documents": [3]}, TypeError, "document 0 is a int"),
        ({"question": "a", "documents": ["x" * 9999]}, PromptTooLongError, "retrieve fewer or shorter"),
        (None, ValueError, "pass a dict with documents and question"),
    ],
)
def test_bad_input(pipe, inputs, error, match):
    with pytest.raises(error, match=match):
        pipe(inputs)
    assert not len(pipe.library.pool)


def test_a_library_of_another_model(kv):
    with pytest.raises(ValueError, match="the library is of another model"):
        pipeline("blended-text-generation", model=tiny_model("llama"), tokenizer=kv.tokenizer, library=kv)
