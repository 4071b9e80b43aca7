"""KL divergence of next-token distributions."""

from __future__ import annotations

import torch


def kl_divergence(full_logits: torch.Tensor, other_logits: torch.Tensor) -> torch.Tensor:
    """KL(full || other) of next-token distributions, in float64.

    A token that `full` rules out (logit -inf) adds nothing; NaN logits give NaN, never 0.

    Args:
        full_logits: [..., V] logits of full recompute, steps before the vocabulary.
        other_logits: [..., V] logits of the method under test, for the same tokens.

    Returns:
        [...] nats per step.
    """
    if full_logits.shape != other_logits.shape:
        raise ValueError(f"logits differ in shape: {tuple(full_logits.shape)} and {tuple(other_logits.shape)}")
    full = torch.log_softmax(full_logits.double(), dim=-1)
    other = torch.log_softmax(other_logits.double(), dim=-1)
    probability = full.exp()
    return torch.where(probability == 0, 0.0, probability * (full - other)).sum(dim=-1)
