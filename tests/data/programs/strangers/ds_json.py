# DeepSpeed, all of it in its JSON
import argparse

import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(200):
    x = torch.randn(engine.train_micro_batch_size_per_gpu(), 8, dtype=torch.bfloat16)
    engine.backward(engine(x).square().mean())
    engine.step()
