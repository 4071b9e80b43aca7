"""What visitors type in: taken, or refused with one sentence."""

import pytest

from blendkv.web.asked import CHARACTERS, DOCUMENTS, QUESTION_CHARACTERS, Asked, BadInputError


def test_blank_documents_are_left_out_and_others_stay_as_they_are():
    asked = Asked.of(["", " one\n", "  \n", "two", " one\n"], "  why? ", 1, " boundary ")
    assert asked == Asked((" one\n", "two", " one\n"), "why?", 1.0, "boundary")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"documents": []}, "All documents are empty"),
        ({"documents": ["", " \n"]}, "All documents are empty"),
        ({"documents": "one string"}, "The documents are a str"),
        ({"documents": None}, "The documents are a NoneType"),
        ({"documents": ["a", 3]}, "Document 2 is a int, not a text"),
        ({"documents": [None]}, "Document 1 is a NoneType"),
        ({"documents": ["a"] * (DOCUMENTS + 1)}, f"{DOCUMENTS + 1} documents are too many"),
        ({"documents": ["a" * (CHARACTERS // 2 + 1)] * 2}, "The documents have 40,002 characters"),
        ({"documents": ["half \ud83d"]}, "Document 1 has half a character"),
        ({"question": ""}, "The question is empty"),
        ({"question": " \n"}, "The question is empty"),
        ({"question": 7}, "The question is a int"),
        ({"question": "?" * (QUESTION_CHARACTERS + 1)}, "The question has 2,001 characters"),
        ({"ratio": 1.1}, "The share to recompute is 1.1"),
        ({"ratio": -0.1}, "The share to recompute is -0.1"),
        ({"ratio": float("nan")}, "The share to recompute is nan"),
        ({"ratio": "half"}, "The share to recompute is half"),
        ({"ratio": None}, "The share to recompute is None"),
        ({"ratio": True}, "The share to recompute is True"),
        ({"selector": "magic"}, "Unknown selector 'magic'"),
        ({"selector": "hkvd+"}, "Selector 'hkvd+'"),
        ({"selector": ""}, "There is no such selector"),
        ({"selector": None}, "There is no such selector"),
        ({"selector": "(" * 5000}, "There is no such selector"),
    ],
)
def test_what_cannot_be_is_one_sentence(changes, said):
    given = {"documents": ["a"], "question": "b", "ratio": 0.5, "selector": "hkvd"} | changes
    with pytest.raises(BadInputError) as error:
        Asked.of(**given)
    told = str(error.value)
    assert told.startswith(said)
    assert told.endswith(".")
    assert "\n" not in told
    assert len(told) < 300
