"""A trainer of several ranks."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "ranks",
    adds={
        "ranks": {
            "replicate": "polyrhythm.plugins.ranks.replicated:ReplicatedRanks",
            "shard": "polyrhythm.plugins.ranks.sharded:ShardedRanks",
        },
        "checkpoint": {
            "folder": "polyrhythm.plugins.ranks.shards:load_folder",
        },
    },
)
