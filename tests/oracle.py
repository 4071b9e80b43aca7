"""A slow, obvious blend on plain tensors, for Llama-like models: what the fast path must equal.

Nothing of blendkv is used but chunks. Everything is fp64, every layer works on full-length tensors with NaN where a row
was not computed, rotation is written out from `inv_freq`, and the mask compares positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from blendkv.chunk import ChunkCache


@dataclass
class Placement:
    """A run of a chunk in the prompt: `length` tokens from `offset` of the chunk stand at `start`."""

    chunk: ChunkCache
    start: int
    offset: int = 0
    length: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.chunk) - self.offset if self.length is None else self.length


@dataclass
class Blended:
    """What came out: `logits [V]` of the last row; of every layer keys and values `[H, T, D]`, computed rows, and the
    attention `[T]` that keys get from rows after the last chunk, summed over heads."""

    logits: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)


def blend(
    model: nn.Module,
    ids: Tensor,
    placements: Sequence[Placement] = (),
    schedule: dict[int, float] | None = None,
    score: str | Tensor = "k",
    shift: float = 0.0,
    temperature: float = 1.0,
) -> Blended:
    """Blends one prompt.

    Args:
        model: a Llama, Qwen2, Qwen3, Mistral or SmolLM3 model.
        ids: `[T]`.
        placements: where chunks stand.
        schedule: layer -> share of chunk tokens kept from there on.
        score: "k", "v" or "kv" (deviation at the layer of the schedule), "boundary" (earlier in its chunk is better),
            or `[N]` scores of all chunk tokens in prompt order.
        shift: share of the mean error of a chunk's computed rows that is added to its others, keys un-rotated, each
            head's less what is noise of it, the chunk's first four tokens left out.
        temperature: that keys of rows which are not computed are divided by.
    """
    core, config, schedule = model.model, model.config, schedule or {}
    total = len(ids)
    owner = {}  # prompt index of a chunk token -> (placement, index in the chunk)
    for p in placements:
        for i in range(p.tokens):
            owner[p.start + i] = (p, p.offset + i)
    owner.pop(total - 1, None)  # the last row is always fresh
    chunk_rows = sorted(owner)
    rows = list(range(total))
    position = torch.arange(total)
    window = config.sliding_window if config.model_type == "mistral" else None
    visible = position[None, :] <= position[:, None]
    if window is not None:
        visible &= position[:, None] - position[None, :] < window
    hidden = core.embed_tokens.weight.detach().double()[ids]
    out = Blended(torch.empty(0))
    for index, layer in enumerate(core.layers):
        attention, width = layer.self_attn, layer.self_attn.head_dim
        rotates = getattr(config, "no_rope_layers", None) is None or bool(config.no_rope_layers[index])
        normed = rms_norm(layer.input_layernorm, hidden)
        q, k, v = (
            linear(projection, normed).view(total, -1, width)  # [T, heads, D]
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = rms_norm(attention.q_norm, q), rms_norm(attention.k_norm, k)
        stored_k, stored_v = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
        for row, (p, i) in owner.items():
            stored_k[row], stored_v[row] = p.chunk.keys[index][:, i].double(), p.chunk.values[index][:, i].double()
        own_k, kept_k = k, stored_k  # un-rotated
        if rotates:
            q, k, stored_k = (rotate(core, x, position) for x in (q, k, stored_k))

        if index in schedule and chunk_rows:
            candidates = [r for r in rows if r in owner]
            budget = min(round(schedule[index] * len(chunk_rows)), len(candidates))
            if isinstance(score, Tensor):
                points = {r: float(score[chunk_rows.index(r)]) for r in candidates}
            elif score == "boundary":
                points = {r: -float(owner[r][1] - owner[r][0].offset) for r in candidates}
            else:
                of_k = {r: float((k[r] - stored_k[r]).square().sum()) for r in candidates}
                of_v = {r: float((v[r] - stored_v[r]).square().sum()) for r in candidates}
                mean_k, mean_v = (sum(d.values()) / max(1, len(d)) for d in (of_k, of_v))
                both = {r: of_k[r] / max(mean_k, 1e-30) + of_v[r] / max(mean_v, 1e-30) for r in candidates}
                points = {"k": of_k, "v": of_v, "kv": both}[score]
            chosen = sorted(candidates, key=lambda r: (-points[r], r))[:budget]
            rows = [r for r in rows if r not in owner or r in chosen]

        for row in set(range(total)) - set(rows):
            k[row], v[row] = stored_k[row], stored_v[row]
            mates = [r for r in rows if r in owner and owner[r][0] is owner[row][0] and r - owner[r][0].start >= 4]
            if shift and len(mates) > 1 and row - owner[row][0].start >= 4:
                moved = kept_k.clone()
                moved[row] += shift * shrunk_mean([own_k[r] - kept_k[r] for r in mates])
                k[row] = rotate(core, moved, position)[row] if rotates else moved[row]
                v[row] = stored_v[row] + shift * shrunk_mean([v[r] - stored_v[r] for r in mates])
            k[row] = k[row] / temperature
        following = torch.full_like(hidden, torch.nan)
        per_group = q.shape[1] // k.shape[1]
        asked = torch.zeros(total, dtype=torch.float64)
        for row in rows:
            seen = visible[row]
            answer = []
            for head in range(q.shape[1]):
                weights = torch.softmax(k[seen, head // per_group] @ q[row, head] * width**-0.5, dim=0)
                answer.append(weights @ v[seen, head // per_group])
                if row > max(owner, default=-1):
                    asked[seen] += weights
            x = hidden[row] + linear(attention.o_proj, torch.cat(answer))
            y, mlp = rms_norm(layer.post_attention_layernorm, x), layer.mlp
            gated = nn.functional.silu(linear(mlp.gate_proj, y)) * linear(mlp.up_proj, y)
            following[row] = x + linear(mlp.down_proj, gated)
        hidden = following
        out.keys.append(k.transpose(0, 1))
        out.values.append(v.transpose(0, 1))
        out.rows.append(list(rows))
        out.attention.append(asked)
    out.logits = linear(model.lm_head, rms_norm(core.norm, hidden[total - 1]))
    return out


def shrunk_mean(errors: Sequence[Tensor]) -> Tensor:
    """`[heads, D]` mean of errors, each head's shrunk after James and Stein: by the share of it that noise explains."""
    mean = sum(errors) / len(errors)
    noise = sum((error - mean).square().sum(-1) for error in errors) / (len(errors) - 1) / len(errors)
    return mean * (1 - noise / mean.square().sum(-1)).clamp_min(0)[:, None]


def rotate(core: nn.Module, x: Tensor, position: Tensor) -> Tensor:
    """RoPE of `[T, heads, D]`: dimension i turns with i + D/2."""
    half = x.shape[-1] // 2
    angle = (position[:, None].double() * core.rotary_emb.inv_freq.double())[:, None]
    cos, sin = (f(angle) * core.rotary_emb.attention_scaling for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def linear(module: nn.Module, x: Tensor) -> Tensor:
    y = x @ module.weight.detach().double().T
    return y if module.bias is None else y + module.bias.detach().double()


def rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return x * scale * module.weight.detach().double()
