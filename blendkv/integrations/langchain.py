"""LangChain: a retriever and a callback that see to it that chunks are there, and a chat model that reuses them.

Needs langchain-core: `pip install 'blendkv[langchain]'`.
"""

from blendkv.integrations.langchain_chat import ChatBlended
from blendkv.integrations.langchain_messages import as_content_blocks
from blendkv.integrations.langchain_retriever import ChunkCacheRetriever, ChunkPrefetchHandler

__all__ = ["ChatBlended", "ChunkCacheRetriever", "ChunkPrefetchHandler", "as_content_blocks"]
