import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _apart(tmp_path_factory):
    """A temporary folder of our own: a test that measures keeps nobody else of this machine from measuring.

    MLX keeps there what its compiler made for the CPU, half a second each, which is everybody's.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tmp")
        compiled = Path(tempfile.gettempdir(), "mlx")
        compiled.mkdir(exist_ok=True)
        (folder / "mlx").symlink_to(compiled)
        patch.setenv("TMPDIR", str(folder))  # of processes that are started
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.fixture(scope="session")
def unit_35b(checkpoints):
    """The shared unit-35b checkpoint: never write there."""
    return checkpoints["unit-35b"]
