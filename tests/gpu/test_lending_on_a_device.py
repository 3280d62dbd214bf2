"""Lent prefixes on a CUDA device: by captured passes within a process, and by CUDA IPC between processes.
Never run: no such device was at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.test_prefixes import check_deaths
from tests.stations.test_lending import check_lending

pytestmark = pytest.mark.gpu


def test_captured_passes_lend_what_the_policy_gives(cuda: torch.device) -> None:
    check_lending("captured", cuda)


def test_prefixes_cross_processes_and_outlive_generators(cuda: torch.device, tmp_path: Path) -> None:
    check_deaths(tmp_path, str(cuda))
