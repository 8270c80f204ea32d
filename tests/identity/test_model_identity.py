"""Everything that changes a model's state is in its root."""

import json
from dataclasses import fields, replace

import pytest
from blake3 import blake3

from tierkv.identity.model import ModelIdentity

BASE = ModelIdentity("aa" * 32, "bb" * 32, "mlx-lm", "mlx-lm 0.32.2 mlx 0.32.4", name="toy")
OTHER = {"str": "something else", "int": 7}


@pytest.mark.parametrize("name", [field.name for field in fields(ModelIdentity) if field.name != "name"])
def test_any_other_part_gives_another_root(name: str):
    value = getattr(BASE, name)
    changed = replace(BASE, **{name: OTHER[type(value).__name__]})
    assert changed.digest() != BASE.digest()
    assert BASE.differing_parts(changed) == (name,)


def test_the_name_is_for_people():
    assert replace(BASE, name="other").digest() == BASE.digest()


def test_the_root_is_that_of_a_plain_blake3_call():
    parts = {field.name: getattr(BASE, field.name) for field in fields(BASE) if field.name != "name"}
    text = json.dumps({**parts, "key_schema": 1}, sort_keys=True, separators=(",", ":"))
    assert BASE.digest() == blake3(text.encode(), derive_key_context="tierkv 2026 v1 model identity").digest()
