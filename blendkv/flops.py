"""Floating point operations of full prefill and of a blend, counted exactly.

Conventions, the same everywhere:

* A linear layer costs 2 x parameters per row; a mixture of experts counts its router and the experts that
  are active for a row. Norms, activations, biases and rotation are not counted.
* Attention is exact causal: a row costs 2 x heads x (QK dim + V dim) per key at a position <= its own (and
  inside its sliding window). No triangle is rounded up to a square.
* The LM head counts for one row, in full prefill and in the blend alike, as in `generate`.
* The check layer projects Q, K and V of every row, and charges a selected row only the rest of the layer.
  So a blend at ratio 1 costs exactly full prefill, and its limit is 1.0.
* `tokens` is the context (chunk rows); question rows come after it and are not part of it.

A probe of the K projection alone would raise the limit by about 1% (SmolLM2 at 5% and 4,096 tokens: 10.84
instead of 10.57).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = ("self_attn", "self_attention", "attention", "attn")
OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "top_k")


@dataclass(frozen=True)
class LayerShape:
    """What one row costs in one decoder layer.

    Attributes:
        qkv_flops: Query, key and value projections, per row.
        rest_flops: All other linear layers (output projection, MLP or active experts), per row.
        key_flops: Scores and weighted sum, per row and visible key: 4 x heads x head dim for plain attention.
        window: Keys that a row sees at most (sliding window), or None.
    """

    qkv_flops: int
    rest_flops: int
    key_flops: int
    window: int | None = None

    @property
    def row_flops(self) -> int:
        """All linear layers, per row."""
        return self.qkv_flops + self.rest_flops

    def visible(self, rows: int) -> int:
        """Keys seen by the first `rows` rows of a prompt, summed over those rows."""
        seen = min(rows, self.window) if self.window else rows
        return seen * (seen + 1) // 2 + (rows - seen) * seen


@dataclass(frozen=True)
class ModelShape:
    """What one row costs in each decoder layer, and in the LM head."""

    layers: tuple[LayerShape, ...]
    head_flops: int = 0

    @property
    def qkv_share(self) -> float:
        """Share of the decoder's linear FLOPs that Q, K and V projections take."""
        return sum(layer.qkv_flops for layer in self.layers) / sum(layer.row_flops for layer in self.layers)


@dataclass(frozen=True)
class LayerRows:
    """Chunk rows that one layer computed.

    Attributes:
        full: Rows that went through the whole layer.
        probed: Rows whose Q, K and V alone were computed, to choose among them.
        selected: Rows computed to the end after a selection. Where the layer was probed they are among the
            probed rows and cost only the rest; where it was not, they cost the whole layer.
    """

    full: float = 0
    probed: float = 0
    selected: float = 0


def full_flops(shape: ModelShape, tokens: int, question_tokens: int = 0) -> float:
    """FLOPs of prefilling `tokens` context and `question_tokens` question rows."""
    rows = tokens + question_tokens
    layers = sum(rows * layer.row_flops + layer.key_flops * layer.visible(rows) for layer in shape.layers)
    return float(layers + shape.head_flops)


def blend_flops(
    shape: ModelShape, tokens: int, question_tokens: int, schedule: Mapping[int, float], *, probe: bool = True
) -> float:
    """FLOPs of a blend whose selected rows are spread evenly over the context (each sees the mean of its keys).

    Args:
        shape: The model.
        tokens: Context rows, all covered by chunks.
        question_tokens: Rows after the context, computed in every layer.
        schedule: Layer -> share of the context rows kept from there on. Layers before the first run in full.
        probe: Whether a layer in `schedule` projects Q, K and V of all rows that reach it.
    """
    return sum(blend_parts(shape, tokens, question_tokens, schedule, probe=probe))


def blend_parts(
    shape: ModelShape, tokens: int, question_tokens: int, schedule: Mapping[int, float], *, probe: bool = True
) -> tuple[float, float]:
    """FLOPs of a blend as `blend_flops` counts them: of linear layers, and of attention."""
    _check_schedule(schedule, len(shape.layers))
    rows, kept, linear, attention = tokens + question_tokens, float(tokens), float(shape.head_flops), 0.0
    for index, layer in enumerate(shape.layers):
        reached = kept
        if index in schedule:
            kept = schedule[index] * tokens
        projected = reached if probe else kept
        context = layer.visible(tokens)
        keys = kept / max(tokens, 1) * context + layer.visible(rows) - context
        linear += (projected + question_tokens) * layer.qkv_flops + (kept + question_tokens) * layer.rest_flops
        attention += layer.key_flops * keys
    return linear, attention


def flop_limit(
    shape: ModelShape, tokens: int, question_tokens: int, ratio: float, check_layer: int = 1, static: bool = False
) -> float:
    """Largest speed-up over full prefill that a recompute ratio allows, by operations alone.

    Depends on the model's configuration, the prompt's lengths and the ratio, never on an implementation:
    full prefill over (layers below `check_layer` for all rows + Q, K and V of all rows there + the selected
    and question rows from there on).

    Args:
        shape: The model.
        tokens: Context rows, all covered by chunks.
        question_tokens: Rows after the context, always computed.
        ratio: Share of the context rows recomputed, 0 to 1.
        check_layer: Layer that selects.
        static: Rows are known beforehand: nothing is probed and no layer runs in full. Implied by ratio 0.
    """
    static = static or ratio == 0
    schedule = {0 if static else check_layer: ratio}
    blend = blend_flops(shape, tokens, question_tokens, schedule, probe=not static)
    return full_flops(shape, tokens, question_tokens) / blend if blend else float("inf")


def charged_budget(shape: ModelShape, layers: Iterable[LayerRows], chunk_rows: int) -> float:
    """FLOPs of linear layers spent on chunk rows / those of full prefill on the same rows.

    A full layer counts 1/L (weighted by its size where layers differ), a probed row its QKV share, a
    selected row the rest. Question rows are not charged.

    Args:
        shape: The model.
        layers: What each layer computed, first layer first.
        chunk_rows: Chunk rows of the prompt.
    """
    records = list(layers)
    if len(records) != len(shape.layers):
        raise ValueError(f"{len(records)} layer records for a model of {len(shape.layers)} layers")
    if not chunk_rows:
        return 0.0
    spent = sum(
        (done.full + max(done.probed, done.selected)) * layer.qkv_flops + (done.full + done.selected) * layer.rest_flops
        for done, layer in zip(records, shape.layers, strict=True)
    )
    return spent / (chunk_rows * sum(layer.row_flops for layer in shape.layers))


def model_shape(source: PreTrainedModel | PretrainedConfig) -> ModelShape:
    """Count a decoder from its modules; a config alone is built on the meta device (no memory).

    Raises:
        ValueError: The decoder layers, or a layer's attention or experts, were not recognised.
    """
    model = source if isinstance(source, nn.Module) else _empty_model(source)
    config = model.config.get_text_config(decoder=True)
    layers = tuple(layer_shape(layer, config, index) for index, layer in enumerate(_decoder_layers(model, config)))
    head = model.get_output_embeddings()
    return ModelShape(layers, 2 * sum(_weights(head, config)) if head is not None else 0)


def layer_shape(layer: nn.Module, config: PretrainedConfig, index: int = 0) -> LayerShape:
    """Count one decoder layer.

    Args:
        layer: The decoder layer.
        config: The text config of its model: heads, head dim, active experts, sliding window.
        index: Number of the layer, for configs that list a type per layer.
    """
    attention = next((child for name, child in layer.named_children() if name in ATTENTION), None)
    if attention is None:
        raise ValueError(f"layer {index} ({type(layer).__name__}) has no attention module named {', '.join(ATTENTION)}")
    output = next((child for name, child in attention.named_children() if name in OUTPUT), None)
    if output is None:
        raise ValueError(f"{type(attention).__name__} has no output projection named {', '.join(OUTPUT)}")
    qkv = 2 * (sum(_weights(attention, config)) - sum(_weights(output, config)))
    heads = config.num_attention_heads
    head_dim = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    qk_dim, v_dim = getattr(attention, "qk_head_dim", head_dim), getattr(attention, "v_head_dim", head_dim)
    return LayerShape(
        qkv_flops=qkv,
        rest_flops=2 * sum(_weights(layer, config)) - qkv,
        key_flops=2 * heads * (qk_dim + v_dim),
        window=_window(config, index),
    )


def _weights(module: nn.Module, config: Any) -> Iterator[int]:
    """Multiply-adds per row of each weight below `module`.

    Linear layers count by their features (a quantised weight has another shape), other weights by their
    matrices; stacked experts ([E, out, in]) and lists of experts by the share that is active.
    """
    features = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(features[0], int) and isinstance(features[1], int) and not list(module.children()):
        yield features[0] * features[1]
        return
    if isinstance(module, nn.Embedding):
        return
    for name, weight in module.named_parameters(recurse=False):
        if "bias" in name:
            continue
        if weight.ndim == 2:
            yield weight.numel()
        elif weight.ndim == 3:
            yield weight[0].numel() * _active(config, len(weight))
    for name, child in module.named_children():
        if name == "experts" and isinstance(child, nn.ModuleList):
            yield sum(_weights(child[0], config)) * _active(config, len(child))
        else:
            yield from _weights(child, config)


def _active(config: Any, experts: int) -> int:
    """Experts that compute a row, of `experts`."""
    for name in ACTIVE_EXPERTS:
        if (active := getattr(config, name, None)) is not None:
            return min(int(active), experts)
    raise ValueError(f"config has none of {', '.join(ACTIVE_EXPERTS)}: how many of {experts} experts are active?")


def _window(config: Any, index: int) -> int | None:
    """Sliding window of a layer, or None where it sees every earlier key."""
    types = getattr(config, "layer_types", None)
    slides = types[index] == "sliding_attention" if types else getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if slides else None


def _decoder_layers(model: nn.Module, config: Any) -> nn.ModuleList:
    """Find the decoder layers: the first ModuleList as long as the config says, with attention inside."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    for layers in lists:
        if len(layers) == config.num_hidden_layers and any(hasattr(layers[0], name) for name in ATTENTION):
            return layers
    raise ValueError(f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder layers with attention")


def _empty_model(config: PretrainedConfig) -> Any:
    """Build the causal language model of a config, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    build: Callable[[PretrainedConfig], Any] = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return build(config)


def _check_schedule(schedule: Mapping[int, float], layers: int) -> None:
    """Refuse a schedule that is empty, grows, or names a layer or ratio out of range."""
    if not schedule:
        raise ValueError("the schedule is empty: give at least one layer and its ratio, such as {1: 0.15}")
    previous = 1.0
    for layer, ratio in sorted(schedule.items()):
        if not 0 <= layer < layers:
            raise ValueError(f"check layer {layer} is not one of the model's layers, 0 to {layers - 1}")
        if not 0 <= ratio <= previous:
            raise ValueError(f"ratio {ratio} at layer {layer} is outside [0, {previous}]: ratios never grow")
        previous = ratio
