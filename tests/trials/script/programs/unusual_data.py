"""Reads its data from one file that is open from the start, copies and pickles its loader, and gives
``DistributedDataParallel`` its settings by place: prints ``unharmed`` if every item was the right one."""

import copy
import pickle
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

SIZE, ITEMS = 4096, 64


class FileData(Dataset):
    def __init__(self, path):
        self.file = path.open("rb")
        self.file.read(16)

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        self.file.seek(index * SIZE)
        data = self.file.read(SIZE)
        assert data == bytes([index]) * SIZE
        return torch.full((8,), float(data[0]) / ITEMS)


folder = Path(tempfile.mkdtemp())
(folder / "data").write_bytes(b"".join(bytes([number]) * SIZE for number in range(ITEMS)))
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
net = DistributedDataParallel(nn.Linear(8, 8), None, None, 0, True, True, None, 25)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
is_open = sys.argv[1] == "open file"
loader = DataLoader(FileData(folder / "data") if is_open else TensorDataset(torch.randn(ITEMS, 8)), batch_size=8)
for batch in loader:
    net(batch if is_open else batch[0]).sum().backward()
    optimizer.step()
    if not is_open:
        assert len(copy.deepcopy(loader)) == len(pickle.loads(pickle.dumps(loader))) == ITEMS // 8
dist.destroy_process_group()
print("unharmed")
