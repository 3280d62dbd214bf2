"""Whether the tokens of an environment are those that a folder's model was trained with.

A policy sees ids alone, so another tokenizer that has no more of them than the model would go unnoticed: the model
would be given, and answer, other words.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from polyrhythm.errors import ConfigError
from polyrhythm.specs import ActionSpec
from polyrhythm.specs.model_folder import end_ids


def check_vocabulary(checkpoint: str, action: ActionSpec, what: str) -> None:
    """ConfigError: the folder's own tokenizer has another largest id than the environment's, or none of the folder's
    end-of-text tokens ends a message there. what: the setting that names the folder.

    A tokenizer with the same largest id and end of text is not told apart.
    """
    folder = Path(checkpoint).expanduser()
    own = _own_ids(folder)
    if own and own != action.choices:
        raise ConfigError(
            f"{what}: its own tokenizer has ids below {own}, the environment's ids below {action.choices}; set "
            "env.tokenizer to the same folder"
        )
    ends = set(end_ids(folder))
    if ends and not ends & set(action.stops):
        named, stops = (", ".join(map(str, sorted(ids))) for ids in (ends, set(action.stops)))
        raise ConfigError(
            f"{what}: its end of text is token {named}, the environment's messages end at {stops}; set env.tokenizer "
            "to the same folder, or correct eos_token_id in its generation_config.json"
        )


@lru_cache(maxsize=8)
def _own_ids(folder: Path) -> int:
    """The largest id of the folder's tokenizer.json, added ones included, and 1: ids may have gaps. 0 where there is no
    tokenizer that can be read."""
    from transformers import PreTrainedTokenizerFast

    try:
        known = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).get_vocab()
    except Exception:  # noqa: BLE001 - transformers and tokenizers raise many kinds
        return 0
    return 1 + max(known.values(), default=-1)
