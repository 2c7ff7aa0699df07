# an agent acts one observation at a time, then learns from batches of what it saw
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--num-envs", type=int, default=1)
parser.add_argument("--minibatch-size", type=int, default=20)
args = parser.parse_args()
policy = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters())
for episode in range(40):
    seen = []
    with torch.no_grad():
        for _ in range(60):
            observation = torch.randn(args.num_envs, 4)
            policy(observation)
            seen.append(observation)
    batch = torch.cat(seen)
    for part in batch.split(args.minibatch_size):
        policy(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
