# key=value as with Hydra, by a parser of its own; the defaults are in YAML
import sys

import torch
import yaml

with open("keys.yaml") as file:
    config = yaml.safe_load(file)
for word in sys.argv[1:]:
    key, _, value = word.partition("=")
    *path, last = key.split(".")
    section = config
    for name in path:
        section = section[name]
    if last not in section:
        raise SystemExit(f"unknown key {key}")
    section[last] = yaml.safe_load(value)
data, train = config["data"], config["train"]
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=train["lr"])
samples = torch.utils.data.TensorDataset(torch.randn(2048, 8))
loader = iter(torch.utils.data.DataLoader(samples, batch_size=data["size"], num_workers=data["workers"]))
for step in range(train["steps"]):
    for _ in range(train["repeat"]):
        (x,) = next(loader)
        (model(x).square().mean() / train["repeat"]).backward()
    optimizer.step()
    optimizer.zero_grad()
