"""The demonstration's models, made once into this user's cache."""

from pathlib import Path

import pytest

from tierkv.demo.models import model_folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return model_folder("smollm2")


@pytest.fixture(scope="session")
def hybrid_folder() -> Path:
    return model_folder("hybrid")
