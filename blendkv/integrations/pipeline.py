"""A pipeline of transformers for documents and a question; importing it registers "blended-text-generation"."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.pipelines import PIPELINE_REGISTRY, Pipeline

from blendkv.integrations.answering import end_ids, pad_id, room
from blendkv.layout import Prompt
from blendkv.library import ChunkLibrary

TASK = "blended-text-generation"
MAX_NEW_TOKENS = 256
"""Unless the call, or the model's generation config, says how many."""
_BLEND = ("recompute_ratio", "selector", "check_layers", "strict", "reserve", "corrector")
_INPUT = ("documents", "question", "system")


class BlendedTextGenerationPipeline(Pipeline):
    """Answers questions from documents whose chunks are reused.

    `pipe(documents=[...], question="...")`, or `pipe({"documents": [...], "question": "...", "system": "..."})`, or a
    list, generator or dataset of such dicts, which are answered one after the other. Each answer is a dict:
    `generated_text`, the new text alone, and `report`, the `BlendReport`; with `num_return_sequences`, a list of them.
    Other arguments are those of `generate` (`max_new_tokens`, `do_sample`, `streamer`, ...) and of `BlendedCache`
    (`recompute_ratio`, `selector`, ...), for the pipeline or for one call.

    Args:
        *args: as for every pipeline.
        library: chunks of this very model; by default the pipeline makes a `ChunkLibrary` of its own.
        store: where that one keeps chunks.
        namespace: of that one; needed where others reach the store.
        **kwargs: as for every pipeline, and what calls take.

    Raises:
        ValueError: for a library of another model, or no tokenizer.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(
        self,
        *args: Any,
        library: ChunkLibrary | None = None,
        store: str | os.PathLike[str] | Any = "memory://",
        namespace: str | None = None,
        **kwargs: Any,
    ) -> None:
        if library is not None and kwargs.get("device") is None and not hasattr(library.model, "hf_device_map"):
            kwargs["device"] = next(library.model.parameters()).device  # not moved away from its chunks
        super().__init__(*args, **kwargs)
        if self.tokenizer is None:
            raise ValueError(f"{TASK} needs a tokenizer: pipeline({TASK!r}, model=model, tokenizer=tokenizer)")
        if library is not None and library.model is not self.model:
            raise ValueError("the library is of another model: pass pipeline(..., model=library.model)")
        if library is None:
            library = ChunkLibrary(self.model, self.tokenizer, store, namespace=namespace)
        self.library = library

    def __call__(self, inputs: Any = None, **kwargs: Any) -> Any:
        """Answers one question, or several; see the class."""
        given = {name: kwargs.pop(name) for name in _INPUT if name in kwargs}
        if (inputs is None) == (not given):
            raise ValueError("pass a dict with documents and question, a list of such dicts, or both by name")
        if isinstance(inputs, list | tuple):
            inputs = list(inputs)
            if not inputs:
                return []
        return super().__call__(given if inputs is None else inputs, **kwargs)

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, kwargs, {}

    def preprocess(self, input_: Any, **parameters: Any) -> dict[str, Any]:
        """Lays a prompt out; chunks are found later."""
        if not isinstance(input_, Mapping) or "question" not in input_ or set(input_) - set(_INPUT):
            what = sorted(map(str, input_)) if isinstance(input_, Mapping) else type(input_).__name__
            raise ValueError(
                f"{TASK} was given {what}: pass {{'documents': [...], 'question': '...'}}, with 'system' if you like"
            )
        documents: Iterable[Any] = input_.get("documents") or ()
        return {"prompt": self.library.assemble(documents, input_["question"], input_.get("system"))}

    def _forward(self, input_tensors: dict[str, Any], **options: Any) -> Any:
        blend = {name: options.pop(name) for name in _BLEND if name in options}
        if "recompute_ratio" in blend:
            blend.setdefault("check_layers", None)  # a schedule of the library would outweigh it
        prompt: Prompt = input_tensors["prompt"]
        ends = end_ids(self.library)
        left = room(self.model, len(prompt.ids))
        config = options.get("generation_config") or self.model.generation_config
        if config.max_new_tokens is None and not {"max_new_tokens", "max_length"} & set(options):
            options["max_new_tokens"] = min(MAX_NEW_TOKENS, left)
        options = {"eos_token_id": ends or None, "pad_token_id": pad_id(self.tokenizer, ends)} | options
        inputs = self.library.inputs(prompt, **blend)
        out = self.library.model.generate(**inputs, **options)
        return {"ids": out[:, len(prompt.ids) :], "report": inputs.report}

    def postprocess(self, model_outputs: dict[str, Any], **parameters: Any) -> Any:
        """Ids to text."""
        texts = self.library.tokenizer.batch_decode(model_outputs["ids"], skip_special_tokens=True)
        answers = [{"generated_text": text, "report": model_outputs["report"]} for text in texts]
        return answers[0] if len(answers) == 1 else answers


PIPELINE_REGISTRY.register_pipeline(
    TASK, pipeline_class=BlendedTextGenerationPipeline, pt_model=AutoModelForCausalLM, type="text"
)
