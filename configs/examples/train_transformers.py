"""Train a small Llama from scratch with the transformers Trainer, on the source of Python's standard library.

torchrun --nproc-per-node 2 train_transformers.py --output_dir out --per_device_train_batch_size 2
"""

import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SEQ_LENGTH = 128


class Bytes(Dataset):
    def __init__(self):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    def __len__(self):
        return len(self.data) // SEQ_LENGTH

    def __getitem__(self, index):
        tokens = self.data[index * SEQ_LENGTH : (index + 1) * SEQ_LENGTH].long()
        return {"input_ids": tokens, "labels": tokens}


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LENGTH,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Bytes())
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
