import tempfile

import pytest


@pytest.fixture(scope="module", autouse=True)
def _apart(tmp_path_factory):
    """A temporary folder of our own: a test that measures keeps nobody else of this machine from measuring."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("tmp"))
        patch.setenv("TMPDIR", folder)  # of processes that are started
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def unit_35b(checkpoints):
    """The shared unit-35b checkpoint: never write there."""
    return checkpoints["unit-35b"]
