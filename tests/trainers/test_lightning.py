"""p3.lightning.Strategy beside Lightning's DDPStrategy: the same trainings, by the same script."""

import sys

import pytest
import trainer_jobs as jobs
from processes import ROOT, Process, clean_environment

pytest.importorskip("lightning", reason="no Lightning here; make test-trainers installs it")
pytestmark = pytest.mark.timeout(400)  # the first test waits for the jobs

SCRIPT = "on_lightning.py"
LIKE_DDP = ["plain", "by_name", "clipped", "value_clipped", "accumulated", "halved", "halved_clipped", "manual",
            "stopped", "saved", "begun", "resumed", "validated", "unseen", "looked_at", "changed",
            "averaged"]  # fmt: skip
BY_P3_ALONE = ["fused", "moved", "refused", "local", "local_begun", "local_resumed", "local_linked", "local_ended",
            "local_manual", "local_weighed", "sweep"]  # fmt: skip


def test_one_worker_may_validate_before_it_trains(tmp_path, processes):
    command = [sys.executable, str(ROOT / "tests" / "jobs" / "lightning_alone.py")]
    processes.append(Process(command, clean_environment(OMP_NUM_THREADS="1", HOME=str(tmp_path)), tmp_path))
    finished = processes[-1].wait(100)
    assert finished.code == 0 and "trained alone" in finished.out, finished.out + finished.err


@pytest.mark.parametrize("name", LIKE_DDP)
def test_losses_gradients_samples_evaluations_and_files_are_those_of_ddp(by_p3, by_ddp, name):
    assert jobs.differences(by_p3[name], by_ddp[name]) == []


def test_the_same_under_torchrun_and_from_a_checkpoint_of_p3_run(folder, by_p3, by_ddp):
    names = ["plain", "accumulated", "manual"]
    told = jobs.run(jobs.torchrun(), SCRIPT, "p3", folder / "torchrun", [*names, "taken_over"])
    assert jobs.differences({name: told[name] for name in names}, {name: by_ddp[name] for name in names}) == []
    assert jobs.differences(told["taken_over"], by_p3["resumed"]) == []


def test_every_sample_is_used_and_by_one_worker_but_for_what_fills_up_the_last_batches(by_p3):
    assert [one["world"] for one in by_p3["plain"]] == [[2, 0], [2, 1]]
    seen = [one["seen"] for one in by_p3["plain"]]
    for epoch in (slice(0, 7), slice(7, 14)):
        together = [sample for one in seen for sample in one[epoch]]
        assert set(together) == set(range(13)) and len(together) == 14


def test_no_step_waits_for_the_network(folder):
    jobs.require_no_wait(SCRIPT, folder)


@pytest.mark.parametrize("name", ["losing", "losing_validated"])
def test_lost_servers_come_back_between_steps(folder, name):
    jobs.require_servers_back(SCRIPT, folder, name)


def test_workers_have_the_same_weights(by_p3):
    assert all(one["weights"] == other["weights"] for one, other in by_p3.values() if "weights" in one)


def test_rank_0_alone_writes_and_the_best_two_stay(by_p3):
    assert [len(one["files"]) for one in by_p3["saved"]] == [2, 0]


def test_a_checkpoint_resumes_under_p3_and_under_ddp(by_p3, by_ddp):
    """resumed() is the third epoch of begun()."""
    assert [one["weights"] for one in by_p3["resumed"]] == [one["weights"] for one in by_p3["begun"]]
    assert jobs.differences(by_ddp["taken_over"], by_p3["resumed"]) == []


def test_gradients_of_a_fused_optimizer_are_clipped_too(by_p3):
    """In the first epoch, before the scheduler's next rate: as AdamW's own that is not fused."""
    for one, other in zip(by_p3["fused"], by_p3["halved_clipped"]):
        count = len(one["losses"])
        assert 0 < count < len(other["losses"])
        assert jobs.differences(one["losses"], other["losses"][:count], 1e-4) == []


def test_weights_and_states_go_to_another_device_behind_their_last_update(by_p3):
    for one in by_p3["moved"]:
        assert one["pending"] and not any(one["pending"])


def test_early_stopping_stops_all_workers_at_one_step(by_p3):
    assert [one["steps"] for one in by_p3["stopped"]] == [[12, 12], [12, 12]]


def test_local_steps_are_those_of_a_plain_loop(by_p3):
    """Accumulated, clipped, with a scheduler; validations of the global weights, which are the model's at the end."""
    jobs.require_same_as_in_a_loop(by_p3["local"])


def test_local_steps_resume_with_the_same_bits(by_p3):
    """From a checkpoint with fragments under way, of which the model has the global weights."""
    jobs.require_resumed(by_p3["local_begun"], by_p3["local_resumed"])
    for one in by_p3["local_begun"]:
        assert one["saved"] == one["evaluated"][1] and abs(one["validated"][0] - one["validated"][1]) < 1e-6
        kept = ["epoch=%d.ckpt%s" % (epoch, of) for epoch in (0, 1, 3) for of in ("", ".p3_local_0", ".p3_local_1")]
        assert one["files"] == [*kept, "last.ckpt"]


def test_a_link_to_a_checkpoint_leads_to_its_parts_too(by_p3):
    assert all(of_file == of_link and len(of_file["losses"]) == 4 for of_file, of_link in by_p3["local_linked"])


def test_a_training_of_which_nothing_is_left_ends_with_the_global_weights(by_p3):
    for ended, begun in zip(by_p3["local_ended"], by_p3["local_begun"]):
        assert ended["losses"] == [] and ended["weights"] == begun["weights"]


def test_each_of_two_optimizers_has_local_steps_of_its_own(by_p3):
    first, second = by_p3["local_manual"]
    assert first["losses"] != second["losses"] and first["weights"] == second["weights"]


def test_workers_count_by_the_samples_of_their_batches_or_by_what_a_function_says(by_p3):
    jobs.require_weighed(by_p3["local_weighed"])


def test_trainings_of_new_models_are_alike_and_the_former_are_released(by_p3):
    for one in by_p3["sweep"]:
        for found in one.values():
            assert found["weights"] == [found["weights"][0]] * 3
            assert found["released"] == [[False], [True, False], [True, True, False]]


@pytest.mark.parametrize("what, said", [
    ("weigh", "local_steps has weigh='tokens'; it must be True"),
    ("weigh batch", "weigh(-1): it takes how many samples"),
    ("P3's optimizer", "return the plain one"),
    ("LBFGS", "use another optimizer"),
    ("workers", "the launcher says how many there are"),
    ("local options", "local_steps is '30'; it must be a dict"),
    ("local every", "every is 0"),
    ("precision", "bf16-mixed so far"),
])  # fmt: skip
def test_what_cannot_work_is_refused_with_what_to_do(by_p3, what, said):
    assert said in by_p3["refused"][0][what]
