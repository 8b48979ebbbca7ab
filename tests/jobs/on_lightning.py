"""Trainings by Lightning's Trainer, with P3 or DDP: python on_lightning.py p3|ddp FOLDER NAME ...

Each worker writes what it has seen of every training to FOLDER/NAME.RANK.json.
"""

import contextlib
import logging
import os
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
import lightning
import this_job
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainer_jobs import error, main

BY_P3 = sys.argv[1] == "p3"
if BY_P3:
    import struck
    from former_ones import released
    from local_loop import LR, MEAN, OPTIONS, in_a_loop, in_one_process, weights

    import p3.lightning
    from p3.worker.session import current

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
SAMPLES = 13


def data(count=SAMPLES):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(torch.arange(count), x, x[:, :3].argmax(1))


class Net(lightning.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        self.lr = lr
        self.losses, self.norms, self.seen, self.evaluated = [], [], [], []

    def training_step(self, batch, number):
        index, x, y = batch
        self.seen += index.tolist()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        _, x, y = batch
        self.log("held_out", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self):
        self.evaluated.append(self.trainer.callback_metrics["held_out"].item())

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(sum(one.grad.square().sum().item() for one in self.parameters()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train_dataloader(self):
        return DataLoader(data(), 2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(data(7), 2)


class Manual(Net):
    """Two optimizers, as of a GAN."""

    automatic_optimization = False

    def training_step(self, batch, number):
        _, x, y = batch
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def on_before_optimizer_step(self, optimizer):
        pass

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[layer].parameters(), lr=0.1) for layer in (0, 2)]


class Counting(Callback):
    steps = 0

    def on_train_batch_end(self, *_):
        self.steps += 1


def trainer(folder, **options):
    given = {"devices": 2, "max_epochs": 2, "logger": False, "enable_checkpointing": False, **options}
    if BY_P3:
        strategy = "p3" if folder.name == "by_name" else p3.lightning.Strategy()
    else:
        strategy = "ddp_find_unused_parameters_true" if folder.name == "manual" else "ddp"
    return lightning.Trainer(
        accelerator="cpu", strategy=strategy, default_root_dir=str(folder), enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **given,
    )  # fmt: skip


def trained(folder, net=None, resume=None, callbacks=(), **options):
    lightning.seed_everything(3, verbose=False)
    net = Net() if net is None else net
    counting = Counting()
    run = trainer(folder, callbacks=[counting, *callbacks], **options)
    run.fit(net, ckpt_path=resume and str(resume))
    return {
        "world": [run.world_size, run.global_rank],
        "losses": net.losses,
        "norms": net.norms,
        "seen": net.seen,
        "evaluated": net.evaluated,
        "steps": [run.global_step, counting.steps],
        "weights": sum(one.detach().double().abs().sum().item() for one in net.parameters()),
    }


def plain(folder):
    return trained(folder)


def by_name(folder):
    return trained(folder)


def clipped(folder):
    return trained(folder, gradient_clip_val=0.1)


def value_clipped(folder):
    return trained(folder, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Unseen(Net):
    """Nobody looks at a gradient."""

    def on_before_optimizer_step(self, optimizer):
        pass


def unseen(folder):
    return trained(folder, Unseen(), gradient_clip_val=0.1)


class Looking(Unseen):
    """Behind the backward pass, rank 0 in every step and others in every other one; and behind clipping."""

    def on_after_backward(self):
        if self.global_step % 2 == 0 or self.global_rank == 0:
            self.norms += [one.grad.double().norm().item() for one in self.parameters()]

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.norms.append(sum(one.grad.square().sum().item() for one in self.parameters()))


def looked_at(folder):
    return trained(folder, Looking(), gradient_clip_val=0.1)


class Changing(Net):
    """Before they are clipped."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step % 3:
            for one in self.parameters():
                one.grad *= self.global_step


def changed(folder):
    return trained(folder, Changing(), gradient_clip_val=0.1)


def averaged(folder):
    """A moving average stands in for the weights in each validation."""
    return trained(folder, Unseen(), gradient_clip_val=0.1, callbacks=[EMAWeightAveraging(decay=0.9)])


class Freezing(Unseen):
    """In the third step the server stands still from before the forward pass on."""

    def training_step(self, batch, number):
        if self.global_step == 2:
            self.net(batch[1])  # all weights have come
            self.frozen.enter_context(this_job.frozen_server())
        return super().training_step(batch, number)

    def on_train_batch_end(self, *_):
        self.frozen.close()


def never_waits(folder):
    net = Freezing()
    with contextlib.ExitStack() as net.frozen:
        told = trained(folder, net, gradient_clip_val=0.1, max_steps=3, devices=1)
    return {"ended": told["steps"][1]}


def accumulated(folder):
    return trained(folder, accumulate_grad_batches=3)


def halved(folder):
    return trained(folder, precision="bf16-mixed")


def halved_clipped(folder):
    return trained(folder, precision="bf16-mixed", gradient_clip_val=0.1)


class Fused(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


def fused(folder):
    """Of which Lightning alone does not clip the gradients; it would wait for a scaler."""
    return trained(folder, Fused(), precision="bf16-mixed", gradient_clip_val=0.1, max_epochs=1)


def manual(folder):
    return trained(folder, Manual())


def stopped(folder):
    """The loss does not get better by so much."""
    return trained(folder, max_epochs=6, callbacks=[EarlyStopping("held_out", min_delta=5.0, patience=2)])


def saved(folder):
    """The best two of four epochs stay; each worker has a folder of its own, so that it is seen who writes what."""
    own = folder / ("of_%s" % os.environ.get("RANK", "0"))
    keep = ModelCheckpoint(str(own), "{epoch}", monitor="held_out", save_top_k=2)
    told = trained(folder, max_epochs=4, enable_checkpointing=True, callbacks=[keep])
    return {**told, "files": sorted(path.name for path in own.iterdir()) if own.exists() else []}


def begun(folder):
    keep = ModelCheckpoint(str(folder), "{epoch}", save_top_k=-1)
    return trained(folder, max_epochs=3, enable_checkpointing=True, callbacks=[keep])


def resumed(folder):
    return trained(folder, max_epochs=3, resume=folder.parent / "begun" / "epoch=1.ckpt")


def taken_over(folder):
    return trained(folder, max_epochs=3, resume=folder.parents[1] / "p3" / "begun" / "epoch=1.ckpt")


def validated(folder):
    """Without a training before."""
    run = trainer(folder)
    found = run.validate(Net(), verbose=False)
    predicted = run.predict(Predicting(), DataLoader(data(6), 2))
    return {"held_out": found[0]["held_out"], "predicted": sum(map(len, predicted))}


def moved(folder):
    """At the end Lightning moves the optimizer's states to the CPU, and then the model: both have their last values."""
    move, found = strategy._optimizers_to_device, []

    def moved(optimizers, device):
        found.append([hasattr(weight, "_p3_pending") for one in optimizers for weight in net.parameters()])
        move(optimizers, device)

    net = Unseen()
    strategy._optimizers_to_device = moved
    try:
        trained(folder, net, gradient_clip_val=0.1, max_steps=3, limit_val_batches=0)
    finally:
        strategy._optimizers_to_device = move
    return {"pending": found[-1]}


class Predicting(Net):
    def predict_step(self, batch, number):
        return self.net(batch[1]).tolist()


class Local(Net):
    """Steps of two batches each, the last one of an epoch included."""

    def training_step(self, batch, number):
        index, x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.seen.append(index.tolist())
        self.losses.append(loss.item() / 2)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(torch.cat([one.grad.flatten() for one in self.parameters()]).norm().item())

    def validation_step(self, batch, number):
        self.log("held_out", held_out(self), sync_dist=True)

    def train_dataloader(self):
        return DataLoader(data(), 2)


def held_out(net):
    _, x, y = data(7).tensors
    with torch.no_grad():
        return nn.functional.cross_entropy(net.net(x), y).item()


def locally(folder, local_steps=None, resume=None, callbacks=(), epochs=4):
    """Local steps, of which an epoch has two; each epoch is validated."""
    net = Local()
    run = lightning.Trainer(
        accelerator="cpu", strategy=p3.lightning.Strategy(local_steps=local_steps or OPTIONS), max_epochs=epochs,
        accumulate_grad_batches=2, gradient_clip_val=0.5, default_root_dir=str(folder), logger=False,
        enable_checkpointing=bool(callbacks), callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    run.fit(net, ckpt_path=resume and str(resume))
    return run, net, {"losses": net.losses, "norms": net.norms, "evaluated": net.evaluated, "weights": weights(net)}


def local(folder):
    _, trained, told = locally(folder)
    net, seen, (_, x, y) = Local(), trained.seen, data().tensors
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # of an epoch's steps

    def loss_of(net, batch, batches):
        return nn.functional.cross_entropy(net.net(x[batch]), y[batch]) / len(batches)

    plain = in_a_loop(net, optimizer, scheduler, list(zip(seen[::2], seen[1::2])), loss_of, held_out, (2, 4, 6, 8), 0.5)
    told.pop("norms")  # here they are those before clipping
    plain.pop("norms")
    return {"trained": told, "plain": plain}


def local_begun(folder):
    """Checkpoints with fragments under way; that of the third epoch goes, and its parts with it."""
    keep = ModelCheckpoint(str(folder), "{epoch}", save_top_k=-1, save_last="link")
    run, net, told = locally(folder, callbacks=[keep])
    run.strategy.remove_checkpoint(str(folder / "epoch=2.ckpt"))
    saved = Local()
    saved.load_state_dict(torch.load(folder / "epoch=1.ckpt", weights_only=True)["state_dict"])
    found = run.validate(net, verbose=False)[0]["held_out"]  # by the model as it is
    told.update({"saved": held_out(saved), "validated": [found, held_out(net)]})
    run.strategy.barrier()
    return {**told, "files": sorted(path.name for path in folder.iterdir())}


def local_resumed(folder):
    return locally(folder, resume=folder.parent / "local_begun" / "epoch=1.ckpt")[2]


def local_linked(folder):
    """An epoch more, from the last checkpoint and by a link to it."""
    begun = folder.parent / "local_begun"
    return [locally(folder, resume=begun / name, epochs=5)[2] for name in ("epoch=3.ckpt", "last.ckpt")]


def local_ended(folder):
    """From the last checkpoint, behind which nothing is left to train."""
    return locally(folder, resume=folder.parent / "local_begun" / "epoch=3.ckpt")[2]


def local_manual(folder):
    """Two optimizers, each with local steps of its own."""
    net = Manual()
    own = p3.lightning.Strategy(local_steps={**OPTIONS, "fragments": 1})  # each has one layer
    run = lightning.Trainer(accelerator="cpu", strategy=own, max_epochs=2, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)  # fmt: skip
    run.fit(net)
    return {"losses": net.losses, "weights": weights(net)}


def sweep(folder):
    """Trainings of new models, each by a Trainer of its own; the first is validated again behind the last."""

    def of(local_steps):
        optimizers, runs, found = [], [], {"weights": [], "released": []}
        for _ in range(3):
            net = Unseen()
            own = p3.lightning.Strategy(local_steps=local_steps)
            run = lightning.Trainer(
                accelerator="cpu", strategy=own, max_steps=4, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            )  # fmt: skip
            lightning.seed_everything(3, verbose=False)
            run.fit(net)
            runs.append((run, net))
            optimizers += run.optimizers
            found["weights"].append(weights(net))
            found["released"].append(released(optimizers))
        run, net = runs[0]
        run.validate(net, verbose=False)
        run.save_checkpoint(folder / "first.ckpt")
        return found

    return {"shared": of(None), "local": of({**OPTIONS, "weigh": True})}


class Weighed(Net):
    """Workers have batches of different sizes, of which two are a step."""

    def training_step(self, batch, number):
        index, x, y = batch
        self.seen.append(index.tolist())
        return nn.functional.cross_entropy(self.net(x), y)

    def on_before_optimizer_step(self, optimizer):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LR)

    def train_dataloader(self):
        return DataLoader(data(32), 1 + self.global_rank)


class WeighedByHand(Weighed):
    """Two optimizers, whose steps of two batches the script counts itself."""

    automatic_optimization = False

    def training_step(self, batch, number):
        optimizers = self.optimizers()
        self.manual_backward(super().training_step(batch, number) / 2)
        if number % 2 == 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[layer].parameters(), LR) for layer in (0, 2)]


def of_index(batch):
    return 1.0 + batch[0].float().sum()


def local_weighed(folder):
    _, x, y = data(32).tensors

    def loss_of(net, batch, batches):
        return nn.functional.cross_entropy(net.net(x[batch]), y[batch]) / len(batches)

    def trained(net, weigh, count):
        run = lightning.Trainer(
            accelerator="cpu", strategy=p3.lightning.Strategy(local_steps={**MEAN, "weigh": weigh}), max_epochs=1,
            limit_train_batches=8, limit_val_batches=0, logger=False, enable_checkpointing=False,
            accumulate_grad_batches=2 if net.automatic_optimization else 1, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        run.fit(net)
        seen = p3.torch.all_gather_object(net.seen)
        steps = [list(zip(one[::2], one[1::2])) for one in seen]
        return [weights(net), *(in_one_process(Weighed(), steps, loss_of, one) for one in (count, bool))]

    return {
        "samples": trained(Weighed(), True, len),
        "function": trained(Weighed(), of_index, lambda batch: 1 + sum(batch)),
        "by hand": trained(WeighedByHand(), True, len),
    }


class Struck(Callback):
    """Servers die, and at each mark but the first there is some time for one to come back."""

    def on_train_start(self, *_):
        struck.begin(current())

    def on_train_epoch_end(self, *_):
        struck.pace(current())

    on_validation_start = on_train_epoch_end


def losing(folder):
    told = trained(folder, callbacks=[Struck()], max_epochs=100, limit_val_batches=0)
    return {**told, "changes": current().servers.changes}


class Long(Net):
    def train_dataloader(self):
        return DataLoader(data(800), 2, shuffle=True)


def losing_validated(folder):
    """Its only epoch is long, and validates in between."""
    told = trained(folder, Long(), callbacks=[Struck()], max_epochs=1, val_check_interval=2)
    return {**told, "changes": current().servers.changes}


class OfP3(Net):
    def configure_optimizers(self):
        return p3.torch.DistributedOptimizer(torch.optim.SGD(self.parameters(), lr=0.1), self)


class OfLBFGS(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def refused(folder):
    def of_other_size():
        run = lightning.Trainer(accelerator="cpu", devices=3, strategy="p3", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        run.fit(Net())

    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    return {
        "P3's optimizer": error(lambda: trainer(folder).fit(OfP3())),
        "LBFGS": error(lambda: trainer(folder).fit(OfLBFGS())),
        "workers": error(of_other_size),
        "local options": error(lambda: locally(folder, local_steps="30")),
        "local every": error(lambda: locally(folder, local_steps={"every": 0})),
        "weigh": error(lambda: locally(folder, local_steps={**MEAN, "weigh": "tokens"})),
        "weigh batch": error(lambda: locally(folder, local_steps={**MEAN, "weigh": lambda batch: -1})),
        "precision": error(lambda: trainer(folder, plugins=[scaled]).fit(Net())),
    }


if __name__ == "__main__":
    main(globals())
