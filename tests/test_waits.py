"""What makes the host wait is noticed (here of tensors on the CPU, as if it were the device)."""

import pytest
import torch
from torch.nn import functional as F

from blendkv.waits import Waits


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("_local_scalar_dense", lambda x: x[0, 0].item()),
        pytest.param("_local_scalar_dense", lambda x: bool((x > 0).any()), id="bool"),
        ("equal", lambda x: torch.equal(x, x)),
        ("_to_copy", lambda x: x.to("meta")),
        ("index", lambda x: x[x > 0]),
        ("index_put_", lambda x: x.__setitem__(x > 0, torch.zeros(()))),
        ("nonzero", lambda x: torch.where(x > 0)),
        ("masked_select", lambda x: x.masked_select(x > 0)),
        ("_unique2", lambda x: x.unique()),
        ("bincount", lambda x: x.view(-1).long().abs().bincount()),
    ],
)
def test_what_waits_is_named(name, run):
    x = torch.randn(4, 8)
    with Waits("cpu") as waits:
        run(x)
    assert waits.first == name


def test_a_layers_usual_work_waits_for_nothing():
    x, index = torch.randn(4, 8), torch.zeros(2, dtype=torch.long)
    with Waits("cpu") as waits:
        y = F.rms_norm(x, (8,)) @ torch.randn(8, 16)
        y = F.silu(y) * y.softmax(-1)
        y = torch.cat([y[..., 8:], -y[..., :8]], -1).transpose(0, 1).float().to(torch.bfloat16)
        y = y[index] + y.index_select(0, index)
        y.copy_(torch.where(y > 0, y, 0))
        y.topk(1, dim=-1)
    assert waits.first is None


def test_other_devices_are_not_looked_at():
    with Waits() as waits:
        assert torch.ones(3).sum().item() == 3
        assert torch.ones(3).nonzero().shape == (3, 1)
    assert waits.first is None
