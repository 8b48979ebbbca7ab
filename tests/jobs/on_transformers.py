"""Trainings by transformers' Trainer, with P3 or DDP: python on_transformers.py p3|ddp FOLDER [NAME ...]

Each worker writes what it has seen of every training to FOLDER/RANK.json. Samples are numbered, so that it is known who
has trained on which.
"""

import contextlib
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import this_job
import torch
import transformers
from trainer_jobs import error, main
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

if sys.argv[1] == "p3":
    import p3.torch
    import struck
    from former_ones import released
    from local_loop import LR, MEAN, OPTIONS, UNDER_WAY, in_a_loop, in_one_process, weights

    from p3.transformers import Trainer
    from p3.worker.session import current
else:
    from transformers import Trainer

transformers.logging.set_verbosity_error()
SAMPLES = 13  # two workers with batches of 2: the last ones are uneven


def model():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=17, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
                        attn_pdrop=0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config)


def samples(count, seed):
    random = np.random.RandomState(seed)
    made = []
    for index in range(count):
        tokens = random.randint(0, 17, 8)
        labels = tokens.copy()
        labels[: index % 5] = -100  # so that workers have unlike numbers of tokens
        made.append({"input_ids": tokens, "labels": labels, "index": index})
    return made


def collate(batch):
    return {name: torch.tensor(np.stack([one[name] for one in batch])) for name in batch[0]}


class Recording(Trainer):
    """Notes the samples that this worker trains on."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen.extend(inputs.pop("index").tolist())
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model, inputs, *arguments, **keywords):
        inputs.pop("index")
        return super().prediction_step(model, inputs, *arguments, **keywords)


class Counting(TrainerCallback):
    steps = 0

    def on_step_end(self, args, state, control, **keywords):
        self.steps += 1


def accuracy(prediction):
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"count": len(prediction.label_ids), "accuracy": float(right.mean())}


def trained(folder, kind=Recording, resume=None, callbacks=(), frozen=None, count=SAMPLES, **options):
    counting = Counting()
    given = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 2, "seed": 3,
             "logging_steps": 1, "learning_rate": 0.01, "use_cpu": True, "report_to": [], "save_strategy": "no",
             "remove_unused_columns": False, "disable_tqdm": True, **options}  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **given)
    trainer = kind(
        model(), args, train_dataset=samples(count, 5), eval_dataset=samples(7, 6), data_collator=collate,
        compute_metrics=accuracy, callbacks=[counting, *callbacks],
    )  # fmt: skip
    trainer.seen, trainer.frozen = [], frozen
    trainer.train(resume_from_checkpoint=resume)
    log = trainer.state.log_history
    told = {
        "losses": [one["loss"] for one in log if "loss" in one],
        "norms": [one["grad_norm"] for one in log if "grad_norm" in one],
        "evaluated": [[one["eval_loss"], one["eval_count"], one["eval_accuracy"]] for one in log if "eval_loss" in one],
        "seen": trainer.seen,
        "steps": [trainer.state.global_step, counting.steps],
        "weights": magnitude(trainer.model),
    }
    return trainer, told


def magnitude(model):
    return sum(one.detach().double().abs().sum().item() for one in model.parameters())


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def plain(folder):
    return trained(folder)[1]


def saved(folder):
    """Two checkpoints stay; each worker has a folder of its own, so that it is seen who writes what."""
    own = folder / ("of_%s" % os.environ.get("RANK", "0"))
    return {**trained(own, save_strategy="steps", save_steps=2, save_total_limit=2)[1], "files": files(own)}


def accumulated(folder):
    return trained(folder, gradient_accumulation_steps=3)[1]


def unclipped(folder):
    return trained(folder, max_grad_norm=0)[1]


def clipped(folder):
    return trained(folder, max_grad_norm=0.1)[1]


def halved(folder):
    return trained(folder, bf16=True)[1]


def checkpointed(folder):
    return trained(folder, gradient_checkpointing=True)[1]


def evaluated(folder):
    trainer, told = trained(folder, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
                            load_best_model_at_end=True)  # fmt: skip
    told["best"] = trainer.state.best_global_step
    predicted = trainer.predict(samples(5, 7))
    told["predicted"] = [len(predicted.predictions), float(np.abs(predicted.predictions).sum())]
    return told


class AtEnd(TrainerCallback):
    """Notes what the model is when a training ends."""

    def __init__(self):
        self.magnitudes = []

    def on_train_end(self, args, state, control, model=None, **keywords):
        self.magnitudes.append(magnitude(model))


def best_apart(folder):
    """Each worker has a disk of its own, and rank 0's alone has the model; without states others have no folder."""
    found = []
    for only_model in (False, True):
        own, at_end = folder / ("%s_of_%s" % (only_model, os.environ["RANK"])), AtEnd()
        trainer, told = trained(
            own, callbacks=[at_end], eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
            save_only_model=only_model, load_best_model_at_end=True, greater_is_better=True,
        )  # fmt: skip
        name = "checkpoint-%d" % trainer.state.best_global_step
        best = GPT2LMHeadModel.from_pretrained(folder / ("%s_of_0" % only_model) / name)
        trainer.train()  # goes on from there
        found.append([told["weights"], magnitude(best), files(own), magnitude(trainer.model), at_end.magnitudes[0]])
    return found


class Looking(TrainerCallback):
    """Looks at gradients between clipping and step(): rank 0 in every step, others in every other one."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **keywords):
        if state.global_step % 2 == 0 or args.process_index == 0:
            self.found.append([one.grad.double().norm().item() for one in model.parameters()])


def looked_at(folder):
    looking = Looking()
    return {**trained(folder, callbacks=[looking], max_grad_norm=0.5)[1], "gradients": looking.found}


class Changing(TrainerCallback):
    """Changes them there, in place, by others or by none, and not in every step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **keywords):
        first, *others = model.parameters()
        if state.global_step % 4 == 1:
            first.grad = None
        elif state.global_step % 4 == 2:
            first.grad = first.grad * 2
            for one in others:
                one.grad.mul_(0.5)


def changed(folder):
    return trained(folder, callbacks=[Changing()])[1]


class Freezing(Recording):
    """In the third step the server stands still from before the backward pass on."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step == 2:
            with torch.no_grad():
                model(inputs["input_ids"])  # all weights have come
            self.frozen.enter_context(this_job.frozen_server())
        return super().training_step(model, inputs, num_items_in_batch)


class Thawing(TrainerCallback):
    def __init__(self, frozen):
        self.frozen, self.ended = frozen, []

    def on_optimizer_step(self, args, state, control, **keywords):
        self.frozen.close()
        self.ended.append(state.global_step)


def never_waits(folder):
    with contextlib.ExitStack() as frozen:
        thawing = Thawing(frozen)
        trained(folder, Freezing, callbacks=[thawing], frozen=frozen, max_steps=3)
    return {"ended": len(thawing.ended)}


def stopped(folder):
    """The loss does not get better by so much, so two evaluations after the first one are the last."""
    return trained(folder, callbacks=[EarlyStoppingCallback(2, 5.0)], eval_strategy="steps", eval_steps=1,
                   save_strategy="steps", save_steps=1, save_total_limit=1, load_best_model_at_end=True)[1]  # fmt: skip


def begun(folder):
    return trained(folder, save_strategy="steps", save_steps=3, save_total_limit=2, max_steps=5)[1]


def resumed(folder):
    """From the checkpoint of begun(), whoever has written it."""
    return trained(folder, resume=str(folder.parent / "begun" / "checkpoint-3"), max_steps=5)[1]


def taken_over(folder):
    """From the one that P3 has written under `p3 run`."""
    return trained(folder, resume=str(folder.parents[1] / "p3" / "begun" / "checkpoint-3"), max_steps=5)[1]


def again(folder):
    """A second training of the same Trainer, which goes on with the weights of the first."""
    trainer, told = trained(folder)
    trainer.seen.clear()
    trainer.train()
    told["weights"] = magnitude(trainer.model)
    return told


class Locally(Trainer):
    """Notes what this worker trains on, and the loss of each batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen.append(inputs.pop("index").tolist())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss.item())
        return loss

    def prediction_step(self, model, inputs, *arguments, **keywords):
        inputs.pop("index")
        return super().prediction_step(model, inputs, *arguments, **keywords)


def locally(folder, resume=None, local_steps=None, callbacks=(), **options):
    """Local steps, of two batches each; in every third one it evaluates."""
    given = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 8, "seed": 3,
             "gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 0.01, "use_cpu": True,
             "report_to": [], "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3, "max_grad_norm": 0.5,
             "remove_unused_columns": False, "disable_tqdm": True, **options}  # fmt: skip
    trainer = Locally(
        model(), TrainingArguments(output_dir=str(folder), **given), train_dataset=samples(SAMPLES, 5),
        eval_dataset=samples(7, 6), data_collator=collate, callbacks=list(callbacks),
        compute_metrics=lambda found: {"logits": float(np.abs(found.predictions.astype(float)).mean())},
        local_steps=local_steps or OPTIONS,
    )  # fmt: skip
    trainer.seen, trainer.losses = [], []
    trainer.train(resume_from_checkpoint=resume)
    log = trainer.state.log_history
    return trainer, {
        "losses": trainer.losses,
        "norms": [one["grad_norm"] for one in log if "grad_norm" in one],
        "evaluated": [one["eval_logits"] for one in log if "eval_logits" in one],
        "weights": weights(trainer.model),
    }


def logits(net):
    net.eval()
    found = net(torch.tensor(np.stack([one["input_ids"] for one in samples(7, 6)]))).logits
    net.train()
    return found.detach().double().abs().mean().item()


def local(folder):
    trainer, told = locally(folder)
    of_all, net, seen = samples(SAMPLES, 5), model(), trainer.seen
    optimizer = Trainer(net, trainer.args, eval_dataset=trainer.eval_dataset).create_optimizer()
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 0, 8)

    def loss_of(net, batch, batches):
        labels = [torch.tensor(np.stack([of_all[index]["labels"] for index in one])) for one in (batch, *batches)]
        ids = torch.tensor(np.stack([of_all[index]["input_ids"] for index in batch]))
        counted = sum((one != -100).sum() for one in labels[1:])  # as the Trainer counts
        return net(input_ids=ids, labels=labels[0], num_items_in_batch=counted).loss

    plain = in_a_loop(net, optimizer, scheduler, list(zip(seen[::2], seen[1::2])), loss_of, logits, (3, 6, 8), 0.5)
    return {"trained": told, "plain": plain}


class Weighed(Trainer):
    """Notes what this worker trains on. `counts`: whether it counts tokens, as it does by itself."""

    counts = True

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen.append(inputs.pop("index").tolist())
        return super().training_step(model, inputs, num_items_in_batch)

    def _get_num_items_in_batch(self, batches, device):
        return super()._get_num_items_in_batch(batches, device) if self.counts else None


def local_weighed(folder):
    """Workers have batches of different sizes."""
    of_all = samples(SAMPLES, 5)

    def tokens(batch):
        return sum(int((of_all[index]["labels"] != -100).sum()) for index in batch)  # as the Trainer counts

    def trained(counts, weigh, count):
        batch = 1 + p3.torch.rank()
        args = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=batch, max_steps=4, seed=3,
                                 gradient_accumulation_steps=1 if counts else 2, use_cpu=True, report_to=[],
                                 save_strategy="no", logging_steps=100, max_grad_norm=0, remove_unused_columns=False,
                                 disable_tqdm=True, accelerator_config={"even_batches": False})  # fmt: skip
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), LR)
        trainer = Weighed(
            net, args, train_dataset=of_all * 3, data_collator=collate, local_steps={**MEAN, "weigh": weigh},
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        )  # fmt: skip
        trainer.seen, trainer.counts = [], counts
        trainer.train()

        def loss_of(net, batch, batches):
            many = {name: torch.tensor(np.stack([of_all[index][name] for index in batch]))
                    for name in ("input_ids", "labels")}  # fmt: skip
            many["num_items_in_batch"] = sum(map(tokens, batches)) if counts else None
            return net(**many).loss / (1 if counts else len(batches))

        seen, size = p3.torch.all_gather_object(trainer.seen), args.gradient_accumulation_steps
        steps = [[one[at : at + size] for at in range(0, len(one), size)] for one in seen]
        return [weights(trainer.model), *(in_one_process(model(), steps, loss_of, one) for one in (count, bool))]

    return {
        "tokens": trained(True, True, tokens),
        "samples": trained(False, True, len),
        "function": trained(False, lambda batch: batch["index"].sum() + 1, lambda batch: sum(batch) + 1),
    }


def local_begun(folder):
    """A checkpoint with fragments under way, behind an evaluation."""
    told = locally(folder, save_strategy="steps", save_steps=UNDER_WAY, eval_steps=UNDER_WAY)[1]
    saved = GPT2LMHeadModel.from_pretrained(folder / ("checkpoint-%d" % UNDER_WAY))
    return {**told, "saved": logits(saved), "files": [name for name in files(folder) if "p3" in name]}


def sweep(folder):
    """Trainings of new models, by one Trainer; one of the last model again; and one by another Trainer."""

    def trainer(local_steps):
        args = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, seed=3,
                                 save_strategy="steps", save_steps=4, use_cpu=True, report_to=[], disable_tqdm=True,
                                 learning_rate=0.01, remove_unused_columns=False)  # fmt: skip
        return Recording(model_init=model, args=args, train_dataset=samples(SAMPLES, 5), data_collator=collate,
                         local_steps=local_steps)  # fmt: skip

    def trained(one, found, resume=None):
        one.seen = []
        one.train(resume_from_checkpoint=resume)
        found["optimizers"].append(one.optimizer.optimizer)
        found["weights"].append(weights(one.model))
        found["released"].append(released(found["optimizers"]))

    def of(local_steps):
        found = {"optimizers": [], "weights": [], "released": []}
        first = trainer(local_steps)
        for trial in range(3):
            if trial == 1:
                first.create_accelerator_and_postprocess()  # as hyperparameter_search() does
            trained(first, found)
        first.model_init = None
        trained(first, found)
        first.accelerator.free_memory()
        trained(trainer(local_steps), found)
        if local_steps is not None:
            found["parts"] = len(torch.load(folder / "checkpoint-4" / ("p3_local_%d.pt" % p3.torch.rank())))
        found.pop("optimizers")
        return found

    return {"shared": of(None), "local": of({**OPTIONS, "weigh": True})}


def local_args(folder):
    """What those of the script say of averages, and the trainer's own."""
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    first = Trainer(model(), args, local_steps=OPTIONS)
    own = first.args
    first.create_accelerator_and_postprocess()  # as hyperparameter_search() does
    averages = [args.average_tokens_across_devices, own.average_tokens_across_devices]
    return [*averages, first.args is own, Trainer(model(), own, local_steps=OPTIONS).args is own]


def local_resumed(folder):
    resume = folder.parent / "local_begun" / ("checkpoint-%d" % UNDER_WAY)
    return locally(folder, str(resume), eval_strategy="no")[1]


def local_best(folder):
    """Loaded at the end, from where training goes on, as evaluations do."""
    trainer, told = locally(
        folder, save_strategy="steps", save_steps=3, load_best_model_at_end=True, metric_for_best_model="logits",
        greater_is_better=False,
    )  # fmt: skip
    best = GPT2LMHeadModel.from_pretrained(folder / ("checkpoint-%d" % trainer.state.best_global_step))
    told.update({"best": weights(best), "logits": [trainer.evaluate()["eval_logits"], logits(best)]})
    with trainer.optimizer.optimizer.global_weights():
        told["global"] = weights(trainer.model)
    trainer.train()
    return {**told, "later": weights(trainer.model)}


class Struck(TrainerCallback):
    """Servers die, and at each mark but the first there is some time for one to come back."""

    def on_train_begin(self, args, state, control, **keywords):
        struck.begin(current())

    def on_epoch_end(self, args, state, control, **keywords):
        struck.pace(current())

    on_save = on_epoch_end


def losing(folder):
    told = trained(folder, callbacks=[Struck()], num_train_epochs=100)[1]
    return {**told, "changes": current().servers.changes}


def losing_saved(folder):
    """Its only epoch is long, and has checkpoints."""
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "num_train_epochs": 1}
    told = trained(folder, callbacks=[Struck()], count=800, **saving)[1]
    return {**told, "changes": current().servers.changes}


def waiting(folder):
    """How many seconds a barrier has behind each; 1800 is transformers' own."""
    group, found = torch.distributed.group.WORLD._get_backend(torch.device("cpu")), []
    for options in ({}, {"ddp_timeout": 7200}, {"ddp_timeout": 60}):
        args = TrainingArguments(output_dir=str(folder), use_cpu=True, **options)
        with args.main_process_first():
            found.append(group.options._timeout.total_seconds())
    return found


def refused(folder):
    from accelerate import PartialState

    of_p3 = model()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(of_p3.parameters(), lr=0.1), of_p3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def train(chosen, optimizers=(None, None), after=lambda: None, **options):
        args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], remove_unused_columns=False,
                                 disable_tqdm=True, **options)  # fmt: skip
        after()
        Trainer(chosen, args, train_dataset=samples(4, 5), data_collator=collate, optimizers=optimizers).train()

    def see_one_process():
        PartialState().num_processes = 1

    ddp = torch.nn.parallel.DistributedDataParallel
    return {
        "P3's optimizer": error(lambda: train(of_p3, (optimizer, scheduler))),
        "DDP after P3": error(lambda: ddp(of_p3)),
        "DDP before P3": error(lambda: train(ddp(model()))),
        "batch size": error(lambda: train(model(), auto_find_batch_size=True)),
        "optim": error(lambda: train(model(), optim="lomo")),
        "fp16": error(lambda: train(model(), fp16=True)),
        "local options": error(lambda: locally(folder, local_steps="30")),
        "local every": error(lambda: locally(folder, local_steps={"every": 0})),
        "weigh": error(lambda: locally(folder, local_steps={**MEAN, "weigh": 3})),
        "weigh batch": error(lambda: locally(folder, local_steps={**MEAN, "weigh": lambda batch: float("inf")})),
        "late": error(lambda: train(model(), after=see_one_process)),
    }


if __name__ == "__main__":
    main(globals())
