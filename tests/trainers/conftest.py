"""The jobs whose results a file's tests look at: trainings of its SCRIPT that are LIKE_DDP, with P3 and with DDP."""

import pytest
import trainer_jobs as jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def by_p3(request, folder):
    """What jobs.run() returns of them, and of those that are BY_P3_ALONE."""
    module = request.module
    return jobs.run(jobs.P3, module.SCRIPT, "p3", folder / "p3", [*module.LIKE_DDP, *module.BY_P3_ALONE])


@pytest.fixture(scope="module")
def by_ddp(request, folder, by_p3):
    """The same, and of taken_over(), which goes on from a checkpoint that P3 has written."""
    module = request.module
    return jobs.run(jobs.torchrun(), module.SCRIPT, "ddp", folder / "ddp", [*module.LIKE_DDP, "taken_over"])
