# a stream of samples of changing length, with variables of the environment; three modules that nothing holds together
import os

import torch

size = int(os.environ.get("BATCH_SIZE", "8"))
rate = float(os.getenv("LR", "0.001"))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(4000):
            yield torch.arange(i, i + 12) % 50


loader = torch.utils.data.DataLoader(Stream(), batch_size=size)
embedding, layer, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 50)
parameters = [*embedding.parameters(), *layer.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=rate)
for n, x in enumerate(loader):
    x = x[:, : 6 + n % 6]
    loss = torch.nn.functional.cross_entropy(head(layer(embedding(x))).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
