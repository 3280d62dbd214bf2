"""Gives a server weights by a folder in the layout of Hugging Face, which is gone once they are loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.servers.protocol import NotLoaded, ServerProtocol


def load_weights(network: CausalNetwork, protocol: ServerProtocol, folder: str, version: int) -> None:
    """Write the network's weights below `folder`, "" for the system's temporary one, and have the server load them.

    RunHalted: they cannot be written, or the server does not load them.
    """
    within = Path(folder or tempfile.gettempdir())
    try:
        within.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"version-{version}-", dir=within) as found:
            Path(found).chmod(0o755)  # the server may be another user's
            write_model(network, Path(found))
            protocol.load(Path(found), version)
    except OSError as error:
        raise RunHalted(
            f"policy.engine.folder = {within}: weights cannot be written ({error.strerror}); make room, or name "
            "another folder"
        ) from error
    except NotLoaded as said:
        raise protocol.client.error(
            f"it did not load the weights ({said}); it needs this run's model, and to read {within} "
            "(policy.engine.folder)"
        ) from said


def write_model(network: CausalNetwork, folder: Path) -> None:
    """The model in the layout of Hugging Face."""
    from safetensors.torch import save_model

    config: Any = network.model.config
    config.architectures = [type(network.model).__name__]  # which servers start by
    config.save_pretrained(folder)
    save_model(network.model, str(folder / "model.safetensors"), metadata={"format": "pt"})
