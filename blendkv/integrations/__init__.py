"""blendkv in other frameworks: LangChain, LlamaIndex, Haystack, pipelines of transformers; each module needs its own."""
