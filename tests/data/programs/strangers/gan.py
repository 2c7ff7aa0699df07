# two models, two optimisers
import torch

BATCH = 32
generator, critic = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1024, 8)), batch_size=BATCH)
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
for (real,) in loader:
    of_critic.zero_grad()
    fake = generator(torch.randn(BATCH, 4))
    (critic(fake.detach()).mean() - critic(real).mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(fake).mean()).backward()
    of_generator.step()
