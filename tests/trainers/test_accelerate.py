"""p3.accelerate.Accelerator beside Accelerate's own with DDP: the same loops, by the same script."""

import re

import pytest
import trainer_jobs as jobs

pytest.importorskip("accelerate", reason="no Accelerate here; make test-trainers installs it")
pytestmark = pytest.mark.timeout(400)  # the first test waits for the jobs

SCRIPT = "on_accelerate.py"
LIKE_DDP = ["plain", "apart", "value_clipped", "accumulated", "accumulated_each", "halved", "compiled", "begun",
            "resumed", "two_models", "looked_at", "changed", "left_out", "written", "sharpness"]  # fmt: skip
BY_P3_ALONE = ["waiting", "uneven", "refused", "local", "local_begun", "local_resumed", "local_lost", "local_of_other",
            "local_weighed", "sweep"]  # fmt: skip


@pytest.mark.parametrize("name", LIKE_DDP)
def test_losses_norms_samples_evaluations_and_files_are_those_of_ddp(by_p3, by_ddp, name):
    assert jobs.differences(by_p3[name], by_ddp[name]) == []


def test_the_same_under_torchrun_and_from_a_checkpoint_of_p3_run(folder, by_p3, by_ddp):
    names = ["plain", "accumulated", "two_models"]
    told = jobs.run(jobs.torchrun(), SCRIPT, "p3", folder / "torchrun", [*names, "taken_over"])
    assert jobs.differences({name: told[name] for name in names}, {name: by_ddp[name] for name in names}) == []
    assert jobs.differences(told["taken_over"], by_p3["resumed"]) == []


def test_lost_servers_come_back_where_the_script_says_so(folder):
    jobs.require_servers_back(SCRIPT, folder, "losing")


def test_every_sample_is_used_and_by_one_worker_but_for_what_fills_up_the_last_batches(by_p3):
    assert [one["world"] for one in by_p3["plain"]] == [[2, 0], [2, 1]]
    seen = [one["seen"] for one in by_p3["plain"]]
    half = len(seen[0]) // 2
    for epoch in (slice(0, half), slice(half, None)):
        together = [sample for one in seen for sample in one[epoch]]
        assert set(together) == set(range(13)) and len(together) <= 16


def test_evaluation_sees_each_sample_of_all_workers_once(by_p3):
    assert {one["evaluated"][1] for one in by_p3["plain"]} == {7}
    assert by_p3["plain"][0]["evaluated"] == by_p3["plain"][1]["evaluated"]


def test_no_step_waits_for_the_network(folder):
    jobs.require_no_wait(SCRIPT, folder)


def test_workers_have_the_same_weights(by_p3):
    assert all(one["weights"] == other["weights"] for one, other in by_p3.values() if "weights" in one)


def test_a_checkpoint_resumes_under_p3_and_under_ddp(by_p3, by_ddp):
    """Each worker has random states of its own; rank 0 writes the rest. Steps 4 and 5 are what resumed() takes."""
    files = by_p3["begun"][0]["files"]
    assert "model.safetensors" in files and {"random_states_0.pkl", "random_states_1.pkl"} <= set(files)
    assert jobs.differences(by_ddp["taken_over"], by_p3["resumed"]) == []


def test_workers_that_run_out_of_batches_follow_the_others(by_p3):
    first, second = by_p3["uneven"]
    assert (first["steps"], second["steps"]) == (2, 1)
    assert first["weights"] == second["weights"] and first["weights"][0] == first["weights"][1]


def test_waits_take_as_long_as_the_script_says_of_the_group(by_p3):
    assert by_p3["waiting"] == [[600, 7200]] * 2


def test_local_steps_are_those_of_a_plain_loop(by_p3):
    """Accumulated, clipped, with a scheduler; evaluations of the global weights, which are the models' at the end."""
    jobs.require_same_as_in_a_loop(by_p3["local"])


def test_local_steps_resume_with_the_same_bits(by_p3):
    """From a checkpoint with fragments under way, of which the model has the global weights."""
    jobs.require_resumed(by_p3["local_begun"], by_p3["local_resumed"])
    for one in by_p3["local_begun"]:
        assert one["saved"] == one["evaluated"][0]
        assert one["files"] == ["p3_local_0.pt", "p3_local_1.pt"]


def test_a_worker_without_a_part_in_the_checkpoint_begins_with_the_global_weights(by_p3):
    first, second = by_p3["local_lost"]
    assert first["loaded"] == by_p3["local_resumed"][0]["loaded"]
    assert second["loaded"] == by_p3["local_begun"][0]["global"] != by_p3["local_resumed"][1]["loaded"]
    assert first["weights"] == second["weights"] != by_p3["local_resumed"][0]["weights"]


def test_local_steps_are_refused_where_workers_may_be_lost(folder):
    told = jobs.run(jobs.P3, SCRIPT, "p3", folder / "lossy", ["local_lossy"], P3_ON_WORKER_LOSS="continue")
    for one in told["local_lossy"]:
        assert re.search("going on without lost workers .* and a trainer's loop exclude", one["refused"])


def test_local_steps_go_on_from_a_checkpoint_of_a_training_without(by_p3):
    first, second = by_p3["local_of_other"]
    for one in (first, second):
        assert one["loaded"] == one["global"] == one["saved"] and one["weights"] == first["weights"]


def test_workers_count_by_the_samples_of_their_batches(by_p3):
    jobs.require_weighed(by_p3["local_weighed"])


def test_trainings_of_new_models_are_alike_and_the_former_are_released(by_p3):
    """But for one that is prepared again."""
    for one in by_p3["sweep"]:
        for found in one.values():
            *new, again = found["weights"]
            assert new == [new[0]] * 3 and again != new[0]
            assert found["released"] == [[False], [True, False], [True, True, False], [True, True, False]]


@pytest.mark.parametrize("what, said", [
    ("weigh", "weigh(nan): it takes how many samples"),
    ("weigh twice", "weigh() was called before in this step"),
    ("weigh alone", "say Accelerator(local_steps=...)"),
    ("weigh early", "prepare() the optimizer before"),
    ("weigh option", "call accelerator.weigh(len(x)) for each batch"),
    ("fsdp", "Accelerator(fsdp_plugin=)"),
    ("parallelism", "Accelerator(parallelism_config=)"),
    ("fp16", "'no' and 'bf16'"),
    ("P3's optimizer", "give Accelerator the plain one"),
    ("DDP before P3", "pass the model itself"),
    ("DDP after P3", "Take DistributedDataParallel away"),
    ("no model", "accelerator.prepare(model, optimizer)"),
    ("clip", "if accelerator.sync_gradients:"),
    ("clip uneven", "leave even_batches=True"),
    ("leave out uneven", "join() and a step that is left out exclude each other: a worker that has joined takes every"),
    ("two optimizers uneven", "prepare one, or leave even_batches=True"),
    ("local uneven", "with local_steps all workers take the same number of steps"),
    ("local options", "local_steps is 3; it must be a dict"),
    ("local every", "every is 0"),
    ("local given", "give Accelerator the plain one"),
    ("local quorum", "a quorum (quorum=1) and a trainer's loop exclude each other"),
    ("local compression", 'say local_steps={"codec": ...}'),
])  # fmt: skip
def test_what_cannot_work_is_refused_with_what_to_do(by_p3, what, said):
    assert said in by_p3["refused"][0][what]
