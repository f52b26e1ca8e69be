"""What the tests of the sources share."""

import numpy as np
import pytest
from reference import FILE_BYTES


@pytest.fixture
def file(tmp_path):
    """A file of `FILE_BYTES` random bytes, no multiple of any block."""
    path = tmp_path / "model-00001-of-00001.safetensors"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, FILE_BYTES, np.uint8).tobytes())
    return path
