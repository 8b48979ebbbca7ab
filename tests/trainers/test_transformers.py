"""p3.transformers.Trainer beside transformers' own under DDP: the same trainings, by the same script."""

import pytest
import trainer_jobs as jobs

pytest.importorskip("transformers", reason="no transformers here; make test-trainers installs it")
pytestmark = pytest.mark.timeout(400)  # the first test waits for the jobs

SCRIPT = "on_transformers.py"
LIKE_DDP = ["plain", "saved", "accumulated", "unclipped", "clipped", "halved", "checkpointed", "evaluated",
            "stopped", "begun", "resumed", "again", "looked_at", "changed"]  # fmt: skip
BY_P3_ALONE = ["best_apart", "waiting", "refused", "local", "local_begun", "local_resumed", "local_best",
               "local_weighed", "local_args", "sweep"]  # fmt: skip


@pytest.mark.parametrize("name", LIKE_DDP)
def test_losses_norms_samples_evaluations_and_files_are_those_of_ddp(by_p3, by_ddp, name):
    assert jobs.differences(by_p3[name], by_ddp[name]) == []


def test_the_same_under_torchrun_and_from_a_checkpoint_of_p3_run(folder, by_p3, by_ddp):
    names = ["plain", "accumulated", "evaluated"]
    told = jobs.run(jobs.torchrun(), SCRIPT, "p3", folder / "torchrun", [*names, "taken_over"])
    assert jobs.differences({name: told[name] for name in names}, {name: by_ddp[name] for name in names}) == []
    assert jobs.differences(told["taken_over"], by_p3["resumed"]) == []


def test_every_sample_is_used_and_by_one_worker_but_for_what_fills_up_the_last_batches(by_p3):
    seen = [one["seen"] for one in by_p3["plain"]]
    assert len(seen[0]) == len(seen[1]) == 16
    for epoch in (slice(0, 8), slice(8, 16)):
        together = [sample for one in seen for sample in one[epoch]]
        assert set(together) == set(range(13)) and len(together) == 13 + 3


def test_no_step_waits_for_the_network(folder):
    jobs.require_no_wait(SCRIPT, folder)


@pytest.mark.parametrize("name", ["losing", "losing_saved"])
def test_lost_servers_come_back_between_steps(folder, name):
    jobs.require_servers_back(SCRIPT, folder, name)


def test_workers_have_the_same_weights(by_p3):
    assert all(one["weights"] == other["weights"] for one, other in by_p3.values() if "weights" in one)


def test_rank_0_alone_writes_but_for_the_random_state_that_each_worker_has(by_p3):
    first, second = (one["files"] for one in by_p3["saved"])
    kept = {name.partition("/")[0] for name in first}
    assert kept == {"checkpoint-6", "checkpoint-8"} and "checkpoint-8/model.safetensors" in first
    assert {name.partition("/")[2] for name in second} == {"rng_state_1.pth"}


def test_a_checkpoint_resumes_under_p3_and_under_ddp(by_p3, by_ddp):
    """Steps 4 and 5, of five; the log has those before the checkpoint, too."""
    assert by_p3["begun"][0]["losses"] == by_p3["resumed"][0]["losses"]
    assert by_p3["begun"][0]["weights"] == by_p3["resumed"][0]["weights"]
    assert jobs.differences(by_ddp["taken_over"], by_p3["resumed"]) == []


def test_early_stopping_stops_all_workers_at_one_step(by_p3):
    assert [one["steps"] for one in by_p3["stopped"]] == [[3, 3], [3, 3]]


def test_evaluation_and_prediction_see_each_sample_of_all_workers_once(by_p3):
    for one in by_p3["evaluated"]:
        assert {count for _, count, _ in one["evaluated"]} == {7} and one["predicted"][0] == 5


def test_where_rank_0_alone_has_the_best_model_all_workers_get_its_weights(by_p3):
    """Of which the first evaluation, whose loss is the greatest, is the best here."""
    first, second = by_p3["best_apart"]
    for of_rank_0, of_other in zip(first, second):
        assert of_rank_0[0] == of_rank_0[1] == of_other[0]
        assert of_rank_0[4] == of_other[4] == of_rank_0[0]  # what callbacks see at the end
        assert [any("model.safetensors" in name for name in one[2]) for one in (of_rank_0, of_other)] == [True, False]
        assert of_rank_0[3] == of_other[3] != of_rank_0[0]
    assert second[1][2] == []


def test_waits_take_as_long_as_arguments_say_at_most(by_p3):
    assert by_p3["waiting"] == [[1800, 7200, 7200]] * 2


def test_local_steps_are_those_of_a_plain_loop(by_p3):
    """Accumulated, clipped, with a scheduler; evaluations of the global weights, which are the model's at the end."""
    jobs.require_same_as_in_a_loop(by_p3["local"])


def test_local_steps_resume_with_the_same_bits(by_p3):
    """From a checkpoint with fragments under way, of which the model has the global weights."""
    jobs.require_resumed(by_p3["local_begun"], by_p3["local_resumed"])
    for one in by_p3["local_begun"]:
        assert abs(one["saved"] - one["evaluated"][0]) < 1e-6
        assert {"checkpoint-4/p3_local_0.pt", "checkpoint-4/p3_local_1.pt"} <= set(one["files"])


def test_the_best_global_model_is_that_of_all_workers_and_training_goes_on_from_it(by_p3):
    for one in by_p3["local_best"]:
        assert one["weights"] == one["global"] == one["best"] and abs(one["logits"][0] - one["logits"][1]) < 1e-6
        assert abs(min(one["evaluated"]) - one["logits"][0]) < 1e-6
    first, second = by_p3["local_best"]
    assert first["later"] == second["later"] != first["best"]


def test_workers_count_by_tokens_samples_or_what_a_function_says(by_p3):
    jobs.require_weighed(by_p3["local_weighed"])


def test_trainings_of_new_models_are_alike_and_the_former_are_released(by_p3):
    """Of the fourth, the optimizer is that of the third."""
    for one in by_p3["sweep"]:
        assert one["local"].pop("parts") == 1
        for found in one.values():
            new = [found["weights"][place] for place in (0, 1, 2, 4)]
            assert new == [new[0]] * 4 and found["weights"][3] != new[0]
            assert found["released"] == [[False], [True, False], [True, True, False], [True, True, False, False],
                                         [True, True, True, True, False]]  # fmt: skip


def test_local_steps_leave_the_script_s_arguments_as_they_are(by_p3):
    """And copy them only if they say otherwise."""
    assert by_p3["local_args"] == [[True, False, True, True]] * 2


@pytest.mark.parametrize("what, said", [
    ("weigh", "local_steps has weigh=3; it must be True"),
    ("weigh batch", "weigh(inf): it takes how many samples"),
    ("P3's optimizer", "give Accelerator the plain one"),
    ("DDP before P3", "pass the model itself"),
    ("DDP after P3", "Take DistributedDataParallel away"),
    ("batch size", "set per_device_train_batch_size"),
    ("optim", "updates within backward()"),
    ("fp16", "'no' and 'bf16'"),
    ("local options", "local_steps is '30'; it must be a dict"),
    ("local every", "every is 0"),
    ("late", "before anything makes Accelerate's state"),
])  # fmt: skip
def test_what_cannot_work_is_refused_with_what_to_do(by_p3, what, said):
    assert said in by_p3["refused"][0][what]
