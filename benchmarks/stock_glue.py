"""Stock fine-tuning on RTE or SST-2, as in transformers' run_glue.py: truncated to 128 tokens, `Trainer`. Padded to the
longest of a batch, an option of run_glue.py (padding to 128 takes longer and scores the same). Prints the validation
accuracy after each epoch, to compare with `finetune_glue.py` with the same flags:

    python benchmarks/stock_glue.py glue/RTE MODEL OUTPUT_DIR --seed 1 --bf16
    python finetune_glue.py --config presets/glue/rte.yaml --data_dir glue --model_name_or_path MODEL --seeds 1 \\
        --num_train_epochs 5 --warmup_steps 0.06 --learning_rate 1e-4 --head_dropout 0.1 --bf16 true \\
        --output_dir OTHER_DIR
"""

import argparse
from pathlib import Path

import datasets
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("model")
    parser.add_argument("output_dir")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--num_train_epochs", type=int, default=5)
    parser.add_argument("--bf16", action="store_true", help="Trainer's default is fp32")
    args = parser.parse_args()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def split(name: str) -> datasets.Dataset:
        header, *rows = (
            line.split("\t") for line in (args.data_dir / f"{name}.tsv").read_text().rstrip("\n").split("\n")
        )
        texts = [[row[header.index(column)] for row in rows] for column in header if column.startswith("sentence")]
        columns = tokenizer(*texts, truncation=True, max_length=128)
        of_label = {"entailment": 0, "not_entailment": 1, "0": 0, "1": 1}
        return datasets.Dataset.from_dict({**columns, "labels": [of_label[row[header.index("label")]] for row in rows]})

    training = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=args.num_train_epochs,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=args.learning_rate,
        warmup_steps=0.06,
        weight_decay=0.1,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        max_grad_norm=0.0,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=args.bf16,
        seed=args.seed,
    )
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2),
        args=training,
        train_dataset=split("train"),
        eval_dataset=split("dev"),
        processing_class=tokenizer,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.train()


if __name__ == "__main__":
    main()
