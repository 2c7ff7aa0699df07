# transformers' Trainer with its arguments in code
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, i):
        ids = torch.arange(i, i + 16) % 50
        return {"input_ids": ids, "labels": ids}


model = LlamaForCausalLM(
    LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=3,
    gradient_accumulation_steps=4,
    max_steps=20,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
Trainer(model=model, args=arguments, train_dataset=Text()).train()
