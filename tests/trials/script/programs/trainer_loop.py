"""A user's use of the Trainer of transformers: a causal language model from scratch. Unaware of tuning."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Tokens(Dataset):
    def __init__(self):
        self.x = torch.randint(0, 64, (512, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


class Poison(TrainerCallback):
    """Makes the loss of the third step not a number."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                model.get_input_embeddings().weight.fill_(torch.nan)


def main():
    poison = "--poison" in sys.argv
    if poison:
        sys.argv.remove("--poison")
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=16,
    )
    callbacks = [Poison()] if poison else []
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Tokens(), callbacks=callbacks)
    trainer.train()
    print("steps", trainer.state.global_step)
    for entry in trainer.state.log_history[:-1]:
        print("step", entry["step"], "loss", entry["loss"])


if __name__ == "__main__":
    main()
