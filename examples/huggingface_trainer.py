"""The Trainer of Hugging Face. The model is created from a configuration, so nothing is downloaded.

Run: elasticrun --standalone --nproc-per-node 2 --max-restarts 3 examples/huggingface_trainer.py
Try: pkill -9 -nf huggingface_trainer.py kills a rank. Watch both resume.
Try: pkill -USR1 -of huggingface_trainer.py saves a checkpoint of the current step; pkill -of saves and stops.
"""

import os

import task
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from elasticrs import checkpoint_requested

SENTENCES = 256
WORDS = 12
VOCABULARY = 32


class Sentences(torch.utils.data.Dataset):
    """Sentences of random words. The label is 1 if the first word is in the upper half of the vocabulary."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.words = torch.randint(VOCABULARY, (SENTENCES, WORDS), generator=generator)

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "labels": (words[0] >= VOCABULARY // 2).long()}


class SaveOnRequest(TrainerCallback):
    """Saves a checkpoint if a signal to elasticrun asks for it: on all ranks after the same step."""

    def on_step_end(
        self, _args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_more: object
    ) -> None:
        if wish := checkpoint_requested():
            control.should_save = True
        if wish == "stop":
            control.should_training_stop = True


def make_model() -> BertForSequenceClassification:
    set_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=WORDS,
    )
    return BertForSequenceClassification(config)


def main() -> None:
    arguments = task.parse_arguments()
    settings = TrainingArguments(
        output_dir=str(arguments.checkpoints),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=task.GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
        learning_rate=0.01,
        save_strategy="epoch",
        save_total_limit=2,
        logging_strategy="epoch",
        disable_tqdm=True,
        report_to="none",
        # Without this, the ranks on a machine without a GPU would train without each other.
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=make_model(), args=settings, train_dataset=Sentences(), callbacks=[SaveOnRequest()]
    )
    # Rank 0 writes this file last, so an incomplete checkpoint does not contain it.
    complete = [file.parent for file in arguments.checkpoints.glob("checkpoint-*/trainer_state.json")]
    checkpoint = max(complete, default=None, key=lambda folder: int(folder.name.rpartition("-")[2]))
    if checkpoint is not None:
        task.say(f"resumed from {checkpoint.name}")
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    task.report(trainer.evaluate(Sentences())["eval_loss"])


if __name__ == "__main__":
    main()
    task.leave()
