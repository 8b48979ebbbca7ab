"""Where the processes of a job meet: who can read what rank 0 says, and what is refused."""

import os

import pytest

from p3.errors import ConfigError, RendezvousError
from p3.launch.launchers import meeting
from p3.launch.launchers.channels import FileChannel
from p3.launch.launchers.place import Place
from p3.settings import Settings


def place(rank=0, size=2, machines=2, **others):
    return Place("slurm", rank, size, 0, 1, machines, str(rank), "slurm-0123", **others)


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "meeting")


def channel(folder):
    return FileChannel(folder, place())


def test_all_learn_where_the_scheduler_is_and_the_secret(folder):
    met = meeting.meet(Settings(), place(), channel(folder), "127.0.0.1")
    with met.listener:
        assert met.variables["DMLC_PS_ROOT_PORT"] == str(met.listener.getsockname()[1])
        assert len(met.variables["P3_SECRET"]) == 64
        assert meeting.meet(Settings(), place(1), channel(folder), "").variables == met.variables
    (name,) = os.listdir(folder)
    assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o600
    channel(folder).withdraw()
    channel(folder).withdraw()
    assert os.listdir(folder) == []


def test_a_secret_that_is_given_is_not_written_down(folder):
    met = meeting.meet(Settings(secret="a secret that only tests use"), place(), channel(folder), "127.0.0.1")
    met.listener.close()
    assert "P3_SECRET" not in met.variables
    assert len(channel(folder).read(1).split()) == 2


def test_a_job_of_one_server_that_is_to_outlive_it_does_not_begin(folder):
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="one server on each machine, so there have to be two machines"):
            alone = place(rank, machines=1)
            meeting.meet(Settings(on_server_loss="continue"), alone, FileChannel(folder, alone), "127.0.0.1")


def test_a_channel_that_others_can_read_gets_no_secret(folder):
    public = channel(folder)
    public.private = False
    with pytest.raises(ConfigError, match="the job has no secret: set P3_SECRET or P3_SECRET_FILE"):
        meeting.meet(Settings(), place(), public, "127.0.0.1")


def test_a_file_that_others_may_read_is_refused(folder):
    channel(folder).publish("127.0.0.1 1 secret")
    os.chmod(os.path.join(folder, "slurm-0123"), 0o640)
    with pytest.raises(ConfigError, match="others have access to it"):
        channel(folder).read(1)


def test_a_folder_that_others_may_write_to_is_refused(folder):
    os.mkdir(folder)
    os.chmod(folder, 0o777)
    with pytest.raises(ConfigError, match="Name a folder of yours: --meeting-dir"):
        channel(folder).publish("127.0.0.1 1 secret")
    assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to .*/file .*--meeting-dir"):
        channel(str(tmp_path / "file")).publish("127.0.0.1 1 secret")


def test_who_waits_in_vain_is_told_where_and_what_to_do(folder):
    with pytest.raises(RendezvousError, match="rank 0 has not written .*slurm-0123 in 0.2 s .*--meeting-dir"):
        channel(folder).read(0.2)


def test_a_worker_alone_writes_nothing(folder):
    meeting.meet(Settings(), place(size=1, machines=1), channel(folder), "127.0.0.1").listener.close()
    assert not os.path.exists(folder)


def test_a_known_scheduler_needs_a_given_secret(folder):
    known = Settings(root_host="train-0.train", root_port=9091)
    with pytest.raises(ConfigError, match="the job has no secret"):
        meeting.arrange(known, place(), folder, {}).__enter__()


def test_where_a_known_scheduler_is_nobody_has_to_say(folder):
    """Its name may not resolve yet: whoever connects to it waits for that."""
    settings = Settings(root_host="nowhere.invalid", root_port=9091, secret="a secret that only tests use")
    with meeting.arrange(settings, place(1), folder, {}) as (channel, *_):
        assert channel.read(0.1) == "nowhere.invalid 9091"


@pytest.mark.parametrize(
    "settings, machines, expected",
    [
        (Settings(), 1, "127.0.0.1"),
        (Settings(node_host="10.0.0.7"), 2, "10.0.0.7"),
        (Settings(root_host="train-0.train"), 4, "train-0.train"),
    ],
)
def test_the_address_of_rank_0(settings, machines, expected):
    assert meeting.address_of_rank_0(settings, place(machines=machines)) == expected
