"""Hugging Face's Trainer, in float64. Arguments: batch size, samples, micro-batches, the task.

Tasks: ``samples`` has one label a sample, ``tokens`` texts of different lengths; ``smoothed`` is
``tokens`` with label smoothing, ``own`` is ``samples`` with a loss that the script computes.
"""

import json
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

BATCH_SIZE, SAMPLES, MICRO_BATCHES = map(int, sys.argv[1:4])
TASK = sys.argv[4]


class Texts(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, 20, (9,), generator=generator)
        if TASK in ("samples", "own"):
            return {"input_ids": words, "labels": words.sum() % 2}
        labels = words.clone()
        labels[2 + index % 7 :] = -100
        return {"input_ids": words, "labels": labels}


class Count(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.steps = state.global_step


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.CrossEntropyLoss()(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
config = LlamaConfig(vocab_size=20, num_attention_heads=2, pad_token_id=0, **sizes)
kind = LlamaForSequenceClassification if TASK in ("samples", "own") else LlamaForCausalLM
model = kind(config)
count = Count()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=MICRO_BATCHES,
        num_train_epochs=4,
        learning_rate=0.02,
        # AdamW without these two knows no scale of the gradient: the Trainer multiplies a loss
        # that does not use the number of items in a batch by the number of ranks
        label_smoothing_factor=0.1 if TASK == "smoothed" else 0.0,
        max_grad_norm=0.0,
        adam_epsilon=1e-20,
        save_strategy="no",
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = (OwnLoss if TASK == "own" else Trainer)(
        model, arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[count]
    )
    trainer.train()
flat = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
result = {"rank": arguments.process_index, "steps": count.steps, "seen": 0, "model": flat}
print("RESULT", json.dumps({**result, "eval": evals}))
