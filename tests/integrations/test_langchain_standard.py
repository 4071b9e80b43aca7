"""LangChain's own standard tests: the chat model and the retriever, on tiny models."""

import pytest

pytest.importorskip("langchain_tests")

from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from blendkv.integrations.langchain import ChatBlended, ChunkCacheRetriever, as_content_blocks
from tests.helpers import unprintable

DOCUMENTS = [Document(page_content=f"Tower {i} is {60 + i} m high.", id=str(i)) for i in range(9)]


@pytest.fixture(autouse=True)
def on_the_class(library, monkeypatch, request):
    """Where the standard classes find it. It says no spaces: an answer of nothing else would be no text."""
    kv = library()
    monkeypatch.setattr(kv.model.generation_config, "suppress_tokens", unprintable(kv.tokenizer, " "))
    monkeypatch.setattr(request.cls, "library", kv, raising=False)


class Chat:
    chat_model_class = ChatBlended
    has_tool_calling = False  # a small local model cannot: docs/guides/langchain.md
    has_structured_output = False

    @property
    def chat_model_params(self):
        return {"library": self.library}

    @property
    def standard_chat_model_params(self):
        return {"temperature": 0, "max_tokens": 8, "timeout": 60, "stop": [], "max_retries": 2}


class TestChatUnit(Chat, ChatModelUnitTests):
    pass


class TestChat(Chat, ChatModelIntegrationTests):
    @property
    def supported_usage_metadata_details(self):
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_creation_input(self, *, stream=False):
        self.library.clear()
        return self._ask(stream)

    def invoke_with_cache_read_input(self, *, stream=False):
        self.library.prefill(DOCUMENTS)
        message = self._ask(stream)
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message

    def _ask(self, stream):
        chat = ChatBlended(library=self.library, max_tokens=5)
        messages = [("human", [*as_content_blocks(DOCUMENTS), {"type": "text", "text": "Which is highest?"}])]
        if not stream:
            return chat.invoke(messages)
        whole, *rest = chat.stream(messages)
        for part in rest:
            whole += part
        return whole


def nearest(query, k=None):
    return DOCUMENTS[:k]


class TestRetriever(RetrieversIntegrationTests):
    retriever_constructor = ChunkCacheRetriever
    retriever_query_example = "high"

    @property
    def retriever_constructor_params(self):
        return {"retriever": RunnableLambda(nearest), "library": self.library}
