"""LangChain: a chat model that reuses the chunks of the documents in its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from blendkv.correctors import get_corrector
from blendkv.integrations.answering import Answer, Asking, PromptTooLongError, Settings, model_name
from blendkv.integrations.extras import missing
from blendkv.integrations.langchain_messages import turns_of
from blendkv.library import ChunkLibrary
from blendkv.selectors import get_selector

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.language_models import BaseChatModel, LangSmithParams
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
    from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
except ImportError as error:
    raise missing("langchain", error) from error

from pydantic import ConfigDict, Field

_OURS = ("max_tokens", "temperature", "top_p", "top_k", "timeout")
_BLEND = ("recompute_ratio", "selector", "check_layers", "strict", "reserve", "corrector")
_IGNORED = ("stream",)
"""What LangChain itself passes along."""


class ChatTooLongError(ContextOverflowError, ValueError):
    """The messages have more tokens than the model takes; LangChain's own word for that, and a `ValueError`."""


class ChatBlended(BaseChatModel):
    """A local chat model that starts from cached chunks of the documents in its messages.

    Documents are text blocks marked with `cache_control` (`as_content_blocks` makes them) in any message, and those on
    the `artifact` of a tool message. Each is a chunk, found in the library's store or computed and kept, wherever it
    stands and whatever stands around it; other text is computed. Messages without documents are answered as ever. Every
    turn of a conversation is laid out anew from all its messages, so documents of earlier turns are reused too.

    `usage_metadata["input_token_details"]` says how many prompt tokens were taken from the cache (`cache_read`) and how
    many were computed for it (`cache_creation`); `response_metadata["blend"]` is the whole `BlendReport`, as numbers.

    Any setting may be given per call too (`chat.invoke(messages, temperature=0.7)`, `chat.bind(recompute_ratio=1.0)`).
    It does not call tools, and reads no images.

    Args:
        library: the model, its tokenizer, which needs a chat template, and its chunks.
        max_tokens: most tokens of an answer.
        temperature: 0, the default, takes the likeliest token each time.
        top_p, top_k: for sampling; None leaves them to the model's generation config.
        stop: strings that end an answer, and are not part of it.
        timeout: most seconds of an answer, after which `TimeoutError` is raised.
        max_retries: taken, as by every chat model, and not used: there is no network to fail.
        recompute_ratio, selector: of the blend; None leaves them to the library.
        template: more arguments of the chat template (`{"enable_thinking": False}`).
    """

    library: ChunkLibrary = Field(exclude=True, repr=False)
    max_tokens: int = 256
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    max_retries: int | None = None
    streaming: bool = False
    recompute_ratio: float | None = None
    selector: Any = None
    template: dict[str, Any] = Field(default_factory=dict)

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def model_post_init(self, context: Any) -> None:
        """Refuses bad settings now, not at the first message."""
        super().model_post_init(context)
        self._settings(None, {})

    @property
    def model_name(self) -> str:
        """What the model is called: where it was loaded from, or its type."""
        return model_name(self.library.model)

    @property
    def _llm_type(self) -> str:
        return "blendkv"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        names = ("model_name", "max_tokens", "temperature", "top_p", "top_k", "stop", "template")
        blend = {**self.library.options, **self._settings(None, {}).blend}
        selector, corrector = get_selector(blend["selector"]).name, get_corrector(blend["corrector"])
        return {name: getattr(self, name) for name in names} | {
            "recompute_ratio": blend["recompute_ratio"],
            "check_layers": blend["check_layers"],
            "selector": selector,
            "corrector": corrector and corrector.name,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "blendkv"
        params["ls_max_tokens"] = kwargs.get("max_tokens", self.max_tokens)
        if ends := stop or self.stop:
            params["ls_stop"] = ends
        return params

    def get_num_tokens(self, text: str) -> int:
        """Tokens of a text, by the model's tokenizer."""
        return len(self.get_token_ids(text))

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text, by the model's tokenizer."""
        return list(self.library.layout.plain(text).ids)

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NoReturn:
        """Refuses: a small local model that calls tools by text is better served by its own class.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "ChatBlended does not call tools: let another chat model call them, and pass their results on as tool "
            "messages, whose documents are reused"
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(self._asking(messages, stop, kwargs).run())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asking = await asyncio.to_thread(self._asking, messages, stop, kwargs)  # to cut long texts takes a while
        return self._result(await asking.arun())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        stream = self._asking(messages, stop, kwargs).stream()
        try:
            while True:
                yield ChatGenerationChunk(message=AIMessageChunk(content=next(stream)))
        except StopIteration as end:
            yield self._last(end.value)
        finally:
            stream.close()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        stream = (await asyncio.to_thread(self._asking, messages, stop, kwargs)).astream()
        try:
            async for item in stream:
                is_text = isinstance(item, str)
                yield ChatGenerationChunk(message=AIMessageChunk(content=item)) if is_text else self._last(item)
        finally:
            await stream.aclose()

    def _asking(self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Asking:
        """What is to be answered.

        Raises:
            ChatTooLongError: for more tokens than the model takes.
            ValueError, TypeError: for messages or settings that it does not take.
        """
        settings = self._settings(stop, options)
        prompt = self.library.conversation(turns_of(messages), **self.template)
        try:
            return Asking(self.library, prompt, settings)
        except PromptTooLongError as error:
            raise ChatTooLongError(str(error)) from error

    def _settings(self, stop: list[str] | None, options: dict[str, Any]) -> Settings:
        known = (*_OURS, *_BLEND, *_IGNORED)
        if unknown := sorted(name for name in options if name not in known):
            tools = " (it calls no tools, and holds to no schema)" if {"tools", "response_format"} & {*unknown} else ""
            raise TypeError(f"ChatBlended does not take {', '.join(unknown)}{tools}: it takes {', '.join(known[:-1])}")
        own = {name: options.get(name, getattr(self, name)) for name in _OURS}
        own["temperature"] = own["temperature"] or 0.0
        mine = {"recompute_ratio": self.recompute_ratio, "selector": self.selector}
        blend = {name: value for name, value in mine.items() if value is not None}
        blend |= {name: options[name] for name in _BLEND if name in options}
        ends = self.stop if stop is None else stop
        return Settings.of({**own, "stop": ends}, blend)

    def _result(self, answer: Answer) -> ChatResult:
        message = AIMessage(
            content=answer.text, usage_metadata=_usage(answer), response_metadata=self._response_metadata(answer)
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last(self, answer: Any) -> ChatGenerationChunk:
        """The end of a stream: no more text, and what it took."""
        message = AIMessageChunk(
            content="",
            usage_metadata=_usage(answer),
            response_metadata=self._response_metadata(answer),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def _response_metadata(self, answer: Answer) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "finish_reason": answer.finish,
            "blend": answer.report.to_dict(),
        }


def _usage(answer: Answer) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=answer.prompt_tokens,
        output_tokens=answer.tokens,
        total_tokens=answer.prompt_tokens + answer.tokens,
        input_token_details=InputTokenDetails(cache_read=answer.cache_read, cache_creation=answer.cache_creation),
    )
