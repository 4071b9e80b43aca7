"""What a first forward may hold in memory at most, counted from a configuration, to compare the measured peak with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from blendkv.flops import ACTIVE_EXPERTS

RESERVE = 256
"""Tokens of room that a `BlendedCache` has beyond the prompt unless told otherwise."""


@dataclass(frozen=True)
class Peak:
    """Bytes, beyond the weights and the stored chunks.

    Attributes:
        placed: keys and values of the prompt in every layer, with the room to grow.
        selected_rows: activations of one decoder layer for the rows that are recomputed and the question.
        full_rows: what there is once for all rows: their embeddings, which live as long as the forward, and the
            activations of one layer where a layer runs in full; elsewhere one more copy of one layer's keys and values
            on the way to their places, and the output that is handed back (NaN where nothing was computed).
    """

    placed: int
    selected_rows: int
    full_rows: int

    @property
    def total(self) -> int:
        """The bound: the three parts together, although they are not all there at the same moment."""
        return self.placed + self.selected_rows + self.full_rows


def layer_row_bytes(config: PretrainedConfig, itemsize: int) -> dict[str, int]:
    """Bytes per row that a decoder layer like Llama's holds at once without autograd, in each of its stages.

    D is the hidden size, Q all query heads, K all KV heads, I the MLP's width, e the bytes of an element. The layer's
    input stays alive in its caller, and is the residual of the first half.

    * norm, before the MLP: input and residual (2 D e), the rows in fp32 and their product with 1 / RMS (8 D).
    * attention: input and normed rows (2 D e), q, k, v ((Q + 2 K) e), and for the rotation of q three more of its size:
      q cos, the half-turned q, and that times sin (or the sum). Attention itself needs less: q, k, v, its output and a
      transposed copy.
    * mlp: input, residual and normed rows (3 D e), the activated gate, up, and their product (3 I e).

    Norms of queries and keys, and the log-sum-exp of attention, are left out: no stage becomes the largest by them.

    Raises:
        ValueError: for a mixture of experts, whose activations depend on how rows are routed.
    """
    text: Any = config.get_text_config()
    if any(getattr(text, name, None) is not None for name in ACTIVE_EXPERTS):
        raise ValueError("activations of a mixture of experts are not counted: they depend on the routing")
    hidden, mlp, head = text.hidden_size, text.intermediate_size, _head_dim(text)
    q, k = text.num_attention_heads * head, text.num_key_value_heads * head
    return {
        "norm": 2 * hidden * itemsize + 8 * hidden,
        "attention": (2 * hidden + 4 * q + 2 * k) * itemsize,
        "mlp": (3 * hidden + 3 * mlp) * itemsize,
    }


def expected_peak(
    config: PretrainedConfig,
    *,
    tokens: int,
    question_tokens: int,
    ratio: float,
    itemsize: int,
    batch: int = 1,
    full_layer: bool = True,
    reserve: int = RESERVE,
) -> Peak:
    """Peak of a blend: the placed keys and values + one layer of the selected rows + one layer of all rows.

    Args:
        config: of the model.
        tokens: chunk tokens of a row of the batch.
        question_tokens: tokens after them.
        ratio: share of the chunk tokens that is recomputed.
        itemsize: bytes of an element.
        batch: rows of the batch.
        full_layer: whether some layer runs for all rows (selectors that compare); False for selectors that need only
            positions.
        reserve: tokens of room beyond the prompt.

    Raises:
        ValueError: for a mixture of experts.
    """
    text: Any = config.get_text_config()
    rows, head = batch * (tokens + question_tokens), _head_dim(text)
    kv = 2 * text.num_key_value_heads * head * itemsize
    layer = max(layer_row_bytes(config, itemsize).values())
    tables = 2 * head * itemsize + 4 * head  # cosines and sines: the model's own, and the blend's in fp32
    once = text.hidden_size * itemsize + (layer if full_layer else text.hidden_size * itemsize + kv)
    return Peak(
        placed=(rows + batch * reserve) * kv * text.num_hidden_layers,
        selected_rows=batch * (round(ratio * tokens) + question_tokens) * layer,
        full_rows=rows * (once + tables),
    )


def _head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
