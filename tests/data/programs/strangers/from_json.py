# everything is in a JSON file, which the command names
import json
import sys

import torch

with open(sys.argv[1]) as file:
    settings = json.load(file)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
for step in range(settings["steps"]):
    for _ in range(settings["accumulation"]):
        (model(torch.randn(settings["batch_size"], 8)).square().mean() / settings["accumulation"]).backward()
    optimizer.step()
    optimizer.zero_grad()
