"""A pipeline in a training loop of Hugging Face's style: by itself, or `torchrun --nproc-per-node 2` in front."""

from dataclasses import dataclass
from itertools import chain, repeat

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from stagewright.engine import Pipeline, from_environment, launch_local, under_launcher
from stagewright.models import GPTConfig, build_gpt_stage, token_loss
from stagewright.schedules import create


@dataclass
class TrainingArguments:
    schedule: str = "1f1b"
    num_microbatches: int = 4  # into which the pipeline cuts a batch
    train_batch_size: int = 16
    gradient_accumulation_steps: int = 2
    max_steps: int = 20
    learning_rate: float = 3e-3
    max_grad_norm: float = 1.0


@dataclass
class TensorBoardCallback:
    folder: str

    def on_log(self, step, logs):
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(self.folder) as writer:
            for name, value in logs.items():
                writer.add_scalar(name, value, step)


def collate(rows):
    tokens = torch.stack(rows)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def train(ctx, args, config, train_dataset, callbacks=()):  # in every rank; each reads the same batches
    shuffled = torch.Generator().manual_seed(0)
    loader = DataLoader(train_dataset, args.train_batch_size, True, generator=shuffled, collate_fn=collate)
    batches = chain.from_iterable(repeat(loader))
    schedule = create(args.schedule, num_ranks=ctx.num_ranks, num_microbatches=args.num_microbatches)
    with Pipeline(
        lambda stage: build_gpt_stage(config, stage, schedule.num_stages, device=ctx.device),
        schedule=schedule,
        loss_fn=lambda logits, labels: token_loss(logits, labels) / args.gradient_accumulation_steps,
        transport=ctx.transport,
        share_loss=True,  # the last stage has it, but the callbacks live on rank 0
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=args.learning_rate)
        scheduler = LambdaLR(optimizer, lambda step: 1 - step / args.max_steps)
        for step in range(1, args.max_steps + 1):
            optimizer.zero_grad()
            logs = {"loss": 0.0, "learning_rate": scheduler.get_last_lr()[0]}
            for _ in range(args.gradient_accumulation_steps):
                inputs, labels = (tensor.to(ctx.device) for tensor in next(batches).values())
                logs["loss"] += pipe.forward_backward(inputs, labels).item()
            logs["grad_norm"] = pipe.clip_grad_norm_(args.max_grad_norm)  # of all stages together
            optimizer.step()
            scheduler.step()
            for callback in callbacks if ctx.rank == 0 else ():
                callback.on_log(step, logs)
    return logs


if __name__ == "__main__":
    rows = [(torch.arange(17) * (row % 5 + 1) + row) % 32 for row in range(256)]
    setup = (TrainingArguments(), GPTConfig(32, 4, 32, 2, 16), rows)
    if under_launcher():
        with from_environment() as ctx:
            print(train(ctx, *setup))
    else:
        print(launch_local(train, num_ranks=2, args=setup)[0])
