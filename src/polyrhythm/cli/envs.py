"""List the environments and the packages that each needs; with TYPE: its settings, their defaults and meaning."""

from __future__ import annotations

import argparse

from polyrhythm.cli import adapters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    adapters.add_type(parser)


def run(arguments: argparse.Namespace) -> int:
    return adapters.show("env", arguments)
