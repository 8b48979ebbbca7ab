"""Trains a small GPT-2 to predict the next byte of P3's own documentation, with Hugging Face transformers' Trainer.

    python examples/transformers/gpt2.py                         # alone, in one process
    p3 run -n 2 -s 2 python examples/transformers/gpt2.py        # two workers and two servers
    torchrun --nproc-per-node 2 examples/transformers/gpt2.py    # two workers, which bring a server along

Of a script for one GPU or for DistributedDataParallel, the first import of Trainer is all that differs. Gradients are
clipped to a norm of 1, as Trainer does unless it is told not to. Nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
from p3.transformers import Trainer  # instead of: from transformers import Trainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

CONTEXT = 64  # bytes that the model sees
TEXTS = sorted(Path(__file__).resolve().parents[2].glob("docs/*.md"))


def load():
    """The text's bytes in samples of CONTEXT: nine tenths to train with, and the rest."""
    text = b"\n".join(path.read_bytes() for path in TEXTS)
    samples = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    samples = samples[: len(samples) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    samples = [{"input_ids": sample, "labels": sample} for sample in samples]
    border = len(samples) * 9 // 10
    return samples[:border], samples[border:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", default="build/gpt2", help="where checkpoints go")
    options = parser.parse_args()

    set_seed(1)
    train, unseen = load()
    config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=96, n_layer=3, n_head=4, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    arguments = TrainingArguments(
        output_dir=options.output, max_steps=options.steps, per_device_train_batch_size=16, learning_rate=3e-3,
        lr_scheduler_type="cosine", warmup_steps=10, logging_steps=20, save_strategy="steps", save_steps=60,
        save_total_limit=1, eval_strategy="steps", eval_steps=60, per_device_eval_batch_size=64, report_to=[],
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=train, eval_dataset=unseen)
    trainer.train()
    found = trainer.evaluate()
    print("worker %d of %d: loss %.3f of unseen text after %d steps"
          % (arguments.process_index, arguments.world_size, found["eval_loss"], trainer.state.global_step))  # fmt: skip


if __name__ == "__main__":
    main()
