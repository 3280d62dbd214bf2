"""One reader of a model folder's files for policies and environments."""

from __future__ import annotations

import json
from pathlib import Path

from polyrhythm.specs.model_folder import end_ids, read_object


def test_ends_of_text_are_those_of_generation_first_and_each_once(tmp_path: Path) -> None:
    assert end_ids(tmp_path) == []
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, None]}))
    assert end_ids(tmp_path) == [7, 2]


def test_what_is_no_object_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("[1]", "{", ""):
        file.write_text(text)
        assert read_object(file) == {}
