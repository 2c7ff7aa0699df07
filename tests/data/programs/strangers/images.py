# images as with timm: the options are in a module of their own, evaluation has a batch size, too
import copy

import torch
from images_options import options

args = options()


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, i):
        return torch.full((3, 16, 16), i / 640), i % 4


loader = torch.utils.data.DataLoader(Images(), batch_size=args.batch_size, num_workers=args.workers, shuffle=True)
check = torch.utils.data.DataLoader(Images(), batch_size=args.validation_batch_size)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4)
)
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with torch.no_grad():
    average(next(iter(check))[0])
count = 0
for x, y in loader:
    with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
        loss = torch.nn.functional.cross_entropy(model(x), y) / args.grad_accum_steps
    loss.backward()
    count += 1
    if count % args.grad_accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.data.lerp_(new.data, 0.1)
