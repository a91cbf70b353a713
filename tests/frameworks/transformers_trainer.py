"""The Trainer of Hugging Face with a model made from a configuration: nothing is fetched."""

import argparse
from typing import Any

import torch
from common import (
    BATCH_SIZE,
    BATCHES_PER_EPOCH,
    EPOCHS,
    WORLD_SIZE,
    fail_if_told,
    leave,
    parse_arguments,
    report,
    sum_of,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

VOCABULARY = 32
LENGTH = 12


class Sentences(torch.utils.data.Dataset):
    """Random tokens; the label says whether the first is in the upper half of the vocabulary."""

    def __init__(self) -> None:
        rows = BATCHES_PER_EPOCH * BATCH_SIZE * WORLD_SIZE
        self.tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": (tokens[0] >= VOCABULARY // 2).long()}


class Watch(TrainerCallback):
    """Counts the steps of this attempt, and has the accident."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.steps = 0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.steps += 1
        fail_if_told(self.arguments, state.global_step)


def make_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=LENGTH,
        )
    )


def main() -> None:
    arguments = parse_arguments()
    output = arguments.directory / "transformers"
    output.mkdir(exist_ok=True)
    settings = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=0.01,
        save_strategy="epoch",
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Watch(arguments)
    model = make_model()
    trainer = Trainer(model=model, args=settings, train_dataset=Sentences(), callbacks=[watch])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(output)))
    report("transformers_trainer", watch.steps, sum_of(model))


if __name__ == "__main__":
    main()
    leave()
