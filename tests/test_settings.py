"""Settings are read strictly, once, and never show the secret."""

import contextlib
import logging
import os

import pytest

from p3.errors import ConfigError
from p3.settings import REMOVED, VARIABLES, Settings, in_job, variable_of


def test_an_empty_environment_gives_the_defaults():
    settings = Settings.from_env({})
    assert (settings.role, settings.slice_elements, settings.timeout_s) == (None, "auto", 10.0)


def test_every_setting_is_read_from_its_own_variable():
    settings = Settings.from_env({"DMLC_ROLE": "worker", "P3_SLICE_ELEMENTS": "7", "P3_CHECKSUM": "1"})
    assert (settings.role, settings.slice_elements, settings.checksum) == ("worker", 7, True)
    assert len(VARIABLES) == len({variable_of(name) for name in Settings.__dataclass_fields__})


@pytest.mark.parametrize(
    "variable, value",
    [
        ("DMLC_ROLE", "master"),
        ("DMLC_NUM_SERVER", "0"),
        ("DMLC_NUM_WORKER", "-1"),
        ("DMLC_PS_ROOT_PORT", "65536"),
        ("DMLC_PS_ROOT_URI", "two words"),
        ("P3_SLICE_ELEMENTS", "50k"),
        ("P3_TIMEOUT_S", "nan"),
        ("P3_TIMEOUT_S", "inf"),
        ("P3_CHECKSUM", "true"),
        ("P3_SUM_ORDER", "RANK"),
        ("P3_RANK", "1.0"),
        ("P3_SERVER_PORTS", "9100-"),
        ("P3_SERVER_PORTS", "9107-9100"),
        ("P3_SERVER_PORTS", "9100,70000"),
    ],
)
def test_a_wrong_value_is_refused_and_named(variable, value):
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({variable: value})
    assert "%s=%r: it must be " % (variable, value) in str(caught.value)


def test_ports_are_a_range_or_a_list_or_both_and_addresses_may_stand_in_brackets():
    settings = Settings.from_env({"P3_SERVER_PORTS": "9100-9102, 9100,9200", "DMLC_PS_ROOT_URI": "[fd00::1]"})
    assert (settings.server_ports, settings.root_host) == ((9100, 9101, 9102, 9200), "fd00::1")


@pytest.mark.parametrize("timeout_s, heartbeat_s", [(10.0, 1.0), (2.0, 0.2), (60.0, 1.0)])
def test_several_heartbeats_fit_into_the_time_out(timeout_s, heartbeat_s):
    assert Settings(timeout_s=timeout_s).heartbeat_s == pytest.approx(heartbeat_s)


def test_there_are_few_settings_and_each_is_described():
    ours = [name for name in VARIABLES if name.startswith("P3_")]
    assert len(ours) <= 35
    for setting in VARIABLES.values():
        assert setting.metadata["text"].endswith(".") and len(setting.metadata["text"].split()) > 6


@pytest.mark.parametrize("variable", REMOVED)
def test_a_removed_variable_is_a_warning_that_says_what_to_do(caplog, variable):
    with caplog.at_level(logging.WARNING, "p3"):
        assert Settings.from_env({variable: "1"}) == Settings()
    assert "%s is set, but is no longer a setting and has no effect: %s" % (variable, REMOVED[variable]) in caplog.text


def test_what_scripts_are_told_is_no_unknown_setting(caplog):
    with caplog.at_level(logging.WARNING, "p3"):
        Settings.from_env({"P3_LOCAL_RANK": "0", "P3_LOCAL_SIZE": "2"})
    assert not caplog.records


def test_an_unknown_variable_is_a_warning_that_names_the_nearest(caplog):
    with caplog.at_level(logging.WARNING, "p3"):
        Settings.from_env({"P3_SLICE_ELEMENT": "7"})
    assert "P3_SLICE_ELEMENT is set" in caplog.text and "did you mean P3_SLICE_ELEMENTS?" in caplog.text


def test_the_secret_appears_neither_in_repr_nor_in_errors():
    assert "swordfish" not in repr(Settings.from_env({"P3_SECRET": "swordfish-swordfish"}))
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"P3_SECRET": "swordfish"})
    assert "P3_SECRET=(not shown)" in str(caught.value) and "swordfish" not in str(caught.value)


def test_a_secret_file_is_read_if_only_its_owner_can(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    settings = Settings.from_env({"P3_SECRET_FILE": str(path)})
    path.chmod(0o600)
    assert settings.job_secret() == b"0123456789abcdef"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        settings.job_secret()
    os.unlink(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        settings.job_secret()


def test_without_a_secret_no_job_is_joined():
    with pytest.raises(ConfigError, match="P3_SECRET or P3_SECRET_FILE"):
        Settings.from_env({"DMLC_ROLE": "worker"}).job_secret()


def test_missing_variables_are_all_named_at_once():
    with pytest.raises(ConfigError, match="worker: DMLC_PS_ROOT_URI, DMLC_NUM_WORKER are not set"):
        Settings.from_env({"DMLC_ROLE": "worker", "DMLC_PS_ROOT_PORT": "9"}).require(
            "root_host", "root_port", "num_workers"
        )


@pytest.mark.parametrize(
    "most, loss, text",
    [
        ("1", "continue", "P3_MAX_WORKERS=1 must not be below DMLC_NUM_WORKER=2"),
        ("3", "fail", "others can join only jobs that go on without lost workers: set P3_ON_WORKER_LOSS=continue"),
        ("2", "fail", None),
        ("3", "continue", None),
    ],
)
def test_a_job_begins_with_no_more_workers_than_it_may_have_and_grows_only_if_it_goes_on_without(most, loss, text):
    settings = Settings.from_env({"DMLC_NUM_WORKER": "2", "P3_MAX_WORKERS": most, "P3_ON_WORKER_LOSS": loss})
    assert settings.places == int(most)
    with pytest.raises(ConfigError, match=text) if text else contextlib.nullcontext():
        settings.require("num_workers")
    assert Settings.from_env({"DMLC_NUM_WORKER": "2"}).places == 2


def test_one_that_joins_may_have_a_rank_that_the_job_did_not_begin_with():
    env = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "P3_RANK": "2"}
    Settings.from_env({**env, "P3_JOIN": "60"}).require("role")
    with pytest.raises(ConfigError, match="P3_RANK=2 must be below DMLC_NUM_WORKER=2"):
        Settings.from_env(env).require("role")


def test_a_server_joins_only_a_job_that_goes_on_without_a_lost_one_and_needs_no_numbers():
    env = {"DMLC_ROLE": "server", "P3_JOIN": "60", "P3_RANK": "3"}
    with pytest.raises(ConfigError, match="set P3_ON_SERVER_LOSS=continue, or unset P3_JOIN"):
        Settings.from_env({**env, "P3_ON_WORKER_LOSS": "continue"}).require("role")
    Settings.from_env({**env, "P3_ON_SERVER_LOSS": "continue"}).require("role")
    Settings.from_env({**env, "DMLC_ROLE": "worker"}).require("role")


def test_only_dmlc_variables_ask_for_a_job():
    assert not in_job({"P3_TIMEOUT_S": "5", "DMLC_ROLE": ""})
    assert in_job({"DMLC_NUM_WORKER": "2"})
