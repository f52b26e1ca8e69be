import pytest


@pytest.fixture(scope="session")
def unit_35b(checkpoints):
    """The shared unit-35b checkpoint: never write there."""
    return checkpoints["unit-35b"]
