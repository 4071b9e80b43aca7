"""LlamaIndex: a postprocessor that has the chunks of nodes ready, and a response synthesizer that reuses them.

Needs llama-index-core: `pip install 'blendkv[llama-index]'`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, Literal

from blendkv.integrations.answering import Answer, Asking, Settings
from blendkv.integrations.extras import missing
from blendkv.integrations.prefetching import Prefetcher
from blendkv.library import ChunkLibrary

try:
    from llama_index.core.base.response.schema import RESPONSE_TYPE
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
    from llama_index.core.llms import MockLLM
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.response_synthesizers import BaseSynthesizer
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
    from llama_index.core.types import RESPONSE_TEXT_TYPE
except ImportError as error:
    raise missing("llama-index", error) from error

KEY = "chunk_key"
__all__ = ["BlendedSynthesizer", "ChunkCachePostprocessor"]


class ChunkCachePostprocessor(BaseNodePostprocessor):
    """Has the chunks of retrieved nodes ready before the model is asked.

    Nodes come back as copies with one more entry in their metadata, `chunk_key` (keys with commas between, if a long
    node has several chunks), which neither the model nor an embedding is shown. A chunk is the text that the model is
    shown: the node's, with the metadata that LlamaIndex puts in front of it. Put it last, behind what drops nodes.

    Args:
        library: whose chunks.
        mode: "prefill" computes and stores what is missing; "load" starts to bring what a store has into memory, in a
            thread, and returns at once.
        system: the system prompt that the nodes will be used under; matters with `condition="system"`.
    """

    library: Any = Field(exclude=True)
    mode: Literal["prefill", "load"] = "prefill"
    system: str | None = None
    _prefetcher: Prefetcher = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Makes the thread that loads."""
        super().model_post_init(context)
        self._prefetcher = Prefetcher(self.library, "load", self.system)

    @classmethod
    def class_name(cls) -> str:
        """What LlamaIndex calls it."""
        return "ChunkCachePostprocessor"

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for what mode "load" has started; False if that takes longer than `timeout` seconds."""
        return self._prefetcher.wait(timeout)

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        texts = [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes]
        wanted = [text for text in texts if text]
        if self.mode == "prefill":
            self.library.prefill(wanted, self.system)
        else:
            self._prefetcher.start(wanted)
        return [self._keyed(node, text) if text else node for node, text in zip(nodes, texts, strict=True)]

    def _keyed(self, scored: NodeWithScore, text: str) -> NodeWithScore:
        node = scored.node
        changes = {
            "metadata": {**node.metadata, KEY: ",".join(self.library.keys([text], self.system))},
            "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, KEY],
            "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, KEY],
        }
        return NodeWithScore(node=node.model_copy(update=changes), score=scored.score)


class BlendedSynthesizer(BaseSynthesizer):
    """Answers from the nodes as they are, each a chunk of its own; LlamaIndex's own modes join and cut their texts.

    It needs no LLM of LlamaIndex's: the library's model answers. `response.metadata["blend"]` is what was reused; a
    streamed response has it not, but `on_answer` is told both ways.

    Args:
        library: model, tokenizer and chunks.
        system: the system prompt.
        streaming: answer with a generator of text.
        on_answer: called with each whole `Answer` (its text, token counts and `BlendReport`), in the thread that
            generates.
        blend: options of `BlendedCache` (`{"recompute_ratio": 0.3}`).
        empty_response: what to say if no node was found.
        **settings: `max_tokens`, `temperature`, `top_p`, `top_k`, `stop` (strings), `timeout` (seconds).

    Raises:
        ValueError: for settings that cannot be.
    """

    def __init__(
        self,
        library: ChunkLibrary,
        *,
        system: str | None = None,
        streaming: bool = False,
        on_answer: Callable[[Answer], None] | None = None,
        blend: dict[str, Any] | None = None,
        empty_response: str | None = None,
        **settings: Any,
    ) -> None:
        self._library, self._system, self._on_answer = library, system, on_answer
        self._settings = Settings.of(settings, blend)

        def count(text: str) -> list[int]:
            return list(library.layout.plain(text).ids)

        super().__init__(
            llm=MockLLM(),  # never asked; without one LlamaIndex looks for OpenAI's
            prompt_helper=PromptHelper(tokenizer=count),
            chat_prompt_helper=ChatPromptHelper(tokenizer=count),
            streaming=streaming,
            empty_response=empty_response,
        )

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answers a question from texts; a generator of text if streaming."""
        asking = self._asking(query_str, text_chunks)
        if self._streaming:
            return self._stream(asking)
        return _Answered(self._told(asking.run()))

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """The same from an event loop, which goes on meanwhile."""
        asking = await asyncio.to_thread(self._asking, query_str, text_chunks)
        if self._streaming:
            return self._astream(asking)
        return _Answered(self._told(await asking.arun()))

    def _asking(self, question: str, texts: Sequence[str]) -> Asking:
        prompt = self._library.assemble([text for text in texts if text], question, self._system)
        return Asking(self._library, prompt, self._settings)

    def _told(self, answer: Answer) -> Answer:
        if self._on_answer is not None:
            self._on_answer(answer)
        return answer

    def _stream(self, asking: Asking) -> Generator[str, None, None]:
        self._told((yield from asking.stream()))

    async def _astream(self, asking: Asking) -> AsyncGenerator[str, None]:
        stream = asking.astream()
        try:
            async for item in stream:
                if isinstance(item, Answer):
                    self._told(item)
                else:
                    yield item
        finally:
            await stream.aclose()

    def _prepare_response_output(
        self, response_str: RESPONSE_TEXT_TYPE | None, source_nodes: list[NodeWithScore]
    ) -> RESPONSE_TYPE:
        response = super()._prepare_response_output(response_str, source_nodes)
        if isinstance(response_str, _Answered):
            response.metadata = {**(response.metadata or {}), "blend": response_str.answer.report.to_dict()}
        return response

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts_dict: Any) -> None:
        """No prompt templates: the tokenizer's chat template is used."""


class _Answered(str):
    """The text of an answer, and the answer."""

    answer: Answer

    def __new__(cls, answer: Answer) -> _Answered:
        """A string like another."""
        text = super().__new__(cls, answer.text)
        text.answer = answer
        return text
