"""Describe a Ray cluster that runs, as a file for --cluster of train --check, check and plan --memory.

Example: polyrhythm cluster HEAD:6390 > cluster.yaml
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_ = "HOST:PORT of its head node; auto (default): the cluster that runs on this machine"
    parser.add_argument("address", nargs="?", default="auto", help=help_)


def run(arguments: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from polyrhythm.config.sections.running import RaySettings, is_description
    from polyrhythm.errors import ConfigError
    from polyrhythm.plugins.cluster.description import describe
    from polyrhythm.plugins.cluster.ray.inventory import in_order, read_nodes
    from polyrhythm.plugins.cluster.ray.reach import LOCAL, node_name

    address = arguments.address
    if address == LOCAL or is_description(address):
        raise ConfigError(f"address = {address}: not a cluster that runs; name HOST:PORT of its head node, or auto")
    try:
        RaySettings(address=address)
    except ValidationError:
        raise ConfigError(f"address = {address}: not an address; write HOST:PORT of the head node, or auto") from None
    nodes = in_order(read_nodes(address))
    print(describe([(node_name(node), node["Resources"]) for node in nodes]), end="")
    return 0
