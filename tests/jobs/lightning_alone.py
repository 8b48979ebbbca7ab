"""One worker with Lightning, which validates before it trains: python lightning_alone.py."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import p3.lightning  # noqa: F401


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, _number):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, _number):
        self.log("loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(strategy="p3", accelerator="cpu", max_epochs=2, **quiet)
model = Model()
before = trainer.validate(model, data, verbose=False)[0]["loss"]
trainer.fit(model, data)
assert trainer.validate(model, data, verbose=False)[0]["loss"] < before
print("trained alone")
