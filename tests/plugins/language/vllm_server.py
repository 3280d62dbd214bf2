"""vLLM's own server with a small model, as a process of its own."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.servers.engine import write_model

_LIMIT_S = 600


def started_server(network: CausalNetwork, *, length: int) -> str:
    """The address of a server of this model, which ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="polyrhythm-vllm-server-"))
    write_model(network, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"--model": folder, "--host": "127.0.0.1", "--port": port, "--dtype": "float32"}
    options |= {
        "--max-model-len": length,
        "--max-num-seqs": 16,
        "--block-size": 32,
        "--kv-cache-memory-bytes": 100_000_000,
    }
    options |= {"--logprobs-mode": "processed_logprobs", "--generation-config": "vllm"}
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"]
    started = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    command += [str(part) for option in options.items() for part in option]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | started, stdout=log, stderr=log, start_new_session=True)
    atexit.register(_end, process, folder)
    url = f"http://127.0.0.1:{port}"
    _await(process, url, folder / "log")
    return url


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _LIMIT_S
    while True:
        with suppress(URLError, ConnectionError), urlopen(f"{url}/v1/models") as answer:
            answer.read()
            return
        if process.poll() is not None or time.monotonic() > until:
            raise AssertionError(f"vLLM's server did not start: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
