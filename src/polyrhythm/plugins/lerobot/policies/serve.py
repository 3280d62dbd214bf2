"""The process that runs a LeRobot policy: `python -I` this file, SOCKET FOLDER.

It needs numpy, torch and lerobot, but not this package, so that their pins may conflict. It ends with the connection,
and removes FOLDER, which has its temporary files: `from_pretrained` of a configuration leaves one.

A message on the socket is a line of JSON followed by the bytes of its arrays:

    {"open": FOLDER, "device": DEVICE}     -> {"type", "inputs", "lerobot"}
    {"tasks": [...], "seeds": [...]} obs   -> {} and `actions` [B,H,A] float32 in the environment's units
    any                                    -> {"error": TEXT}
"""

import importlib
import json
import os
import shutil
import socket
import sys
import tempfile
from importlib import metadata
from io import BufferedRWPair
from pathlib import Path
from typing import Any

import numpy as np

#: Policies whose actions follow from the observation alone; the others are computed row by row, each from its seed.
_DETERMINISTIC = ("act",)
#: Step of a processor that moves tensors.
_MOVE = "device_processor"


def write(line: BufferedRWPair, message: dict[str, Any], arrays: dict[str, Any] | None = None) -> None:
    """Send a message. OSError: the other end is closed."""
    arrays = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    message = {**message, "arrays": {name: [x.dtype.str, x.shape] for name, x in arrays.items()}}
    line.write(json.dumps(message).encode() + b"\n" + b"".join(x.tobytes() for x in arrays.values()))
    line.flush()


def read(line: BufferedRWPair) -> tuple[dict[str, Any], dict[str, Any]]:
    """The next message and its arrays. EOFError: the other end is closed."""
    first = line.readline()
    if not first.endswith(b"\n"):
        raise EOFError("the connection was closed")
    message = json.loads(first)
    arrays = {}
    for name, (dtype, shape) in message.pop("arrays").items():
        size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        data = line.read(size)
        if len(data) < size:
            raise EOFError("the connection was closed")
        arrays[name] = np.frombuffer(bytearray(data), dtype).reshape(shape)
    return message, arrays


def open_config(folder: str, device: str) -> Any:
    """The policy's configuration, after the packages of policies (lerobot_policy_NAME) that this Python has registered
    theirs. ValueError: its type is not registered."""
    import lerobot.policies  # noqa: F401 - registers LeRobot's own
    from lerobot.configs.policies import PreTrainedConfig

    try:
        from lerobot.utils.import_utils import register_third_party_plugins
    except ImportError:  # of versions before plugins
        pass
    else:
        register_third_party_plugins()
    kind = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["type"]
    if kind not in PreTrainedConfig.get_known_choices():
        raise ValueError(
            f"no policy of type {kind!r} is registered; install its package, whose name begins with lerobot_policy_, "
            f"in {sys.executable}{_broken()}"
        )
    config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
    config.device = device
    return config


def _broken() -> str:
    """The packages of policies that this Python has and cannot import, with their errors."""
    found = []
    for one in metadata.distributions():
        if (name := one.metadata["Name"] or "").replace("-", "_").startswith("lerobot_policy_"):
            try:
                importlib.import_module(name.replace("-", "_"))
            except Exception as error:  # noqa: BLE001 - it is told
                found.append(f"; {name} is there and cannot be imported: {type(error).__name__}: {error}")
    return "".join(found)


def open_processors(config: Any, folder: str) -> tuple[Any, Any]:
    """The pre- and the post-processor, both on the configuration's device."""
    from lerobot.policies.factory import make_pre_post_processors

    overrides: list[dict[str, Any]] = []
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        saved = json.loads(Path(folder, name).read_text(encoding="utf-8"))
        steps = [step.get("registry_name") for step in saved.get("steps", ())]
        overrides.append({_MOVE: {"device": config.device}} if _MOVE in steps else {})
    pre, post = make_pre_post_processors(
        config, pretrained_path=folder, preprocessor_overrides=overrides[0], postprocessor_overrides=overrides[1]
    )
    return pre, post


class Served:
    """A policy with its pre- and post-processor, from a folder of `save_pretrained`."""

    def __init__(self, folder: str, device: str) -> None:
        import lerobot
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        config = open_config(folder, device)
        from lerobot.policies.factory import get_policy_class

        self.policy = get_policy_class(config.type).from_pretrained(folder, config=config, local_files_only=True)
        self.policy.to(device).eval()
        self.pre, self.post = open_processors(config, folder)
        self.torch, self.config, self.device = torch, config, device
        self.told = {"type": config.type, "inputs": list(config.input_features), "lerobot": lerobot.__version__}

    def act(self, obs: dict[str, Any], tasks: list[str], seeds: list[int]) -> Any:
        """Actions [B,H,A] float32. obs: by feature, images [B,...,C,H,W] in 0..1."""
        if self.config.type in _DETERMINISTIC:
            return self._act(obs, tasks, seeds[0])
        rows = [
            self._act({name: x[i : i + 1] for name, x in obs.items()}, tasks[i : i + 1], seed)
            for i, seed in enumerate(seeds)
        ]
        return np.concatenate(rows)

    def _act(self, obs: dict[str, Any], tasks: list[str], seed: int) -> Any:
        torch = self.torch
        torch.manual_seed(seed)
        batch = {name: torch.from_numpy(x).to(self.device) for name, x in obs.items()}
        with torch.inference_mode():
            self.policy.reset()
            actions = self.post(self.policy.predict_action_chunk(self.pre({**batch, "task": tasks})))
        return actions.float().cpu().numpy()


def main(words: list[str]) -> int:
    line = socket.socket(fileno=int(words[0])).makefile("rwb")
    os.environ["TMPDIR"] = words[1]
    tempfile.tempdir = None
    served: Served | None = None
    try:
        while True:
            message, arrays = read(line)
            try:
                if served is None:
                    served = Served(message["open"], message["device"])
                    write(line, served.told)
                else:
                    write(line, {}, {"actions": served.act(arrays, message["tasks"], message["seeds"])})
            except Exception as error:  # noqa: BLE001 - the other end raises it
                write(line, {"error": " ".join(f"{type(error).__name__}: {error}".split())[:600]})
    except (EOFError, OSError):
        return 0
    finally:
        shutil.rmtree(words[1], ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
