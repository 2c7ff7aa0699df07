# a teacher and a student; the batch is that of all ranks
import argparse
import os

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16, help="samples over all ranks")
parser.add_argument("--accum-iter", type=int, default=1)
args = parser.parse_args()
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
teacher, student = torch.nn.Linear(8, 32).requires_grad_(False), torch.nn.Linear(8, 32)
student = torch.nn.parallel.DistributedDataParallel(student) if ranks > 1 else student
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for step in range(40):
    for _ in range(args.accum_iter):
        x = torch.randn(args.batch // ranks, 8)
        with torch.no_grad():
            target = teacher(x)
        ((student(x) - target).square().mean() / args.accum_iter).backward()
    optimizer.step()
    optimizer.zero_grad()
