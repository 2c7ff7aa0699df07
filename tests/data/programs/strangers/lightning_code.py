# Lightning with a Trainer whose settings are in code
import lightning_module
import pytorch_lightning as lightning
import torch

lightning.seed_everything(0)
samples = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randint(0, 2, (512,)))
trainer = lightning.Trainer(
    max_steps=20,
    accelerator="cpu",
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(lightning_module.Classifier(), torch.utils.data.DataLoader(samples, batch_size=16))
