"""What `torch.compile` must not trace."""

import torch


def refuse_compiled() -> None:
    """Raises where `torch.compile` traces code that a `BlendedCache` steers: the rows computed are chosen as it runs.

    Raises:
        ValueError: when the traced code is run (under `fullgraph`, torch raises an error of its own).
    """
    if torch.compiler.is_compiling():
        torch.compiler.disable(_refuse_compiled)()


def _refuse_compiled() -> None:
    raise ValueError(
        "a model that is compiled would blend wrongly: for a BlendedCache call the model that was not compiled, or "
        "within torch.compiler.set_stance('force_eager')"
    )
