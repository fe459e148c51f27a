"""A pipeline in a trainer of torchtitan's style, which takes any of our schedules from its configuration.

torchrun --nproc-per-node 2 examples/torchtitan_style.py --parallelism.pipeline_parallel_schedule ZBVZeroBubble
"""

import argparse
import tomllib
from pathlib import Path
from types import SimpleNamespace

import torch

from stagewright.engine import Pipeline, from_environment, launch_local, under_launcher
from stagewright.models import GPTConfig, build_gpt_stage, token_loss
from stagewright.schedules import create


def read_config(arguments=None):  # a file, and flags such as --training.steps 100 that take the place of its values
    parser = argparse.ArgumentParser()
    parser.add_argument("--job.config_file", dest="file", type=Path, default=Path(__file__).with_suffix(".toml"))
    file = tomllib.loads(parser.parse_known_args(arguments)[0].file.read_text())
    for section, table in file.items():
        for name, value in table.items():
            parser.add_argument(f"--{section}.{name}", type=type(value), default=value)
    flags = vars(parser.parse_args(arguments))
    tables = {section: {name: flags[f"{section}.{name}"] for name in table} for section, table in file.items()}
    return SimpleNamespace(**{section: SimpleNamespace(**table) for section, table in tables.items()})


def train(ctx, config):
    model, training, parallelism = config.model, config.training, config.parallelism
    schedule = create(
        parallelism.pipeline_parallel_schedule,
        num_ranks=parallelism.pipeline_parallel_degree,
        num_microbatches=training.local_batch_size // parallelism.pipeline_parallel_microbatch_size,
    )
    gpt = GPTConfig(32, model.n_layers, model.dim, model.n_heads, training.seq_len)
    with Pipeline(
        lambda stage: build_gpt_stage(gpt, stage, schedule.num_stages, device=ctx.device),
        schedule=schedule,
        loss_fn=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=training.lr),
        transport=ctx.transport,
        max_norm=training.max_norm,
    ) as pipe:
        for step in range(training.steps):
            rows = torch.arange(training.local_batch_size, device=ctx.device)[:, None] + step
            tokens = (torch.arange(training.seq_len + 1, device=ctx.device) * (rows % 5 + 1) + rows) % 32
            loss = pipe.train_step(tokens[:, :-1], tokens[:, 1:])
            if loss is not None and step % 5 == 4:  # where the last stage lives
                print(f"step: {step + 1}  loss: {loss.item():.4f}  grad_norm: {pipe.grad_norm}", flush=True)
        return None if loss is None else loss.item()


if __name__ == "__main__":
    config = read_config()
    if under_launcher():
        with from_environment() as ctx:
            train(ctx, config)
    else:
        launch_local(train, config.parallelism.pipeline_parallel_degree, args=(config,))
